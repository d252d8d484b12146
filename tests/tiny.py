"""Tiny real models and a tiny real tokenizer for tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
MASK_ID = 259


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte level: ids 0..255 are bytes, 256..259 the specials pad, start, end, mask."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def tiny_target_folder(path: Path, family: str = "llama", seed: int = 0, scale: float = 0.3) -> Path:
    """A random target with its tokenizer: hidden 48, 6 layers, vocabulary 320; a larger `scale` is less uniform."""
    sizes: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "pad_token_id": 256, "eos_token_id": 258, "bos_token_id": None, "initializer_range": scale,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_model(family, sizes)
    model.generation_config.eos_token_id = 258
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_model(family: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """`gemma4` and `gemma4_unified` are the models for images and sound too, `gemma4_text` is the text model alone."""
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**{"tie_word_embeddings": True, **sizes}))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))
    own = gemma4_sizes(sizes)
    if family == "gemma4_text":
        return varied(Gemma4ForCausalLM(Gemma4TextConfig(**own, hidden_size_per_layer_input=0)))
    if family == "gemma4":
        whole = Gemma4Config(text_config=Gemma4TextConfig(**own, hidden_size_per_layer_input=0))
        return varied(Gemma4ForConditionalGeneration(whole))
    # Here keys and values have projections of their own, and the last layers share those of the layers before.
    text = Gemma4UnifiedTextConfig(**own | {"attention_k_eq_v": False, "num_kv_shared_layers": 2})
    return varied(Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(text_config=text)))


def gemma4_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    """Every other layer sees 12 tokens; full attention has heads of twice the width, and one key/value head."""
    layers = sizes["num_hidden_layers"]
    return sizes | {
        "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "sliding_window": 12,
        "final_logit_softcapping": 2.0, "rope_parameters": None,
    }  # fmt: skip


def varied(model: PreTrainedModel) -> PreTrainedModel:
    """The model with norms and layer factors that are not all one, so that none can be forgotten unseen."""
    for name, tensor in model.state_dict().items():
        if name.endswith(("norm.weight", "layer_scalar")):
            tensor.uniform_(0.6, 1.4)
        if name.endswith("embed_tokens.weight"):
            tensor.mul_(0.3)  # or a tied head would repeat the last token for ever
    return model
