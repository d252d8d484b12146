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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint
from safetensors.torch import save_file

from actors.averages import Averages, used
from actors.checkpoint_files import DRAFTER, RECORDS, as_lines, from_lines, resumable_steps, spare_snapshot
from actors.deepspeed_alone import DeepSpeedEngine
from actors.resizing import universal_shards
from actors.retention import LEDGER, PROGRESS, thin_out
from actors.task import TrainTask
from actors.zero import whole_state
from dspark.data.epoch_ledger import EpochLedger, Taken
from dspark.errors import InputError
from dspark.training.plateau import Plateau

SETTINGS, TAG = "settings.yaml", "deepspeed"


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
            spare_snapshot(task.storage)
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
