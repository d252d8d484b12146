"""Drafters of every form on disk: what config.json says of them, and that they come back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from dspark.errors import InputError
from dspark.learning import DrafterSettings
from dspark.model.checkpoints import load_drafter, save_drafter
from dspark.model.config import DSparkConfig, draft_config
from dspark.model.exchange import read_checkpoint, write_checkpoint
from dspark.model.families import GEMMA4_FORM, LLAMA_FORM
from dspark.model.layout import check_servable, config_from_json, config_to_json, extra_keys
from dspark.model.vocabulary import Vocabulary
from tests.dspark.small import small_drafter, small_vocabulary
from tests.tiny import gemma4_sizes

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None, "eos_token_id": [1, 2],
    "bos_token_id": 3, "initializer_range": 0.03,
}  # fmt: skip
GEMMA4_TEXT = Gemma4TextConfig(**gemma4_sizes(SIZES), hidden_size_per_layer_input=0)
TARGETS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "gemma4_text": GEMMA4_TEXT,
    "gemma4": Gemma4Config(text_config=GEMMA4_TEXT),
    "gemma4_unified": Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**gemma4_sizes(SIZES))),
}


def drafter_of(target: PreTrainedConfig, **changes: Any) -> DSparkConfig:
    settings = {"layers": 2, "block": 3, "taps": (-1, 3), "mask_token_id": 29, "markov_rank": 4, **changes}
    return draft_config(target.get_text_config(), DrafterSettings(**settings))


def written(target: PreTrainedConfig, **changes: Any) -> dict[str, Any]:
    values = config_to_json(drafter_of(target, **changes), target, 12, torch.bfloat16)
    copy: dict[str, Any] = json.loads(json.dumps(values))
    return copy


@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_of_every_family_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    config = drafter_of(target)
    drafter = small_drafter(config)
    if config.form == GEMMA4_FORM:
        drafter.layers[1].layer_scalar.fill_(0.5)
    table = small_vocabulary(config)
    vocabulary = Vocabulary(
        table.embedding_VH, table.head_VH, embedding_scale=config.embedding_scale, soft_cap=config.soft_cap
    )
    folder = tmp_path / "drafter"
    save_drafter(folder, drafter.state_dict(), config, vocabulary, target, 12, torch.float32, {"run": "x"})
    loaded = load_drafter(folder, CPU, torch.float32)
    assert loaded.config == config
    assert loaded.extra == {"dspark": {"run": "x"}}
    state = loaded.drafter.state_dict()
    assert all(torch.equal(state[key], value) for key, value in drafter.state_dict().items())
    ids, hidden = torch.arange(30), torch.randn(2, 32)
    assert torch.equal(loaded.vocabulary.embed(ids), vocabulary.embed(ids))
    assert torch.equal(loaded.vocabulary.draft_logits(hidden), vocabulary.draft_logits(hidden))
    # Read and written once more, as an export does; files of a native Llama form are for this project alone.
    write_checkpoint(tmp_path / "again", read_checkpoint(folder), "deepspec", None, {})
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_a_gemma4_drafter_has_the_tensors_of_its_form(tmp_path: Path) -> None:
    config = drafter_of(GEMMA4_TEXT)
    save_drafter(
        tmp_path / "drafter", small_drafter(config).state_dict(), config, small_vocabulary(config), GEMMA4_TEXT, 12,
        torch.bfloat16, {},
    )  # fmt: skip
    with safe_open(tmp_path / "drafter" / "model.safetensors", "pt") as file:
        names = {name.removeprefix("layers.1.") for name in file.keys() if name.startswith("layers.1.")}  # noqa: SIM118 - no mapping
    assert names == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight", "layer_scalar", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
        "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [("gemma4", "gemma4_text"), ("gemma4_text", "gemma4_text"), ("gemma4_unified", "gemma4_unified_text")],
)
def test_a_gemma4_config_names_its_target_and_the_heads_of_full_attention(name: str, text: str) -> None:
    values = written(TARGETS[name])
    wanted = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "target_model_type": name,
        "target_text_model_type": text, "num_hidden_layers": 2, "num_target_layers": 6,
        "layer_types": ["full_attention"] * 2, "head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 16,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 2.0,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "enable_moe_block": False,
        "tie_word_embeddings": False, "target_layer_ids": [-1, 3], "block_size": 3, "mask_token_id": 29,
        "eos_token_id": [1, 2], "rope_parameters": GEMMA4_TEXT.rope_parameters, "dtype": "bfloat16",
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    assert "per_layer_config" not in values
    assert extra_keys(values) == {}


def test_transformers_reads_the_heads_of_a_gemma4_drafter_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written(GEMMA4_TEXT)))
    layer = AutoConfig.from_pretrained(tmp_path).per_layer_config[1]
    assert (layer.head_dim, layer.num_key_value_heads, layer.num_hidden_layers) == (16, 1, 2)


def test_a_gemma4_target_with_values_of_its_own_has_key_heads_like_sliding_attention() -> None:
    target = Gemma4TextConfig(**gemma4_sizes(SIZES) | {"attention_k_eq_v": False}, hidden_size_per_layer_input=0)
    values = written(target)
    assert (values["num_global_key_value_heads"], values["attention_k_eq_v"]) == (None, False)
    config = config_from_json(values)
    assert (config.kv_heads, config.shared_kv) == (2, False)
    assert config == drafter_of(target)


def test_a_published_gemma4_12b_drafter_is_read() -> None:
    """Sizes and oddities (rotary defaults beside the two kinds of layers) of the drafter that was published."""
    full = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    values = written(GEMMA4_TEXT) | {
        "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8,
        "global_head_dim": 512, "head_dim": 256, "vocab_size": 262144, "final_logit_softcapping": 30.0,
        "num_target_layers": 48, "target_layer_ids": [5, 17, 29, 41, 46], "mask_token_id": 4, "block_size": 7,
        "target_model_type": "gemma4_unified", "target_text_model_type": "gemma4_unified_text",
        "rope_parameters": {
            "full_attention": full, "rope_theta": None, "rope_type": "default",
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }  # fmt: skip
    config = config_from_json(values)
    assert (config.heads, config.kv_heads, config.head_dim, config.hidden) == (16, 1, 512, 3840)
    assert (config.shared_kv, config.soft_cap, config.rope) == (True, 30.0, full)
    assert config.embedding_scale == pytest.approx(61.9677)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma4_unified_text"),
        ("target_model_type", None),
        ("target_text_model_type", None),
        ("hidden_activation", "nothing"),
        ("hidden_size_per_layer_input", 256),
        ("enable_moe_block", True),
        ("attention_k_eq_v", None),
        ("global_head_dim", "16"),
        ("num_global_key_value_heads", 3),
        ("final_logit_softcapping", 0),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "proportional"}}),
    ],
)
def test_a_value_that_a_gemma4_drafter_does_not_compute_is_refused_with_its_key(key: str, value: Any) -> None:
    named = "key/value heads" if key == "num_global_key_value_heads" else key
    with pytest.raises(InputError, match=named):
        config_from_json(written(GEMMA4_TEXT) | {key: value})
    absent = {name: held for name, held in written(GEMMA4_TEXT).items() if name != key}
    with pytest.raises(InputError, match=key):
        config_from_json(absent)


def test_drafters_of_qwen2_are_written_in_qwen3_form_without_biases() -> None:
    values = written(TARGETS["qwen2"])
    assert (values["architectures"], values["model_type"]) == (["Qwen3DSparkModel"], "qwen3")
    assert (values["attention_bias"], values["head_dim"]) == (False, 8)


def test_layers_in_llama_form_are_named_so_and_cannot_be_served() -> None:
    target = LlamaConfig(**SIZES)
    native = drafter_of(target, family="llama")
    values = written(target, family="llama")
    assert (values["architectures"], values["model_type"]) == (["LlamaDSparkModel"], "llama")
    assert config_from_json(values) == native and native.form == LLAMA_FORM
    with pytest.raises(InputError, match=r"native Llama form.*drafter\.family=qwen3"):
        check_servable(native)
    check_servable(drafter_of(target))
    with pytest.raises(InputError, match="model_type: 'qwen3' contradicts"):
        config_from_json(values | {"model_type": "qwen3"})
