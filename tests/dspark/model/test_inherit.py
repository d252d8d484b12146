"""Starts from a checkpoint: what both have is taken, new heads are fresh, and every other difference is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import InputError
from dspark.model.config import DSparkConfig
from dspark.model.drafter import Drafter, new_drafter
from dspark.model.eagle3 import new_eagle3_drafter
from dspark.model.families import LLAMA_FORM
from dspark.model.inherit import start_from_checkpoint
from tests.dspark.folders import convert, edited, save, save_eagle3, tensors_of
from tests.dspark.small import SMALL_EAGLE3, small_config

TAPS: dict[str, Any] = {"taps": (0, 2)}


def fresh(config: DSparkConfig) -> Drafter:
    kept = torch.arange(0, 2 * config.draft_vocab, 2) if config.draft_vocab < config.vocab else None
    return new_drafter(config, 7, kept)


def assert_started(drafter: Drafter, folder: Path, new: tuple[str, ...] = ()) -> None:
    """Every tensor is the folder's, except those of the `new` heads, which are as in a fresh drafter."""
    theirs, untouched = tensors_of(folder), fresh(drafter.config).state_dict()
    for name, tensor in drafter.state_dict().items():
        if name in ("d2t", "t2d") or name.startswith(new or ("-",)):
            assert torch.equal(tensor, untouched[name]), name
        else:
            assert torch.equal(tensor, theirs[name]), name
            assert not torch.equal(tensor, untouched[name]), name


@pytest.mark.parametrize("name", ["deepspec", "speculators", "specforge"])
def test_a_drafter_starts_from_its_own_kind_in_every_layout(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "source", small_config(**TAPS))
    folder = convert(source, tmp_path / "out", name)
    drafter = fresh(small_config(**TAPS))
    start_from_checkpoint(drafter, folder)
    assert_started(drafter, source)


def test_a_dspark_drafter_starts_from_a_dflash_checkpoint_with_fresh_heads(tmp_path: Path) -> None:
    out = convert(save(tmp_path / "source", small_config("vanilla", **TAPS)), tmp_path / "out", "specforge")

    def as_dflash(values: dict[str, Any], tensors: dict[str, Any]) -> None:
        values["architectures"] = ["DFlashDraftModel"]
        values["dflash_config"] = {"mask_token_id": 29, "target_layer_ids": [0, 2]}
        for name in [name for name in tensors if "_head." in name]:
            del tensors[name]

    folder = edited(out, tmp_path / "dflash", as_dflash)
    for number, changes in enumerate(({}, {"markov_head": "gated"}, {"draft_vocab": 12}, {"block": 9})):
        drafter = fresh(replace(small_config(**TAPS), **changes))  # type: ignore[arg-type]
        start_from_checkpoint(drafter, folder)
        assert_started(drafter, folder, new=("markov_head.", "confidence_head."))
        assert number != 2 or (drafter.kept is not None and drafter.kept.tolist() == list(range(0, 24, 2)))


