"""From a captured table to padded tensors on the host: a row for each sample, or several samples packed into a row.

A packed sample is a document of its row. What a document's tokens see, where they stand and which labels they have is
the same as in a row of their own: positions restart, and nothing crosses a boundary. Packing saves the padding of rows
of unequal length; it costs the masked attention cells between a row's documents.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.data.captures import bf16_column, is_finite
from dspark.data.origin import final_column, tap_column


@dataclass(frozen=True)
class Batch:
    """Rows of a micro-batch, padded at the end. B rows, S positions, L taps, H hidden width."""

    input_ids_BS: Tensor  # int64
    loss_mask_BS: Tensor  # bool; false on padding
    taps_BSLH: Tensor  # [B, S, L*H], taps concatenated in the drafter's order
    final_BSH: Tensor  # state after the target's last norm
    packed_starts_BS: Tensor | None = None  # int64; None: every row is one document

    @property
    def starts_BS(self) -> Tensor:
        """Column at which the document of each position begins; padding continues the row's last document."""
        return torch.zeros_like(self.input_ids_BS) if self.packed_starts_BS is None else self.packed_starts_BS

    @property
    def positions_BS(self) -> Tensor:
        """Positions 0, 1, ... of every document."""
        return torch.arange(self.input_ids_BS.shape[1], device=self.input_ids_BS.device) - self.starts_BS


class Tokens(NamedTuple):
    """The rows of a batch without their states: all that blocks are made from."""

    input_ids_BS: Tensor  # int64
    loss_mask_BS: Tensor  # bool
    starts_BS: Tensor  # int64


class Place(NamedTuple):
    """Where a sample lies in a batch."""

    row: int
    column: int


def pack(lengths: Sequence[int], tokens: int | None) -> list[Place]:
    """The place of each sample of the given lengths in rows of at most `tokens` tokens; None: a row for each.

    The longest goes first, each into the first row with room for it (ties keep their order). A longer sample than
    `tokens` has a row for itself.
    """
    if tokens is None:
        return [Place(row, 0) for row in range(len(lengths))]
    filled: list[int] = []
    places = [Place(0, 0)] * len(lengths)
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        row = next((row for row, used in enumerate(filled) if used + lengths[sample] <= tokens), len(filled))
        if row == len(filled):
            filled.append(0)
        places[sample] = Place(row, filled[row])
        filled[row] += lengths[sample]
    return places


def loss_masks(table: pa.Table) -> list[NDArray[np.uint8]]:
    """The loss mask of each row, one byte per token."""
    return [np.frombuffer(mask.as_py(), dtype=np.uint8) for mask in table.column("loss_mask")]


def tokens_of(table: pa.Table, places: Sequence[Place]) -> Tokens:
    """Ids, masks and starts of the samples at their places, padded at the end."""
    masks = loss_masks(table)
    rows = 1 + max(place.row for place in places)
    length = max(place.column + len(mask) for place, mask in zip(places, masks, strict=True))
    ids_BS = torch.zeros(rows, length, dtype=torch.int64)
    mask_BS = torch.zeros(rows, length, dtype=torch.bool)
    starts_BS = torch.zeros(rows, length, dtype=torch.int64)
    # From left to right: each document's start is written up to the row's end, and the next one's over it.
    for sample in sorted(range(len(places)), key=lambda sample: places[sample].column):
        row, column = places[sample]
        own = slice(column, column + len(masks[sample]))
        ids_BS[row, own] = torch.from_numpy(table.column("input_ids")[sample].values.to_numpy().astype(np.int64))
        mask_BS[row, own] = torch.from_numpy(masks[sample].astype(bool))
        starts_BS[row, column:] = column
    return Tokens(ids_BS, mask_BS, starts_BS)


def collate(
    table: pa.Table,
    taps: Sequence[int],
    hidden: int,
    dtype: torch.dtype,
    places: Sequence[Place] | None = None,
    blank: Collection[int] = (),
    pinned: bool = False,
) -> Batch:
    """The samples of a captured table (`dspark.data.origin`) as a batch, by default in a row each.

    States of the samples numbered in `blank` are zeros. Each other one goes straight from Arrow's memory to its place
    in the batch: one read, one write, converted on the way. `pinned`: in memory that a GPU reads by itself; torch keeps
    such buffers, and uses one again when the copies out of it are done.
    """
    lengths = [len(mask) for mask in loss_masks(table)]
    places = places or pack(lengths, None)
    tokens = tokens_of(table, places)
    shape = tokens.input_ids_BS.shape
    taps_BSLH = torch.empty(*shape, len(taps) * hidden, dtype=dtype, pin_memory=pinned)
    final_BSH = torch.empty(*shape, hidden, dtype=dtype, pin_memory=pinned)
    columns = [tap_column(tap) for tap in taps] + [final_column()]
    parts = [*taps_BSLH.split(hidden, dim=-1), final_BSH]
    ends = [0] * len(tokens.input_ids_BS)
    for sample, (row, column) in enumerate(places):
        end = column + lengths[sample]
        ends[row] = max(ends[row], end)
        for name, part_BSH in zip(columns, parts, strict=True):
            if sample in blank:
                part_BSH[row, column:end] = 0
            else:
                part_BSH[row, column:end] = bf16_column(table, name, sample, hidden)
    assert sum(ends) == sum(lengths), "samples of a row lie side by side, and nothing else is written"
    for row, end in enumerate(ends):
        taps_BSLH[row, end:] = 0
        final_BSH[row, end:] = 0
    return Batch(tokens.input_ids_BS, tokens.loss_mask_BS, taps_BSLH, final_BSH, tokens.starts_BS)


def finite_samples(table: pa.Table, taps: Sequence[int]) -> list[bool]:
    """For each sample of a table, whether all states that a batch takes of it are finite."""
    columns = [tap_column(tap) for tap in taps] + [final_column()]
    return [all(is_finite(table, name, row) for name in columns) for row in range(table.num_rows)]
