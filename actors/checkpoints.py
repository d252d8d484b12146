"""Training checkpoints through Ray Train: one folder per saved step, complete or never loaded.

    step-00000400/
      deepspeed/          each rank's shard: weights, master weights, optimizer, schedule
      rank-00000.pt       each rank's random state, and its part of the moving averages
      drafter.safetensors the whole drafter (averaged, with `train.ema`), without the target's embedding and head
      ledger.npz          which rows were trained, and how often
      records.jsonl       all records so far: where the driver alone is killed, nobody takes the last ones
      settings.yaml       what the run was asked for
      progress.json       steps done, ranks, validation so far, and what a run must share to go on

Every rank uploads its files; Ray Train then registers the folder in its snapshot. What is not registered, as after a
kill in mid-save, is never loaded, and removed when the run goes on. `actors.retention` says which ones stay.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, Result
from safetensors.torch import save_file

from actors.averages import Averages, used
from actors.deepspeed_alone import DeepSpeedEngine
from actors.resizing import check_resizable, universal_shards
from actors.retention import LEDGER, PROGRESS, SNAPSHOT, thin_out
from actors.task import TrainTask
from actors.zero import whole_state
from dspark.data.epoch_ledger import EpochLedger, Taken
from dspark.data.folder import Folder
from dspark.errors import InputError
from dspark.training.plateau import Plateau

DRAFTER, RECORDS, SETTINGS, TAG = "drafter.safetensors", "records.jsonl", "settings.yaml", "deepspeed"
# Ray Train writes its snapshot in place, so a kill can leave half of one.
SPARE = "checkpoint_manager_snapshot.spare.json"


@dataclass
class Progress:
    """What a run has done, besides the state of its engine."""

    step: int
    ledger: EpochLedger  # of the whole run up to the last checkpoint, on rank 0 alone
    fresh: EpochLedger  # what this rank took since
    plateau: Plateau = field(default_factory=Plateau)
    measured: dict[str, float] = field(default_factory=dict)  # the validation of this step; empty: there was none
    records: list[dict[str, float]] = field(default_factory=list)  # that were sent to the driver, on rank 0 alone
    over: bool = False  # no step follows: the plan is done, or validation stopped to improve

    @classmethod
    def begin(cls, rows: int) -> "Progress":
        """Of a run over so many rows, before its first step."""
        return cls(0, EpochLedger(rows), EpochLedger(rows))

    def take(self, step: int, taken: Taken) -> None:
        """A step was made of these rows."""
        self.step, self.measured = step, {}
        self.fresh.take(taken)

    def add_up(self, device: torch.device) -> None:
        """Moves what all ranks took into rank 0's ledger; collective."""
        for epoch, times in sorted(self.fresh.times.items()):
            both = np.concatenate([times.astype(np.int32), self.fresh.counts[epoch].astype(np.int32)])
            summed = torch.from_numpy(both).to(device)
            dist.all_reduce(summed)
            if dist.get_rank() == 0:
                found = summed.cpu().numpy()
                self.ledger.add({epoch: found[:-2].astype(np.uint8)}, {epoch: found[-2:].astype(np.int64)})
        self.fresh = EpochLedger(self.fresh.rows)


def save(engine: DeepSpeedEngine, task: TrainTask, progress: Progress, averages: Averages | None) -> None:
    """Saves after an optimizer step; every rank calls it at the same step, between two accumulation windows."""
    name = f"step-{progress.step:08d}"
    with tempfile.TemporaryDirectory() as temporary:
        write(engine, task, progress, averages, Path(temporary))
        if dist.get_rank() == 0:
            _spare_snapshot(task.storage)
            thin_out(task.storage, task.settings)
        metrics: dict[str, float] = {"step": progress.step, **progress.measured}
        ray.train.report(metrics, Checkpoint.from_directory(temporary), checkpoint_dir_name=name)


def write(
    engine: DeepSpeedEngine, task: TrainTask, progress: Progress, averages: Averages | None, folder: Path
) -> None:
    """Writes this rank's files of a checkpoint; collective."""
    assert engine.micro_steps % task.settings.train.accumulation == 0, "a checkpoint holds no half-made step"
    progress.add_up(engine.device)
    engine.save_checkpoint(str(folder), tag=TAG)
    cuda = torch.cuda.get_rng_state(engine.device) if engine.device.type == "cuda" else None
    own = {"torch": torch.get_rng_state(), "cuda": cuda, "averages": None if averages is None else averages.parts}
    torch.save(own, folder / _own(dist.get_rank()))
    with used(averages):
        state = whole_state(engine)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / DRAFTER)
        (folder / LEDGER).write_bytes(progress.ledger.dump())
        (folder / RECORDS).write_text(as_lines(progress.records))
        (folder / SETTINGS).write_text(task.written)
        facts = {
            "step": progress.step,
            "over": progress.over,
            "workers": dist.get_world_size(),
            "validation": {"mark": _mark(task), **asdict(progress.plateau)},
            "identity": task.identity,
        }
        (folder / PROGRESS).write_text(json.dumps(facts, indent=1))


