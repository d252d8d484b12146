"""Drafters that other programs wrote: read where they are one, told apart where they are another kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dspark.errors import InputError
from dspark.model.exchange import Checkpoint, check_expressible, read_checkpoint, with_vocabulary, write_checkpoint
from tests.dspark.folders import assert_equal, convert, edited, save, tensors_of
from tests.dspark.small import small_config, small_vocabulary

HEADS = ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]


def foreign(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object], **config: Any) -> Checkpoint:
    """A drafter as other programs write it: only what their files hold, then `change`."""
    source = save(folder / "source", small_config(**{"taps": (0, 2), **config}))
    out = convert(source, folder / "out", "specforge")

    def strip(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in ("num_anchors", "dspark", "rope_parameters", "transformers_version", *HEADS):
            del values[key]
        values["architectures"] = ["DSparkDraftModel"]
        values["auto_map"] = {"AutoModel": "dspark.DSparkDraftModel"}
        change(values, tensors)

    return read_checkpoint(edited(out, folder / "foreign", strip))


def test_a_training_export_of_specforge_is_read_without_the_keys_that_it_lacks(tmp_path: Path) -> None:
    found = foreign(tmp_path, lambda values, _: values["dflash_config"].pop("attention_mode"))
    assert found.config == small_config(taps=(0, 2))
    assert found.stored.values["num_anchors"] == 512
    assert found.stored.values["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert not {"auto_map", "dflash_config"} & found.stored.values.keys()
    assert_equal(found.stored.tensors, tensors_of(tmp_path / "out"))


def test_heads_that_early_files_nest_once_more_are_found(tmp_path: Path) -> None:
    def nest(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(("markov_head.", "confidence_head."))]:
            tensors[f"logit_head.{name}"] = tensors.pop(name)

    assert_equal(foreign(tmp_path, nest).stored.tensors, tensors_of(tmp_path / "out"))


def as_modelopt(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Names of a ModelOpt export."""
    section = values["dflash_config"]
    section["use_confidence_head"] = section.pop("enable_confidence_head")
    del section["confidence_head_with_markov"], section["attention_mode"]
    section |= {"shift_label": True, "causal": False}
    values["architectures"] = ["DFlashDraftModel"]
    values["torch_dtype"] = values.pop("dtype")
    for name in list(tensors):
        if name.startswith(("markov_head.", "confidence_head.")):
            flat = name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj")
            tensors[flat] = tensors.pop(name)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_flat_names_of_modelopt_become_the_published_ones(tmp_path: Path, head: str) -> None:
    config = small_config(head, taps=(0, 2))
    found = foreign(tmp_path, as_modelopt, markov_head=head)
    assert (found.layout.name, found.config) == ("modelopt", config)
    assert "markov_w1.weight" in tensors_of(tmp_path / "foreign")
    completed = with_vocabulary(found, small_vocabulary(config))
    write_checkpoint(tmp_path / "published", completed, "deepspec", None, {})
    assert_equal(tensors_of(tmp_path / "published"), tensors_of(tmp_path / "source"))


@pytest.mark.parametrize("key", ["shift_label", "markov_rank", "markov_head_type", "mask_token_id", "target_layer_ids"])
def test_a_key_that_a_modelopt_file_lacks_is_named(tmp_path: Path, key: str) -> None:
    def change(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        as_modelopt(values, tensors)
        del values["dflash_config"][key]

    with pytest.raises(InputError, match=rf"dflash_config\.{key} is missing"):
        foreign(tmp_path, change)


@pytest.mark.parametrize("tensor", ["markov_w1.weight", "markov_w2.weight", "gate_proj.bias", "confidence_proj.bias"])
def test_a_tensor_that_a_modelopt_file_lacks_is_named_as_the_file_names_it(tmp_path: Path, tensor: str) -> None:
    def change(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        as_modelopt(values, tensors)
        del tensors[tensor]

    with pytest.raises(InputError, match=f"tensor {tensor} is missing".replace(".", r"\.")):
        foreign(tmp_path, change, markov_head="gated")


def as_dflash(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    values["architectures"] = ["DFlashDraftModel"]
    values["dflash_config"] = {key: values["dflash_config"][key] for key in ("target_layer_ids", "mask_token_id")}
    for name in [name for name in tensors if name.startswith(("markov_head.", "confidence_head."))]:
        del tensors[name]


def test_a_dflash_checkpoint_is_read_but_is_no_drafter_of_this_kind(tmp_path: Path) -> None:
    found = foreign(tmp_path, as_dflash)
    assert found.config == small_config("none", taps=(0, 2))
    assert not found.stored.next_token
    with pytest.raises(InputError, match=r"slot k predicts the token of its own place.*drafter\.start_from"):
        check_expressible(found, "deepspec")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"projector_type": "domino"}, r"projector_type='domino', needed 'dspark' or 'dflash'"),
        ({"use_swa": True}, "use_swa=True is nothing that a drafter here computes"),
        ({"attention_sink_bias": True}, "attention_sink_bias=True"),
        ({"causal": True}, "causal=true"),
        ({"markov_rank": 4}, r"markov_w1\.weight has shape \[30, 5\], needed \[30, 4\]"),
    ],
)
def test_what_no_drafter_here_computes_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        foreign(tmp_path, lambda values, _: values["dflash_config"].update(change))


def test_a_copy_at_the_top_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"markov_rank=4 contradicts dflash_config\.markov_rank=5"):
        foreign(tmp_path, lambda values, _: values.update(markov_rank=4))


def test_speculators_drafters_that_leave_slot_0_out_are_told_apart(tmp_path: Path) -> None:
    out = convert(save(tmp_path / "source", small_config()), tmp_path / "out", "speculators")
    bonus = edited(out, tmp_path / "bonus", lambda values, _: values.update(sample_from_anchor=False))
    with pytest.raises(
        InputError, match=r"speculative_tokens=3 contradicts block_size=3 with sample_from_anchor=false"
    ):
        read_checkpoint(bonus)

    def change(values: dict[str, Any], _: dict[str, Tensor]) -> None:
        values["sample_from_anchor"] = False
        values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2

    found = read_checkpoint(edited(out, tmp_path / "two", change))
    with pytest.raises(InputError, match="slot k predicts the token of its own place"):
        check_expressible(found, "deepspec")


def test_the_number_of_target_layers_comes_from_the_target_where_a_file_lacks_it(tmp_path: Path) -> None:
    out = convert(save(tmp_path / "source", small_config()), tmp_path / "out", "speculators")
    bare = edited(out, tmp_path / "bare", lambda values, _: values.pop("num_target_layers"))
    assert read_checkpoint(bare, target_layers=6).config == small_config()
