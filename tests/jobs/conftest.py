"""One undisturbed training run for all tests of jobs that compare others with it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark.config import Settings
from jobs.config import load_settings
from jobs.train import train
from tests.conftest import tiny_preset
from tests.jobs.runs import values


@dataclass(frozen=True)
class PlainRun:
    """One rank under ZeRO 1, live states, two epochs of 33 rows: what was asked for, its folder, every step's loss."""

    preset: Path
    settings: Settings
    folder: Path
    losses: list[float]


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, local_ray: None) -> PlainRun:
    """Every forward of its target holds one row: so a capture in the order of the rows gives the same bits."""
    folder = tmp_path_factory.mktemp("plain")
    preset = tiny_preset(folder, tiny_target, targets={"batch_tokens": 1}, train={"epochs": 2})
    settings = load_settings(preset, [])
    train(settings, None, False)
    folder = (settings.output / "latest").resolve()
    return PlainRun(preset, settings, folder, values(folder, "loss"))
