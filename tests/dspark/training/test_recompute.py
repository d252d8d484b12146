"""`train.recompute`: the backward computes draft layers once more, and its gradients are the same bits."""

import pytest
import torch
from torch import Tensor, nn

from dspark.config import Settings
from dspark.model.kinds import AnyDrafter
from dspark.model.layers import DraftLayer
from dspark.training.batch import Batch, Place, Tokens
from dspark.training.kinds import blocks_of, objective_of, weight_of
from tests.dspark.small import positions, small_batch, small_config, small_drafter, small_eagle3, small_vocabulary
from tests.dspark.training.shares import settings_of

MASKS = [[0, 1, 1, 1, 1, 0, 1, 1, 1], [1] * 6]
ANCHORS = positions([1, 3, 6, 7], [0, 2, 4])


def gradients(drafter: AnyDrafter, settings: Settings, batch: Batch) -> tuple[dict[str, Tensor], int]:
    """Gradients by name, and how often the feed-forward part of a layer was entered."""
    objective = objective_of(drafter, settings)
    blocks = blocks_of(
        Tokens(batch.input_ids_BS, batch.loss_mask_BS, batch.starts_BS),
        ANCHORS,
        [len(mask) for mask in MASKS],
        settings,
        [Place(0, 0), Place(1, 0)],
    )
    runs: list[nn.Module] = []
    for layer in drafter.layers:
        assert isinstance(layer, DraftLayer)
        layer.mlp.register_forward_pre_hook(lambda module, _: runs.append(module))
    objective(small_vocabulary(drafter.config), batch, blocks, weight_of(blocks)).loss.backward()
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}, len(runs)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_gradients_are_equal_with_and_without_and_layers_run_twice(kind: str) -> None:
    config = small_config("gated")
    found = []
    for recompute in (False, True):
        settings = settings_of(config, recompute=recompute)
        if kind == "eagle3":
            changed = settings.drafter.model_copy(update={"kind": "eagle3"})
            settings = settings.model_copy(update={"drafter": changed})
        drafter: AnyDrafter = small_eagle3() if kind == "eagle3" else small_drafter(config)
        found.append(gradients(drafter, settings, small_batch(drafter.config, MASKS)))
    (kept, once), (again, twice) = found
    assert twice == 2 * once > 0
    assert kept.keys() == again.keys() == dict(drafter.named_parameters()).keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
