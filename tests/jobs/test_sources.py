"""Training that cannot tell live states from cached ones: the losses of every step are the same numbers."""

from pathlib import Path

import pytest

from dspark.data.cache_reader import CacheReader
from dspark.errors import InputError
from jobs.capture import capture
from jobs.config import load_settings
from jobs.train import train
from tests.jobs.conftest import PlainRun
from tests.jobs.runs import assert_each_row_once, values

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_kept_cache_is_read_in_the_second_epoch_and_by_the_next_run(plain_run: PlainRun, tmp_path: Path) -> None:
    keeping = [f"output={tmp_path}", "data.source=live_and_keep"]
    train(load_settings(plain_run.preset, keeping), None, False)
    assert values(tmp_path / "latest", "loss") == plain_run.losses
    assert_each_row_once(tmp_path / "latest", 2 * 33)
    reader = CacheReader(str(tmp_path / "cache" / "tiny"))
    assert len(reader.sample_ids) == 33 and reader.manifest.settings["by"] == "live_and_keep"
    with pytest.raises(InputError, match="was begun with plan="):
        train(load_settings(plain_run.preset, [*keeping, "seed=1"]), None, False)


def test_training_from_a_captured_cache_needs_no_target_and_gives_the_losses_of_live_training(
    plain_run: PlainRun, tmp_path: Path
) -> None:
    folder = f"cache.folder={tmp_path / 'cache'}"
    capture(load_settings(plain_run.preset, [folder, "drafter.taps=[-1,0,1,2,4]"]), None, False, False)
    # No GPU is there: a target actor could not be started.
    cached = [folder, f"output={tmp_path}", "data.source=cache", "targets.gpus=1"]
    train(load_settings(plain_run.preset, cached), None, False)
    assert values(tmp_path / "latest", "loss") == plain_run.losses
    assert_each_row_once(tmp_path / "latest", 2 * 33)
