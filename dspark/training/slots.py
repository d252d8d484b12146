"""The slots of a batch that are projected to the vocabulary, grouped by the column whose target row they share.

Slot k of the block at anchor a is judged by the target's distribution at column a+k, and so are other blocks' slots
there: sorted by column, each distinct one is projected once. Columns with equally many slots follow each other, so that
their slots are a block [columns, slots each] of any table of slots, without a copy. Shape suffixes: B batch, A blocks,
K slots, S columns, N projected slots, P distinct columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """N slots in the order of their columns, all int64. The host knows the counts, so no chunk waits for a device."""

    index_N: Tensor  # place in the flattened [B, A, K]
    row_N: Tensor  # which of the P columns; ascending
    place_P: Tensor  # the columns, in the flattened [B, S]: by number of slots, then by place
    first_P: Tensor  # each column's first slot
    counts: tuple[int, ...]  # slots on each of the P columns; ascending

    def of(self, values_BAKX: Tensor) -> Tensor:
        """Values [N, ...] of the slots out of [B, A, K, ...]."""
        return values_BAKX.flatten(0, 2)[self.index_N]

    def scatter(self, values_N: Tensor, shape: torch.Size) -> Tensor:
        """The slots' values at their places in `shape` [B, A, K], zero elsewhere."""
        placed = torch.zeros(shape, dtype=values_N.dtype, device=values_N.device)
        placed.view(-1)[self.index_N] = values_N
        return placed


class Tile(NamedTuple):
    """Columns of a chunk that have `each` slots, and these slots; both counted within the chunk."""

    places: slice
    slots: slice
    each: int


class Chunk(NamedTuple):
    """A stretch of columns and all slots on them."""

    places: slice
    slots: slice
    counts: tuple[int, ...]  # slots on each of its columns

    @property
    def column_count(self) -> int:
        return self.places.stop - self.places.start

    @property
    def slot_count(self) -> int:
        return self.slots.stop - self.slots.start

    def tiles(self, rows: int) -> Iterator[Tile]:
        """Stretches of columns with equally many slots: about `rows` slots each, at least one column."""
        place = slot = 0
        for each, group in groupby(self.counts):
            end = place + len(list(group))
            while place < end:
                columns = min(end - place, max(1, rows // each))
                yield Tile(slice(place, place + columns), slice(slot, slot + columns * each), each)
                place, slot = place + columns, slot + columns * each


def slots_of(wanted_BAK: Tensor, columns_BAK: Tensor, length: int) -> Slots:
    """The slots where `wanted` is true; `columns` are those of their target rows in rows of `length` columns."""
    index_N = wanted_BAK.flatten().nonzero()[:, 0]
    rows_BAK = torch.arange(len(wanted_BAK), device=index_N.device)[:, None, None]
    place_N = (rows_BAK * length + columns_BAK).flatten()[index_N]
    place_P, row_N, counts_P = torch.unique(place_N, return_inverse=True, return_counts=True)
    counts_P, order_P = counts_P.sort(stable=True)
    row_N, order_N = order_P.argsort()[row_N].sort(stable=True)
    first_P = counts_P.cumsum(0) - counts_P
    return Slots(index_N[order_N], row_N, place_P[order_P], first_P, tuple(counts_P.tolist()))


def logit_bytes(
    drafted: int, tokens: int, size: int, reduced: bool, capped: bool, bias: Literal["column", "slot"] | None
) -> tuple[int, int]:
    """What a chunk's buffers hold for each of its slots, and for each of its columns.

    Logits are fp32, or fp64 for states of that type; states of `size` bytes a number below 4 give rounded ones beside
    them. `bias`: of what a Markov bias is: that of columns is held with its gradient, that of slots is in the logits.
    """
    exact = max(size, 4)
    rounded = size if size < exact else 0
    slot = drafted * (exact + exact * capped + rounded)
    column = tokens * (exact + rounded) + drafted * exact * reduced
    return slot, column + 2 * drafted * exact * (bias == "column")


def chunks(slots: Slots, slot_bytes: int, place_bytes: int, budget: int) -> Iterator[Chunk]:
    """Stretches that cover all columns and take at most `budget` bytes each, or a single column that takes more."""
    place, slot, places, within = 0, 0, 0, 0
    for count in (*slots.counts, None):
        added = within if count is None else within + count
        if places and (count is None or (places + 1) * place_bytes + added * slot_bytes > budget):
            yield Chunk(slice(place, place + places), slice(slot, slot + within), slots.counts[place : place + places])
            place, slot, places, within = place + places, slot + within, 0, 0
        if count is not None:
            places, within = places + 1, within + count
