"""A rank's share of one optimizer step: its captured rows as micro-batches with drawn blocks.

A micro-batch has equally many rows of the table whether or not they are packed into fewer rows of tensors: packing
changes what is padded, never which blocks stand in which micro-batch. Whatever the rows hold, the share has the planned
number of micro-batches, so that all ranks make the same calls: padding rows and rows with non-finite states stay in,
without anchors.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.config import Settings
from dspark.data.plan import Plan
from dspark.model.config import DraftConfig
from dspark.target import DTYPES
from dspark.training.batch import Batch, Place, collate, loss_masks, pack
from dspark.training.blocks import Blocks
from dspark.training.kinds import anchors_of, blocks_of, weight_of
from dspark.training.means import Mean, Means


@dataclass(frozen=True)
class Share:
    """Micro-batches with their blocks, the weight of each, and counts over the rows as means.

    Rows that only fill the last step count nowhere, in `tokens` neither.
    """

    batches: list[Batch]
    blocks: list[Blocks]
    weights: Tensor  # [micro-batches], fp32, on the device
    tokens: int  # without padding
    counts: Means


def make_share(
    table: pa.Table, positions: range, plan: Plan, draft: DraftConfig, settings: Settings, device: torch.device
) -> Share:
    """The share that holds the rows of `table`, trained at plan `positions` (one per row, in order).

    Anchors depend on (seed, epoch, sample id) alone (design section 4).
    """
    train = settings.train
    ids, masks = table.column("sample_id").to_pylist(), loss_masks(table)
    counted = [plan.counted[position] for position in positions]
    batches, blocks, available, used, bad = [], [], 0, 0, 0
    for at in range(0, len(positions), train.micro_batch):
        rows = range(at, min(at + train.micro_batch, len(positions)))
        places = pack([len(masks[row]) for row in rows], train.pack_tokens)
        part, dtype = table.slice(at, len(rows)), DTYPES[train.precision]
        batch, finite = without_non_finite(collate(part, draft.taps, draft.hidden, device, dtype, places), places)
        bad += sum(counted[row] and not good for row, good in zip(rows, finite, strict=True))
        anchors, lengths = [], []
        for row, good in zip(rows, finite, strict=True):
            drawn, length = np.empty(0, np.int64), 0
            if counted[row] and good:
                drawn = anchors_of(masks[row], settings, plan.epochs[positions[row]], ids[row])
                length = len(masks[row])
                available += int(np.count_nonzero(masks[row][:-1] & masks[row][1:]))
            used += len(drawn)
            anchors.append(drawn)
            lengths.append(length)
        batches.append(batch)
        blocks.append(blocks_of(batch, placed(anchors, places), lengths, settings, places))
    return Share(
        batches=batches,
        blocks=blocks,
        weights=torch.stack([weight_of(part) for part in blocks]),
        tokens=sum(len(mask) for mask, counts in zip(masks, counted, strict=True) if counts),
        counts={
            "anchors_available": _count(available, sum(counted), device),
            "anchors_used": _count(used, sum(counted), device),
            "rows_not_finite": _count(bad, sum(counted), device),
        },
    )


def _count(total: int, rows: int, device: torch.device) -> Mean:
    """A count per counted row."""
    return Mean(torch.tensor(float(total), device=device), torch.tensor(float(rows), device=device))


def placed(anchors: Sequence[NDArray[np.int64]], places: Sequence[Place]) -> list[NDArray[np.int64]]:
    """Columns of the anchors of each row of a batch, ascending, from each sample's own positions."""
    rows = [[np.empty(0, np.int64)] for _ in range(1 + max(place.row for place in places))]
    for (row, column), own in zip(places, anchors, strict=True):
        rows[row].append(own + column)
    return [np.sort(np.concatenate(row)) for row in rows]


def without_non_finite(batch: Batch, places: Sequence[Place]) -> tuple[Batch, list[bool]]:
    """The batch with zeros in documents that hold a non-finite state, and for each sample whether it is finite."""
    bad_BS = ~(batch.taps_BSLH.isfinite().all(-1) & batch.final_BSH.isfinite().all(-1))
    if not bad_BS.any():
        return batch, [True] * len(places)
    # Gathered at each document's first column, and read from there by the whole document.
    found_BS = torch.zeros_like(batch.starts_BS).scatter_reduce(1, batch.starts_BS, bad_BS.long(), "amax")
    bad_BS = found_BS.gather(1, batch.starts_BS).bool()
    rows, columns = zip(*places, strict=True)
    finite: list[bool] = (~bad_BS[list(rows), list(columns)]).tolist()
    clean = dataclasses.replace(
        batch,
        taps_BSLH=batch.taps_BSLH.masked_fill(bad_BS[..., None], 0),
        final_BSH=batch.final_BSH.masked_fill(bad_BS[..., None], 0),
    )
    return clean, finite
