"""The training step against the textbook's and against its bare matrix products: `make bench-step`.

    for each case and type: (a) the project's step, (b) the textbook's, (c) the least products that both must make,
    each in fresh processes, in turn -> medians, ratios b/a and a/c, peak memory above the model's own

Prints a table and, as its last line, one JSON object; `--record` writes docs/performance.md from it. A step is forward,
loss and backward of one batch. Where the textbook's step would not fit, it runs with fewer anchors and its seconds and
bytes are scaled, which the table says.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = Path("docs/performance.md")
SIDES = {"a": "project", "b": "textbook", "c": "products"}
# What `glibc` is told so that freed memory stays in the heap: fresh pages cost the textbook's step most.
KEPT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=34359738368:glibc.malloc.trim_threshold=34359738368"}


@dataclass(frozen=True)
class Case:
    """One shape of a step: batch 1, H 576, 5 taps, block 7, rank 256."""

    name: str
    layers: int
    vocab: int
    length: int
    anchors: int
    span: int | None = None  # supervised spans of so many tokens, 30 % of all; None: everything is supervised
    textbook_anchors: int | None = None  # as many as fit; None: all


CASES = [
    Case("A", layers=5, vocab=49_152, length=512, anchors=64),
    Case("B", layers=5, vocab=49_152, length=512, anchors=256),
    Case("C", layers=2, vocab=151_936, length=1_024, anchors=512, textbook_anchors=128),
    Case("D", layers=5, vocab=49_152, length=512, anchors=256, span=5),
]
AIMS = {
    "bf16": {"b/a": {"A": 2.5, "B": 3.0, "C": 6.0, "D": 4.0}, "a/c": 2.0},
    "fp32": {"b/a": {"A": 1.5, "B": 2.0, "D": 3.5}, "a/c": 1.35},
}


@dataclass(frozen=True)
class Run:
    """What one process measured."""

    seconds: list[float]
    peak: int  # bytes above the model's own
    loss: float | None
    slots: int  # supervised
    scale: float = 1.0  # of the whole step's anchors to those that were run


def measured(case: Case, side: str, dtype: str, repetitions: int, kept_heap: bool) -> Run:
    """Runs one side in a process of its own."""
    from benchmarks.step_sides import __file__ as program

    order = json.dumps({**asdict(case), "side": side, "dtype": dtype, "repetitions": repetitions})
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **(KEPT_HEAP if kept_heap else {})}
    done = subprocess.run([sys.executable, program, order], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"case {case.name}, {SIDES[side]}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))
