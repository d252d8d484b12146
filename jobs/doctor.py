"""`dspark doctor`: does this machine have what the jobs need? One small function per check, one table."""

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.errors import InputError

GB = 1e9
DISK_GB = 5
MEMORY_GB = 6
DASHBOARD_PORT = 8265
CORE_PACKAGES = (
    "accelerate",
    "deepspeed",
    "gguf",
    "mlflow",
    "numpy",
    "pyarrow",
    "pydantic",
    "ray",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Check:
    """One line of the table; `ok` is None for a note that stops no job."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


def doctor() -> bool:
    """Prints all checks; True unless one of them failed."""
    home, here = Path.home(), Path.cwd()
    checks = [
        python_version(sys.version_info[:3]),
        compiler(os.environ),
        disk(here),
        memory(Path("/sys/fs/cgroup/memory.max")),
        versions(Path(__file__).parents[1] / "constraints.txt"),
        ray_token(os.environ, home),
        ray_cluster(os.environ, Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"),
        dashboard_port(DASHBOARD_PORT),
        target_files(),
        gpu(),
        bf16_instructions(Path("/proc/cpuinfo")),
        platform_folder(here),
    ]
    _print(checks)
    return all(check.ok is not False for check in checks)


def python_version(version: tuple[int, int, int]) -> Check:
    """Needs 3.11 or newer."""
    found = ".".join(str(part) for part in version)
    return Check("Python", version >= (3, 11, 0), found, "install Python 3.11, then run make again")


def compiler(environment: Mapping[str, str]) -> Check:
    """A C++ compiler and Python's headers, with which DeepSpeed builds its extension at first use."""
    name = environment.get("CXX", "c++")
    path = shutil.which(name) or shutil.which("g++")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    advice = "DeepSpeed builds an extension at first use: install g++ and the Python headers (on Debian, python3-dev)"
    if path is None:
        return Check("C++ compiler", False, f"neither {name} nor g++", advice)
    if not header.is_file():
        return Check("C++ compiler", False, f"{path}, but no {header}", advice)
    return Check("C++ compiler", True, path)


def disk(folder: Path) -> Check:
    """Room for checkpoints, spilled objects and the run's report."""
    free_gb = shutil.disk_usage(folder).free / GB
    advice = f"free at least {DISK_GB} GB or work in another folder"
    return Check("free disk", free_gb >= DISK_GB, f"{free_gb:.1f} GB at {folder}", advice)


def memory(cgroup_limit: Path) -> Check:
    """What the system can give, no more than the container's limit where there is one."""
    available = psutil.virtual_memory().available
    if cgroup_limit.is_file():
        text = cgroup_limit.read_text().strip()
        available = available if text == "max" else min(available, int(text))
    advice = f"the quickstart needs {MEMORY_GB} GB: end other programs or raise the container's limit"
    return Check("memory", available >= MEMORY_GB * GB, f"{available / GB:.1f} GB available", advice)


def versions(constraints: Path) -> Check:
    """The installed core packages against the versions that are known to work together."""
    installed = {name: _installed(name) for name in CORE_PACKAGES}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        return Check("packages", False, f"missing: {', '.join(missing)}", "run make again")
    if not constraints.is_file():
        return Check("packages", None, "all installed", "constraints.txt is only in a checkout: versions not compared")
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==", 1) for line in lines if "==" in line)
    other = [f"{name} {version}, not {pinned[name]}" for name, version in installed.items() if version != pinned[name]]
    if other:
        return Check("packages", None, "; ".join(other), "untested together: run make for the pinned versions")
    return Check("packages", True, f"{len(installed)} core packages as pinned")


def ray_token(environment: Mapping[str, str], home: Path) -> Check:
    """Whether a Ray asks for a token before it runs anybody's code; it listens on all interfaces of the machine."""
    name, mode = "Ray token", environment.get("RAY_AUTH_MODE")
    found = "RAY_AUTH_MODE is not set" if mode is None else f"RAY_AUTH_MODE={mode}"
    open_to_all = "whoever reaches its ports can run code: set RAY_AUTH_MODE=token where others share the network"
    if mode is None:
        return Check(name, True, f"{found}: a Ray that a job starts makes a token and asks for it")
    if mode.lower() == "disabled":
        return Check(name, None, found, f"Ray asks for no token, {open_to_all}")
    if mode.lower() != "token":
        return Check(name, False, found, "Ray takes this for `disabled`: set disabled or token")
    if environment.get("RAY_AUTH_TOKEN"):
        return Check(name, True, f"{found}, token from RAY_AUTH_TOKEN")
    given = environment.get("RAY_AUTH_TOKEN_PATH")
    file = Path(given) if given else home / ".ray" / "auth_token"
    if file.is_file() and file.stat().st_size > 0:
        return Check(name, True, f"{found}, token from {file}")
    if given:
        return Check(name, False, f"{found}, no token in {file}", "write the token there or unset RAY_AUTH_TOKEN_PATH")
    return Check(name, None, f"{found}, no token yet", f"a Ray that a job starts writes one to {file}")


def ray_cluster(environment: Mapping[str, str], current: Path) -> Check:
    """A Ray that is there already; `ray.address` decides whether a job joins it."""
    name, advice = "running Ray", "ray.address=local starts another Ray beside it; ray.address=auto joins it"
    address = environment.get("RAY_ADDRESS")
    if address:
        return Check(name, None, f"RAY_ADDRESS={address}", advice)
    if current.is_file():
        host, _, port = current.read_text().strip().rpartition(":")
        if port.isdigit() and _answers(host, int(port)):
            return Check(name, None, f"{host}:{port}", advice)
    return Check(name, True, "none, ray.address=local starts one for each job")


def dashboard_port(port: int) -> Check:
    """Only a job with `ray.dashboard_port` needs one."""
    if _answers("127.0.0.1", port):
        return Check("dashboard port", None, f"{port} is in use", "give ray.dashboard_port another number")
    return Check("dashboard port", True, f"{port} is free")


def target_files() -> Check:
    """The quickstart's target: its dense copy, or the data wheel from which the first job makes it."""
    from dspark.quickstart import NAME, dense_folder, gguf_path

    if dense_folder().is_dir():
        return Check("target files", True, f"{NAME}: dense copy in {dense_folder()}")
    try:
        found = gguf_path()
    except InputError as error:
        return Check("target files", False, "neither data wheel nor dense copy", str(error))
    return Check("target files", True, f"{NAME}: {found.name}, the first job makes the dense copy")


def gpu() -> Check:
    """The GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return Check(
            "GPU", None, f"torch {torch.__version__} sees none", "the jobs run on CPU: use a preset made for it"
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("GPU", True, ", ".join(names))


def bf16_instructions(cpuinfo: Path) -> Check:
    """On a CPU without them, bf16 is emulated and slower than fp32."""
    words = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    found = sorted(words & {"avx512_bf16", "amx_bf16", "bf16"})
    if found:
        return Check("CPU bf16", True, ", ".join(found))
    return Check(
        "CPU bf16", None, "no bf16 instructions", "target.dtype=fp32 train.precision=fp32 is faster on this CPU"
    )


def platform_folder(folder: Path) -> Check:
    """`platform` must mean Python's own module in a process that starts in this folder."""
    program = "import platform; print(platform.system())"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return Check("platform module", True, "Python's own")
    advice = "no Python file may lie in platform/ and no platform.py here: torch and Ray would import it"
    return Check("platform module", False, f"shadowed by a file in {folder}", advice)


def _installed(package: str) -> str | None:
    try:
        # A local part, as in 2.13.0+cpu, names the build and not the version.
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _print(checks: list[Check]) -> None:
    table = Table("check", "", title="dspark doctor", title_justify="left")
    for column in ("found", "advice"):
        table.add_column(column, overflow="fold")
    marks = {True: ("ok", "green"), False: ("failed", "bold red"), None: ("note", "yellow")}
    for check in checks:
        mark, style = marks[check.ok]
        table.add_row(check.name, Text(mark, style), Text(check.found), Text("" if check.ok else check.advice))
    Console().print(table)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("doctor")
