"""EAGLE-3 drafters on disk: the published tensors and keys, bit-equal round trips, faults by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from dspark.errors import InputError
from dspark.model.checkpoints import LoadedDrafter, load_drafter, save_drafter
from dspark.model.config import Eagle3Config
from dspark.model.eagle3 import Eagle3Drafter, new_eagle3_drafter
from dspark.training.chains import make_chains
from dspark.training.eagle3 import run_chains
from tests.dspark.small import SMALL_EAGLE3, positions, small_batch, small_eagle3, small_vocabulary
from tests.dspark.training.test_eagle3 import DEFAULT

TARGET = LlamaConfig(bos_token_id=3, eos_token_id=[4, 5], pad_token_id=None)
LAYER = {
    "hidden_norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
}  # fmt: skip


def saved(folder: Path, config: Eagle3Config = SMALL_EAGLE3) -> Eagle3Drafter:
    """A small drafter that was saved as `folder`."""
    drafter = small_eagle3(config)
    if config.draft_vocab < config.vocab:
        drafter.keep(torch.arange(0, 2 * config.draft_vocab, 2))
    vocabulary = small_vocabulary(config)
    save_drafter(folder, drafter.state_dict(), config, vocabulary, TARGET, None, torch.float32, {"run": "x"})
    return drafter


def load(folder: Path) -> LoadedDrafter:
    return load_drafter(folder, torch.device("cpu"), torch.float32)


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


@pytest.mark.parametrize("draft_vocab", [30, 12])
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path, draft_vocab: int) -> None:
    config = replace(SMALL_EAGLE3, draft_vocab=draft_vocab)
    state = saved(tmp_path / "drafter", config).state_dict()
    loaded = load(tmp_path / "drafter")
    assert isinstance(loaded.drafter, Eagle3Drafter)
    found = loaded.drafter.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert loaded.config == config
    assert loaded.extra == {"dspark": {"run": "x"}}
    assert len(loaded.vocabulary.draft_head_DH) == draft_vocab


def test_a_loaded_drafter_computes_what_the_saved_one_does(tmp_path: Path) -> None:
    drafter = saved(tmp_path / "drafter")
    loaded = load(tmp_path / "drafter")
    assert isinstance(loaded.drafter, Eagle3Drafter)
    batch = small_batch(SMALL_EAGLE3, [[1] * 9])
    chains = make_chains(batch, positions([1, 4]), [9], DEFAULT)
    expected = run_chains(drafter, small_vocabulary(SMALL_EAGLE3), batch, chains)
    assert torch.equal(run_chains(loaded.drafter, loaded.vocabulary, batch, chains), expected)


def test_the_tensors_are_the_published_ones(tmp_path: Path) -> None:
    saved(tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    names = {"fc", "norm", "embed_tokens", "lm_head"} | {f"layers.0.{name}" for name in LAYER}
    assert tensors.keys() == {f"{name}.weight" for name in names}
    for projection in ("q", "k", "v"):
        assert tensors[f"layers.0.self_attn.{projection}_proj.weight"].shape[1] == 2 * SMALL_EAGLE3.hidden
    assert tensors["layers.0.self_attn.o_proj.weight"].shape[0] == SMALL_EAGLE3.hidden


def test_the_keys_are_the_published_ones_beside_the_target_s_own(tmp_path: Path) -> None:
    saved(tmp_path / "drafter")
    values = config_of(tmp_path / "drafter")
    assert values["architectures"] == ["Qwen3Eagle3Model"]
    wanted = {
        "target_layer_ids": [-1, 2], "ttt_length": 4, "step_loss_decay": 0.5, "draft_num_hidden_layers": 1,
        "target_model_name_or_path": "small", "block_size": 3, "num_hidden_layers": 1, "num_target_layers": 6,
        "vocab_size": 30, "tie_word_embeddings": False, "dtype": "float32", "rope_theta": 10000.0,
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    assert not {"mask_token_id", "num_anchors", "markov_rank", "enable_confidence_head"} & values.keys()
    read = AutoConfig.from_pretrained(tmp_path / "drafter")
    assert (read.model_type, read.num_hidden_layers, read.ttt_length) == ("qwen3", 1, 4)


def test_a_file_that_does_not_say_how_much_a_round_drafts_drafts_what_was_trained(tmp_path: Path) -> None:
    saved(tmp_path / "drafter")
    values = config_of(tmp_path / "drafter")
    del values["block_size"]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(values))
    assert load(tmp_path / "drafter").config.block == 4


def test_missing_unexpected_and_misshapen_tensors_are_named_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    del tensors["layers.0.hidden_norm.weight"]
    tensors |= {"hidden_norm.weight": torch.zeros(16), "fc.weight": torch.zeros(16, 16)}
    save_file(tensors, file)
    with pytest.raises(InputError) as caught:
        load(tmp_path / "drafter")
    for text in (
        "layers.0.hidden_norm.weight is missing",
        "tensor hidden_norm.weight is unexpected",
        "fc.weight has shape [16, 16], needed [16, 32]",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft_num_hidden_layers", 2),
        ("num_hidden_layers", 6),
        ("ttt_length", 0),
        ("step_loss_decay", 1.5),
        ("target_layer_ids", [5]),
        ("model_type", "llama"),
        ("hidden_act", "loud"),
        ("rope_theta", 5.0),
    ],
)
def test_a_drafter_that_is_not_computed_here_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    saved(tmp_path / "drafter")
    values = config_of(tmp_path / "drafter") | {key: value}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=key):
        load(tmp_path / "drafter")


def test_equal_seeds_give_equal_drafters() -> None:
    first, again, other = (new_eagle3_drafter(SMALL_EAGLE3, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all((value == 1).all() for name, value in first.items() if "norm" in name)
