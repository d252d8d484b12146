"""Training through real Ray, Ray Data, Ray Train and DeepSpeed, on a tiny target."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.checkpoints import PROGRESS, newest_checkpoint
from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.model_card import Licences
from dspark.model.exchange import read_checkpoint
from dspark.target import fingerprint
from jobs.config import load_settings
from jobs.export import export
from jobs.train import train
from tests.conftest import tiny_preset

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
    with checkpoint.as_directory() as stored:
        identity: dict[str, Any] = json.loads((Path(stored) / PROGRESS).read_text())["identity"]
    return identity
