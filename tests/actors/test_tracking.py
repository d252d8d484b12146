"""MLflow runs say the truth about their driver."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.tracking import Tracker
from dspark.sections import TrackingSettings

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys, time
from pathlib import Path
from actors.tracking import Tracker
from dspark.sections import TrackingSettings
with Tracker(TrackingSettings(), Path(sys.argv[1]), "first") as tracker:
    print(tracker.run_id, flush=True)
    time.sleep(600)
"""


def test_the_next_start_ends_the_run_of_a_killed_driver_and_no_other(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    killed = driver.stdout.readline().strip()
    with Tracker(TrackingSettings(), tmp_path, "second") as tracker:
        states = [tracker.client.get_run(run_id).info.status for run_id in (killed, tracker.run_id)]
        assert states == ["RUNNING", "RUNNING"]  # a living driver keeps its run
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        with Tracker(TrackingSettings(), tmp_path, "third"):
            states = [tracker.client.get_run(run_id).info.status for run_id in (killed, tracker.run_id)]
            assert states == ["KILLED", "RUNNING"]
    assert tracker.client.get_run(tracker.run_id).info.status == "FINISHED"
    with Tracker(TrackingSettings(), tmp_path, "first", killed) as resumed:
        assert resumed.client.get_run(killed).info.status == "RUNNING"


def test_a_stopped_job_leaves_its_run_killed_and_a_failed_one_failed(tmp_path: Path) -> None:
    for error, state in ((SystemExit(15), "KILLED"), (KeyboardInterrupt(), "KILLED"), (ValueError(), "FAILED")):
        with pytest.raises(type(error)), Tracker(TrackingSettings(), tmp_path, "run") as tracker:
            raise error
        assert tracker.client.get_run(tracker.run_id).info.status == state
