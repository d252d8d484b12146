"""What training does differently for each kind of drafter: anchors, blocks, their weight, and the objective."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark.config import Settings
from dspark.model.drafter import Drafter
from dspark.model.kinds import AnyDrafter
from dspark.training.batch import Place, Tokens
from dspark.training.blocks import Blocks, draw_anchors, make_blocks
from dspark.training.chains import Chains, chain_anchors, make_chains
from dspark.training.eagle3 import Eagle3Objective
from dspark.training.objective import DraftObjective, step_weight

AnyObjective = DraftObjective | Eagle3Objective


def objective_of(drafter: AnyDrafter, settings: Settings) -> AnyObjective:
    """The drafter with its loss, as the module that a training engine wraps."""
    drafter.recompute = settings.train.recompute
    if isinstance(drafter, Drafter):
        return DraftObjective(drafter, settings.loss, settings.train.logits_mb)
    return Eagle3Objective(drafter, settings.train.logits_mb)


def anchors_of(loss_mask: NDArray[np.uint8], settings: Settings, epoch: int, sample_id: str) -> NDArray[np.int64]:
    """Anchors of a sample, ascending: a draw for DSpark, all rows that carry loss for EAGLE-3."""
    if settings.drafter.kind == "eagle3":
        return chain_anchors(loss_mask, settings.eagle3)
    return draw_anchors(loss_mask, settings.train.anchors, settings.seed, epoch, sample_id)


def blocks_of(
    tokens: Tokens,
    anchors: Sequence[NDArray[np.int64]],
    lengths: Sequence[int],
    settings: Settings,
    places: Sequence[Place],
    least: int = 1,
) -> Blocks | Chains:
    """Blocks or chains at the anchors, an array of columns for each row of the batch.

    `lengths`: tokens of each sample, 0 for one that takes no part; `places`: where each lies. Rows of blocks are
    filled with dummies up to `least`; chains are as many as carry loss.
    """
    if settings.drafter.kind == "eagle3":
        return make_chains(tokens, anchors, lengths, settings.eagle3, places)
    return make_blocks(
        tokens.input_ids_BS,
        tokens.loss_mask_BS,
        anchors,
        settings.drafter.block,
        settings.loss.gamma,
        tokens.starts_BS,
        least,
    )


def weight_of(blocks: Blocks | Chains) -> Tensor:
    """This batch's part of the step's denominator, known before any forward."""
    return blocks.divisor if isinstance(blocks, Chains) else step_weight(blocks)
