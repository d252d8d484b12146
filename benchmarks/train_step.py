"""The training step against the textbook's and against its bare matrix products: `make bench-step`.

    for each case and type: (a) the project's step, (b) the textbook's, (c) the least products that both must make,
    each in fresh processes, in turn -> medians, ratios b/a and a/c, peak memory above the model's own

Prints a table and, as its last line, one JSON object; `--record` writes docs/performance.md from it. A step is forward,
loss and backward of one batch. Where the textbook's step would not fit, it runs with fewer anchors and its seconds and
bytes are scaled, which the table says.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.performance_record import COLUMNS, cells_of, document, machine
from dspark.target_files import native_precision

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
AIMS: dict[str, dict[str, Any]] = {
    "bf16": {"b/a": {"A": 2.5, "B": 3.0, "C": 6.0, "D": 4.0}, "a/c": 2.0},
    "fp32": {"b/a": {"A": 1.5, "B": 2.0, "D": 3.5}, "a/c": 1.35},
}


@dataclass(frozen=True)
class Measured:
    """One side of a case: over all its processes."""

    seconds: list[float]
    peak: int  # bytes above the model's own
    estimate: int  # of the project's, as a dry run says it
    loss: float | None
    blocks: int
    slots: int  # supervised
    scale: float = 1.0  # blocks of the whole step for each that was run

    @property
    def median(self) -> float:
        """Seconds of the whole step."""
        return statistics.median(self.seconds) * self.scale


def run_process(case: Case, side: str, dtype: str, repetitions: int, threads: int, kept_heap: bool) -> Measured:
    """Measures one side in a fresh process."""
    anchors = case.textbook_anchors if side == "b" and case.textbook_anchors else case.anchors
    order = asdict(case) | {
        "anchors": anchors, "side": side, "dtype": dtype, "repetitions": repetitions, "threads": threads
    }  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **(KEPT_HEAP if kept_heap else {})}
    done = subprocess.run(
        [sys.executable, "benchmarks/step_case.py", json.dumps(order)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"case {case.name}, {SIDES[side]}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]), scale=case.anchors / anchors)


def measure(case: Case, dtype: str, rounds: int, per_round: int, threads: int, kept_heap: bool) -> dict[str, Measured]:
    """All sides of a case, in turn, so that what else the machine does falls on all of them alike."""
    parts: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            parts[side].append(run_process(case, side, dtype, per_round, threads, kept_heap))
    return {
        side: replace(
            found[0],
            seconds=[second for part in found for second in part.seconds],
            peak=max(part.peak for part in found),
        )
        for side, found in parts.items()
    }


def result_of(case: Case, dtype: str, heap: str, sides: dict[str, Measured]) -> dict[str, Any]:
    """One line of the table and of the JSON object."""
    a, b, c = (sides[side] for side in SIDES)
    return {
        "case": case.name,
        "dtype": dtype,
        "heap": heap,
        "blocks": a.blocks,
        "slots": a.slots,
        "seconds": {SIDES[side]: round(found.median, 4) for side, found in sides.items()},
        "b/a": round(b.median / a.median, 2),
        "a/c": round(a.median / c.median, 2),
        "peak_gb": {"project": round(a.peak / 1e9, 3), "textbook": round(b.peak * b.scale / 1e9, 3)},
        "peak_estimated_gb": round(a.estimate / 1e9, 3),
        "peak_b/a": round(b.peak * b.scale / a.peak, 1),
        "tokens_per_second": round(case.length / a.median, 1),
        "textbook_blocks": b.blocks,
        "loss_difference": abs(a.loss - b.loss) if a.loss is not None and b.loss is not None and b.scale == 1 else None,
        "aim": {"b/a": AIMS[dtype]["b/a"].get(case.name), "a/c": AIMS[dtype]["a/c"]},
    }


def show(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table(title="forward, loss and backward")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for found in results:
        table.add_row(*cells_of(found))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="ABCD", help="letters of the cases to run")
    parser.add_argument("--dtypes", default="auto", help="fp32, bf16, or both with a comma; auto: bf16 only if native")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side, in turn")
    parser.add_argument("--repetitions", type=int, default=2, help="steps per process, after one that is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads")
    parser.add_argument("--heaps", default="default,kept", help="default, kept or both: whether freed memory stays")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD}")
    arguments = parser.parse_args()
    native = native_precision(torch.cuda.is_available()) == "bf16"
    automatic = ["fp32", "bf16"] if native else ["fp32"]
    dtypes = automatic if arguments.dtypes == "auto" else arguments.dtypes.split(",")
    console = Console(width=160, stderr=True)
    results = []
    for heap in arguments.heaps.split(","):
        for case in (case for case in CASES if case.name in arguments.cases):
            for dtype in dtypes:
                console.print(f"case {case.name}, {dtype}, {heap} heap")
                sides = measure(case, dtype, arguments.rounds, arguments.repetitions, arguments.threads, heap == "kept")
                results.append(result_of(case, dtype, heap, sides))
    show(Console(width=190), results)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(arguments.threads),
        "bf16_native": native,
        "results": results,
    }
    if arguments.record:
        RECORD.write_text(document(report))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
