"""The drafter: what a block may see, and that training and decoding compute the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.model.attention import Sight
from dspark.model.drafter import Drafter, new_drafter
from dspark.training.batch import Batch
from dspark.training.blocks import Blocks
from dspark.training.objective import run_drafter
from tests.dspark.plain import plain_blocks, weights_of
from tests.dspark.small import (
    HEADS,
    positions,
    small_batch,
    small_blocks,
    small_config,
    small_drafter,
    small_vocabulary,
)

CONFIG = small_config()
LENGTH = 12
ANCHORS = [0, 3, 4, 8]


def example() -> tuple[Batch, Blocks]:
    batch = small_batch(CONFIG, [[1] * LENGTH])
    return batch, small_blocks(CONFIG, batch, positions(ANCHORS))


def hidden_of(batch: Batch, blocks: Blocks) -> Tensor:
    """Hidden states [B, A, K, H]."""
    with torch.no_grad():
        return run_drafter(small_drafter(CONFIG), small_vocabulary(CONFIG), batch, blocks).hidden_BAKH


def changed_blocks(before: Tensor, after: Tensor) -> list[bool]:
    changed: list[bool] = (before != after).flatten(2).any(-1)[0].tolist()
    return changed


@pytest.mark.parametrize("position", range(LENGTH))
def test_a_tap_reaches_exactly_the_blocks_whose_anchor_lies_behind_it(position: int) -> None:
    batch, blocks = example()
    taps = batch.taps_BSLH.clone()
    taps[0, position] += 1
    after = hidden_of(replace(batch, taps_BSLH=taps), blocks)
    assert changed_blocks(hidden_of(batch, blocks), after) == [anchor > position for anchor in ANCHORS]


@pytest.mark.parametrize("position", range(LENGTH))
def test_a_token_reaches_the_block_that_it_anchors_and_no_other(position: int) -> None:
    batch, blocks = example()
    ids = batch.input_ids_BS.clone()
    ids[0, position] = (ids[0, position] + 1) % CONFIG.mask_token_id
    other = replace(batch, input_ids_BS=ids)
    after = hidden_of(other, small_blocks(CONFIG, other, positions(ANCHORS)))
    assert changed_blocks(hidden_of(batch, blocks), after) == [anchor == position for anchor in ANCHORS]


def test_a_slot_sees_every_slot_of_its_block() -> None:
    # The anchor's token enters in slot 0 alone; all slots hear of it.
    batch, blocks = example()
    ids = batch.input_ids_BS.clone()
    ids[0, 4] = (ids[0, 4] + 1) % CONFIG.mask_token_id
    other = replace(batch, input_ids_BS=ids)
    before, after = hidden_of(batch, blocks), hidden_of(other, small_blocks(CONFIG, other, positions(ANCHORS)))
    assert (before != after)[0, 2].any(-1).tolist() == [True] * CONFIG.block


def test_blocks_are_the_same_alone_and_among_others() -> None:
    batch, blocks = example()
    together = hidden_of(batch, blocks)
    for number, anchor in enumerate(ANCHORS):
        alone = hidden_of(batch, small_blocks(CONFIG, batch, positions([anchor])))
        torch.testing.assert_close(alone[:, 0], together[:, number], rtol=1e-5, atol=1e-5)


def test_dummy_blocks_and_padding_change_no_block() -> None:
    batch, blocks = example()
    padded = small_batch(CONFIG, [[1] * LENGTH, [1] * (LENGTH + 5)])
    found = hidden_of(padded, small_blocks(CONFIG, padded, positions(ANCHORS, [1, 2, 3, 4, 5, 6])))
    torch.testing.assert_close(found[:1, : len(ANCHORS)], hidden_of(batch, blocks), rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("layers", [1, 3])
def test_hidden_states_equal_the_plain_float64_blocks(layers: int) -> None:
    config = small_config(layers=layers)
    drafter, vocabulary = small_drafter(config), small_vocabulary(config)
    batch = small_batch(config, [[1] * LENGTH])
    with torch.no_grad():
        output = run_drafter(drafter, vocabulary, batch, small_blocks(config, batch, positions(ANCHORS)))
    plain = plain_blocks(weights_of(drafter, vocabulary), config, batch, [ANCHORS])
    expected = torch.stack([block.hidden_KH for block in plain]).detach()
    torch.testing.assert_close(output.hidden_BAKH[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_decoding_one_block_over_a_growing_context_equals_training() -> None:
    # Decoding keeps keys and values of what it has seen, and runs one block behind them.
    batch, blocks = example()
    drafter, vocabulary = small_drafter(CONFIG), small_vocabulary(CONFIG)
    trained = hidden_of(batch, blocks)
    with torch.no_grad():
        for number, anchor in enumerate(ANCHORS):
            old, new = anchor // 2, anchor
            parts = [
                drafter.context(batch.taps_BSLH[:, piece], batch.positions_BS[:, piece])
                for piece in (slice(0, old), slice(old, new))
            ]
            context = [
                type(a)(torch.cat((a.keys, b.keys), dim=2), torch.cat((a.values, b.values), dim=2))
                for a, b in zip(*parts, strict=True)
            ]
            ids = torch.tensor([[int(batch.input_ids_BS[0, anchor])] + [CONFIG.mask_token_id] * (CONFIG.block - 1)])
            found = drafter(
                vocabulary.embed(ids),
                anchor + torch.arange(CONFIG.block)[None],
                context,
                Sight(torch.tensor([[0]]), torch.tensor([[anchor]])),
            )
            torch.testing.assert_close(found[0], trained[0, number], rtol=1e-5, atol=1e-5)


def test_equal_seeds_give_equal_drafters_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first, again, other = (new_drafter(CONFIG, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("head", HEADS)
def test_a_new_drafter_begins_without_markov_bias_with_norms_of_one_and_biases_of_zero(head: str) -> None:
    config = small_config(head, init_std=0.05)
    state = new_drafter(config, seed=0).state_dict()
    for name, value in state.items():
        if name.endswith("markov_w2.weight") or name.endswith(".bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        elif value.numel() > 200:
            assert 0.04 < value.std().item() < 0.06, name
    assert state["layers.1.mlp.up_proj.weight"].numel() > 200


def test_a_drafter_holds_only_the_heads_that_its_config_names() -> None:
    heads = {
        head: sorted({name.split(".")[0] for name in Drafter(small_config(head)).state_dict()} - BACKBONE)
        for head in HEADS
    }
    assert heads == {
        "vanilla": ["confidence_head", "markov_head"],
        "gated": ["confidence_head", "markov_head"],
        "rnn": ["confidence_head", "markov_head"],
        "confidence_alone": ["confidence_head"],
        "none": [],
    }


BACKBONE = {"fc", "hidden_norm", "layers", "norm"}
