"""The plan: the order in which a run trains on its samples, and how the target captures them.

Both are pure functions of (seed, ids, lengths, settings), so that resume, retry and other actors repeat the same
batches: bf16 states depend on the rows that share a forward (design section 8).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Plan:
    """Row numbers in training order. Each epoch is a whole number of optimizer steps.

    `order[i]` is the row trained at position i; positions whose `counted` is false pad the epoch's last step: they are
    captured and passed through the trainer, so that every rank makes the same calls, but carry no weight. Arrays, since
    a run of millions of rows passes its plan to every process.
    """

    order: NDArray[np.int64]
    counted: NDArray[np.bool_]
    epochs: NDArray[np.int32]  # number of the epoch, ascending
    global_batch: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return len(self.order) // self.global_batch

    @property
    def identity(self) -> str:
        """Hash of the whole plan: equal plans train the same rows in the same order."""
        digest = hashlib.sha256(f"{self.global_batch}/".encode())
        for values, form in ((self.order, "<i8"), (self.counted, "?"), (self.epochs, "<i4")):
            digest.update(np.ascontiguousarray(values, dtype=form).tobytes())
        return digest.hexdigest()[:32]


def make_plan(rows: int, seed: int, epochs: int, global_batch: int, max_steps: int | None) -> Plan:
    """The order of `epochs` passes over `rows` rows, each shuffled anew and padded to whole steps."""
    positions = rows + -rows % global_batch
    end = epochs * positions if max_steps is None else min(epochs * positions, max_steps * global_batch)
    # An epoch begins anew where it needs rows to fill its last step.
    order = [np.resize(epoch_order(rows, seed, epoch), positions) for epoch in range(-(-end // positions))]
    place = np.arange(end)
    return Plan(
        np.concatenate(order)[:end], place % positions < rows, (place // positions).astype(np.int32), global_batch
    )


def largest_step(plan: Plan, lengths: Sequence[int]) -> int:
    """Most tokens in one optimizer step; `lengths` are those of the rows by number."""
    return int(np.asarray(lengths)[plan.order].reshape(-1, plan.global_batch).sum(axis=1).max())


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of the row numbers that depends on (rows, seed, epoch) alone."""
    digest = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.permutation(rows)


def windows(plan: Plan, window_rows: int, start: int) -> list[range]:
    """Plan positions that are captured together, about `window_rows` each and never of two epochs.

    They are whole optimizer steps, or parts of one step where a step has more rows: a window is what an actor holds at
    once. They begin at fixed positions of the plan whatever `start` is, so that a resumed run captures the same
    batches; the first of them is the one that holds `start`.
    """
    step = plan.global_batch
    size = max(1, round(window_rows / step)) * step
    within = min(step, window_rows) if size == step else size
    # Epochs follow each other, so each ends where the next one's number would be sorted in.
    ends = np.searchsorted(plan.epochs, np.unique(plan.epochs), side="right").tolist()
    return [
        range(at, min(at + within, outer + size, end))
        for begin, end in zip([0, *ends], ends, strict=False)
        for outer in range(begin, end, size)
        for at in range(outer, min(outer + size, end), within)
        if min(at + within, outer + size, end) > start
    ]


def capture_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups of row numbers for one forward each: sorted by length, so that little is padded, each group at most
    `batch_tokens` tokens with padding (a longer single row goes alone). Ties keep their order."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        widest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * widest <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def planned_batches(lengths: Sequence[int], window_rows: int, batch_tokens: int) -> list[list[int]]:
    """Every forward of a capture of all rows: within windows of `window_rows` consecutive rows, `capture_batches`."""
    batches: list[list[int]] = []
    for start in range(0, len(lengths), window_rows):
        window = lengths[start : start + window_rows]
        batches += [[start + row for row in batch] for batch in capture_batches(window, batch_tokens)]
    return batches


def padded_share(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Share of the forwards' tokens that is padding."""
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    return 1 - sum(lengths[row] for batch in batches for row in batch) / padded
