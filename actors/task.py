"""What a training run is, as one small value that travels to every rank."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.util import get_current_placement_group

from actors.gauges import Gauges
from dspark.config import Settings, dotted
from dspark.data.origin import Origin
from dspark.data.plan import Plan, make_plan
from dspark.data.rows import samples_fingerprint
from dspark.learning import TrainSettings
from dspark.model.kinds import AnyConfig


@dataclass(frozen=True)
class Validation:
    """Rows that are measured and never trained. `captured`: references to their tables, in plan order."""

    rows: int
    mark: str  # what measurements must have in common to be compared: the rows, and which metric
    captured: tuple[Any, ...]


def validation_plan(rows: int, train: TrainSettings) -> Plan:
    """Every validation row once; a step is one forward of every rank, and rows without weight fill the last one."""
    return make_plan(rows, 0, 1, train.workers * train.micro_batch, None)


@dataclass(frozen=True)
class TrainTask:
    """Settings, architecture, plan and data identity of one run."""

    settings: Settings
    draft: AnyConfig
    plan: Plan
    sample_ids: tuple[str, ...]
    origin: Origin
    kept: NDArray[np.int64] | None  # ids of the tokens that the drafter may propose; None: all
    start: Any  # object reference to the `Bigrams` that a drafter begins with; None: none are wanted
    records: Any  # ray.util.queue.Queue, filled by rank 0 with one dict per logged step
    started_from: str | None = None  # fingerprint of the folder `drafter.start_from`
    streams: tuple[str, ...] = ("steps",)  # names of the datasets that hold the plan's tables, one after the other
    storage: str = ""  # folder or URI of the run's checkpoints
    written: str = ""  # the settings as YAML, without secrets
    stop: Any = None  # handle of the run's StopActor; None: nobody can stop it
    validation: Validation | None = None
    run: str = ""  # name of the run's folder
    places: Any = None  # ray.util.queue.Queue of (run, placement group), for whoever ends runs from outside

    def positions(self, step: int, rank: int) -> range:
        """Plan positions of a rank's rows of a step: rows are dealt to the ranks in turn."""
        first = step * self.plan.global_batch
        return range(first + rank, first + self.plan.global_batch, self.settings.train.workers)

    def begin(self, rank: int) -> None:
        """Shows Prometheus that trainers are at work, so that a first record that never comes is noticed."""
        if rank == 0:
            Gauges(self.run).set("dspark_recorded_seconds", time.time())
            if self.places is not None:
                self.places.put((self.run, get_current_placement_group()))

    def report(self, record: Mapping[str, float], steps: int) -> None:
        """Sends a record over so many steps to the driver, and shows it to Prometheus."""
        self.records.put(dict(record))
        Gauges(self.run).record(record, steps * self.plan.global_batch)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a run must have in common with the checkpoint that it continues, by dotted key."""
        settings = self.settings
        used = settings.model_dump(mode="json")
        # Of the checkpoint that it started from the content matters, not the place.
        used["drafter"]["start_from"] = self.started_from
        sections: dict[str, Any] = {
            "seed": settings.seed,
            "plan": self.plan.identity,
            "data": samples_fingerprint(self.sample_ids),
            "data.source": settings.data.source,
            "kept": None if self.kept is None else hashlib.sha256(self.kept.tobytes()).hexdigest()[:32],
            "target": {"fingerprint": self.origin.fingerprint, "dtype": self.origin.dtype},
            "targets": settings.targets.model_dump(mode="json", include={"batch_tokens", "window_rows"}),
            "train": settings.train.model_dump(mode="json", include=_TRAIN_KEYS),
            **{name: used[name] for name in ("drafter", "loss", "eagle3") if name in used},
        }
        return dotted(sections)


_TRAIN_KEYS = {
    "zero_stage", "precision", "global_batch", "micro_batch", "pack_tokens", "anchors", "lr", "warmup",
    "betas", "weight_decay", "clip", "ema",
}  # fmt: skip
