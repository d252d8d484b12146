"""Drafters on disk: bit-equal round trips in the published layout, and errors that name what is wrong."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from dspark.errors import InputError
from dspark.model import checkpoints
from dspark.model.checkpoints import LoadedDrafter, load_drafter, save_drafter
from dspark.model.config import DSparkConfig
from dspark.model.drafter import Drafter
from dspark.model.layout import config_from_json
from dspark.model.vocabulary import Vocabulary
from dspark.training.objective import draft_logits, run_drafter
from tests.dspark.small import (
    HEADS,
    positions,
    small_batch,
    small_blocks,
    small_config,
    small_drafter,
    small_vocabulary,
)

CPU = torch.device("cpu")
GOLDEN = Path("tests/golden")
TARGET = LlamaConfig(bos_token_id=3, eos_token_id=[4, 5], pad_token_id=None, max_position_embeddings=64)
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}


def save(
    folder: Path, config: DSparkConfig, dtype: torch.dtype = torch.float32, vocabulary: Vocabulary | None = None
) -> Mapping[str, Tensor]:
    """Saves a small drafter and returns its state."""
    state = small_drafter(config).state_dict()
    vocabulary = vocabulary or small_vocabulary(config)
    save_drafter(folder, state, config, vocabulary, TARGET, 12, dtype, {"run": "x", "tau": 2.5})
    return state


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedDrafter:
    return load_drafter(folder, CPU, dtype)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("head", HEADS)
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path, head: str) -> None:
    config = small_config(head, rope=YARN)
    state = save(tmp_path / "drafter", config)
    loaded = load(tmp_path / "drafter")
    found = loaded.drafter.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    vocabulary = small_vocabulary(config)
    assert torch.equal(loaded.vocabulary.embedding_VH, vocabulary.embedding_VH)
    assert torch.equal(loaded.vocabulary.head_VH, vocabulary.head_VH)
    assert loaded.config == config
    assert loaded.extra == {"dspark": {"run": "x", "tau": 2.5}}


@pytest.mark.parametrize("head", HEADS)
def test_a_loaded_drafter_gives_the_logits_and_confidences_of_the_saved_one(tmp_path: Path, head: str) -> None:
    config = small_config(head, rope=YARN)
    save(tmp_path / "drafter", config)
    loaded = load(tmp_path / "drafter")
    assert isinstance(loaded.drafter, Drafter)
    batch = small_batch(config, [[1] * 9])
    blocks = small_blocks(config, batch, positions([0, 4]))
    found = []
    for drafter, vocabulary in (
        (small_drafter(config), small_vocabulary(config)),
        (loaded.drafter, loaded.vocabulary),
    ):
        output = run_drafter(drafter, vocabulary, batch, blocks)
        found.append((draft_logits(drafter, vocabulary, output, blocks.valid_BAK), output.confidence_BAK))
    assert torch.equal(found[0][0], found[1][0])
    if config.confidence:
        assert found[0][1] is not None and found[1][1] is not None
        assert torch.equal(found[0][1], found[1][1])


def test_the_declared_type_is_the_type_of_every_tensor(tmp_path: Path) -> None:
    state = save(tmp_path / "drafter", small_config(), torch.bfloat16)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load(tmp_path / "drafter", torch.float32).drafter.state_dict()
    assert all(torch.equal(loaded[name], value.bfloat16().float()) for name, value in state.items())


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated"])
def test_the_layout_is_the_published_one(tmp_path: Path, case: str) -> None:
    published = json.loads((GOLDEN / case / "config.json").read_text())
    stored = load_file(GOLDEN / case / "case.safetensors")
    weights = {name.removeprefix("weights."): t for name, t in stored.items() if name.startswith("weights.")}
    config = config_from_json(published)
    drafter, vocabulary = checkpoints.assemble(weights, config)
    target = LlamaConfig(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    save_drafter(
        tmp_path / "drafter", drafter.state_dict(), config, vocabulary, target, published["num_anchors"],
        torch.float32, {},
    )  # fmt: skip
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert {key: written[key] for key in published} == published
    assert written.keys() - published.keys() == {"dtype", "rope_theta", "rope_scaling", "dspark"}
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_transformers_reads_the_written_config_as_qwen3(tmp_path: Path) -> None:
    save(tmp_path / "drafter", small_config(rope=YARN), torch.bfloat16)
    read = AutoConfig.from_pretrained(tmp_path / "drafter")
    assert read.model_type == "qwen3"
    assert {key: read.rope_parameters[key] for key in YARN} == YARN
    assert read.dtype == torch.bfloat16
    assert (read.num_hidden_layers, read.head_dim, read.target_layer_ids, read.block_size) == (2, 6, [-1, 2], 3)


def test_missing_unexpected_and_misshapen_tensors_are_named_at_once(tmp_path: Path) -> None:
    save(tmp_path / "drafter", small_config())

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["confidence_head.proj.bias"], tensors["lm_head.weight"]
        tensors["module.fc.weight"] = torch.zeros(1)
        tensors["norm.weight"] = torch.zeros(17)

    edit_weights(tmp_path / "drafter", change)
    with pytest.raises(InputError) as caught:
        load(tmp_path / "drafter")
    assert all(
        text in str(caught.value)
        for text in (
            "confidence_head.proj.bias is missing",
            "lm_head.weight is missing",
            "module.fc.weight is unexpected",
            "norm.weight has shape [17], needed [16]",
        )
    )


def test_a_tensor_of_another_type_than_the_declared_one_is_named(tmp_path: Path) -> None:
    save(tmp_path / "drafter", small_config())
    edit_weights(tmp_path / "drafter", lambda tensors: tensors.update({"norm.weight": torch.zeros(16).bfloat16()}))
    with pytest.raises(InputError, match=r"norm\.weight is bfloat16, needed float32"):
        load(tmp_path / "drafter")


def test_a_head_that_the_config_switches_off_makes_its_tensors_unexpected(tmp_path: Path) -> None:
    save(tmp_path / "drafter", small_config())
    edit_config(tmp_path / "drafter", lambda values: values.update(enable_confidence_head=False))
    with pytest.raises(InputError, match=r"confidence_head\.proj\.weight is unexpected"):
        load(tmp_path / "drafter")


def test_weights_in_several_files_are_joined(tmp_path: Path) -> None:
    state = save(tmp_path / "drafter", small_config())
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    for number, names in enumerate((sorted(tensors)[:9], sorted(tensors)[9:]), start=1):
        part = {name: tensors[name] for name in names}
        save_file(part, file.with_name(f"model-0000{number}-of-00002.safetensors"))
    loaded = load(tmp_path / "drafter").drafter.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    file.with_name("model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"norm\.weight is missing"):
        load(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json cannot be read"),
        ("config.json", b'{"block_size": ', "config.json cannot be read"),
        ("config.json", b"[1]", "holds list"),
        ("config.json", b"\xff\xfe", "config.json cannot be read"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"", "model.safetensors cannot be read"),
        ("model.safetensors", b"garbage" * 100, "model.safetensors cannot be read"),
    ],
)
def test_absent_and_broken_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    save(tmp_path / "drafter", small_config())
    file = tmp_path / "drafter" / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path / "drafter")
    assert str(tmp_path / "drafter") in str(caught.value)


def test_a_weight_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "drafter", small_config())
    file = tmp_path / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "drafter")


def test_a_tied_head_is_written_beside_its_embedding(tmp_path: Path) -> None:
    table = small_vocabulary(small_config()).embedding_VH
    save(tmp_path / "drafter", small_config(), vocabulary=Vocabulary(table, table))
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], table)
    assert torch.equal(tensors["lm_head.weight"], table)


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        save(tmp_path / "drafter", small_config())
    assert os.listdir(tmp_path / "drafter") == ["notes.txt"]
    assert os.listdir(tmp_path) == ["drafter"]


def test_an_empty_folder_and_missing_parents_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", small_config())
    save(tmp_path / "a" / "b" / "drafter", small_config())
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "drafter"):
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path / "a" / "b") == ["drafter"]


def test_a_save_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full_disk)
    with pytest.raises(InputError, match="no space left"):
        save(tmp_path / "drafter", small_config())
    assert os.listdir(tmp_path) == []


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="could not be written"):
        save(tmp_path / "file" / "drafter", small_config())


def test_a_state_with_foreign_names_is_never_written(tmp_path: Path) -> None:
    config = small_config()
    state = {f"module.{name}": value for name, value in small_drafter(config).state_dict().items()}
    with pytest.raises(AssertionError, match=r"module\.fc\.weight is unexpected"):
        save_drafter(tmp_path / "d", state, config, small_vocabulary(config), TARGET, 1, torch.float32, {})
    assert os.listdir(tmp_path) == []


def reduced(folder: Path, dtype: torch.dtype = torch.float32) -> Mapping[str, Tensor]:
    """Saves a drafter that proposes from 12 of 30 tokens, and returns its state."""
    config = small_config(draft_vocab=12)
    drafter = small_drafter(config)
    drafter.keep(torch.arange(0, 24, 2))
    state = drafter.state_dict()
    save_drafter(folder, state, config, small_vocabulary(config), TARGET, 12, dtype, {})
    return state


def test_a_reduced_vocabulary_lies_in_the_weights_and_its_size_in_the_config(tmp_path: Path) -> None:
    state = reduced(tmp_path / "drafter", torch.bfloat16)
    loaded = load(tmp_path / "drafter", torch.bfloat16)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["draft_vocab_size"] == 12
    for name in ("d2t", "t2d"):
        assert torch.equal(loaded.drafter.state_dict()[name], state[name])
    assert loaded.vocabulary.kept_D is not None and loaded.vocabulary.kept_D.tolist() == list(range(0, 24, 2))
    assert torch.equal(loaded.vocabulary.draft_head_DH, loaded.vocabulary.head_VH[:24:2])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("d2t"), "tensor d2t is missing"),
        (lambda tensors: tensors.pop("t2d"), "tensor t2d is missing"),
        (lambda tensors: tensors["d2t"].add_(1), "d2t and t2d name different tokens"),
        (lambda tensors: tensors["t2d"].logical_not_(), "d2t and t2d name different tokens"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].flip(0)), "not in ascending order"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].int()), "d2t is int32, needed torch.int64"),
    ],
)
def test_maps_that_are_missing_or_contradict_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], named: str
) -> None:
    reduced(tmp_path / "drafter")
    edit_weights(tmp_path / "drafter", change)
    with pytest.raises(InputError, match=named):
        load(tmp_path / "drafter")
