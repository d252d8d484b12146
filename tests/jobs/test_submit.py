"""Submitted jobs: what goes along, which paths are refused, and a real job on a real cluster of this machine."""

import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from benchmarks.head_node import Head, head_node
from dspark.errors import InputError
from jobs.config import load_settings
from jobs.submit import connect, job_entrypoint
from jobs.uploading import check_inputs, collect_upload
from tests.conftest import tiny_preset

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "platform/presets/smollm2_135m.yaml"
_PATIENCE_S = 280.0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Code, presets and data as a clone has them, with what must stay behind."""
    root = tmp_path / "checkout"
    for folder in ("actors", "dspark", "jobs", "platform"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, root / name)
    return root


def write_sparse(path: Path, megabytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(megabytes * 10**6)


def test_caches_runs_and_weights_stay_behind_however_large(checkout: Path) -> None:
    for name in (
        "runs/a/train/state.pt",
        "cache/shard-0.parquet",
        ".venv/lib/torch.so",
        ".git/objects/pack",
        "m.safetensors",
    ):
        write_sparse(checkout / name, 5000)
    upload = collect_upload(checkout)
    assert upload.total < 5_000_000
    assert {Path("jobs/train.py"), Path("platform/presets/smollm2_135m.yaml")} <= set(upload.files)
    assert {path.parts[0] for path in upload.files} == {
        "actors",
        "dspark",
        "jobs",
        "platform",
        ".gitignore",
        ".rayignore",
    }


def test_too_large_an_upload_is_refused_and_names_its_largest_folder(checkout: Path) -> None:
    write_sparse(checkout / "notes/video.mp4", 60)
    with pytest.raises(InputError, match=r"6\d MB, at most 50 MB go along; the largest folders: notes \(60 MB\)"):
        collect_upload(checkout)


def test_a_relative_output_is_refused_here_and_in_a_job_that_was_submitted_by_hand(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    preset = Path("platform/presets/smollm2_135m.yaml")
    with pytest.raises(InputError, match=r"output=.*/checkout/runs: a submitted job works in a copy"):
        job_entrypoint(checkout, "train", preset, [], None)
    for key, value, kept in (
        ("train.storage", "states", "s3://bucket/states"),
        ("tracking.uri", "sqlite:///runs/mlflow.db", "sqlite:////shared/mlflow.db"),
    ):
        with pytest.raises(InputError, match=rf"^{key}=.*: a submitted job works in a copy"):
            job_entrypoint(checkout, "train", preset, ["output=/shared/runs", f"{key}={value}"], None)
        job_entrypoint(checkout, "train", preset, ["output=/shared/runs", f"{key}={kept}"], None)
    load_settings(preset, [])
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(InputError, match="give an absolute folder"):
        load_settings(preset, [])


def test_the_job_runs_the_module_on_the_cluster_that_runs_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    preset = checkout / "platform/presets/smollm2_135m.yaml"
    line = job_entrypoint(checkout, "train", preset, ["output=/shared/my runs"], "/shared/runs/latest")
    assert line == (
        "python -m jobs.train platform/presets/smollm2_135m.yaml 'output=/shared/my runs' ray.address=auto "
        "--resume /shared/runs/latest"
    )
    with pytest.raises(InputError, match="leave the setting out"):
        job_entrypoint(checkout, "train", preset, ["output=/shared", "ray.address=10.0.0.1:6379"], None)
    with pytest.raises(InputError, match="lies outside"):
        job_entrypoint(checkout, "train", PRESET, ["output=/shared"], None)


def test_measuring_commands_take_drafters_that_all_nodes_see(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    preset, shared = Path("platform/presets/smollm2_135m.yaml"), "output=/shared/runs"
    line = job_entrypoint(checkout, "evaluate", preset, [shared, "/shared/a", "models:/x@champion"], "/shared/runs/e")
    assert line.endswith("smollm2_135m.yaml /shared/a models:/x@champion output=/shared/runs ray.address=auto --resume "
                         "/shared/runs/e")  # fmt: skip
    line = job_entrypoint(checkout, "calibrate", preset, ["/shared/a", shared, "--profile"], None)
    assert line.endswith("smollm2_135m.yaml /shared/a output=/shared/runs ray.address=auto --profile")
    for words, resume, message in (
        ([shared], None, r"`submit calibrate` takes one CHECKPOINT behind the preset, found 0"),
        (["/shared/a", "/shared/b", shared], None, "found 2"),
        (["runs/latest/drafter", shared], None, "drafter runs/latest/drafter: the job cannot read it"),
        (["/shared/a", shared], "/shared/runs/e", "calibrate begins anew each time"),
    ):
        with pytest.raises(InputError, match=message):
            job_entrypoint(checkout, "calibrate", preset, words, resume)
    with pytest.raises(InputError, match="override `/shared/a` needs the form key=value"):
        job_entrypoint(checkout, "train", preset, ["/shared/a", shared], None)


@pytest.mark.parametrize(
    ("words", "resume", "shown"),
    [
        (
            ["tracking.uri=https://ann:hunter2@mlflow.example.com"],
            None,
            "tracking.uri=https://ann:***@mlflow.example.com",
        ),
        (["tracking.uri=http://sesame-opens-it.example.com"], None, "tracking.uri=http://***.example.com"),
        ([], "s3://bucket/runs/a?X-Amz-Signature=0123abcd", "s3://bucket/runs/a?X-Amz-Signature=***"),
    ],
)
def test_a_secret_is_no_part_of_what_every_user_of_the_cluster_can_read(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], resume: str | None, shown: str
) -> None:
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("SHOP_PASSWORD", "sesame-opens-it")
    preset = Path("platform/presets/smollm2_135m.yaml")
    with pytest.raises(InputError, match=rf"^`{re.escape(shown)}` holds a secret.*set it on the cluster's nodes"):
        job_entrypoint(checkout, "train", preset, ["output=/shared/runs", *words], resume)


def test_data_that_stays_behind_is_refused_before_the_job_is_sent(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    write_sparse(checkout / "rows.parquet", 1)
    settings = load_settings(checkout / "platform/presets/smollm2_135m.yaml", ["data.conversations=rows.parquet"])
    with pytest.raises(InputError, match=r"data\.conversations=rows\.parquet: not among the files"):
        check_inputs(settings, collect_upload(checkout))


def test_a_cluster_that_does_not_answer_is_an_error_after_the_timeout() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(InputError, match=r"no Ray cluster took the job at http://127\.0\.0\.1:\d+ within 0\.1 s"):
        connect(address, 0.1)


@pytest.fixture
def cluster() -> Iterator[Head]:
    """A head node of its own, on free ports, that takes jobs of whoever has its token."""
    with head_node(cpus=4, store_mb=100, token="5" * 64) as head:
        yield head


@pytest.mark.faults
def test_a_job_is_sent_to_a_cluster_that_still_starts_and_its_exit_code_comes_back(
    checkout: Path, cluster: Head, tmp_path: Path
) -> None:
    absent = f"data.held_out={tmp_path}/absent.jsonl"
    job = cluster.dspark(checkout, "submit", "train", str(PRESET.relative_to(ROOT)), f"output={tmp_path}/out", absent)
    assert job.wait(_PATIENCE_S) == 2, job.text
    assert f"data.held_out: there is no file {tmp_path}/absent.jsonl" in job.text  # the job's own log
    assert job.state == "FAILED, exit code 2"


def state_of(folder: Path) -> str:
    """State of the MLflow run of a run's folder."""
    record = json.loads((folder / "run.json").read_text())
    return str(MlflowClient(record["mlflow_uri"]).get_run(record["mlflow_run_id"]).info.status)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_stopped_job_leaves_nothing_behind_and_resumes_to_the_end(
    checkout: Path, cluster: Head, tmp_path: Path, tiny_target: Path
) -> None:
    # What the preset names lies outside the checkout, as on storage of all nodes.
    changes: dict[str, Any] = {"train": {"epochs": 4, "checkpoint_every": 20}}
    shutil.copy(tiny_preset(tmp_path, tiny_target, rows=400, **changes), checkout / "tiny.yaml")
    output = tmp_path / "runs"
    job = cluster.dspark(checkout, "submit", "train", "tiny.yaml")
    job.wait_for_a_checkpoint(output, _PATIENCE_S)
    stop = cluster.dspark(checkout, "submit", "--stop", job.name)
    assert (stop.wait(_PATIENCE_S), stop.state) == (0, "STOPPED"), stop.text
    assert cluster.of_jobs_after(20) == []
    folder = (output / "latest").resolve()
    assert state_of(folder) == "KILLED"
    assert (job.wait(_PATIENCE_S), job.state) == (1, "STOPPED, exit code None")
    assert f"dspark submit train tiny.yaml ray.address=auto --resume {folder}" in job.text

    resumed = cluster.dspark(checkout, "submit", "train", "tiny.yaml", "--resume", str(folder))
    assert (resumed.wait(_PATIENCE_S), resumed.state) == (0, "SUCCEEDED, exit code 0")
    assert int(resumed.said("resumed at step ")) >= 20
    assert state_of(folder) == "FINISHED"
    steps = [json.loads(line)["step"] for line in (folder / "history.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 801))
    assert cluster.of_jobs_after(20) == []

    stranger = replace(cluster, environment={**cluster.environment, "RAY_AUTH_TOKEN": "6" * 64})
    refused = stranger.dspark(checkout, "submit", "--stop", job.name)
    assert refused.wait(_PATIENCE_S) == 2 and "refused the token" in refused.text
