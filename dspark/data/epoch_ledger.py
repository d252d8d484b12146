"""Which rows were trained, and how often: counted where they are trained, compared with the plan at the end.

    rows of a step, by their sample ids -> `Taken` -> `EpochLedger` of a rank -> added up at a checkpoint -> `Tally`

One byte per row and epoch, which a checkpoint stores compressed: nearly nothing, since nearly all are equal.
"""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.data.plan import Plan

_BARE, _BROKEN = 0, 1


class Taken(NamedTuple):
    """What a rank took of one step; rows that only fill the step are left out."""

    epoch: int
    rows: NDArray[np.int64]
    without_anchors: int  # of these, rows in which nothing could be trained
    not_finite: int  # of these, rows with a state that is not finite: they took part without weight


@dataclass(frozen=True)
class Tally:
    """Rows of some epochs, counted once per epoch. `repeated` counts how often a row was trained too often."""

    expected: int = 0
    trained: int = 0
    repeated: int = 0
    missing: int = 0
    without_anchors: int = 0
    not_finite: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        mine, theirs = asdict(self), asdict(other)
        return Tally(**{name: mine[name] + theirs[name] for name in mine})

    def __str__(self) -> str:
        return (
            f"{self.expected:,} rows expected, {self.trained:,} trained, {self.repeated:,} repeated, "
            f"{self.missing:,} missing; {self.without_anchors:,} without anchors, {self.not_finite:,} not finite"
        )


@dataclass
class EpochLedger:
    """By epoch: how often each row was trained [rows], uint8, and (without anchors, not finite), int64."""

    rows: int
    times: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    counts: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def take(self, taken: Taken) -> None:
        """Books what was trained."""
        times = self.times.setdefault(taken.epoch, np.zeros(self.rows, np.uint8))
        counts = self.counts.setdefault(taken.epoch, np.zeros(2, np.int64))
        np.add.at(times, taken.rows, 1)
        counts[_BARE] += taken.without_anchors
        counts[_BROKEN] += taken.not_finite

    def add(self, times: Mapping[int, NDArray[np.uint8]], counts: Mapping[int, NDArray[np.int64]]) -> None:
        """Adds what other ranks, or an earlier part of the run, have booked."""
        for epoch in times:
            self.times[epoch] = self.times.get(epoch, np.zeros(self.rows, np.uint8)) + times[epoch]
            self.counts[epoch] = self.counts.get(epoch, np.zeros(2, np.int64)) + counts[epoch]

    def tallies(self, plan: Plan, steps: int) -> dict[int, Tally]:
        """By epoch, what was booked beside what the first `steps` steps of the plan hold."""
        end = steps * plan.global_batch
        epochs, order = np.asarray(plan.epochs[:end]), np.asarray(plan.order[:end])
        counted = np.asarray(plan.counted[:end], dtype=bool)
        found: dict[int, Tally] = {}
        for epoch in sorted({*np.unique(epochs).tolist(), *self.times}):
            wanted = np.bincount(order[(epochs == epoch) & counted], minlength=self.rows)
            times = self.times.get(epoch, np.zeros(self.rows, np.uint8)).astype(np.int64)
            counts = self.counts.get(epoch, np.zeros(2, np.int64))
            found[epoch] = Tally(
                expected=int(wanted.sum()),
                trained=int(np.minimum(wanted, times).sum()),
                repeated=int(np.maximum(times - wanted, 0).sum()),
                missing=int(np.maximum(wanted - times, 0).sum()),
                without_anchors=int(counts[_BARE]),
                not_finite=int(counts[_BROKEN]),
            )
        return found

    def dump(self) -> bytes:
        """The ledger as one compressed file."""
        file = io.BytesIO()
        arrays: dict[str, NDArray[Any]] = {f"times.{epoch}": times for epoch, times in self.times.items()}
        arrays |= {f"counts.{epoch}": counts for epoch, counts in self.counts.items()}
        np.savez_compressed(file, rows=np.array(self.rows), **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    @classmethod
    def load(cls, data: bytes) -> "EpochLedger":
        """What `dump` wrote."""
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            ledger = cls(int(stored["rows"]))
            for name in stored.files:
                part, _, epoch = name.partition(".")
                if part == "times":
                    ledger.times[int(epoch)] = stored[name]
                elif part == "counts":
                    ledger.counts[int(epoch)] = stored[name]
        return ledger
