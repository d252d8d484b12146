"""A rank's share of one optimizer step: its captured rows as micro-batches with drawn blocks.

Whatever the rows hold, the share has the planned number of micro-batches, so that all ranks make the same calls:
padding rows and rows with non-finite states stay in, without anchors.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dspark.config import Settings
from dspark.data.plan import Plan
from dspark.model.config import DraftConfig
from dspark.target import DTYPES
from dspark.training.batch import Batch, collate, loss_masks
from dspark.training.blocks import Blocks
from dspark.training.kinds import anchors_of, blocks_of, weight_of
from dspark.training.means import Mean, Means


@dataclass(frozen=True)
class Share:
    """Micro-batches with their blocks, the slot weights of each, and counts over the rows as means."""

    batches: list[Batch]
    blocks: list[Blocks]
    weights: Tensor  # [micro-batches], fp32, on the device
    tokens: int
    counts: Means


def make_share(
    table: pa.Table, positions: range, plan: Plan, draft: DraftConfig, settings: Settings, device: torch.device
) -> Share:
    """The share that holds the rows of `table`, trained at plan `positions` (one per row, in order).

    Anchors depend on (seed, epoch, sample id) alone (design section 4).
    """
    train = settings.train
    ids, masks = table.column("sample_id").to_pylist(), loss_masks(table)
    batches, blocks, available, used, bad = [], [], 0, 0, 0
    for at in range(0, len(positions), train.micro_batch):
        rows = range(at, min(at + train.micro_batch, len(positions)))
        batch = collate(table.slice(at, len(rows)), draft.taps, draft.hidden, device, DTYPES[train.precision])
        batch, finite = without_non_finite(batch)
        bad += finite.count(False)
        anchors, lengths = [], []
        for row, good in zip(rows, finite, strict=True):
            drawn, length = np.empty(0, np.int64), 0
            if good and plan.counted[positions[row]]:
                drawn = anchors_of(masks[row], settings, plan.epochs[positions[row]], ids[row])
                length = len(masks[row])
                available += int(np.count_nonzero(masks[row][:-1] & masks[row][1:]))
            used += len(drawn)
            anchors.append(drawn)
            lengths.append(length)
        batches.append(batch)
        blocks.append(blocks_of(batch, anchors, lengths, settings))
    counted = sum(plan.counted[position] for position in positions)
    return Share(
        batches=batches,
        blocks=blocks,
        weights=torch.stack([weight_of(part) for part in blocks]),
        tokens=sum(len(mask) for mask in masks),
        counts={
            "anchors_available": _count(available, counted, device),
            "anchors_used": _count(used, counted, device),
            "rows_not_finite": _count(bad, counted, device),
        },
    )


def _count(total: int, rows: int, device: torch.device) -> Mean:
    """A count per counted row."""
    return Mean(torch.tensor(float(total), device=device), torch.tensor(float(rows), device=device))


def without_non_finite(batch: Batch) -> tuple[Batch, list[bool]]:
    """The batch with zeros in rows that hold a non-finite state, and for each row whether it is finite."""
    finite_B = batch.taps_BSLH.isfinite().flatten(1).all(-1) & batch.final_BSH.isfinite().flatten(1).all(-1)
    finite: list[bool] = finite_B.tolist()
    if all(finite):
        return batch, finite
    keep = finite_B[:, None, None]
    return (
        dataclasses.replace(
            batch,
            taps_BSLH=torch.where(keep, batch.taps_BSLH, 0),
            final_BSH=torch.where(keep, batch.final_BSH, 0),
        ),
        finite,
    )
