"""What is computed from each draft logit once it is there: softmax, terms and the gradient, in the logits' own memory.

Shape suffixes: n slots of a tile, D tokens that may be drafted.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Slots to be judged: their target, their labels and what their terms weigh."""

    probs_nD: Tensor  # the target's among the tokens that may be drafted
    mass_n1: Tensor | None  # how much of the target these hold where others exist; None: 1
    best_n1: Tensor  # place of the target's likeliest token of all among these; that of another where it is not kept
    labels_n1: Tensor | None  # places among these tokens; None: cross-entropy against `probs`
    ce_n1: Tensor  # weight of the cross-entropy in the loss
    l1_n1: Tensor | None  # weight of the distance; None: 0


class Verdict(NamedTuple):
    """Terms of a tile's slots."""

    ce_n: Tensor
    l1_n: Tensor
    greedy_n: Tensor  # bool: no draft is likelier than the target's likeliest token


def judge_tile(logits_nD: Tensor, tile: Tile, differentiate: bool) -> Verdict:
    """Terms of draft logits; afterwards `logits` holds the gradient of the weighted terms, or q.

    With s = sign(q - p), the L1 distance has the gradient q (s - <q, s>), the cross-entropy q - target. Each operation
    is the fastest for a tile in cache: maxima without their places, sums of products, factors of rows in place.
    """
    top_n1 = logits_nD.amax(-1, keepdim=True)
    greedy_n1 = logits_nD.gather(1, tile.best_n1) == top_n1
    if tile.labels_n1 is not None:
        expected_n1 = logits_nD.gather(1, tile.labels_n1)
    else:
        expected_n1 = (tile.probs_nD * logits_nD).sum(-1, keepdim=True)
    q_nD = torch.softmax(logits_nD, -1, out=logits_nD)
    # The likeliest q is at least 1/D, so its logarithm is safe where a label's would not be.
    ce_n1 = top_n1 - q_nD.amax(-1, keepdim=True).log() - expected_n1
    if tile.mass_n1 is None:
        off_nD = q_nD - tile.probs_nD
    else:
        off_nD = torch.addcmul(q_nD, tile.probs_nD, tile.mass_n1, value=-1)
    l1_n1 = off_nD.abs().sum(-1, keepdim=True)
    if tile.mass_n1 is not None:
        l1_n1 += (1 - tile.mass_n1).clamp(min=0)
    if differentiate:
        _to_gradient(q_nD, off_nD, tile)
    return Verdict(ce_n1[:, 0], l1_n1[:, 0], greedy_n1[:, 0])


def _to_gradient(q_nD: Tensor, off_nD: Tensor, tile: Tile) -> None:
    """Turns q into the gradient; `off` = q - p is spent."""
    if tile.l1_n1 is None:
        q_nD.mul_(tile.ce_n1)
    else:
        sign_nD = off_nD.sign_()
        mean_n1 = (q_nD * sign_nD).sum(-1, keepdim=True)
        q_nD.mul_(sign_nD.mul_(tile.l1_n1).add_(tile.ce_n1 - tile.l1_n1 * mean_n1))
    if tile.labels_n1 is not None:
        q_nD.scatter_add_(1, tile.labels_n1, -tile.ce_n1)
    else:
        q_nD.addcmul_(tile.probs_nD, tile.ce_n1, value=-1)
