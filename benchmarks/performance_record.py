"""`docs/performance.md` from what `benchmarks/train_step.py` measured."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

_INTRODUCTION = """\
# How fast a training step is

Written by a program; no number here is typed. A step is forward, loss and backward of one batch of one row
(H 576, 5 taps, block 7, rank 256). (a) is the project's step, (b) the textbook's (`benchmarks/textbook.py`: a dense
mask through SDPA, all logits at once), (c) the least matrix products that the mathematics needs
(`benchmarks/products.py`: supervised slots, distinct columns, prefixes alone). Each side runs in fresh processes, in
turn; seconds are medians.
Peaks are above the model's own memory and hold gradients, activations and buffers; `estimated` is what a dry run says
of (a) beforehand. `kept` heap: `glibc` keeps freed
memory, which spares the textbook's step most of its page faults.

A: 5 layers, V 49,152, S 512, 64 anchors. B: the same, 256 anchors. C: 2 layers, V 151,936, S 1,024, 512 anchors.
D: as B, with 30 % of the positions supervised in spans of 5 tokens.
"""


def machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"device": processor, "threads": threads, "python": platform.python_version(), **versions}


COLUMNS = ("case", "type", "heap", "blocks", "slots", "a, s", "b, s", "c, s", "b/a (aim)", "a/c (aim)", "peak a, GB",
           "estimated", "peak b, GB", "peak b/a", "tokens/s")  # fmt: skip


def cells_of(found: dict[str, Any]) -> list[str]:
    """One result in the order of `COLUMNS`."""
    seconds, peak, aim = found["seconds"], found["peak_gb"], found["aim"]
    few = found["textbook_blocks"]
    scaled = "" if few == found["blocks"] else f" (scaled from {few} blocks)"
    return [
        found["case"], found["dtype"], found["heap"], str(found["blocks"]), str(found["slots"]),
        f"{seconds['project']:.3f}", f"{seconds['textbook']:.3f}{scaled}", f"{seconds['products']:.3f}",
        f"{found['b/a']} ({aim['b/a'] or 'none'})", f"{found['a/c']} ({aim['a/c']})",
        f"{peak['project']}", f"{found['peak_estimated_gb']}", f"{peak['textbook']}{scaled}",
        f"{found['peak_b/a']}", f"{found['tokens_per_second']}",
    ]  # fmt: skip


def document(report: dict[str, Any]) -> str:
    """The page for one report."""
    measured_on = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [_INTRODUCTION, f"Measured by `{report['command']}` (`make record-step`) on: {measured_on}."]
    if not report["bf16_native"]:
        lines += ["", "This machine does not multiply bf16 natively, so bf16 was not measured."]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "| --- | --- | --- |" + " ---: |" * (len(COLUMNS) - 3)]
    lines += [f"| {' | '.join(cells_of(found))} |" for found in report["results"]]
    return "\n".join(lines) + "\n"
