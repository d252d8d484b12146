"""An engine's EAGLE-3 layer, built from the exported folder alone, beside ours.

The layer is the one of the library whose `model_type` the folder names, with projections of twice the width: what both
engines build. Suffixes: S positions, H hidden, K steps, D draft tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from dspark.model.eagle3 import Eagle3Drafter
from dspark.model.families import LLAMA_FORM, QWEN3_FORM, Form
from dspark.training.batch import Batch
from dspark.training.chains import make_chains
from dspark.training.eagle3 import run_chains
from tests.dspark.folders import convert, save_eagle3, tensors_of, values_of
from tests.dspark.model.test_eagle3_exchange import NATIVE, ROPES
from tests.dspark.small import positions, small_vocabulary
from tests.dspark.training.test_eagle3 import DEFAULT

# What each layout can hold beyond the native form with taps above the embedding.
CASES = [("speculators", QWEN3_FORM, (-1, 2)), ("speculators", LLAMA_FORM, (3,)), ("specforge", LLAMA_FORM, (0, 2, 4))]


def engine_logits(folder: Path, entering: Tensor, ids: list[int], row: int, steps: int) -> Tensor:
    """Draft logits [K, V] of a chain, as an engine computes them from the folder: its keys, tensors and layer.

    `entering` [layers, S, H] holds what goes into each of the target's layers.
    """
    values, tensors = values_of(folder), tensors_of(folder)
    layer = values.get("transformer_layer_config", values)
    if values["architectures"] == ["LlamaForCausalLMEagle3"]:
        # SGLang numbers the states by the layer that they come out of, vLLM by the one that they go into.
        numbers = [number + 1 for number in values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        prefix, embedding_VH = "midlayer.", small_vocabulary(NATIVE).embedding_VH
    else:
        numbers, prefix = values["eagle_aux_hidden_state_layer_ids"], "layers.0."
        embedding_VH = tensors["embed_tokens.weight"]
    config, block, rotary, norm = engine_parts(layer)
    hidden_norm, last_norm = norms = [norm(config.hidden_size, config.rms_norm_eps) for _ in range(2)]
    for module, name in zip(norms, (f"{prefix}hidden_norm", "norm"), strict=True):
        module.load_state_dict({"weight": tensors[f"{name}.weight"]})
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    block.load_state_dict({name: tensor for name, tensor in own.items() if name != "hidden_norm.weight"})

    def joined(feature_H: Tensor, token: int) -> Tensor:
        return torch.cat((block.input_layernorm(embedding_VH[token]), hidden_norm(feature_H)))

    features_SH = torch.cat([entering[number] for number in numbers], dim=-1) @ tensors["fc.weight"].T
    rows = [joined(features_SH[place], ids[place + 1]) for place in range(row + 1)]
    state_H, found = features_SH[row], []
    for step in range(steps):
        if step:
            rows.append(joined(state_H, ids[row + 1 + step]))
        rows_1S = torch.stack(rows)[None]
        unseen_SS = torch.full((len(rows), len(rows)), float("-inf")).triu(1)
        turned = rotary(rows_1S, torch.arange(len(rows))[None])
        mixed, _ = block.self_attn(rows_1S, position_embeddings=turned, attention_mask=unseen_SS[None, None])
        state_H = state_H + mixed[0, -1]
        state_H = state_H + block.mlp(block.post_attention_layernorm(state_H))
        found.append(last_norm(state_H) @ tensors["lm_head.weight"].T)
    logits_KD = torch.stack(found)
    logits_KV = logits_KD.new_full((steps, config.vocab_size), float("-inf"))
    logits_KV[:, torch.arange(logits_KD.shape[1]) + tensors.get("d2t", torch.tensor(0))] = logits_KD
    return logits_KV


def engine_parts(layer: Mapping[str, Any]) -> tuple[PreTrainedConfig, Any, nn.Module, Any]:
    """Configuration, layer, rotary table and norm of the library that the layer's `model_type` names."""
    config: Any
    if layer["model_type"] == "llama":
        config = LlamaConfig(**layer)
        parts: Any = llama.LlamaDecoderLayer(config, 0), llama.LlamaRotaryEmbedding(config), llama.LlamaRMSNorm
    else:
        config = Qwen3Config(**layer)
        parts = qwen3.Qwen3DecoderLayer(config, 0), qwen3.Qwen3RotaryEmbedding(config), qwen3.Qwen3RMSNorm
    config._attn_implementation = "eager"
    block, rotary, norm = parts
    for name in ("q_proj", "k_proj", "v_proj"):
        width = getattr(block.self_attn, name).out_features
        setattr(block.self_attn, name, nn.Linear(2 * config.hidden_size, width, bias=False))
    return config, block, rotary, norm


@pytest.mark.parametrize(("case", "draft_vocab", "rope"), [*product(CASES, [30, 12], ROPES[:2])])
@torch.no_grad()
def test_an_engine_s_layer_computes_from_the_folder_what_ours_does(
    tmp_path: Path, case: tuple[str, Form, tuple[int, ...]], draft_vocab: int, rope: dict[str, Any]
) -> None:
    name, form, taps = case
    config = replace(NATIVE, form=form, taps=taps, draft_vocab=draft_vocab, rope=rope)
    source = save_eagle3(tmp_path / "source", config)
    there = convert(source, tmp_path / "there", name)
    generator = torch.Generator().manual_seed(4)
    entering = torch.randn(config.target_layers, 9, config.hidden, generator=generator)
    ids = torch.randint(config.vocab, (9,), generator=generator)
    row, steps = 3, DEFAULT.ttt_length

    taps_BSLH = torch.cat([entering[tap + 1] for tap in taps], dim=-1)[None]
    in_loss, final = torch.ones(1, 9, dtype=torch.bool), torch.zeros(1, 9, config.hidden)
    batch = Batch(ids[None], in_loss, taps_BSLH, final)
    chains = make_chains(batch, positions([row + 1]), [9], DEFAULT)
    drafter = Eagle3Drafter(config)
    drafter.load_state_dict({key: tensor for key, tensor in tensors_of(source).items() if key in drafter.state_dict()})
    vocabulary = small_vocabulary(config).narrowed(drafter.kept)
    states = run_chains(drafter, vocabulary, batch, chains)[0, 0]
    ours = vocabulary.spread(vocabulary.draft_logits(states))
    theirs = engine_logits(there, entering, ids.tolist(), row, min(steps, 9 - row - 1))
    torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-4, atol=1e-4)