def test_the_block_and_the_type_of_the_weights_may_differ(tmp_path: Path) -> None:
    source = save(tmp_path / "source", small_config(), torch.bfloat16)
    drafter = fresh(small_config(block=5, max_positions=128))
    start_from_checkpoint(drafter, source)
    theirs = tensors_of(source)
    assert all(torch.equal(value, theirs[name].float()) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"taps": (0, 3)}, r"drafter\.taps is \(0, 3\), the checkpoint has \(0, 2\)"),
        ({"form": LLAMA_FORM}, r"drafter\.family is llama, the checkpoint has qwen3"),
        ({"layers": 3}, r"drafter\.layers is 3, the checkpoint has 2"),
        ({"mask_token_id": 28}, r"drafter\.mask_token_id is 28, the checkpoint has 29"),
        ({"hidden": 32}, "the target's width is 32"),
        ({"intermediate": 48}, "the target's MLP width is 48"),
        ({"heads": 8}, "the target's attention heads is 8"),
        ({"kv_heads": 4}, "the target's key and value heads is 4"),
        ({"head_dim": 8}, "the target's head width is 8"),
        ({"vocab": 40, "draft_vocab": 40}, "the target's vocabulary is 40"),
        ({"target_layers": 8}, "the target's layers is 8"),
        ({"norm_eps": 1e-5}, "the target's norm epsilon is 1e-05"),
        ({"rope": {"rope_type": "default", "rope_theta": 5.0}}, "the target's rotary parameters"),
        ({"activation": "gelu"}, "the target's activation is gelu"),
        ({"shared_kv": True}, "the target's use of keys as values is True"),
        ({"soft_cap": 30.0}, "the target's soft cap is 30.0"),
        ({"markov_rank": 4}, r"drafter\.markov_rank is 4, the checkpoint has 5"),
        ({"markov_rank": 0, "confidence_with_markov": False}, r"drafter\.markov_rank is 0, the checkpoint has 5"),
        ({"markov_head": "gated"}, r"drafter\.markov_head is gated, the checkpoint has vanilla"),
        ({"confidence": False, "confidence_with_markov": False}, r"drafter\.confidence is False"),
        ({"confidence_with_markov": False}, r"drafter\.confidence_with_markov is False, the checkpoint has True"),
        ({"draft_vocab": 12}, r"drafter\.vocab is 12, the checkpoint has 30"),
    ],
)
def test_every_other_difference_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    source = save(tmp_path / "source", small_config(**TAPS))
    drafter = fresh(replace(small_config(**TAPS), **changes))
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(InputError, match=f"drafter.start_from=.*{named}"):
        start_from_checkpoint(drafter, source)
    assert all(torch.equal(before[name], value) for name, value in drafter.state_dict().items())


def test_a_markov_head_over_other_tokens_is_refused(tmp_path: Path) -> None:
    config = small_config(draft_vocab=12)
    source = save(tmp_path / "source", config)
    start_from_checkpoint(fresh(config), source)
    with pytest.raises(InputError, match="proposes from other 12 tokens"):
        start_from_checkpoint(new_drafter(config, 0, torch.arange(12)), source)


def test_the_target_of_the_run_tells_what_a_file_does_not(tmp_path: Path) -> None:
    out = convert(save(tmp_path / "source", small_config()), tmp_path / "out", "speculators")
    folder = edited(out, tmp_path / "bare", lambda values, _: values.pop("num_target_layers"))
    drafter = fresh(small_config())
    start_from_checkpoint(drafter, folder)
    assert_started(drafter, tmp_path / "source")


def test_an_eagle3_drafter_starts_from_another_whatever_its_steps_and_its_block(tmp_path: Path) -> None:
    source = save_eagle3(tmp_path / "source")
    drafter = new_eagle3_drafter(replace(SMALL_EAGLE3, block=5, ttt_length=2, step_loss_decay=1.0), 7)
    start_from_checkpoint(drafter, source)
    theirs = tensors_of(source)
    assert all(torch.equal(value, theirs[name]) for name, value in drafter.state_dict().items())
    with pytest.raises(InputError, match=r"drafter\.taps is \(0, 3\), the checkpoint has \(-1, 2\)"):
        start_from_checkpoint(new_eagle3_drafter(replace(SMALL_EAGLE3, taps=(0, 3)), 7), source)


def test_a_drafter_of_another_kind_is_no_start(tmp_path: Path) -> None:
    blocks, chains = save(tmp_path / "blocks", small_config()), save_eagle3(tmp_path / "chains")
    with pytest.raises(InputError, match=r"drafter\.start_from=.*is of another kind \(EAGLE-3, .*change drafter\.kind"):
        start_from_checkpoint(fresh(small_config()), chains)
    with pytest.raises(InputError, match=r"drafter\.start_from=.*is of another kind \(DSpark, .*change drafter\.kind"):
        start_from_checkpoint(new_eagle3_drafter(SMALL_EAGLE3, 7), blocks)
