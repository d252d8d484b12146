"""Chains: the rows of a text that an EAGLE-3 drafter learns from, and what each of their steps weighs.

Row t joins the feature of position t with token t+1. Step j of its chain reads token t+1+j and predicts token t+2+j:
what slot j of a DSpark block with anchor t+1 predicts after the same token (design section 5). So a chain is a block,
and anchors, labels and metrics are those of blocks. A packed document is a sequence of its own: its last position joins
no token of the next one. Shape suffixes: B batch, S columns, A chains per row of the batch, K steps.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.learning import Eagle3Settings
from dspark.training.batch import Batch, Place, Tokens
from dspark.training.blocks import Blocks, make_blocks
from dspark.training.slots import slots_of


@dataclass(frozen=True)
class Chains(Blocks):
    """Blocks whose slots are chained steps.

    `valid` says which steps decoding asks for, whatever the loss covers. `weights` are those of the loss: the step's
    decay, over the steps of the sequence's other rows where every sequence weighs the same. `used` are the steps that
    are valid or carry weight.
    """

    divisor: Tensor  # scalar, fp32: what this batch adds to the denominator of the whole optimizer step


def chain_anchors(loss_mask: NDArray[np.uint8], settings: Eagle3Settings) -> NDArray[np.int64]:
    """Anchors t+1 of all rows t that carry loss or are measured at some step, ascending; position 0 has no row."""
    in_loss = np.append(loss_mask.astype(bool), np.zeros(settings.ttt_length, bool))
    rows = len(loss_mask) - 1
    reached = in_loss[1 : rows + 1] & in_loss[2 : rows + 2]
    if settings.mask_alignment == "published":
        # Row t counts at step j with token t+j, as long as token t+1+j exists.
        in_loss[rows] = False
        for step in range(settings.ttt_length):
            reached = reached | in_loss[step : step + rows]
    return np.flatnonzero(reached) + 1


def make_chains(
    batch: Batch | Tokens,
    anchors: Sequence[NDArray[np.int64]],
    lengths: Sequence[int],
    settings: Eagle3Settings,
    places: Sequence[Place] | None = None,
) -> Chains:
    """Chains at the given anchors, one array of columns for each row of the batch.

    `lengths`: tokens of each sequence, 0 for one that takes no part; `places`: where each lies, None: one in each row.
    `normaliser: published` divides by the sum of the lengths; the published code counts padding too, so its loss
    depends on which rows share a batch.
    """
    starts_BS = batch.starts_BS
    blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, settings.ttt_length, None, starts_BS)
    # An anchor need not be supervised where the mask is unshifted.
    valid_BAK = blocks.valid_BAK & batch.loss_mask_BS.gather(1, blocks.anchors_BA)[..., None]
    carries_BAK = valid_BAK
    if settings.mask_alignment == "published":
        # At each sequence's first column, its length.
        lengths_BS = torch.zeros(starts_BS.shape, dtype=torch.int64)
        for place, length in zip(places or [Place(row, 0) for row in range(len(lengths))], lengths, strict=True):
            lengths_BS[place] = length
        exists_BAK = blocks.positions_BAK < lengths_BS.gather(1, blocks.starts_BA)[..., None]
        before_BAK = (blocks.columns_BAK - 1).clamp(min=0, max=batch.loss_mask_BS.shape[1] - 1)
        in_loss_BAK = batch.loss_mask_BS.gather(1, before_BAK.flatten(1)).view_as(before_BAK)
        carries_BAK = in_loss_BAK & exists_BAK & blocks.keep_BA[..., None]
    weights_BAK = carries_BAK * settings.step_loss_decay ** torch.arange(settings.ttt_length)
    divisor = torch.tensor(sum(lengths))
    if settings.normaliser == "sequences":
        # Supervised rows of each step, added up at each sequence's first column.
        place_BAK = blocks.starts_BA[..., None].expand_as(carries_BAK)
        rows_BSK = torch.zeros(*starts_BS.shape, settings.ttt_length, dtype=torch.int64)
        rows_BSK = rows_BSK.scatter_add(1, place_BAK, carries_BAK.long())
        weights_BAK = weights_BAK / rows_BSK.gather(1, place_BAK).clamp(min=1)
        divisor = (rows_BSK[..., 0] > 0).sum()
    given = {field.name: getattr(blocks, field.name) for field in dataclasses.fields(blocks)}
    used_BAK = valid_BAK | carries_BAK
    changed = {
        "valid_BAK": valid_BAK,
        "weights_BAK": weights_BAK.float(),
        "used": slots_of(used_BAK, blocks.columns_BAK, batch.input_ids_BS.shape[1]),
        "divisor": divisor.float(),
    }
    return Chains(**{**given, **changed})
