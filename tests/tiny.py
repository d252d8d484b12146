"""Tiny real models and a tiny real tokenizer for tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
        if family == "llama":
            model: Any = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))
    model.generation_config.eos_token_id = 258
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
