"""Targets that the trials of a sweep have in common: loaded once, they outlive every trial.

a trial's windows -> its BorrowingActors -> SharedTarget, in turn with other trials -> captured rows -> its trainers

Waits for: the windows of other trials that a target has before this one. Bounded by: one window per BorrowingActor. A
dead target is restarted by Ray, and its windows are repeated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from actors.places import Places
from actors.target import LoadedTarget
from actors.task import Validation
from dspark.data.captures import Origin, fault_table
from dspark.data.plan import Plan
from dspark.data.rows import sample_at
from dspark.errors import InputError
from dspark.sections import TargetPoolSettings, TargetSettings


@dataclass(frozen=True)
class Common:
    """What the trials of a sweep are given, so that none of them loads a target; the sweep's own process holds it."""

    stop: Any  # handle of the one StopActor of all trials
    places: Places  # of the trainers of all trials
    bigrams: Any  # reference to the target's `Bigrams`; None: no trial begins with them
    validation: Mapping[int, Validation]  # by the rows of one forward of all ranks
    targets: tuple[Any, ...]  # handles of SharedTarget; empty: trials read a cache


class SharedTarget:
    """One target on one device, for the windows of many runs."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings) -> None:
        self.target = LoadedTarget(target, pool)
        self.proved: set[tuple[int, ...]] = set()

    def ready(self) -> str | None:
        """What keeps the target from being had, if anything does."""
        return self.target.fault

    def captured(self, rows: pa.Table, origin: Origin) -> pa.Table:
        """The captured table of these token rows, with the taps of `origin`."""
        samples = [sample_at(rows, row) for row in range(rows.num_rows)]
        if origin.taps not in self.proved:
            self.target.prove(samples[0], origin.taps)
            self.proved.add(origin.taps)
        try:
            return self.target.captured(samples, origin)
        except InputError as error:
            return fault_table(origin, rows.num_rows, str(error))


class BorrowingActor:
    """Stands in a run's stream where a target would; `rows` and `plan` as for `TargetActor`."""

    def __init__(self, targets: tuple[Any, ...], origin: Origin, rows: Any, plan: Any) -> None:
        self.targets, self.origin = targets, origin
        self.rows: pa.Table = ray.get(rows)
        self.plan: Plan = ray.get(plan)

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        """The rows of one window, a table each."""
        first, last = window.column("start")[0].as_py(), window.column("stop")[0].as_py()
        wanted = self.rows.take(pa.array(self.plan.order[first:last]))
        target = self.targets[window.column("window")[0].as_py() % len(self.targets)]
        captured = ray.get(target.captured.remote(wanted, self.origin))
        yield from (captured.slice(row, 1) for row in range(captured.num_rows))
