"""What a run will need, computed before it starts: shown as the plan, and refused where the machine has less."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from safetensors import safe_open

from actors.pipelines import check_store
from actors.stages import stage_of
from dspark.config import Settings
from dspark.data.cache import bytes_per_token
from dspark.data.conversations import main_reasons
from dspark.data.folder import Folder
from dspark.errors import InputError
from dspark.learning import TrainSettings
from dspark.model.kinds import drafter_of
from dspark.redaction import redacted
from dspark.target_files import load_whole_config, resolve
from dspark.training.memory import PROCESS_BYTES, SIZES, Estimate, largest_load, rank_memory
from jobs.facts import print_facts
from jobs.fitting import held_bytes
from jobs.rows import Rows
from jobs.session import target_actors
from jobs.streams import check_keeping, kept_bytes, kept_rows

_GB = 1e9


@dataclass(frozen=True)
class Needs:
    """Bytes and counts of a run."""

    target_weights: int
    drafter_weights: int
    target_memory: int  # all target actors
    rank: Estimate  # of one trainer, on its device
    trainer_memory: int  # all ranks, on the host
    evaluator_memory: int
    object_store: int
    disk: int

    @property
    def memory(self) -> int:
        """Most bytes of the host in use at one time: training and evaluation follow each other."""
        return max(self.target_memory + self.trainer_memory, self.evaluator_memory) + self.object_store


def needs_of(settings: Settings, rows: Rows) -> Needs:
    """What the settings need on this target; weights are counted from the files, without loading them."""
    train, draft = settings.train, rows.draft
    target = _stored_weights(resolve(settings.target))
    with torch.device("meta"):
        drafter = sum(parameter.numel() for parameter in drafter_of(draft).parameters())
    forward, gpu = SIZES[train.precision], train.gpus > 0
    tied = load_whole_config(settings.target).get_text_config().tie_word_embeddings
    load = largest_load(draft, settings, [len(ids) for ids in rows.table.column("input_ids")])
    as_run = settings.model_copy(update={"train": train.model_copy(update={"zero_stage": stage_of(train)})})
    rank = rank_memory(draft, as_run, load, drafter, tied, gpu)
    # A rank on a GPU keeps its process and the batches on their way on the host.
    host = PROCESS_BYTES + rank.parts["micro-batches"] if gpu else rank.total
    actors = target_actors(settings)
    capture = 4 * settings.targets.batch_tokens * draft.hidden * (len(draft.taps) + 8)
    state = drafter * (forward + 12 + (4 if train.ema else 0)) + drafter * forward
    export = (drafter + 2 * draft.vocab * draft.hidden) * forward
    return Needs(
        target_weights=target,
        drafter_weights=drafter,
        target_memory=actors * (target * SIZES[settings.target.dtype] + capture + PROCESS_BYTES),
        rank=rank,
        trainer_memory=train.workers * host,
        evaluator_memory=settings.evaluate.widest_pool
        * ((target + drafter) * SIZES[settings.evaluate.dtype] + PROCESS_BYTES),
        object_store=settings.ray.object_store_mb * 2**20,
        disk=(0 if train.storage else (train.kept + 1) * state) + 2 * export,
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
    """Refuses a run that this machine, or the disk of the cache that it keeps, cannot hold; touches nothing.

    Memory is looked at where Ray is started here; that of a cluster is known when it is joined.

    Raises:
        InputError: what is short, by how much, and which settings need less.
    """
    needs = needs_of(settings, rows)
    output = settings.output.resolve()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    if (free := shutil.disk_usage(existing).free) < needs.disk:
        raise InputError(
            f"output={output} has {free / _GB:.1f} GB free, the run needs {needs.disk / _GB:.1f} GB: free some space, "
            "choose another output, or lower train.keep_last"
        )
    if settings.ray.address == "local":
        _check_memory(settings, needs)
        check_store(settings, held_bytes(rows), needs.object_store)
    check_keeping(settings, rows, needs.disk)


def _check_memory(settings: Settings, needs: Needs) -> None:
    available, device, rank = memory_available(), device_memory(settings.train), needs.rank.total
    if device is not None and device < rank:
        raise InputError(
            f"{device / _GB:.1f} GB of GPU memory are free for each rank, which needs about {rank / _GB:.1f} GB: "
            f"{remedy(settings, needs.rank.parts)}"
        )
    if available < needs.memory:
        raise InputError(
            f"{available / _GB:.1f} GB of memory are available, the run needs about {needs.memory / _GB:.1f} GB "
            f"(targets {needs.target_memory / _GB:.1f}, trainers {needs.trainer_memory / _GB:.1f}, evaluators "
            f"{needs.evaluator_memory / _GB:.1f}, object store {needs.object_store / _GB:.1f}): "
            f"{remedy(settings, _on_host(settings, needs))}"
        )


def _on_host(settings: Settings, needs: Needs) -> dict[str, int]:
    """What the host holds when it holds most, by part."""
    held = {"object store": needs.object_store}
    if needs.evaluator_memory > needs.target_memory + needs.trainer_memory:
        return held | {"evaluators": needs.evaluator_memory}
    parts = {"micro-batches": needs.rank.parts["micro-batches"]} if settings.train.gpus else needs.rank.parts
    ranks = {part: settings.train.workers * size for part, size in parts.items()}
    return held | {"targets": needs.target_memory} | ranks


def remedies(settings: Settings) -> dict[str, str]:
    """By part of the memory, what makes it smaller; parts that no setting lowers are left out."""
    train, targets = settings.train, settings.targets
    blocks = "train.anchors" if settings.drafter.kind == "dspark" else "data.max_length"
    more = " or train.micro_batch" if train.micro_batch > 1 else ""
    packed = " or train.pack_tokens" if train.pack_tokens is not None else ""
    found = {
        "activations": f"lower {blocks}{more}" + ("" if train.recompute else ", or set train.recompute=true"),
        "context": f"lower data.max_length{more}{packed}",
        "objective": "lower train.logits_mb",
        "micro-batches": "lower " + ("train.prefetch or " if train.prefetch else "") + f"data.max_length{more}{packed}",
        "targets": f"lower targets.batch_tokens or targets.{'max_actors' if targets.max_actors else 'actors'}",
        "evaluators": "lower evaluate.actors",
        "object store": "lower ray.object_store_mb",
    }
    # The first stage that deals a part out to the ranks.
    for part, stage in {"optimizer": 1, "gradients": 2, "parameters": 3}.items():
        if train.workers > 1 and stage_of(train) < stage:
            found[part] = f"raise train.zero_stage to {stage}"
    return found


def remedy(settings: Settings, held: dict[str, int]) -> str:
    """The largest part that a setting lowers, and that setting."""
    lowered = remedies(settings)
    part = max((part for part in held if part in lowered), key=lambda part: held[part])
    return f"{part} take {held[part] / _GB:.1f} GB of it: {lowered[part]}"


def device_memory(train: TrainSettings) -> int | None:
    """Free bytes of a GPU for each rank on it; None: ranks use none, or none can be seen from here."""
    if not train.gpus or not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free // max(1, int(1 / train.gpus)))


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
    per_token = bytes_per_token(rows.origin)
    draft, packed = rows.draft, "" if train.pack_tokens is None else f", packed by {train.pack_tokens} tokens"
    ranks = f"{train.workers} ranks x {train.micro_batch} rows x {train.accumulation} accumulated{packed}"
    lines = {
        "target": f"{settings.target.model}, {needs.target_weights / 1e6:,.0f} M weights, {settings.target.dtype}",
        "rows": f"{rows.table.num_rows:,} with {rows.tokens:,} tokens; {len(rows.dropped)} dropped"
        f"{main_reasons(rows.dropped)}",
        "drafter": f"{needs.drafter_weights / 1e6:,.1f} M weights, {draft}",
        "steps": f"{plan.steps:,} of {train.global_batch} rows: {ranks}, ZeRO {train.zero_stage}, {train.precision}",
        "stream": f"{per_token:,} bytes per token, {per_token * rows.tokens / _GB:.2f} GB per epoch, "
        f"{_source(settings)}",
        "a rank": _rank(settings, needs.rank),
        "memory": f"about {needs.memory / _GB:.1f} GB at most ({memory_available() / _GB:.1f} GB available)",
        "disk": f"{needs.disk / _GB:.1f} GB in {settings.output.resolve()}",
    }
    if settings.data.source == "live_and_keep":
        kept, free = kept_bytes(settings, rows, kept_rows(settings, rows)), Folder(_cache(settings)).free_bytes()
        known = "" if free is None else f" ({free / _GB:.1f} GB free)"
        lines["cache"] = f"{kept / _GB:.2f} GB in {redacted(_cache(settings))}{known}"
    print_facts(console, lines)


def _cache(settings: Settings) -> str:
    return settings.cache.address(settings.output, settings.name)


def _source(settings: Settings) -> str:
    """Where the states of the stream come from, and whether a disk keeps them."""
    match settings.data.source:
        case "live":
            return "from targets, nothing on disk"
        case "cache":
            return f"from the cache {redacted(_cache(settings))}"
        case "live_and_keep":
            return "in the first epoch from targets, which keep it in a cache, later from there"


def _rank(settings: Settings, rank: Estimate) -> str:
    """Memory of one trainer, its parts, and where it must fit."""
    largest = sorted(rank.parts.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{part} {size / _GB:.2f}" for part, size in largest if size >= 0.005 * _GB)
    free = device_memory(settings.train)
    place = (
        "" if not settings.train.gpus else f" of GPU memory ({'unknown' if free is None else f'{free / _GB:.1f}'} free)"
    )
    return f"{rank.total / _GB:.2f} GB{place} at most, in {rank.moment}: {parts}"
