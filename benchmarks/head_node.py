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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

# Processes that serve the whole cluster as long as it lives, whoever was the first to need them: agents, idle workers,
# and the actors that Ray Data detaches.
_OWN = (
    "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE", "ray::_AutoscalingCoordinatorActor",
    "ray::AutoscalingRequester", "ray::_StatsActor", "ray::ActorLocationTracker",
)  # fmt: skip
_END_S = 10


@dataclass(frozen=True)
class Head:
    """A head node that is starting or has started."""

    address: str  # of its dashboard
    environment: Mapping[str, str]  # for those who submit
    pid: int

    def dspark(self, checkout: Path, *words: str) -> subprocess.Popen[str]:
        """A `dspark` command in the checkout that knows this cluster; standard output and errors are one stream."""
        environment = {**self.environment, "PYTHONPATH": str(checkout), "RAY_API_SERVER_ADDRESS": self.address}
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *words], cwd=checkout, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

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
