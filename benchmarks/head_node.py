"""A Ray cluster of one head node on this machine, and jobs that are submitted to it from a checkout.

`ray start --head` on free loopback ports, with a temporary folder -> `dspark submit ...`, each in a process of its own

Only what it started is ended; other clusters of the machine stay.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Processes that serve the whole cluster as long as it lives, whoever was the first to need them: agents, idle workers,
# and the actors that Ray Data detaches.
_OWN = (
    "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE", "ray::_AutoscalingCoordinatorActor",
    "ray::AutoscalingRequester", "ray::_StatsActor", "ray::ActorLocationTracker",
)  # fmt: skip
_END_S = 10


@dataclass
class Job:
    """A command that is running, and what it has printed so far, standard output and errors as one."""

    process: subprocess.Popen[str]
    started: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            print(f"  {line.rstrip()}", flush=True)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, when it has ended."""
        code = self.process.wait(timeout_s)
        self.reader.join()
        return code

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def said(self, beginning: str) -> str:
        """The last line with this beginning, without it; empty where there is none."""
        found = [line.removeprefix(beginning) for line in self.lines if line.startswith(beginning)]
        return found[-1].strip() if found else ""

    @property
    def name(self) -> str:
        """The submitted job's id, once it was sent."""
        return self.said("job ").partition(":")[0]

    @property
    def state(self) -> str:
        """What Ray said of it at its end."""
        return self.said(f"job {self.name}:")

    def wait_for_a_checkpoint(self, output: Path, timeout_s: float) -> None:
        """Returns as soon as Ray Train has registered one of a run below `output`.

        Raises:
            RuntimeError: the command ended before, or the time is over.
        """
        while not any("step-" in file.read_text() for file in output.glob("*/train/checkpoint_manager_snapshot.json")):
            if self.process.poll() is not None:
                raise RuntimeError(f"the job ended before its first checkpoint:\n{self.text}")
            if time.monotonic() - self.started > timeout_s:
                raise RuntimeError(f"no checkpoint in {timeout_s:.0f} s:\n{self.text}")
            time.sleep(0.1)


@dataclass(frozen=True)
class Head:
    """A head node that is starting or has started."""

    address: str  # of its dashboard
    environment: Mapping[str, str]  # for those who submit
    pid: int

    def dspark(self, checkout: Path, *words: str) -> Job:
        """A `dspark` command in the checkout that knows this cluster."""
        environment = {**self.environment, "PYTHONPATH": str(checkout), "RAY_API_SERVER_ADDRESS": self.address}
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *words], cwd=checkout, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return Job(process)

    def of_jobs(self) -> list[str]:
        """Titles of the processes that work for a job: its driver and its actors."""
        titles = []
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                title = " ".join(process.cmdline()).strip()
            except psutil.NoSuchProcess:
                continue
            if "-m jobs." in title or (title.startswith("ray::") and not title.startswith(_OWN)):
                titles.append(title)
        return titles

    def of_jobs_after(self, wait_s: float) -> list[str]:
        """The same, once there are none or the time is over."""
        ends = time.monotonic() + wait_s
        while (found := self.of_jobs()) and time.monotonic() < ends:
            time.sleep(0.2)
        return found


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def head_node(cpus: int, store_mb: int, token: str | None) -> Iterator[Head]:
    """A cluster with so many logical CPUs; with a token it takes no job without it."""
    temp = tempfile.mkdtemp(prefix="ds-", dir="/tmp")  # sockets below it allow no long path
    dashboard = free_port()
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--num-cpus={cpus}", "--num-gpus=0",
        f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
        f"--dashboard-agent-grpc-port={free_port()}", f"--runtime-env-agent-port={free_port()}",
        f"--ray-client-server-port={free_port()}", f"--metrics-export-port={free_port()}",
        f"--temp-dir={temp}", f"--object-store-memory={store_mb * 2**20}", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    access = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    environment = {**os.environ, **access, "RAY_USAGE_STATS_ENABLED": "0"}
    # A job's `python` is the one that its node finds first.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    head = subprocess.Popen(
        command, env={**environment, "PATH": path}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Head(f"http://127.0.0.1:{dashboard}", environment, head.pid)
    finally:
        _end(head)
        shutil.rmtree(temp, ignore_errors=True)


def _end(head: subprocess.Popen[bytes]) -> None:
    """Ends the head with all that it started, also what has left its process group."""
    started = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
    os.killpg(head.pid, signal.SIGTERM)
    try:
        head.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
    _, left = psutil.wait_procs(started, timeout=5)
    for process in left:
        process.kill()
