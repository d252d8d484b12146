"""A rank's share of one optimizer step: its captured rows as micro-batches with drawn blocks.

A micro-batch has equally many rows of the table whether or not they are packed into fewer rows of tensors: packing
changes what is padded, never which blocks stand in which micro-batch. Whatever the rows hold, the share has the planned
number of micro-batches, so that all ranks make the same calls: padding rows and rows with non-finite states stay in,
without anchors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.config import Settings
from dspark.data.plan import Plan
from dspark.model.config import DraftConfig
from dspark.target_files import DTYPES
from dspark.training.batch import Batch, Place, collate, finite_samples, loss_masks, pack, tokens_of
from dspark.training.blocks import Blocks
from dspark.training.kinds import anchors_of, blocks_of, weight_of
from dspark.training.means import Mean, Means


class Rows(NamedTuple):
    """The rows of one micro-batch, not yet collated."""

    table: pa.Table
    places: list[Place]
    blank: set[int]  # samples with a state that is not finite


@dataclass(frozen=True)
class MicroBatches:
    """The batches of a share, each collated when it is asked for: a share never lies in memory as a whole."""

    rows: list[Rows]
    taps: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    pinned: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Batch:
        table, places, blank = self.rows[number]
        return collate(table, self.taps, self.hidden, self.dtype, places, blank, self.pinned)

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class Share:
    """Micro-batches with their blocks, the weight of each, and counts over the rows as means; all on the host.

    Rows that only fill the last step count nowhere, in `tokens` neither.
    """

    batches: MicroBatches
    blocks: list[Blocks]
    weights: Tensor  # [micro-batches], fp32
    tokens: int  # without padding
    counts: Means


def make_share(
    table: pa.Table, positions: range, plan: Plan, draft: DraftConfig, settings: Settings, pinned: bool = False
) -> Share:
    """The share that holds the rows of `table`, trained at plan `positions` (one per row, in order).

    Anchors depend on (seed, epoch, sample id) alone (design section 4). The states are only read here, to see
    whether they are finite; they are copied when a batch is asked for.
    """
    train = settings.train
    ids, masks = table.column("sample_id").to_pylist(), loss_masks(table)
    counted = [bool(plan.counted[position]) for position in positions]
    finite = finite_samples(table, draft.taps)
    # A GPU's kernels are compiled for a number of slots, and idle ones cost little.
    least = train.anchors if pinned else 1
    micro_batches, blocks, available, used, bare = [], [], 0, 0, 0
    for at in range(0, len(positions), train.micro_batch):
        rows = range(at, min(at + train.micro_batch, len(positions)))
        places = pack([len(masks[row]) for row in rows], train.pack_tokens)
        part = table.slice(at, len(rows))
        anchors, lengths = [], []
        for row in rows:
            drawn, length = np.empty(0, np.int64), 0
            if counted[row] and finite[row]:
                drawn = anchors_of(masks[row], settings, int(plan.epochs[positions[row]]), ids[row])
                length = len(masks[row])
                bare += len(drawn) == 0
                available += int(np.count_nonzero(masks[row][:-1] & masks[row][1:]))
            used += len(drawn)
            anchors.append(drawn)
            lengths.append(length)
        micro_batches.append(Rows(part, places, {row - at for row in rows if not finite[row]}))
        blocks.append(blocks_of(tokens_of(part, places), placed(anchors, places), lengths, settings, places, least))
    bad = sum(counts and not good for counts, good in zip(counted, finite, strict=True))
    return Share(
        batches=MicroBatches(micro_batches, draft.taps, draft.hidden, DTYPES[train.precision], pinned),
        blocks=blocks,
        weights=torch.stack([weight_of(part) for part in blocks]),
        tokens=sum(len(mask) for mask, counts in zip(masks, counted, strict=True) if counts),
        counts={
            "anchors_available": _count(available, sum(counted)),
            "anchors_used": _count(used, sum(counted)),
            "rows_not_finite": _count(bad, sum(counted)),
            "rows_without_anchors": _count(bare, sum(counted)),
        },
    )


def _count(total: int, rows: int) -> Mean:
    """A count per counted row."""
    return Mean(torch.tensor(float(total)), torch.tensor(float(rows)))


def placed(anchors: Sequence[NDArray[np.int64]], places: Sequence[Place]) -> list[NDArray[np.int64]]:
    """Columns of the anchors of each row of a batch, ascending, from each sample's own positions."""
    rows = [[np.empty(0, np.int64)] for _ in range(1 + max(place.row for place in places))]
    for (row, column), own in zip(places, anchors, strict=True):
        rows[row].append(own + column)
    return [np.sort(np.concatenate(row)) for row in rows]
