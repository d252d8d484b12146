"""config.json: both rotary schemas, the target's own values, and faults that are named by their key."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from dspark.errors import InputError
from dspark.model.layout import config_from_json, config_to_json
from tests.dspark.small import small_config

GOLDEN = Path("tests/golden")
TARGET = LlamaConfig(bos_token_id=3, eos_token_id=[4, 5], pad_token_id=None)
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}


def golden_config(case: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / case / "config.json").read_text())
    return values


def test_config_json_carries_the_target_and_both_rotary_schemas() -> None:
    values = config_to_json(small_config(rope=YARN), TARGET, 12, torch.bfloat16)
    assert values["rope_parameters"] == YARN
    assert values["rope_theta"] == 5e5
    assert values["rope_scaling"] == {key: value for key, value in YARN.items() if key != "rope_theta"}
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (3, [4, 5], None)
    assert values["max_position_embeddings"] == 64
    assert values["layer_types"] == ["full_attention"] * 2
    assert config_to_json(small_config(), TARGET, 12, torch.bfloat16)["rope_scaling"] is None


@pytest.mark.parametrize("rope", [YARN, {"rope_type": "default", "rope_theta": 77.0}])
@pytest.mark.parametrize("missing", [["rope_parameters"], ["rope_theta", "rope_scaling"]])
def test_either_rotary_schema_is_enough(rope: dict[str, Any], missing: list[str]) -> None:
    values = config_to_json(small_config(rope=rope), TARGET, 12, torch.float32)
    for key in missing:
        del values[key]
    assert config_from_json(values).rope == rope


def test_the_base_of_the_rotation_has_no_default() -> None:
    values = config_to_json(small_config(), TARGET, 12, torch.float32)
    del values["rope_theta"]
    values["rope_parameters"] = {"rope_type": "default"}
    with pytest.raises(InputError, match="rope_theta"):
        config_from_json(values)
    values["rope_parameters"] = None
    with pytest.raises(InputError, match="rope_theta"):
        config_from_json(values)


def test_rotary_schemas_that_contradict_each_other_are_refused() -> None:
    values = config_to_json(small_config(), TARGET, 12, torch.float32) | {"rope_theta": 5.0}
    with pytest.raises(InputError, match=r"rope_theta=5\.0 contradicts.*10000"):
        config_from_json(values)
    values = config_to_json(small_config(), TARGET, 12, torch.float32)
    values["rope_scaling"] = {"type": "linear", "factor": 2.0}
    with pytest.raises(InputError, match=r"rope_scaling=.* contradicts rope_parameters=.* in factor, rope_type"):
        config_from_json(values)


def test_a_rotary_type_without_its_keys_is_refused() -> None:
    values = config_to_json(small_config(), TARGET, 12, torch.float32)
    values["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0}
    with pytest.raises(InputError, match=r"rope_parameters.*factor"):
        config_from_json(values)


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated"])
def test_published_keys_of_heads_that_are_not_there_may_be_absent(case: str) -> None:
    values = golden_config(case) | {"markov_rank": 0, "enable_confidence_head": False}
    del values["markov_head_type"], values["confidence_head_with_markov"]
    config = config_from_json(values)
    assert (config.markov_rank, config.confidence, config.confidence_with_markov) == (0, False, False)


REQUIRED = [
    "architectures", "attention_bias", "block_size", "confidence_head_with_markov", "enable_confidence_head",
    "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "markov_head_type", "markov_rank", "mask_token_id", "max_position_embeddings", "model_type", "num_anchors",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_target_layers", "rms_norm_eps",
    "target_layer_ids", "tie_word_embeddings", "vocab_size",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    values = golden_config("dspark_vanilla")
    del values[key]
    with pytest.raises(InputError, match=key):
        config_from_json(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3Model"]),
        ("model_type", "llama"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("layer_types", ["sliding_attention", "full_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("block_size", "7"),
        ("block_size", 0),
        ("markov_head_type", "lstm"),
        ("hidden_act", "nothing"),
        ("target_layer_ids", []),
        ("target_layer_ids", [1, 7]),
        ("target_layer_ids", [-2, 1]),
        ("mask_token_id", 300),
        ("num_attention_heads", 5),
        ("dtype", "int8"),
    ],
)
def test_a_value_that_the_drafter_does_not_compute_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=key):
        config_from_json(golden_config("dspark_vanilla") | {key: value})


def test_all_faults_of_a_config_are_named_at_once() -> None:
    values = golden_config("dspark_vanilla") | {"attention_bias": True}
    del values["block_size"], values["head_dim"]
    with pytest.raises(InputError) as caught:
        config_from_json(values)
    assert all(key in str(caught.value) for key in ("attention_bias", "block_size", "head_dim"))
