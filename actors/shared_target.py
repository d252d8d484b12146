"""Targets that the trials of a sweep have in common: loaded once, they outlive every trial.

a trial's windows -> its BorrowingActors -> SharedTarget, in turn with other trials -> captured rows -> its trainers

Waits for: the windows of other trials that a target has before this one. Bounded by: one window per BorrowingActor. A
dead target is restarted by Ray, and its windows are repeated.

Without torch: whoever is given a handle of an actor imports its module.
"""

import pyarrow as pa

from dspark.data.origin import Origin, fault_table
from dspark.data.rows import sample_at
from dspark.errors import InputError
from dspark.sections import TargetPoolSettings, TargetSettings


class SharedTarget:
    """One target on one device, for the windows of many runs."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings) -> None:
        from actors.target import LoadedTarget

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
