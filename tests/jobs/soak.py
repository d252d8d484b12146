"""Training runs of which a part is killed every 20 seconds: a target, a trainer, or the driver, which is then resumed.

Every run must end with a complete ledger, and a step that was made more than once, in whatever run, must have had the
same loss each time. `test_stream_faults.py` compares such runs with an undisturbed one.

    python tests/jobs/soak.py [--minutes 10] [--record]
"""

import argparse
import json
import os
import random
import re
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

from tests.conftest import tiny_preset
from tests.jobs.runs import REPOSITORY, Part, parts, records, start
from tests.tiny import tiny_target_folder

PAGE = REPOSITORY / "docs" / "soak.md"
Victim = Literal["target", "trainer", "driver"]
_VICTIMS: tuple[Victim, ...] = ("target", "trainer", "driver")
_EVERY_S, _LOOK_S = 20.0, 0.5
# A run that makes no progress is a failure too.
_LONGEST_S = 900.0
STEPS = 800
_ROWS, _STEP_ROWS = 200, 2
_TALLIES = ("expected", "trained", "repeated", "missing")
_PAGE_TEXT = """\
# Kills every 20 seconds

Written by `make soak`: training runs of a tiny drafter on a stream, of which a target, a trainer or the driver is
killed with SIGKILL every {every:.0f} seconds, in random order; a killed driver is started again with `--resume`. A run
that is getting up again is not killed before it has a new checkpoint.

| seconds | runs | steps | kills of targets | of trainers | of drivers |
| --- | --- | --- | --- | --- | --- |
| {seconds:.0f} | {runs} | {steps} | {target} | {trainer} | {driver} |

The ledgers of all runs together, in rows, counted once per epoch:

| expected | trained | repeated | missing |
| --- | --- | --- | --- |
| {expected} | {trained} | {repeated} | {missing} |

Steps that had another loss when they were made again, after a kill or in another run: {different}.
"""


def endless(preset: Path) -> tuple[str, ...]:
    """Arguments of a run that is restarted without end, and whose targets are never far ahead of its trainers."""
    return (str(preset), "train.max_failures=1000", "train.checkpoint_every=10", "targets.in_flight_mb=1")


@dataclass
class Soak:
    """What a soak of runs of so many steps did and found; the ledgers of its runs added up."""

    steps: int
    seconds: float = 0.0
    runs: int = 0
    kills: Counter[Victim] = field(default_factory=Counter)
    ledger: Counter[str] = field(default_factory=Counter)
    losses: dict[int, float] = field(default_factory=dict)  # by step, as first seen
    different: int = 0  # steps whose loss was another one when they were made again

    def compare(self, folder: Path) -> None:
        """Takes the records of a run: at its end, or before a new driver cuts them back to its last checkpoint."""
        for step, loss in records(folder):
            first = self.losses.setdefault(step, loss)
            self.different += abs(loss - first) > 1e-6 * abs(first)

    @property
    def complete(self) -> bool:
        """Whether every row was trained once per epoch, and every step was the same each time."""
        ledger = self.ledger
        whole = ledger["trained"] == ledger["expected"] == self.runs * self.steps * _STEP_ROWS
        return whole and not (ledger["repeated"] or ledger["missing"] or self.different)


def soak(preset: Path, steps: int, seconds: float, seed: int = 0) -> Soak:
    """Runs under kills, one after the other, as long as at least half of another one would fit into the time."""
    found, since, longest = Soak(steps), time.monotonic(), 0.0
    disturbance = Disturbance(random.Random(seed), found)
    while not found.runs or time.monotonic() - since + longest / 2 < seconds:
        began = time.monotonic()
        folder = disturbance.run(preset, preset.parent / f"soak-{found.runs}")
        found.compare(folder)
        found.ledger.update({name: json.loads((folder / "ledger.json").read_text())[name] for name in _TALLIES})
        found.runs += 1
        longest = max(longest, time.monotonic() - began)
    found.seconds = time.monotonic() - since
    return found


class Disturbance:
    """Kills a part of a run every 20 seconds, each kind once before the next round, and starts killed drivers again."""

    def __init__(self, draw: random.Random, found: Soak) -> None:
        self.draw, self.found = draw, found
        self.due = time.monotonic() + _EVERY_S
        self.next: list[Victim] = []

    def run(self, preset: Path, output: Path) -> Path:
        """One run to its end; returns its folder."""
        arguments = (*endless(preset), f"output={output}")
        run, deadline, saved = start(*arguments), time.monotonic() + _LONGEST_S, 0
        while True:
            try:
                _, errors = run.communicate(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, "the run does not come to its end"
                # Only after a new checkpoint: a run whose restart takes longer than 20 seconds would never get on.
                if time.monotonic() >= self.due and (newest := _newest(output)) > saved:
                    run, saved = self._disturb(run, arguments, (output / "latest").resolve()), newest
                continue
            assert run.returncode == 0, errors[-3000:]
            return (output / "latest").resolve()

    def _disturb(self, run: subprocess.Popen[str], arguments: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
        """Returns the run that goes on."""
        self.next = self.next or self.draw.sample(_VICTIMS, len(_VICTIMS))
        victim = self.next[-1]
        if victim == "driver":
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
            self.found.compare(folder)
            run = start(*arguments, "--resume", str(folder))
        elif not _killed(run, victim):
            return run  # it is about to end, and has no such part any more
        self.next.pop()
        self.found.kills[victim] += 1
        self.due = time.monotonic() + _EVERY_S
        return run


def _killed(run: subprocess.Popen[str], part: Part) -> bool:
    with suppress(psutil.Error):
        for process in parts(run, part)[:1]:
            process.kill()
            return True
    return False


def _newest(output: Path) -> int:
    """The step of the newest checkpoint that Ray Train has registered; 0 without any."""
    snapshots = [file.read_text() for file in output.glob("latest/train/checkpoint_manager_snapshot.json")]
    return max((int(step) for text in snapshots for step in re.findall(r"step-(\d{8})", text)), default=0)


def soak_preset(folder: Path, target: Path, steps: int) -> Path:
    """A run that outlasts several kills, of rows that do not all fit between targets and trainers."""
    train = {"epochs": steps * _STEP_ROWS // _ROWS, "global_batch": _STEP_ROWS}
    return tiny_preset(folder, target, rows=_ROWS, train=train, tracking={"register_model": False})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--record", action="store_true", help="write docs/soak.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        preset = soak_preset(Path(scratch), tiny_target_folder(Path(scratch) / "target"), STEPS)
        found = soak(preset, STEPS, 60 * arguments.minutes)
    facts: dict[str, float] = {"seconds": round(found.seconds), "runs": found.runs, "steps": found.runs * STEPS}
    facts |= {name: found.ledger[name] for name in _TALLIES} | {"different": found.different}
    facts |= {victim: found.kills[victim] for victim in _VICTIMS}
    if arguments.record:
        PAGE.write_text(_PAGE_TEXT.format(every=_EVERY_S, **facts))
    print(json.dumps(facts))
    return int(not found.complete)


if __name__ == "__main__":
    sys.exit(main())
