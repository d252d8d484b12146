"""Training through real Ray, Ray Data, Ray Train and DeepSpeed, on a tiny target."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from actors.checkpoints import (
    DRAFTER,
    SNAPSHOT,
    SPARE,
    best_checkpoint,
    newest_checkpoint,
    progress_of,
    read_file,
    settle_storage,
)
from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.model_card import Licences
from dspark.model.exchange import read_checkpoint
from dspark.target_files import fingerprint
from jobs.config import load_settings
from jobs.export import export
from jobs.train import train
from tests.conftest import tiny_preset, write_conversations

pytestmark = pytest.mark.usefixtures("local_ray")


def losses(output: Path, name: str = "loss") -> list[float]:
    lines = (output / "latest" / "history.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, list[float]]:
    """The preset, and the loss of every step of one rank under ZeRO 1."""
    preset = tiny_preset(tmp_path_factory.mktemp("one"), tiny_target)
    settings = load_settings(preset, [])
    train(settings, None, False)
    return preset, losses(settings.output)


def test_every_row_is_trained_and_the_last_step_is_filled_with_rows_without_weight(
    one_rank: tuple[Path, list[float]],
) -> None:
    preset, curve = one_rank
    assert len(curve) == 17  # 33 rows in steps of 2
    counts = losses(load_settings(preset, []).output, "anchors_used")
    assert all(0 < count <= 8 for count in counts)
    assert curve[-1] < curve[0]


def test_two_ranks_and_zero_3_change_neither_losses_nor_gradient_norms(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = one_rank
    changes = ["train.workers=2", "train.zero_stage=3", "targets.actors=2"]
    settings = load_settings(preset, [f"output={tmp_path}", *changes])
    train(settings, None, False)
    assert losses(settings.output) == pytest.approx(expected, rel=1e-4)
    norms = losses(load_settings(preset, []).output, "grad_norm")
    assert min(norms) > 0
    assert losses(settings.output, "grad_norm") == pytest.approx(norms, rel=1e-3)


def test_a_drafter_of_all_tokens_that_starts_from_the_target_begins_elsewhere_and_learns_too(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = one_rank
    settings = load_settings(preset, [f"output={tmp_path}", "drafter.init=target", "drafter.vocab=null"])
    train(settings, None, False)
    curve = losses(settings.output)
    assert curve[0] != pytest.approx(expected[0], rel=1e-2)
    assert curve[-1] < curve[0]


def test_a_drafter_that_starts_from_another_one_goes_on_where_that_ended(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = one_rank
    start = load_settings(preset, []).output / "latest" / "drafter"
    exported = tmp_path / "exported"
    export(start, exported, "speculators", None, None, Licences(), None, False)
    overrides = [f"output={tmp_path}", "drafter.init=random", f"drafter.start_from={exported}", "train.max_steps=2"]
    settings = load_settings(preset, overrides)
    train(settings, None, False)
    curve = losses(settings.output)
    assert curve[0] < expected[0]
    made = read_checkpoint(settings.output / "latest" / "drafter").facts
    assert made["start_from"] == fingerprint(exported)
    with pytest.raises(InputError, match=r"drafter\.taps is \(1, 2, 4\), the checkpoint has \(0, 2, 4\)"):
        train(load_settings(preset, [*overrides, "drafter.taps=[1,2,4]"]), None, True)
    assert identity_of(settings)["drafter.start_from"] == fingerprint(exported)


def identity_of(settings: Settings) -> dict[str, Any]:
    """The identity in the newest checkpoint of a run."""
    checkpoint = newest_checkpoint(settings.output.resolve() / "latest" / "train")
    assert checkpoint is not None
    identity: dict[str, Any] = progress_of(checkpoint)["identity"]
    return identity


def test_the_ledger_of_a_run_holds_every_row_once(one_rank: tuple[Path, list[float]]) -> None:
    folder = load_settings(one_rank[0], []).output / "latest"
    ledger = json.loads((folder / "ledger.json").read_text())
    assert (ledger["expected"], ledger["trained"], ledger["repeated"], ledger["missing"]) == (33, 33, 0, 0)
    assert ledger["epochs"]["0"]["not_finite"] == 0


def test_what_a_kill_in_mid_save_leaves_is_never_loaded_and_cleared(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    storage = tmp_path / "train"
    shutil.copytree((load_settings(one_rank[0], []).output / "latest").resolve() / "train", storage)
    snapshot = (storage / SNAPSHOT).read_text()
    (storage / SPARE).write_text(snapshot)
    (storage / SNAPSHOT).write_text(snapshot[: len(snapshot) // 2])
    (storage / "step-00000099").mkdir()
    (storage / "step-00000099" / DRAFTER).write_text("half")
    settle_storage(storage)
    assert sorted(path.name for path in storage.glob("step-*")) == ["step-00000010", "step-00000017"]
    checkpoint = newest_checkpoint(storage)
    assert checkpoint is not None and progress_of(checkpoint)["step"] == 17
    # The target's frozen tensors are not in it.
    assert not {"embed_tokens.weight", "lm_head.weight"} & load(read_file(checkpoint, DRAFTER)).keys()


def test_validation_decides_when_to_stop_and_which_checkpoint_is_exported(tmp_path: Path, tiny_target: Path) -> None:
    rows = write_conversations(tmp_path / "validation.jsonl", 5, seed=3)
    train = {"workers": 2, "zero_stage": 2, "checkpoint_every": 1, "keep_best": 2, "ema": 0.5, "lr": 0.3, "clip": 1e9}
    changes: dict[str, Any] = {"train": train, "validation": {"every": 1, "patience": 1, "metric": "loss"}}
    preset = tiny_preset(tmp_path, tiny_target, **changes)
    remote = f"file://{tmp_path / 'remote'}"
    settings = load_settings(preset, [f"data.validation={rows}", f"train.storage={remote}"])
    train_it(settings)
    history = losses(settings.output, "val_loss")
    best = history.index(min(history)) + 1
    # A rate that is far too high: the second step makes it worse.
    assert len(history) == best + 1 < 17
    assert len(losses(settings.output, "val_accept_rate_0")) == len(history)
    storage = f"{remote}/{(settings.output / 'latest').resolve().name}"
    kept = best_checkpoint(storage, "val_loss", smaller=True)
    assert kept is not None and progress_of(kept)["step"] == best
    made = read_checkpoint(settings.output / "latest" / "drafter")
    assert made.facts["steps"] == best
    assert len(list((tmp_path / "remote").glob("*/step-*"))) <= 3
    ledger = json.loads((settings.output / "latest" / "ledger.json").read_text())
    assert ledger["expected"] == ledger["trained"] == 2 * len(history)
    train_it(settings, (settings.output / "latest").resolve())
    assert losses(settings.output, "val_loss") == history


def test_rows_that_are_trained_cannot_validate(one_rank: tuple[Path, list[float]]) -> None:
    conversations = load_settings(one_rank[0], []).data.conversations
    settings = load_settings(one_rank[0], [f"data.validation={conversations}", "validation.every=5"])
    with pytest.raises(InputError, match=r"33 of the 33 rows of data\.validation.*are training rows too"):
        train(settings, None, True)


def train_it(settings: Settings, resume: Path | None = None) -> None:
    train(settings, resume, False)
