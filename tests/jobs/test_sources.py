"""Training that cannot tell live states from cached ones: the losses of every step are the same numbers."""

import json
import math
from pathlib import Path

import pytest

from dspark.config import Settings
from dspark.data.cache_reader import CacheReader
from dspark.errors import InputError
from jobs.capture import capture
from jobs.config import load_settings
from jobs.train import train
from tests.conftest import tiny_preset

pytestmark = pytest.mark.usefixtures("local_ray")


def losses(settings: Settings) -> list[float]:
    lines = (settings.output / "latest" / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, list[float]]:
    """A preset of 7 rows in two epochs of 4 steps, and its losses without a cache.

    Every forward holds one row: so a capture in the order of the rows gives the same bits as one in training order.
    """
    changes = {"targets": {"window_rows": 4, "batch_tokens": 1}, "train": {"epochs": 2}}
    preset = tiny_preset(tmp_path_factory.mktemp("live"), tiny_target, rows=7, **changes)
    settings = load_settings(preset, [])
    train(settings, None, False)
    return preset, losses(settings)


def test_a_kept_cache_is_read_in_the_second_epoch_and_by_the_next_run(
    live: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = live
    assert len(expected) == 8 and all(map(math.isfinite, expected))
    kept = load_settings(preset, [f"output={tmp_path}", "data.source=live_and_keep"])
    train(kept, None, False)
    assert losses(kept) == expected
    reader = CacheReader(str(tmp_path / "cache" / "tiny"))
    assert len(reader.sample_ids) == 7 and reader.manifest.settings["by"] == "live_and_keep"
    with pytest.raises(InputError, match="was begun with plan="):
        train(load_settings(preset, [f"output={tmp_path}", "data.source=live_and_keep", "seed=1"]), None, False)


def test_training_from_a_captured_cache_needs_no_target_and_gives_the_losses_of_live_training(
    live: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = live
    folder = f"cache.folder={tmp_path / 'cache'}"
    capture(load_settings(preset, [folder, "drafter.taps=[-1,0,1,2,4]"]), None, False, False)
    # No GPU is there: a target actor could not be started.
    settings = load_settings(preset, [folder, f"output={tmp_path}", "data.source=cache", "targets.gpus=1"])
    train(settings, None, False)
    assert losses(settings) == expected