def restore(engine: DeepSpeedEngine, task: TrainTask, averages: Averages | None) -> Progress:
    """Loads the newest registered checkpoint of this run; the beginning without one.

    Raises:
        InputError: the checkpoint was made with other settings that matter, by another number of ranks that it cannot
            be dealt out anew from, or DeepSpeed finds no state in it.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return Progress.begin(len(task.sample_ids))
    resumable_steps(checkpoint, task)
    with checkpoint.as_directory() as folder:
        return read(engine, task, averages, Path(folder))


def read(engine: DeepSpeedEngine, task: TrainTask, averages: Averages | None, folder: Path) -> Progress:
    """Loads a checkpoint's folder into engine and averages; collective."""
    facts = json.loads((folder / PROGRESS).read_text())
    if facts["workers"] == dist.get_world_size():
        path, _ = engine.load_checkpoint(str(folder), tag=TAG)
        own = torch.load(folder / _own(dist.get_rank()), map_location="cpu", weights_only=True)
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None and engine.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], engine.device)
        if averages is not None:
            averages.load(own["averages"])
    else:
        # Draws depend on seeds and sample ids alone, so ranks that are dealt anew need no random state of others.
        with universal_shards(engine, folder, TAG, facts["workers"]) as shards:
            path, _ = engine.load_checkpoint(str(shards), tag=TAG)
    if path is None:
        raise InputError(f"checkpoint {folder} holds no DeepSpeed state for this rank: start without --resume")
    ledger = EpochLedger.load((folder / LEDGER).read_bytes())
    progress = Progress(facts["step"], ledger, EpochLedger(ledger.rows), over=facts["over"])
    if dist.get_rank() == 0:
        progress.records = from_lines((folder / RECORDS).read_text())
    found = dict(facts["validation"])
    # Values of other rows, or of another metric, cannot be compared.
    if found.pop("mark") == _mark(task):
        progress.plateau = Plateau(**found)
    return progress


def _own(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _mark(task: TrainTask) -> str | None:
    return None if task.validation is None else task.validation.mark


def as_lines(records: Iterable[Mapping[str, float]]) -> str:
    """Records as JSON, one per line."""
    return "".join(json.dumps(entry) + "\n" for entry in records)


def from_lines(text: str) -> list[dict[str, float]]:
    """The records of a text; a line that a kill broke off has no line break and is none."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def recorded(checkpoint: Checkpoint | None) -> list[dict[str, float]]:
    """The records of the steps that a checkpoint holds; none for None."""
    return [] if checkpoint is None else from_lines(read_file(checkpoint, RECORDS).decode())


def check_identity(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses a checkpoint of another experiment.

    Raises:
        InputError: names the first differing key, what the checkpoint holds and what the run asks for.
    """
    for key, value in wanted.items():
        if found.get(key) != value:
            raise InputError(
                f"the checkpoint was made with {key}={found.get(key)!r}, this run has {value!r}: resume with the same "
                "settings, or start a new run"
            )


def newest_checkpoint(storage: str | Path) -> Checkpoint | None:
    """The newest registered checkpoint under a run's storage, a folder or URI; None when there is none yet."""
    if SNAPSHOT not in Folder(storage).sizes():
        return None
    return Result.from_path(str(storage)).checkpoint


def settle_storage(storage: str | Path) -> None:
    """Clears what a kill in mid-save left: half a snapshot, and folders that were never registered or are no more."""
    folder = Folder(storage)
    if SNAPSHOT in folder.sizes():
        try:
            json.loads(folder.read(SNAPSHOT))
        except ValueError:
            if SPARE in folder.sizes():
                folder.write(SNAPSHOT, folder.read(SPARE))
            else:
                folder.remove(SNAPSHOT)
    known: set[str] = set()
    if SNAPSHOT in folder.sizes():
        result = Result.from_path(str(storage))
        registered = [result.checkpoint, *(one for one, _ in result.best_checkpoints or [])]
        known = {Path(one.path).name for one in registered if one is not None}
    for name in folder.folders():
        if name.startswith("step-") and name not in known:
            folder.remove_folder(name)


def _spare_snapshot(storage: str) -> None:
    """Copies Ray Train's snapshot before it is written anew; its folders are only removed after that."""
    folder = Folder(storage)
    if SNAPSHOT in folder.sizes():
        folder.write(SPARE, folder.read(SNAPSHOT))


def resumable_steps(checkpoint: Checkpoint | None, task: TrainTask) -> int:
    """Optimizer steps that a checkpoint of this run holds; 0 for None.

    Raises:
        InputError: the checkpoint was made with other settings that matter, or by a number of ranks that cannot change.
    """
    if checkpoint is None:
        return 0
    facts = progress_of(checkpoint)
    check_identity(facts["identity"], json.loads(json.dumps(task.identity)))
    check_resizable(facts["workers"], task.settings.train)
    return int(facts["step"])


def finished_steps(checkpoint: Checkpoint | None) -> int:
    """Optimizer steps that a checkpoint holds; 0 for None."""
    return 0 if checkpoint is None else int(progress_of(checkpoint)["step"])


def progress_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    facts: dict[str, Any] = json.loads(read_file(checkpoint, PROGRESS))
    return facts


def read_file(checkpoint: Checkpoint, name: str) -> bytes:
    """One file of a checkpoint, wherever it lies; the others are not fetched."""
    files = checkpoint.filesystem
    assert files is not None, "a registered checkpoint knows its file system"
    with files.open_input_stream(f"{checkpoint.path}/{name}") as stream:
        data: bytes = stream.read()
    return data
