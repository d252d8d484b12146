"""Runs that are killed, resumed or misled: real processes, real signals."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dspark.data.cache_check import verify
from dspark.data.cache_reader import CacheReader
from dspark.data.folder import Folder
from dspark.errors import InputError
from jobs.config import load_settings
from jobs.train import train
from tests.conftest import tiny_preset
from tests.jobs.runs import assert_each_row_once, finish, kill_all, records, start, wait_for_step

pytestmark = pytest.mark.faults
SNAPSHOT = "*/train/checkpoint_manager_snapshot.json"
ROWS, EPOCHS = 33, 2


def losses(folder: Path) -> list[float]:
    """Of all records: a step that was made again would stand there twice."""
    return [loss for _, loss in records(folder)]


def tracked_steps(folder: Path) -> list[int]:
    """Steps of the points that MLflow holds of a run's loss."""
    record = json.loads((folder / "run.json").read_text())
    client = MlflowClient(tracking_uri=record["mlflow_uri"])
    return sorted(metric.step for metric in client.get_metric_history(record["mlflow_run_id"], "loss"))


def wait_for_checkpoint(run: subprocess.Popen[str], output: Path, step: int) -> None:
    """Returns as soon as Ray Train has registered the checkpoint of that step."""
    deadline = time.monotonic() + 240
    while not any(f"step-{step:08d}" in file.read_text() for file in output.glob(SNAPSHOT)):
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.05)


def kill_after_a_checkpoint(run: subprocess.Popen[str], output: Path, step: int = 5) -> None:
    """SIGKILL to the run and all that it started, as soon as it has the checkpoint of that step."""
    wait_for_checkpoint(run, output, step)
    kill_all(run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, list[float]]:
    """A preset, and the losses of its undisturbed run."""
    train = {"checkpoint_every": 5, "epochs": EPOCHS}
    preset = tiny_preset(tmp_path_factory.mktemp("whole"), tiny_target, ROWS, train=train)
    finish(start(str(preset)))
    folder = load_settings(preset, []).output / "latest"
    assert_each_row_once(folder, EPOCHS * ROWS)
    return preset, losses(folder)


def test_a_killed_driver_resumes_with_the_losses_of_the_undisturbed_run_and_the_records_that_it_never_took(
    whole: tuple[Path, list[float]], tmp_path: Path
) -> None:
    preset, expected = whole
    run = start(str(preset), f"output={tmp_path}")
    wait_for_checkpoint(run, tmp_path, 5)
    # The driver hears nothing more, while targets and trainers go on without it.
    os.kill(run.pid, signal.SIGSTOP)
    wait_for_checkpoint(run, tmp_path, 15)
    folder = (tmp_path / "latest").resolve()
    taken = len(losses(folder))
    kill_all(run)
    output = finish(start(str(preset), f"output={tmp_path}", "--resume", str(folder)))
    assert taken < 15 <= int(output.split("resumed at step ")[1].split()[0])
    assert [step for step, _ in records(folder)] == list(range(1, len(expected) + 1))
    assert losses(folder) == pytest.approx(expected, rel=1e-6)
    assert_each_row_once(folder, EPOCHS * ROWS)
    assert tracked_steps(folder) == list(range(1, len(expected) + 1))
    assert (folder / "drafter" / "model.safetensors").is_file()


@pytest.mark.parametrize("step", [5, 20], ids=["first epoch", "second epoch"])
def test_a_killed_run_that_keeps_a_cache_resumes_with_the_same_losses_and_completes_the_cache(
    whole: tuple[Path, list[float]], tmp_path: Path, step: int
) -> None:
    preset, expected = whole
    kept = (str(preset), f"output={tmp_path}", "data.source=live_and_keep")
    run = start(*kept)
    kill_after_a_checkpoint(run, tmp_path, step)
    cache = tmp_path / "cache" / "tiny"
    first = cache / "shard-000000.parquet"
    # Its rows are behind the checkpoint, the trainers will not ask for them again. In the second epoch the cache is
    # complete, and where targets were fast already in the first.
    os.truncate(first, first.stat().st_size - 1)
    folder = (tmp_path / "latest").resolve()
    finish(start(*kept, "--resume", str(folder)))
    assert losses(folder) == pytest.approx(expected, rel=1e-6)
    assert_each_row_once(folder, EPOCHS * ROWS)
    assert verify(Folder(cache), 1, lambda _: None) == []
    assert len(CacheReader(str(cache)).sample_ids) == ROWS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_says_how_to_go_on_and_loses_nothing(
    whole: tuple[Path, list[float]], tmp_path: Path, number: signal.Signals
) -> None:
    preset, expected = whole
    ranks = ["train.workers=2", "train.zero_stage=2"] if number == signal.SIGINT else []
    run = start(str(preset), f"output={tmp_path}", *ranks)
    wait_for_step(run, tmp_path, 3)
    os.kill(run.pid, number)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 75, errors[-3000:]
    folder = (tmp_path / "latest").resolve()
    stopped = len(losses(folder))
    assert 3 <= stopped < len(expected) and f"stopped at step {stopped} of {len(expected)}" in errors
    command = shlex.split(errors.split("to go on: ")[1])
    assert command[0] == "dspark" and command[-2:] == ["--resume", str(folder)]
    # The other number of ranks is asked for at the resume: from two under ZeRO 2 to one.
    more = ["train.workers=1"] if ranks else []
    output = finish(start(*command[2:-2], *more, *command[-2:]))
    assert losses(folder) == pytest.approx(expected, rel=1e-3 if ranks else 1e-6)
    assert f"resumed at step {stopped}" in output
    assert_each_row_once(folder, EPOCHS * ROWS)


def test_a_finished_run_that_is_resumed_trains_nothing_and_keeps_its_records(
    whole: tuple[Path, list[float]], local_ray: None
) -> None:
    preset, expected = whole
    settings = load_settings(preset, [])
    folder = (settings.output / "latest").resolve()
    train(settings, folder, False)
    assert losses(folder) == expected
    assert_each_row_once(folder, EPOCHS * ROWS)


def test_a_run_that_is_resumed_with_other_settings_is_refused(whole: tuple[Path, list[float]], local_ray: None) -> None:
    settings = load_settings(whole[0], ["loss.l1=0.5"])
    with pytest.raises(InputError, match=r"loss\.l1=0\.9.*0\.5"):
        train(settings, (settings.output / "latest").resolve(), False)


def test_a_folder_that_is_no_run_is_not_resumed(whole: tuple[Path, list[float]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        train(load_settings(whole[0], []), tmp_path, False)


def test_a_loss_that_is_not_finite_stops_the_run_with_advice(
    tmp_path: Path, tiny_target: Path, local_ray: None
) -> None:
    preset = tiny_preset(tmp_path, tiny_target, train={"lr": 1e30, "clip": 1e30})
    with pytest.raises(InputError, match=r"the loss is (nan|inf).*lower train\.lr"):
        train(load_settings(preset, []), None, False)


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, tiny_target: Path) -> None:
    run = start(str(tiny_preset(tmp_path, tiny_target)), "ray.address=127.0.0.1:1")
    _, errors = run.communicate(timeout=280)
    assert run.returncode == 2
    assert "no Ray cluster answers there" in " ".join(errors.split())


def test_a_port_that_is_in_use_is_named(tmp_path: Path, tiny_target: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = start(str(tiny_preset(tmp_path, tiny_target)), f"ray.dashboard_port={taken.getsockname()[1]}")
        _, errors = run.communicate(timeout=280)
    assert run.returncode == 2
    assert "in use on this machine" in " ".join(errors.split())
