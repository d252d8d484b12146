"""What a run will need, computed before it starts: shown as the plan, and refused where the machine has less."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from dspark.config import Settings
from dspark.errors import InputError
from dspark.model.kinds import drafter_of
from dspark.target import resolve
from jobs.rows import Rows
from jobs.session import target_actors
from jobs.streams import check_keeping

_GB = 1e9
# Interpreter, torch, Ray and DeepSpeed of one process, measured as resident memory before any weight is loaded.
_PROCESS_BYTES = int(0.45 * _GB)
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Needs:
    """Bytes and counts of a run."""

    target_weights: int
    drafter_weights: int
    vocabulary_weights: int
    target_memory: int  # all target actors
    trainer_memory: int  # all ranks
    evaluator_memory: int
    object_store: int
    disk: int

    @property
    def memory(self) -> int:
        """Most bytes in use at one time: training and evaluation follow each other."""
        return max(self.target_memory + self.trainer_memory, self.evaluator_memory) + self.object_store


def needs_of(settings: Settings, rows: Rows) -> Needs:
    """What the settings need on this target; weights are counted from the files, without loading them."""
    train, draft = settings.train, rows.draft
    target = _stored_weights(resolve(settings.target))
    with torch.device("meta"):
        drafter = sum(parameter.numel() for parameter in drafter_of(draft).parameters())
    vocabulary = 2 * draft.vocab * draft.hidden
    forward = _BYTES[train.precision]
    # Adam holds two moments beside the fp32 master weights and gradients; ZeRO deals parts of them to the ranks.
    shared = {0: 0, 1: 12, 2: 16, 3: 16}[train.zero_stage]
    rank = drafter * (forward + 16 - shared) + drafter * shared // train.workers + vocabulary * forward
    # Logits, probabilities and their gradients: of the drafter's slots, and of the target's distinct positions. EAGLE-3
    # holds those of one step at a time, and has a chain at every supervised token.
    positions = slots = train.micro_batch * settings.data.max_length
    if settings.drafter.kind == "dspark":
        slots = train.micro_batch * train.anchors * draft.block
        positions = min(slots, positions)
    objective = 4 * (6 * slots * draft.draft_vocab + 2 * positions * draft.vocab)
    batch = train.micro_batch * settings.data.max_length * (len(draft.taps) + 1) * draft.hidden * forward
    actors = target_actors(settings)
    capture = 4 * settings.targets.batch_tokens * draft.hidden * (len(draft.taps) + 8)
    state = drafter * (forward + 12) + drafter * forward
    export = (drafter + vocabulary) * forward
    return Needs(
        target_weights=target,
        drafter_weights=drafter,
        vocabulary_weights=vocabulary,
        target_memory=actors * (target * _BYTES[settings.target.dtype] + capture + _PROCESS_BYTES),
        trainer_memory=train.workers * (rank + objective + (train.prefetch + 1) * batch + _PROCESS_BYTES),
        evaluator_memory=settings.evaluate.actors
        * ((target + drafter) * _BYTES[settings.evaluate.dtype] + _PROCESS_BYTES),
        object_store=settings.ray.object_store_mb * 2**20,
        disk=(train.keep_checkpoints + 1) * state + 2 * export,
    )


def _stored_weights(folder: Path) -> int:
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no mapping
                shape = tensors.get_slice(name).get_shape()
                total += int(torch.Size(shape).numel())
    return total


def check_machine(settings: Settings, rows: Rows) -> None:
    """Refuses a run that this machine, or the cache that it keeps, cannot hold. Ray checks a cluster that is joined.

    Raises:
        InputError: what is short, by how much, and which settings need less.
    """
    needs = needs_of(settings, rows)
    output = settings.output.resolve()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    if (free := shutil.disk_usage(existing).free) < needs.disk:
        raise InputError(
            f"output={output} has {free / _GB:.1f} GB free, the run needs {needs.disk / _GB:.1f} GB: free some space, "
            "choose another output, or lower train.keep_checkpoints"
        )
    available = memory_available()
    learnt = "train.anchors" if settings.drafter.kind == "dspark" else "data.max_length"
    if settings.ray.address == "local" and available < needs.memory:
        raise InputError(
            f"{available / _GB:.1f} GB of memory are available, the run needs about {needs.memory / _GB:.1f} GB "
            f"(targets {needs.target_memory / _GB:.1f}, trainers {needs.trainer_memory / _GB:.1f}, evaluators "
            f"{needs.evaluator_memory / _GB:.1f}, object store {needs.object_store / _GB:.1f}): lower {learnt}, "
            "targets.actors, train.workers, evaluate.actors or ray.object_store_mb"
        )
    check_keeping(settings, rows)


def memory_available() -> int:
    """Bytes that this process may still use: the machine's, or less where a control group sets a limit."""
    available = int(psutil.virtual_memory().available)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = (Path("/sys/fs/cgroup") / limit).read_text().strip()
            held = int((Path("/sys/fs/cgroup") / used).read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            available = min(available, max(0, int(most) - held))
    return available


def print_plan(console: Console, settings: Settings, rows: Rows) -> None:
    """Rows, steps, bytes and memory of a run, on the screen."""
    needs, plan, train = needs_of(settings, rows), rows.plan, settings.train
    per_token = 2 * rows.draft.hidden * (len(rows.draft.taps) + 1)
    draft, packed = rows.draft, "" if train.pack_tokens is None else f", packed by {train.pack_tokens} tokens"
    ranks = f"{train.workers} ranks x {train.micro_batch} rows x {train.accumulation} accumulated{packed}"
    lines = {
        "target": f"{settings.target.model}, {needs.target_weights / 1e6:,.0f} M weights, {settings.target.dtype}",
        "rows": f"{rows.table.num_rows:,} with {rows.tokens:,} tokens; {len(rows.dropped)} dropped{_reasons(rows)}",
        "drafter": f"{needs.drafter_weights / 1e6:,.1f} M weights, {draft}",
        "steps": f"{plan.steps:,} of {train.global_batch} rows: {ranks}, ZeRO {train.zero_stage}, {train.precision}",
        "stream": f"{per_token:,} bytes per token, {per_token * rows.tokens / _GB:.2f} GB per epoch, {_kept(settings)}",
        "memory": f"about {needs.memory / _GB:.1f} GB at most ({memory_available() / _GB:.1f} GB available)",
        "disk": f"{needs.disk / _GB:.1f} GB in {settings.output.resolve()}",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, text in lines.items():
        table.add_row(f"[bold]{label}", text)
    console.print(table)


def _kept(settings: Settings) -> str:
    address = settings.cache.address(settings.output, settings.name)
    match settings.data.source:
        case "cache":
            return f"from {address}"
        case "live_and_keep":
            return f"kept in {address}"
    return "nothing on disk"


def _reasons(rows: Rows) -> str:
    counts: dict[str, int] = {}
    for one in rows.dropped:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    listed = "; ".join(f"{count} x {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])[:3])
    return f" ({listed})" if listed else ""
