"""Training runs of which a part is killed every 20 seconds: a target, a trainer, or the driver, which is then resumed.

Every run must end with the losses of an undisturbed one, step by step: each rank compares the rows that it gets with
those of the plan (`actors.trainer`), so equal losses at every step mean that each row was trained once, in its place.

    python tests/jobs/soak.py [--minutes 10] [--record]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from jobs.config import load_settings
from tests.conftest import tiny_preset
from tests.tiny import tiny_target_folder

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "soak.md"
Part = Literal["target", "trainer", "driver"]
# What stands in the title of a part's process.
_TITLES: dict[Part, str] = {"target": "TargetActor", "trainer": "RayTrainWorker"}
_EVERY_S = 20.0
# A run that makes no progress is a failure too.
_LONGEST_S = 600.0
_PAGE_TEXT = """\
# Kills every 20 seconds

Written by `make soak`: training runs of a tiny drafter, of which a target, a trainer or the driver is killed with
SIGKILL every {every:.0f} seconds, at random; a killed driver is started again with `--resume`.

| seconds | runs | steps | kills of targets | of trainers | of drivers | losses that differ from the undisturbed run's |
| --- | --- | --- | --- | --- | --- | --- |
| {seconds:.0f} | {runs} | {steps} | {target} | {trainer} | {driver} | {different} |
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    """`dspark train` in a process group of its own, so that a signal reaches what it started."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "jobs.train", *arguments]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each record of a run."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    last = {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}  # a step that was made again comes later
    return sorted(last.items())


def parts(run: subprocess.Popen[str], part: Part) -> list[psutil.Process]:
    """The processes of a part, of all that a run has started."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.Error):
            if _TITLES[part] in " ".join(process.cmdline()):
                found.append(process)
    return found


def endless(preset: Path) -> tuple[str, ...]:
    """Arguments of a run that is restarted without end, and whose targets are never far ahead of its trainers."""
    return (str(preset), "train.max_failures=1000", "train.checkpoint_every=10", "targets.in_flight_mb=1")


@dataclass
class Soak:
    """What a soak did and found."""

    seconds: float = 0.0
    runs: int = 0
    steps: int = 0
    different: int = 0
    kills: Counter[Part] = field(default_factory=Counter)


def soak(preset: Path, seconds: float, seed: int = 0) -> Soak:
    """Runs under kills until `seconds` are over and the last of them has ended."""
    found, draw, since = Soak(), random.Random(seed), time.monotonic()
    expected = _undisturbed(preset)
    while not found.runs or time.monotonic() - since < seconds:
        folder = _run(preset, preset.parent / f"soak-{found.runs}", draw, found)
        trained = losses(folder)
        found.runs += 1
        found.steps += len(trained)
        found.different += sum(abs(a[1] - b[1]) > 1e-6 * abs(b[1]) for a, b in zip(trained, expected, strict=True))
        assert [step for step, _ in trained] == [step for step, _ in expected]
        # An undisturbed run is no soak.
        assert found.kills.total() >= found.runs, "a run ended before a part of it was killed"
    found.seconds = time.monotonic() - since
    return found


def _undisturbed(preset: Path) -> list[tuple[int, float]]:
    run = start(*endless(preset))
    _, errors = run.communicate(timeout=_LONGEST_S)
    assert run.returncode == 0, errors[-3000:]
    return losses(load_settings(preset, []).output / "latest")


def _run(preset: Path, output: Path, draw: random.Random, found: Soak) -> Path:
    """One run to its end; returns its folder."""
    arguments = (*endless(preset), f"output={output}")
    run, deadline, folder = start(*arguments), time.monotonic() + _LONGEST_S, output / "latest"
    while True:
        try:
            _, errors = run.communicate(timeout=_EVERY_S)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, "the run does not come to its end"
            run = _kill(run, draw, arguments, folder, found)
            continue
        assert run.returncode == 0, errors[-3000:]
        return folder.resolve()


def _kill(
    run: subprocess.Popen[str], draw: random.Random, arguments: tuple[str, ...], folder: Path, found: Soak
) -> subprocess.Popen[str]:
    """Kills a part of a run that trains by now; returns the run that goes on."""
    if not (folder / "history.jsonl").exists() or not losses(folder):
        return run
    part: Part = draw.choice(["target", "trainer", "driver"])
    if part == "driver":
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        found.kills[part] += 1
        return start(*arguments, "--resume", str(folder.resolve()))
    for process in parts(run, part)[:1]:
        with suppress(psutil.Error):
            process.kill()
            found.kills[part] += 1
    return run


def soak_preset(folder: Path, target: Path) -> Path:
    """Some forty seconds of training on one core, of rows that do not all fit between targets and trainers."""
    return tiny_preset(
        folder, target, rows=200, train={"epochs": 8, "max_steps": 400}, tracking={"register_model": False}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--record", action="store_true", help="write docs/soak.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        preset = soak_preset(Path(scratch), tiny_target_folder(Path(scratch) / "target"))
        found = soak(preset, 60 * arguments.minutes)
    kills: dict[str, int] = {part: found.kills[part] for part in ("target", "trainer", "driver")}
    facts = {"seconds": round(found.seconds), "runs": found.runs, "steps": found.steps, "different": found.different}
    if arguments.record:
        PAGE.write_text(_PAGE_TEXT.format(every=_EVERY_S, **facts, **kills))
    print(json.dumps(facts | {f"{part}_kills": count for part, count in kills.items()}))
    return int(found.different > 0)


if __name__ == "__main__":
    sys.exit(main())
