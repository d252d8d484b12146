"""Norm, rotary tables and the draft layer against transformers and against plain formulas."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.attention import KeyValues, Sight
from dspark.model.config import DSparkConfig, draft_config
from dspark.model.drafter import Drafter
from dspark.model.layers import DraftLayer, RMSNorm, RotaryTable
from tests.dspark.small import small_config, small_drafter

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def qwen3(rope: str = "default") -> Qwen3Config:
    implementation: dict[str, Any] = {"attn_implementation": "sdpa"}
    return Qwen3Config(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32768,
        rope_parameters=dict(ROPES[rope]),
        **implementation,
    )


def config_for(target: Qwen3Config) -> DSparkConfig:
    return draft_config(target, DrafterSettings(layers=1, taps=(1, 3), mask_token_id=29, markov_rank=4))


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_equal_those_of_the_target_at_every_length(kind: str) -> None:
    target = qwen3(kind)
    positions = torch.tensor([[0, 1, 4095, 8192, 32767]])
    cos, sin = Qwen3RotaryEmbedding(target)(torch.zeros(1, dtype=torch.float32), positions)
    ours = RotaryTable(config_for(target)).at(positions)
    assert torch.equal(ours.cos, cos)
    assert torch.equal(ours.sin, sin)


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_stay_fp32_when_the_drafter_becomes_bf16(kind: str) -> None:
    drafter = Drafter(config_for(qwen3(kind)))
    positions = torch.tensor([[0, 4095, 32767]])
    before = drafter.rotary.at(positions)
    after = drafter.to(torch.bfloat16).rotary.at(positions)
    assert (after.cos.dtype, after.sin.dtype) == (torch.float32, torch.float32)
    assert torch.equal(after.cos, before.cos) and torch.equal(after.sin, before.sin)
    assert after(torch.ones(1, 2, 3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_rotary_type_that_changes_with_the_text_is_refused() -> None:
    with pytest.raises(InputError, match="'dynamic'"):
        RotaryTable(small_config(rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 4000))
def test_a_rotated_product_depends_on_the_distance_alone(query: int, key: int, shift: int) -> None:
    table = RotaryTable(small_config(head_dim=8))
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator)

    def product(a: int, b: int) -> float:
        return float((table.at(torch.tensor([[a]]))(q) * table.at(torch.tensor([[b]]))(k)).sum())

    assert product(query + shift, key + shift) == pytest.approx(product(query, key), abs=5e-3)


def test_the_norm_equals_that_of_transformers_in_fp32_and_bf16() -> None:
    ours, theirs = RMSNorm(16, 1e-6), Qwen3RMSNorm(16, 1e-6)
    weight = torch.randn(16, generator=torch.Generator().manual_seed(0))
    ours.weight.data, theirs.weight.data = weight, weight.clone()
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)) * 7
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()))


def layers_of_both(target: Qwen3Config) -> tuple[DraftLayer, Qwen3DecoderLayer]:
    """One layer with the same random weights in both projects; their tensor names are equal."""
    config = config_for(target)
    layer = small_drafter(config).layers[0]
    assert isinstance(layer, DraftLayer)
    twin = Qwen3DecoderLayer(target, 0)
    twin.load_state_dict(layer.state_dict(), strict=True)
    return layer, twin


def nothing(layer: DraftLayer, x: torch.Tensor) -> KeyValues:
    rotary = RotaryTable(config_for(qwen3())).at(torch.zeros(len(x), 0, dtype=torch.long))
    return layer.self_attn.key_values(x[:, :0], rotary)


def test_a_draft_layer_without_context_is_a_qwen3_layer_that_sees_everything() -> None:
    target = qwen3()
    layer, twin = layers_of_both(target)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(7, 12).expand(2, 5)
    rotary = RotaryTable(config_for(target)).at(positions)
    visible = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    expected = twin(x, attention_mask=visible, position_embeddings=(rotary.cos, rotary.sin))
    own_alone = Sight(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    torch.testing.assert_close(layer(x, rotary, nothing(layer, x), own_alone), expected, rtol=1e-5, atol=1e-5)


def test_context_keys_are_those_of_the_same_positions_in_one_sequence() -> None:
    # A context of what the Qwen3 layer itself would read: its block rows must come out the same.
    target = qwen3()
    layer, twin = layers_of_both(target)
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(3))
    table = RotaryTable(config_for(target))
    positions = torch.arange(9)[None]
    whole, before, block = table.at(positions), table.at(positions[:, :8]), table.at(positions[:, 5:])
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = twin(x, attention_mask=causal[None, None], position_embeddings=(whole.cos, whole.sin))[:, 5:]
    context = layer.self_attn.key_values(layer.input_layernorm(x[:, :8]), before)
    # Each row is a group of its own, over the rows before it.
    found = layer(x[:, 5:], block, context, Sight(torch.zeros_like(positions[:, 5:]), positions[:, 5:]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
