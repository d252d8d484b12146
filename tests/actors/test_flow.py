"""The stream between targets and trainers: bounded, elastic, ended with its reader. Real processes on several nodes."""

from pathlib import Path

import pytest

from dspark.data.epoch_ledger import Tally
from tests.actors.flows import alone, joined_and_lost, pruned, slowly_read
from tests.conftest import tiny_preset

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return tiny_preset(tmp_path_factory.mktemp("flow"), tiny_target)


def test_with_a_slow_trainer_nothing_spills_and_targets_are_never_further_ahead_than_the_bound(preset: Path) -> None:
    found, ledger, in_flight = alone(slowly_read, preset)
    assert ledger == Tally(expected=60, trained=60)
    assert found.bytes == pytest.approx(59 * 4 * 2**20, rel=0.01)  # all rows but the first, which starts the clock
    assert found.spilled == 0
    # Rows at both ends of the stream are not in flight: handed over but not taken up, asked for ahead.
    assert found.most_held <= in_flight + 12 * 4 * 2**20
    assert found.most_held < found.bytes / 2, "all rows were there at once: nothing was held back"


def test_a_node_that_joins_is_used_one_that_is_lost_is_replaced_and_without_any_the_reader_learns_it(
    preset: Path,
) -> None:
    found = alone(joined_and_lost, preset)
    assert found["evaluated there"], "the head has room too, but not the label"
    assert found["alone"] == 1
    ledger = found["ledger"]
    assert ledger == Tally(expected=ledger.trained, trained=ledger.trained) and ledger.trained > 48
    assert "no target is left and none can be started: one needs 1 logical CPUs on a node with labels" in found["error"]
    assert found["seconds"] < 60


def test_the_producers_of_a_trial_that_is_pruned_end_within_15_seconds(preset: Path) -> None:
    producers, seconds, ledger = alone(pruned, preset)
    assert producers >= 1
    assert seconds < 15
    assert ledger == Tally(expected=1, trained=1), "what nobody trained is not booked"
