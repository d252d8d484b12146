"""Families against transformers: a draft layer fed like a target's own, embeddings, rotary tables, refusals."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4Config, Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.attention import Sight
from dspark.model.config import DSparkConfig, draft_config
from dspark.model.families import FAMILIES, GEMMA4_FORM, LLAMA_FORM, QWEN3_FORM, family_of, window
from dspark.model.layers import DraftLayer, RMSNorm, RotaryTable
from dspark.model.vocabulary import Vocabulary
from tests.dspark.small import small_drafter
from tests.tiny import gemma4_sizes

SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "pad_token_id": None, "eos_token_id": 1,
    "attn_implementation": "sdpa",
}  # fmt: skip


def gemma4(**changes: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(**{**gemma4_sizes(SIZES), "hidden_size_per_layer_input": 0, **changes})


def settings(**changes: Any) -> DrafterSettings:
    return DrafterSettings(**{"layers": 1, "taps": (1, 3), "mask_token_id": 29, "markov_rank": 4, **changes})


def draft_layer(config: DSparkConfig) -> DraftLayer:
    layer = small_drafter(config).layers[0]
    assert isinstance(layer, DraftLayer)
    return layer


def assert_rows_of_a_sequence_come_out_the_same(layer: DraftLayer, config: DSparkConfig, twin: nn.Module) -> None:
    """Fed what the target's layer reads, the last four rows, each over the rows before it, give its output."""
    twin.load_state_dict(layer.state_dict(), strict=True)
    x = torch.randn(1, 9, config.hidden, generator=torch.Generator().manual_seed(3))
    positions, table = torch.arange(9)[None], RotaryTable(config)
    whole, before, block = table.at(positions), table.at(positions[:, :8]), table.at(positions[:, 5:])
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    expected = twin(x, attention_mask=causal, position_embeddings=(whole.cos, whole.sin), shared_kv_states={})
    context = layer.self_attn.key_values(layer.input_layernorm(x[:, :8]), before)
    found = layer(x[:, 5:], block, context, Sight(torch.zeros_like(positions[:, 5:]), positions[:, 5:]))
    torch.testing.assert_close(found, expected[:, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_a_gemma4_draft_layer_is_a_full_attention_layer_of_its_target(shared: bool) -> None:
    target = gemma4(attention_k_eq_v=shared)
    config = draft_config(target, settings())
    assert (config.form, config.shared_kv, config.head_dim) == (GEMMA4_FORM, shared, 16)
    assert config.kv_heads == (1 if shared else 2)
    layer = draft_layer(config)
    layer.layer_scalar.fill_(0.7)
    assert ("self_attn.v_proj.weight" in layer.state_dict()) == (not shared)
    assert_rows_of_a_sequence_come_out_the_same(layer, config, Gemma4TextDecoderLayer(target, 5))


def test_a_draft_layer_in_llama_form_is_a_llama_layer() -> None:
    target = LlamaConfig(**SIZES, head_dim=16)
    config = draft_config(target, settings(family="llama"))
    assert config.form == LLAMA_FORM
    assert_rows_of_a_sequence_come_out_the_same(draft_layer(config), config, LlamaDecoderLayer(target, 0))


def test_gemma4_drafters_rotate_like_full_attention() -> None:
    target, positions = gemma4(), torch.tensor([[0, 1, 4095, 32767]])
    cos, sin = Gemma4TextRotaryEmbedding(target)(torch.zeros(1), positions, "full_attention")
    found = RotaryTable(draft_config(target, settings())).at(positions)
    assert torch.equal(found.cos, cos) and torch.equal(found.sin, sin)
    assert (found.cos[0, 3] == 1).sum() == 12  # of 16, a quarter is rotated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_an_fp32_scale_equal_those_of_gemma4(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(16, 1e-6, fp32_scale=True).to(dtype), Gemma4RMSNorm(16).to(dtype)
    ours.weight.data = theirs.weight.data = torch.randn(16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = (torch.randn(500, 16, generator=torch.Generator().manual_seed(1)) * 7).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    plain = RMSNorm(16, 1e-6).to(dtype)
    plain.weight = ours.weight
    assert torch.equal(plain(x), ours(x)) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_scaled_as_the_target_scales_them(dtype: torch.dtype) -> None:
    # sqrt(3000) is 54.7723, and 54.75 in bf16.
    theirs = Gemma4TextScaledWordEmbedding(30, 3000, None, embed_scale=3000**0.5)  # type: ignore[arg-type]
    weight = torch.randn(30, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    theirs.weight.data = weight
    found = Vocabulary(weight, weight, embedding_scale=3000**0.5).embed(torch.arange(30))
    assert found.dtype == dtype
    assert torch.equal(found, theirs(torch.arange(30)))


def test_a_soft_cap_bounds_logits_and_outlives_every_copy() -> None:
    table = torch.tensor([[1.0], [30.0], [-3000.0]])
    capped = Vocabulary(table, table, embedding_scale=2.0, soft_cap=30.0)
    wanted = [30 * torch.tensor(x / 30).tanh().item() for x in (1.0, 30.0, -3000.0)]
    assert capped.logits(torch.ones(1)).tolist() == pytest.approx(wanted)
    reduced = capped.narrowed(torch.tensor([0, 2])).to(torch.device("cpu"), torch.float64)
    assert reduced.draft_logits(torch.ones(1, dtype=torch.float64)).tolist() == pytest.approx([wanted[0], wanted[2]])
    assert reduced.narrowed(None).embed(torch.tensor(1)).tolist() == [60.0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size_per_layer_input": 8}, "inputs per layer"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1}, "a mixture of experts"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"num_kv_shared_layers": 2}, "layers that share keys and values"),
        ({"attention_bias": True}, "biases in attention"),
    ],
)
def test_parts_of_a_gemma4_target_that_are_not_computed_are_refused(change: dict[str, Any], named: str) -> None:
    target = gemma4(**change)
    for config in (target, Gemma4Config(text_config=target)):
        with pytest.raises(InputError, match=f"{next(iter(change))}=.*{named}"):
            family_of(config)


def test_every_family_has_a_default_form_that_engines_load() -> None:
    assert {family.forms[0] for family in FAMILIES.values()} == {QWEN3_FORM, GEMMA4_FORM}


@pytest.mark.parametrize(
    ("target", "family", "fitting"),
    [
        (gemma4(), "qwen3", "gemma4"),
        (Qwen3Config(**SIZES), "llama", "qwen3"),
        (Qwen2Config(**SIZES), "gemma4", "qwen3 or llama"),
    ],
)
def test_a_form_that_does_not_fit_the_target_is_refused(target: PreTrainedConfig, family: str, fitting: str) -> None:
    with pytest.raises(InputError, match=rf"drafter\.family={family} does not fit .*use {fitting}$"):
        draft_config(target, settings(family=family))
    assert draft_config(target, settings()).form.name == fitting.split()[0]


def test_a_start_from_the_target_is_refused_where_its_layers_differ() -> None:
    with pytest.raises(InputError, match=r"gemma4_text differ in shape .*drafter\.init=random"):
        draft_config(gemma4(), settings(init="target"))
    assert draft_config(Qwen3Config(**SIZES), settings(init="target")).layers == 1


def test_a_window_counts_only_where_a_layer_slides() -> None:
    assert window(gemma4()) == 12
    assert window(Qwen2Config(**SIZES, sliding_window=16)) is None  # declared but not used
    assert window(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)) == 16
    assert window(LlamaConfig(**SIZES)) is None
