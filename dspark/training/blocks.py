"""Anchors and blocks: which positions are drafted, from which tokens, towards which labels, with which weight.

Slot k of the block at anchor a sits at position a+k, sees the context below a and its own block, and predicts token
a+k+1 (design section 4). Shape suffixes: B batch, A blocks per row, K slots, S positions.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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

    anchors_BA: Tensor  # int64, 0 for dummies
    keep_BA: Tensor  # bool
    positions_BAK: Tensor  # int64, a+k
    previous_BAK: Tensor  # int64, the token before the predicted one, teacher-forced
    labels_BAK: Tensor  # int64, token a+k+1; 0 where not valid
    valid_BAK: Tensor  # bool, M: all labels up to this slot are supervised
    weights_BAK: Tensor  # fp32, w = M exp(-k/gamma)

    @property
    def block(self) -> int:
        return self.positions_BAK.shape[-1]


def make_blocks(
    input_ids_BS: Tensor, loss_mask_BS: Tensor, anchors: Sequence[NDArray[np.int64]], block: int, gamma: float | None
) -> Blocks:
    """Blocks of `block` slots at the given anchors, one array of positions for each row.

    `gamma` None: no decay over the slots. Rows are filled with dummies up to the largest number of anchors, at least 1.
    """
    device, length = input_ids_BS.device, input_ids_BS.shape[1]
    width = max(1, *(len(row) for row in anchors))
    anchors_BA = torch.zeros(len(anchors), width, dtype=torch.int64)
    keep_BA = torch.zeros(len(anchors), width, dtype=torch.bool)
    for row, positions in enumerate(anchors):
        anchors_BA[row, : len(positions)] = torch.from_numpy(positions)
        keep_BA[row, : len(positions)] = True
    anchors_BA, keep_BA = anchors_BA.to(device), keep_BA.to(device)

    slots_K = torch.arange(block, device=device)
    positions_BAK = anchors_BA[..., None] + slots_K
    targets_BAK = positions_BAK + 1
    inside_BAK = targets_BAK < length
    safe_BAK = targets_BAK.clamp(max=length - 1)
    supervised_BAK = inside_BAK & _gather(loss_mask_BS.bool(), safe_BAK) & keep_BA[..., None]
    valid_BAK = supervised_BAK.cumprod(dim=-1).bool()
    decay_K = torch.exp(-slots_K / gamma) if gamma is not None else torch.ones(block, device=device)
    return Blocks(
        anchors_BA=anchors_BA,
        keep_BA=keep_BA,
        positions_BAK=positions_BAK,
        previous_BAK=_gather(input_ids_BS, positions_BAK.clamp(max=length - 1)),
        labels_BAK=torch.where(valid_BAK, _gather(input_ids_BS, safe_BAK), 0),
        valid_BAK=valid_BAK,
        weights_BAK=valid_BAK.float() * decay_K,
    )


def _gather(values_BS: Tensor, positions_BAK: Tensor) -> Tensor:
    return values_BS.gather(1, positions_BAK.flatten(1)).view_as(positions_BAK)


def visibility(blocks: Blocks, context: int) -> Tensor:
    """Mask [B, 1, A*K, context + A*K]: which columns each slot may attend to.

    True for context positions strictly below the anchor and for all slots of the same block. A dummy block sees only
    itself, so that no softmax is empty.
    """
    anchors_BQ = torch.where(blocks.keep_BA, blocks.anchors_BA, 0).repeat_interleave(blocks.block, dim=1)
    columns_S = torch.arange(context, device=anchors_BQ.device)
    below_BQS = columns_S < anchors_BQ[..., None]
    number_Q = torch.arange(anchors_BQ.shape[1], device=anchors_BQ.device) // blocks.block
    same_QQ = number_Q[:, None] == number_Q
    return torch.cat((below_BQS, same_QQ.expand(len(anchors_BQ), -1, -1)), dim=-1).unsqueeze(1)


def block_inputs(blocks: Blocks, mask_token_id: int) -> Tensor:
    """Input token ids [B, A*K]: the anchor's token in slot 0, the mask token behind it."""
    ids_BAK = torch.full_like(blocks.previous_BAK, mask_token_id)
    ids_BAK[..., 0] = blocks.previous_BAK[..., 0]
    return ids_BAK.flatten(1)
