"""Packed passes of Llama-shaped targets against transformers' own forward of whole texts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.decoding.kv import AimedCache, PackedAim, Store, target_store
from dspark.packed import Packed
from dspark.target import Target, TargetStates
from tests.dspark.decoding.decoders import tiny_target
from tests.tiny import tiny_tokenizer

CPU = torch.device("cpu")
TAPS = (1, -1, 0)
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "initializer_range": 0.3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 258,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Every part that a layer may have: biases of each kind, norms of heads, windows in some layers or in all, wide heads.
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN, attention_bias=True, mlp_bias=True)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SIZES, rope_parameters=ROPE, use_sliding_window=True, sliding_window=7, max_window_layers=1
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, rope_parameters=ROPE, head_dim=16)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, rope_parameters=ROPE, sliding_window=7)),
}  # fmt: skip


def made(kind: str, dtype: torch.dtype = torch.float32) -> Target:
    """A target whose norms and biases are not ones and zeros."""
    architecture, config = KINDS[kind]
    torch.manual_seed(0)
    model = architecture._from_config(config, attn_implementation="sdpa").to(dtype)
    for name, tensor in model.state_dict().items():
        if name.endswith(("norm.weight", "bias")):
            tensor.uniform_(0.6, 1.4)
    return Target(model, tiny_tokenizer(), kind, "local", "none")


def text(length: int, seed: int) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def computed(target: Target, store: Store, starts: list[int], rows: list[list[int]]) -> TargetStates:
    packed = Packed(starts, [len(row) for row in rows], CPU)
    ids = torch.tensor([[token for row in rows for token in row]])
    return target.states(ids, TAPS, cache=AimedCache(store, PackedAim(packed)), packed=packed)


def whole(target: Target, ids: list[int]) -> Tensor:
    """Taps and logits of a text by the model itself."""
    with torch.no_grad():
        found = target.model(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([*(found.hidden_states[tap + 1] for tap in TAPS), found.logits], dim=-1)[0]


def flat(target: Target, states: TargetStates) -> Tensor:
    return torch.cat((states.taps, target.vocabulary.logits(states.final)), dim=-1)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_states_and_logits_of_the_model(kind: str) -> None:
    target = made(kind)
    texts = [text(20, 1), text(4, 2), text(11, 3)]
    expected = [whole(target, ids) for ids in texts]
    assert target.packed_decoder is not None
    store = target_store(target.config, 3, CPU, torch.float32)
    store.reserve(30)
    # A prefill, a round of several tokens of each row, and one of single tokens.
    for starts, ends in (([0, 0, 0], [12, 2, 6]), ([12, 2, 6], [19, 3, 10]), ([19, 3, 10], [20, 4, 11])):
        parts = [ids[start:end] for ids, start, end in zip(texts, starts, ends, strict=True)]
        found = flat(target, computed(target, store, starts, parts))
        wanted = torch.cat([all_of[start:end] for all_of, start, end in zip(expected, starts, ends, strict=True)])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_every_rounding_is_that_of_transformers_layers(kind: str) -> None:
    target, rows = made(kind, torch.bfloat16), [text(9, 1), text(5, 2)]
    found = []
    for decoder in (target.packed_decoder, None):
        target.packed_decoder = decoder
        store = target_store(target.config, 2, CPU, torch.bfloat16)
        store.reserve(10)
        found.append(computed(target, store, [0, 0], rows))
    for ours, theirs in zip(*found, strict=True):
        # A sum in another order may round a number otherwise, never all of them.
        assert (ours == theirs).float().mean() > 0.9
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.05)


def test_joined_weights_are_held_once_and_transformers_forward_goes_on() -> None:
    target = made("qwen2")
    before = whole(target, text(9, 1))
    names = {name: weight.clone() for name, weight in target.model.named_parameters()}
    decoder = target.packed_decoder
    assert decoder is not None
    for layer, ours in zip(target.decoder.layers, decoder.layers, strict=True):
        assert storage(layer.self_attn.v_proj.weight) == storage(ours.qkv.weight)
        assert storage(layer.mlp.up_proj.weight) == storage(ours.gate_up.weight)
    assert all(torch.equal(weight, names.pop(name)) for name, weight in target.model.named_parameters())
    assert not names
    torch.testing.assert_close(whole(target, text(9, 1)), before, atol=1e-5, rtol=1e-5)
    assert target.packed_decoder is decoder  # joined once, however many engines there are


def test_layers_of_another_make_are_left_to_transformers() -> None:
    assert tiny_target("gemma4_text").packed_decoder is None
    target = made("llama")
    layer = target.decoder.layers[1].mlp
    layer.up_proj = nn.Sequential(layer.up_proj)
    assert target.packed_decoder is None
