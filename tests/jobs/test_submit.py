"""Submitted jobs: what goes along, which paths are refused, and a real job on a real cluster of this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.errors import InputError
from jobs.config import load_settings
from jobs.submit import connect, job_entrypoint
from jobs.uploading import check_inputs, collect_upload

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "platform/presets/smollm2_135m.yaml"


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head node of its own, on free ports; only its own processes are ended."""
    temp, dashboard = Path(f"/tmp/ds-{os.getpid()}"), free_port()  # sockets below it allow no long path
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0",
        f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
        f"--dashboard-agent-grpc-port={free_port()}", f"--runtime-env-agent-port={free_port()}",
        f"--ray-client-server-port={free_port()}", f"--metrics-export-port={free_port()}",
        f"--temp-dir={temp}", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    # A job's `python` is the one that its node finds first.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    head = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.faults
def test_a_job_is_sent_to_a_cluster_that_still_starts_and_its_exit_code_comes_back(
    checkout: Path, cluster: str, tmp_path: Path
) -> None:
    arguments = [
        sys.executable, "-m", "jobs.cli", "submit", "train", "platform/presets/smollm2_135m.yaml",
        f"output={tmp_path}/out", f"data.held_out={tmp_path}/absent.jsonl", "--address", cluster,
    ]  # fmt: skip
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(checkout)}
    done = subprocess.run(arguments, cwd=checkout, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert f"data.held_out: there is no file {tmp_path}/absent.jsonl" in done.stdout  # the job's own log
    assert "FAILED, exit code 2" in done.stdout
