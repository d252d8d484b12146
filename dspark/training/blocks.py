"""Anchors and blocks: which positions are drafted, from which tokens, towards which labels, with which weight.

Slot k of the block at anchor a sits at position a+k, sees the context below a and its own block, and predicts token
a+k+1 (design section 4). Where a row packs several documents, a block has one of them alone: columns count from the
row's start, positions from the document's. Shape suffixes: B batch, A blocks per row, K slots, S columns of a row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.model.attention import Sight
from dspark.training.slots import Slots, slots_of


def draw_anchors(loss_mask: NDArray[np.uint8], count: int, seed: int, epoch: int, sample_id: str) -> NDArray[np.int64]:
    """Up to `count` distinct candidates, uniformly without replacement, ascending.

    Position a is a candidate iff a and a+1 are supervised. The draw depends on (seed, epoch, sample id) alone, so it is
    the same on any rank, in any batch and after any resume.
    """
    candidates = np.flatnonzero(loss_mask[:-1].astype(bool) & loss_mask[1:].astype(bool))
    if len(candidates) <= count:
        return candidates
    digest = hashlib.sha256(f"anchors/{seed}/{epoch}/{sample_id}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return np.sort(generator.choice(candidates, size=count, replace=False))


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch. Dummy blocks (keep false) fill rows up to A; they take part in nothing."""

    anchors_BA: Tensor  # int64, columns; 0 for dummies
    starts_BA: Tensor  # int64, the column at which the anchor's document begins
    keep_BA: Tensor  # bool
    previous_BAK: (
        Tensor  # int64, the token before the predicted one, teacher-forced; 0 behind the document and in dummies
    )
    labels_BAK: Tensor  # int64, token a+k+1; 0 where not valid
    valid_BAK: Tensor  # bool, M: all labels up to this slot are supervised
    weights_BAK: Tensor  # fp32, w = M exp(-k/gamma)
    used: Slots  # where valid; listed here, on the host: a device could not without making it wait
    reach: int  # no block sees a column from here on: the batch's largest anchor, at least 1

    @property
    def block(self) -> int:
        return self.labels_BAK.shape[-1]

    @property
    def columns_BAK(self) -> Tensor:
        """Where in its row the token before the predicted one stands; may lie behind the row."""
        return self.anchors_BA[..., None] + torch.arange(self.block, device=self.anchors_BA.device)

    @property
    def positions_BAK(self) -> Tensor:
        """Positions of the slots in their documents, for the rotary tables."""
        return self.columns_BAK - self.starts_BA[..., None]

    @cached_property
    def sight(self) -> Sight:
        """The context columns of each block: of its document, strictly below its anchor; none for a dummy block."""
        return Sight(self.starts_BA, torch.where(self.keep_BA, self.anchors_BA, 0))


def make_blocks(
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchors: Sequence[NDArray[np.int64]],
    block: int,
    gamma: float | None,
    starts_BS: Tensor | None = None,
    least: int = 1,
) -> Blocks:
    """Blocks of `block` slots at the given anchors, one array of columns for each row.

    `gamma` None: no decay over the slots. `starts_BS`: the column at which each column's document begins; None: every
    row is one document. Rows are filled with dummies up to the largest number of anchors, and up to `least`. All
    tensors are on the host.
    """
    length = input_ids_BS.shape[1]
    width = max(least, *(len(row) for row in anchors))
    anchors_BA = torch.zeros(len(anchors), width, dtype=torch.int64)
    keep_BA = torch.zeros(len(anchors), width, dtype=torch.bool)
    for row, columns in enumerate(anchors):
        anchors_BA[row, : len(columns)] = torch.from_numpy(columns)
        keep_BA[row, : len(columns)] = True
    if starts_BS is None:
        starts_BS = torch.zeros_like(input_ids_BS)
    starts_BA = starts_BS.gather(1, anchors_BA)

    slots_K = torch.arange(block)
    columns_BAK = anchors_BA[..., None] + slots_K

    def inside(at_BAK: Tensor) -> tuple[Tensor, Tensor]:
        """Which columns lie in the block's own document, and columns that can be read for all."""
        safe_BAK = at_BAK.clamp(max=length - 1)
        return (at_BAK < length) & (_gather(starts_BS, safe_BAK) == starts_BA[..., None]), safe_BAK

    own_BAK, previous_BAK = inside(columns_BAK)
    next_BAK, targets_BAK = inside(columns_BAK + 1)
    supervised_BAK = next_BAK & _gather(loss_mask_BS.bool(), targets_BAK) & keep_BA[..., None]
    valid_BAK = supervised_BAK.cumprod(dim=-1).bool()
    decay_K = torch.exp(-slots_K / gamma) if gamma is not None else torch.ones(block)
    return Blocks(
        anchors_BA=anchors_BA,
        starts_BA=starts_BA,
        keep_BA=keep_BA,
        previous_BAK=torch.where(own_BAK & keep_BA[..., None], _gather(input_ids_BS, previous_BAK), 0),
        labels_BAK=torch.where(valid_BAK, _gather(input_ids_BS, targets_BAK), 0),
        valid_BAK=valid_BAK,
        weights_BAK=valid_BAK.float() * decay_K,
        used=slots_of(valid_BAK, columns_BAK, length),
        reach=max(1, *(int(columns.max(initial=0)) for columns in anchors)),
    )


def _gather(values_BS: Tensor, columns_BAK: Tensor) -> Tensor:
    return values_BS.gather(1, columns_BAK.flatten(1)).view_as(columns_BAK)


def visibility(blocks: Blocks, context: int) -> Tensor:
    """Mask [B, 1, A*K, context + A*K]: which columns each slot may attend to, as one dense statement of the rule.

    True for context columns of the same document
    strictly below the anchor and for all slots of the same block. A dummy block sees only itself, so that no softmax is
    empty. Training reads `Blocks.sight`, which says the same in two numbers per block; tests and pictures read this.
    """
    anchors_BQ1 = torch.where(blocks.keep_BA, blocks.anchors_BA, 0).repeat_interleave(blocks.block, dim=1)[..., None]
    starts_BQ1 = blocks.starts_BA.repeat_interleave(blocks.block, dim=1)[..., None]
    columns_S = torch.arange(context, device=anchors_BQ1.device)
    below_BQS = (starts_BQ1 <= columns_S) & (columns_S < anchors_BQ1)
    number_Q = torch.arange(anchors_BQ1.shape[1], device=anchors_BQ1.device) // blocks.block
    same_QQ = number_Q[:, None] == number_Q
    return torch.cat((below_BQS, same_QQ.expand(len(anchors_BQ1), -1, -1)), dim=-1).unsqueeze(1)


def block_inputs(blocks: Blocks, mask_token_id: int) -> Tensor:
    """Input token ids [B, A*K]: the anchor's token in slot 0, the mask token behind it; in a dummy, mask tokens alone.

    A dummy thus holds nothing of the row: what is not a number would pass the attention mask into other blocks.
    """
    ids_BAK = torch.full_like(blocks.previous_BAK, mask_token_id)
    ids_BAK[..., 0] = torch.where(blocks.keep_BA, blocks.previous_BAK[..., 0], mask_token_id)
    return ids_BAK.flatten(1)
