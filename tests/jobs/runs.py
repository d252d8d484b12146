"""Training runs in processes of their own, for tests that disturb them: how they start, and what they must leave."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

REPOSITORY = Path(__file__).parents[2]
Part = Literal["target", "trainer"]
# What stands in the title of a part's process.
_TITLES: dict[Part, str] = {"target": "TargetActor", "trainer": "RayTrainWorker"}
_LONGEST_WAIT_S = 240.0


def start(*arguments: str, command: str = "train") -> subprocess.Popen[str]:
    """A command of the project in a process group of its own, so that a signal reaches what it started."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-m", f"jobs.{command}", *arguments]
    return subprocess.Popen(
        words, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finish(run: subprocess.Popen[str], timeout_s: float = 280) -> str:
    """What a run printed, once it has ended well."""
    output, errors = run.communicate(timeout=timeout_s)
    assert run.returncode == 0, errors[-3000:]
    return output


def kill_all(run: subprocess.Popen[str]) -> None:
    """SIGKILL to the run and all that it started, at the same moment: as if the machine had gone."""
    driver = psutil.Process(run.pid)
    processes = [*driver.children(recursive=True), driver]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    run.wait()


def records(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each record of a run as they came: one that was made again comes again."""
    file = folder / "history.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each step of a run, as it was made last."""
    return sorted(dict(records(folder)).items())


def values(folder: Path, name: str) -> list[float]:
    """One number of every record of a finished run that holds it."""
    entries = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [entry[name] for entry in entries if name in entry]


def wait_for_step(run: subprocess.Popen[str], output: Path, step: int) -> None:
    """Returns as soon as the run under way in `output` has a record of that step."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while not any(made >= step for made, _ in records(output / "latest")):
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"step {step} was not made"
        time.sleep(0.05)


def parts(run: subprocess.Popen[str], part: Part) -> list[psutil.Process]:
    """The processes of a part, of all that a run has started."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.Error):
            if _TITLES[part] in " ".join(process.cmdline()):
                found.append(process)
    return found


def assert_each_row_once(folder: Path, rows: int, not_finite: int = 0) -> None:
    """The ledger of a finished run: each of `rows` rows, counted once per epoch, was trained once, none is missing."""
    ledger = json.loads((folder / "ledger.json").read_text())
    found = {name: ledger[name] for name in ("expected", "trained", "repeated", "missing", "not_finite")}
    assert found == {"expected": rows, "trained": rows, "repeated": 0, "missing": 0, "not_finite": not_finite}
    assert sum(epoch["trained"] for epoch in ledger["epochs"].values()) == rows
