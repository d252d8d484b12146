"""A sweep whose driver is killed: what has ended stays, what was broken off goes on, in the same MLflow runs."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.conftest import tiny_preset, write_conversations
from tests.jobs import runs
from tests.jobs.runs import kill_all

pytestmark = [pytest.mark.faults, pytest.mark.timeout(800)]
start = partial(runs.start, command="tune")


def outcomes(folder: Path) -> dict[int, dict[str, Any]]:
    path = folder / "trials.json"
    rows = json.loads(path.read_text())["trials"] if path.is_file() else []
    return {row["number"]: row for row in rows}


def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path: Path, tiny_target: Path) -> None:
    measured = write_conversations(tmp_path / "validation.jsonl", 3, seed=7)
    preset = tiny_preset(
        tmp_path, tiny_target, rows=40,
        data={"validation": str(measured)}, validation={"every": 2}, train={"checkpoint_every": 2},
        tune={"space": {"train.lr": {"grid": [2e-3, 3e-3]}}, "scheduler": "none", "confirm": 0},
    )  # fmt: skip
    run = start(str(preset))
    deadline, folder = time.monotonic() + 300, tmp_path / "runs" / "latest"
    # Trial 0 is over, trial 1 has a few measurements and checkpoints.
    while outcomes(folder).get(1, {}).get("step", 0) < 6:
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "trial 1 never came so far"
        time.sleep(0.05)
    before = outcomes(folder)
    folder = folder.resolve()
    kill_all(run)
    resumed = start(str(preset), "--resume", str(folder))
    _, errors = resumed.communicate(timeout=250)
    assert resumed.returncode == 0, errors[-3000:]
    after = outcomes(folder)
    assert [one["state"] for one in after.values()] == ["finished"] * 3
    assert after[0] == before[0]
    # A trial trains on while Ray Tune thinks: what it had not told when it was killed is not trained or told again.
    curve = [step for step, _ in after[1]["curve"]]
    assert curve == sorted(set(curve)) and curve[:3] == [2, 4, 6] and curve[-1] == 20
    assert "resumed at step" in (folder / "trials" / "01-seed42" / "log.txt").read_text()
    client = MlflowClient(json.loads((folder / "run.json").read_text())["mlflow_uri"])
    child = after[1]["mlflow_run_id"]
    assert child == before[1]["mlflow_run_id"] and client.get_run(child).info.status == "FINISHED"
    steps = [metric.step for metric in client.get_metric_history(child, "loss")]
    assert sorted(steps) == sorted(set(steps)) and {1, 6, 20} <= set(steps)
    changed = start(str(preset), "tune.space.train.lr={grid: [2e-3, 4e-3]}", "--resume", str(folder))
    _, errors = changed.communicate(timeout=120)
    assert changed.returncode == 2 and "tune.space.train.lr.grid was" in errors
