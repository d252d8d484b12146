"""Training through real Ray, Ray Data, Ray Train and DeepSpeed, on a tiny target."""

import json
from pathlib import Path

import pytest

from jobs.config import load_settings
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


@pytest.mark.parametrize(
    "changes",
    [
        ["train.workers=2", "train.zero_stage=3", "targets.actors=2"],
        ["train.micro_batch=2", "train.pack_tokens=128", "train.zero_stage=0"],
    ],
    ids=["two ranks", "packed"],
)
def test_ranks_zero_stages_and_packing_change_neither_losses_nor_gradient_norms(
    one_rank: tuple[Path, list[float]], tmp_path: Path, changes: list[str]
) -> None:
    preset, expected = one_rank
    settings = load_settings(preset, [f"output={tmp_path}", *changes])
    train(settings, None, False)
    assert losses(settings.output) == pytest.approx(expected, rel=1e-4)
    norms = losses(load_settings(preset, []).output, "grad_norm")
    assert min(norms) > 0
    assert losses(settings.output, "grad_norm") == pytest.approx(norms, rel=1e-3)


def test_a_second_run_with_the_same_seed_gives_the_same_losses(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = one_rank
    settings = load_settings(preset, [f"output={tmp_path}"])
    train(settings, None, False)
    assert losses(settings.output) == pytest.approx(expected, abs=1e-6)


def test_bf16_training_without_sharding_follows_the_fp32_curve(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = one_rank
    settings = load_settings(preset, [f"output={tmp_path}", "train.precision=bf16", "train.zero_stage=0"])
    train(settings, None, False)
    assert losses(settings.output) == pytest.approx(expected, rel=0.03)


def test_a_drafter_of_all_tokens_that_starts_at_random_begins_worse_and_learns_too(
    one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = one_rank
    settings = load_settings(preset, [f"output={tmp_path}", "drafter.init=random", "drafter.vocab=null"])
    train(settings, None, False)
    curve = losses(settings.output)
    assert curve[0] > expected[0]
    assert curve[-1] < curve[0]
