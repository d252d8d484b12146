"""What is computed from each draft logit once it is there: softmax, terms and the gradient, in the logits' own memory.

Shape suffixes: p columns of a tile, e slots on each of them, D tokens that may be drafted.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Judge(NamedTuple):
    """What the slots of a tile are judged by, and what their terms weigh."""

    probs_p1D: Tensor  # the target's among the tokens that may be drafted
    mass_p11: Tensor | None  # how much of the target these hold where others exist; None: 1
    best_p11: Tensor  # place of the target's likeliest token of all among these; that of another where it is not kept
    labels_pe1: Tensor | None  # places among these tokens; None: cross-entropy against `probs`
    ce_pe1: Tensor  # weight of the cross-entropy in the loss
    l1_pe1: Tensor | None  # weight of the distance; None: 0


class Verdict(NamedTuple):
    """Terms of a tile's slots."""

    ce_pe: Tensor
    l1_pe: Tensor
    greedy_pe: Tensor  # bool: no draft is likelier than the target's likeliest token


def judge_tile(logits_peD: Tensor, judge: Judge, differentiate: bool) -> Verdict:
    """Terms of draft logits; afterwards `logits` holds the gradient of the weighted terms, or q.

    With s the sign of q - p, the L1 distance has the gradient q (s - <q, s>), the cross-entropy q - target. Where q = p
    the distance has no gradient, and s = 1 is as good as any number in -1..1. Each operation is the fastest for a tile
    in cache: maxima without their places, factors of rows in place.
    """
    top_pe1 = logits_peD.amax(-1, keepdim=True)
    best_pe1 = judge.best_p11.expand(-1, logits_peD.shape[1], -1)
    greedy_pe1 = logits_peD.gather(-1, best_pe1) == top_pe1
    if judge.labels_pe1 is not None:
        expected_pe1 = logits_peD.gather(-1, judge.labels_pe1)
    else:
        expected_pe1 = (judge.probs_p1D * logits_peD).sum(-1, keepdim=True)
    q_peD = torch.softmax(logits_peD, -1, out=logits_peD)
    # The likeliest q is at least 1/D, so its logarithm is safe where a label's would not be.
    ce_pe1 = top_pe1 - q_peD.amax(-1, keepdim=True).log() - expected_pe1
    if judge.mass_p11 is None:
        off_peD = q_peD - judge.probs_p1D
    else:
        off_peD = torch.addcmul(q_peD, judge.probs_p1D, judge.mass_p11, value=-1)
    l1_pe1 = off_peD.abs().sum(-1, keepdim=True)
    if judge.mass_p11 is not None:
        l1_pe1 += (1 - judge.mass_p11).clamp(min=0)
    if differentiate:
        _to_gradient(q_peD, off_peD, judge)
    return Verdict(ce_pe1[..., 0], l1_pe1[..., 0], greedy_pe1[..., 0])


def _to_gradient(q_peD: Tensor, off_peD: Tensor, judge: Judge) -> None:
    """Turns q into the gradient; `off` = q - p is spent."""
    if judge.l1_pe1 is None:
        q_peD.mul_(judge.ce_pe1)
    else:
        signed_peD = torch.copysign(q_peD, off_peD, out=off_peD)
        mean_pe1 = signed_peD.sum(-1, keepdim=True)
        q_peD.mul_(judge.ce_pe1 - judge.l1_pe1 * mean_pe1).addcmul_(signed_peD, judge.l1_pe1)
    if judge.labels_pe1 is not None:
        q_peD.scatter_add_(-1, judge.labels_pe1, -judge.ce_pe1)
    else:
        q_peD.addcmul_(judge.probs_p1D, judge.ce_pe1, value=-1)
