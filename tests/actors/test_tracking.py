"""MLflow runs say the truth about their driver."""

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from actors.tracking import Tracker, open_client, sqlite_file
from dspark.errors import InputError
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


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder for all tests: its store takes MLflow seconds to make."""
    return tmp_path_factory.mktemp("tracked")


def test_the_next_start_ends_the_run_of_a_killed_driver_and_no_other(output: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(output)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    killed = driver.stdout.readline().strip()
    with Tracker(TrackingSettings(), output, "second") as tracker:
        states = [tracker.client.get_run(run_id).info.status for run_id in (killed, tracker.run_id)]
        assert states == ["RUNNING", "RUNNING"]  # a living driver keeps its run
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        with Tracker(TrackingSettings(), output, "third"):
            states = [tracker.client.get_run(run_id).info.status for run_id in (killed, tracker.run_id)]
            assert states == ["KILLED", "RUNNING"]
    assert tracker.client.get_run(tracker.run_id).info.status == "FINISHED"
    with Tracker(TrackingSettings(), output, "first", killed) as resumed:
        assert resumed.client.get_run(killed).info.status == "RUNNING"


def test_a_stopped_job_leaves_its_run_killed_and_a_failed_one_failed(output: Path) -> None:
    for error, state in ((SystemExit(15), "KILLED"), (KeyboardInterrupt(), "KILLED"), (ValueError(), "FAILED")):
        with pytest.raises(type(error)), Tracker(TrackingSettings(), output, "run") as tracker:
            raise error
        assert tracker.client.get_run(tracker.run_id).info.status == state


def test_a_driver_of_another_machine_is_given_up_when_it_has_not_shown_itself_for_long(output: Path) -> None:
    settings = TrackingSettings()
    lost, busy = (Tracker(settings, output, name) for name in ("lost", "busy"))
    for tracker, age_s in ((lost, 1000), (busy, 100)):
        tracker.tags({"dspark.driver_host": "elsewhere", "dspark.driver_seen": f"{time.time() - age_s:.0f}"})
    experiment = lost.client.get_run(lost.run_id).info.experiment_id
    foreign = lost.client.create_run(experiment, run_name="of another program").info.run_id
    with Tracker(settings, output, "next") as tracker:
        states = [tracker.client.get_run(run).info.status for run in (lost.run_id, busy.run_id, foreign)]
    assert states == ["KILLED", "RUNNING", "RUNNING"]


def test_a_run_that_goes_on_logs_no_step_twice_and_fills_the_steps_that_a_kill_swallowed(output: Path) -> None:
    killed = Tracker(TrackingSettings(), output, "run")
    # A checkpoint behind step 3; the record of step 2 never reached MLflow, those of 4 and 5 did.
    killed.records([{"step": step, "loss": float(step)} for step in (1, 3, 4, 5)])
    history = [{"step": step, "loss": float(step)} for step in (1, 2, 3)]
    with Tracker(TrackingSettings(), output, "run", killed.run_id) as resumed:
        resumed.records(history)
        for step in (4, 5, 6):
            resumed.records([{"step": step, "loss": 9.0, "val_loss": 1.0}])
        resumed.records([{"step": 6, "loss": 9.0}, {"step": 7, "loss": float("nan")}])  # trainers that restarted
        # What a whole run gave may be measured anew.
        for speed in (1.5, 2.5):
            resumed.results({"speedup": speed}, 6)
    found = {metric.step: metric.value for metric in resumed.client.get_metric_history(resumed.run_id, "loss")}
    points = resumed.client.get_metric_history(resumed.run_id, "loss")
    assert sorted(point.step for point in points) == [1, 2, 3, 4, 5, 6]
    assert found == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 9}
    run = resumed.client.get_run(resumed.run_id)
    assert run.data.metrics["val_loss"] == 1 and run.data.metrics["speedup"] == 2.5
    with pytest.raises(InputError, match="does not hold the run nothing that is to go on"):
        Tracker(TrackingSettings(), output, "run", "nothing")


def test_a_store_that_takes_nothing_for_a_while_gets_every_record_once(
    output: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("actors.tracking._AGAIN_S", 0.0)
    with Tracker(TrackingSettings(), output, "run") as tracker:
        tracker.records([{"step": 1, "loss": 1.0}])
        with closing(sqlite3.connect(sqlite_file(tracker.uri))) as store:
            store.execute("ALTER TABLE metrics RENAME TO away")
            for step in (2, 3):
                tracker.records([{"step": step, "loss": float(step)}])
            store.execute("ALTER TABLE away RENAME TO metrics")
        warned = [one.getMessage() for one in caplog.records if one.name == "actors.tracking"]
        tracker.records([{"step": 4, "loss": 4.0}])
        monkeypatch.setattr("actors.tracking._AGAIN_S", 1000.0)
    points = tracker.client.get_metric_history(tracker.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert len(warned) == 1 and "takes no records" in warned[0]


def test_a_run_shows_its_machine_and_no_secret(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    monkeypatch.setenv("HF_TOKEN", "not-to-be-seen")
    with Tracker(TrackingSettings(), output, "run") as tracker:
        tracker.params({"tracking.uri": "http://me:pw@host", "addresses": ["http://me:pw@host/?token=x"]})
        tracker.tags({"note": "with not-to-be-seen inside"})
        deadline = time.monotonic() + 30
        while not (metrics := tracker.client.get_run(tracker.run_id).data.metrics):
            assert time.monotonic() < deadline, "no metrics of the machine"
            time.sleep(0.1)
    assert metrics["system/system_memory_usage_percentage"] > 0
    run = tracker.client.get_run(tracker.run_id).data
    assert run.params["tracking.uri"] == "http://me:***@host"
    assert run.params["addresses"] == "['http://me:***@host/?token=***']"
    assert run.tags["note"] == "with *** inside"


def test_a_server_that_does_not_answer_is_named_at_once_without_its_password() -> None:
    since = time.monotonic()
    with pytest.raises(InputError, match=r"http://me:\*\*\*@127\.0\.0\.1:1 cannot be opened .*start the server"):
        open_client("http://me:pw@127.0.0.1:1", create=True)
    assert time.monotonic() - since < 10
