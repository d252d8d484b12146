"""The step that the benchmark compares with is the same step: equal loss, equal gradients."""

import pytest
import torch

from benchmarks.textbook import textbook_loss
from dspark.learning import LossSettings
from dspark.training.objective import DraftObjective, step_weight
from tests.dspark.small import (
    HEADS,
    positions,
    small_batch,
    small_blocks,
    small_config,
    small_drafter,
    small_vocabulary,
)

MASKS = [[1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("head", HEADS)
def test_the_textbook_s_step_is_the_project_s(head: str) -> None:
    config = small_config(head)
    vocabulary, batch = small_vocabulary(config), small_batch(config, MASKS)
    blocks = small_blocks(config, batch, positions([0, 1, 4, 6], [1, 2]))
    settings = LossSettings() if config.confidence else LossSettings(confidence=0.0)
    drafter = small_drafter(config)
    project = DraftObjective(drafter, settings)(vocabulary, batch, blocks, step_weight(blocks)).loss
    textbook = textbook_loss(drafter, vocabulary, batch, blocks, settings)
    torch.testing.assert_close(project, textbook, rtol=1e-6, atol=0)
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    both = (torch.autograd.grad(loss, parameters) for loss in (project, textbook))
    for name, found, expected in zip(names, *both, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name
