"""The whole path as a user runs it: one command, in a process of its own, on a tiny target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dspark.errors import InputError
from jobs.config import load_settings
from jobs.run import run
from tests.conftest import tiny_preset

REPOSITORY = Path(__file__).parents[2]


def dspark(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, str, Path]:
    """Output folder, standard output and preset of a finished run."""
    folder = tmp_path_factory.mktemp("run")
    # The store is made where no URI is set, too.
    preset = tiny_preset(folder, tiny_target, train={"max_steps": 8, "log_every": 2}, tracking={"uri": None})
    done = dspark("run", str(preset))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs", done.stdout, preset


def test_the_last_line_is_the_report_and_latest_points_to_its_run(finished: tuple[Path, str, Path]) -> None:
    output, printed, _ = finished
    report = Path(printed.strip().splitlines()[-1])
    assert report.name == "report.html"
    assert report.parent == (output / "latest").resolve()
    assert report.read_text().startswith("<!doctype html>")
    assert "acceptance length" in printed


def test_result_json_holds_the_numbers_that_scripts_read(finished: tuple[Path, str, Path]) -> None:
    result = json.loads((finished[0] / "latest" / "result.json").read_text())
    assert result["identical"] == [4, 4]
    assert result["steps"] == 8
    assert result["model_version"] == 1
    assert result["acceptance_length"]["t0"] >= 1
    assert result["acceptance_length"]["t1"] >= 1
    assert result["speedup"] > 0
    assert set(result["tokens_per_second"]) == {"plain", "speculative"}
    assert min(result["seconds"][key] for key in ("total", "prepare", "train", "evaluate")) > 0


def test_the_run_is_tracked_and_its_drafter_registered(finished: tuple[Path, str, Path]) -> None:
    output = finished[0]
    record = json.loads((output / "latest" / "run.json").read_text())
    client = MlflowClient(tracking_uri=record["mlflow_uri"])
    run = client.get_run(record["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["drafter.block"] == "4"
    steps = [metric.step for metric in client.get_metric_history(record["mlflow_run_id"], "loss")]
    assert steps == [2, 4, 6, 8]
    assert {"report.html", "result.json", "settings.yaml", "plots", "drafter"} <= {
        item.path for item in client.list_artifacts(record["mlflow_run_id"])
    }
    version = client.get_model_version("tiny", "1")
    lengths = {"acceptance_length.t0.held_out", "acceptance_length.t1.held_out"}
    assert {"target_fingerprint", "data_fingerprint", "settings_hash", *lengths} <= set(version.tags)
    assert version.run_id == version.tags["trained_by"] == record["mlflow_run_id"]
    assert version.tags["lossless"] == "4 of 4 in fp32"


def test_a_finished_run_that_is_resumed_registers_no_second_version(
    finished: tuple[Path, str, Path], local_ray: None
) -> None:
    output, _, preset = finished
    folder = (output / "latest").resolve()
    before = json.loads((folder / "result.json").read_text())
    run(load_settings(preset, []), folder, False)
    after = json.loads((folder / "result.json").read_text())
    assert after["model_version"] == 1 and after["acceptance_length"] == before["acceptance_length"]
    client = MlflowClient(tracking_uri=json.loads((folder / "run.json").read_text())["mlflow_uri"])
    assert [int(version.version) for version in client.search_model_versions("name = 'tiny'")] == [1]


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path: Path, tiny_target: Path) -> None:
    preset = tiny_preset(tmp_path, tiny_target)
    before = sorted(tmp_path.rglob("*"))
    done = dspark("run", str(preset), "--dry-run", "train.global_batch=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "11 of 3 rows" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.conversations=nowhere.jsonl"], "nowhere.jsonl"),
        (["drafter.mask_token_id=320"], "outside the vocabulary 0..319"),
        (["drafter.mask_token_id=258"], "eos token"),
        (["drafter.mask_token_id=256"], "pad token"),
        (["drafter.taps=[0,5]"], "the target's last layer"),
        (["drafter.taps=[0,9]"], "layers 0 to 5"),
        (["drafter.vocab=321"], "exceeds the target's 320 tokens"),
        (["drafter.vocab=3"], "no room for the target's 4 special tokens"),
        (["drafter.markov_rank=0"], "markov_rank > 0"),
        (["drafter.layer=3"], "drafter.layer"),
        (["train.anchors=many"], "train.anchors"),
        (["train.global_batch=3", "train.workers=2"], "global_batch"),
        (["evaluate.prompts_t0=99"], "prompts_t0"),
        (["evaluate.max_new_tokens=600"], "more than the 512 positions of the target"),
        (["evaluate.actors=2", "evaluate.max_actors=1"], "max_actors=1 is below actors=2"),
        (["evaluate.benchmark_names=[gsm9k]"], "there is no benchmark 'gsm9k'"),
        (["evaluate.batch=[2, 2]"], "names one twice"),
        (["target.model=/nowhere"], "/nowhere"),
        (["train.anchors=100000000"], "lower train.anchors"),
        (["output=/proc/nowhere"], "output"),
    ],
)
def test_bad_input_is_refused_with_what_to_do_and_leaves_nothing(
    tmp_path: Path, tiny_target: Path, overrides: list[str], message: str
) -> None:
    preset = tiny_preset(tmp_path, tiny_target)
    with pytest.raises(InputError) as refused:
        run(load_settings(preset, overrides), None, False)
    assert message in " ".join(str(refused.value).split())
    assert not list((tmp_path / "runs").glob("*/drafter"))
