"""The plan: the order in which a run trains on its samples, and how the target captures them.

Both are pure functions of (seed, ids, lengths, settings), so that resume, retry and other actors repeat the same
batches: bf16 states depend on the rows that share a forward (design section 8).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """Row numbers in training order. Each epoch is a whole number of optimizer steps.

    `order[i]` is the row trained at position i; positions whose `counted` is false pad the epoch's last step: they are
    captured and passed through the trainer, so that every rank makes the same calls, but carry no weight.
    """

    order: tuple[int, ...]
    counted: tuple[bool, ...]
    epochs: tuple[int, ...]
    global_batch: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return len(self.order) // self.global_batch

    @property
    def identity(self) -> str:
        """Hash of the whole plan: equal plans train the same rows in the same order."""
        return hashlib.sha256(repr((self.order, self.counted, self.epochs, self.global_batch)).encode()).hexdigest()[
            :32
        ]


def make_plan(rows: int, seed: int, epochs: int, global_batch: int, max_steps: int | None) -> Plan:
    """The order of `epochs` passes over `rows` rows, each shuffled anew and padded to whole steps."""
    order: list[int] = []
    counted: list[bool] = []
    numbers: list[int] = []
    for epoch in range(epochs):
        if max_steps is not None and len(order) >= max_steps * global_batch:
            break
        shuffled = epoch_order(rows, seed, epoch)
        padding = -rows % global_batch
        order += shuffled + [shuffled[i % rows] for i in range(padding)]
        counted += [True] * rows + [False] * padding
        numbers += [epoch] * (rows + padding)
    end = len(order) if max_steps is None else max_steps * global_batch
    return Plan(tuple(order[:end]), tuple(counted[:end]), tuple(numbers[:end]), global_batch)


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of the row numbers that depends on (rows, seed, epoch) alone."""
    digest = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return [int(row) for row in generator.permutation(rows)]


def windows(plan: Plan, window_rows: int, start: int) -> list[range]:
    """Plan positions that are captured together: whole optimizer steps of one epoch, about `window_rows` each.

    Windows begin at fixed positions of the plan whatever `start` is, so that a resumed run captures the same batches;
    the first of them is the one that holds `start`.
    """
    size = max(1, round(window_rows / plan.global_batch)) * plan.global_batch
    # Epochs follow each other, so each ends where the next one's number would be sorted in.
    ends = [bisect_right(plan.epochs, epoch) for epoch in sorted(set(plan.epochs))]
    every = [
        range(at, min(at + size, end))
        for begin, end in zip([0, *ends], ends, strict=False)
        for at in range(begin, end, size)
    ]
    return [window for window in every if window.stop > start]


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
