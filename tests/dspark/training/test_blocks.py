"""Anchors, labels, weights and visibility: literals, properties, and a chi-square test of the draw."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from dspark.training.blocks import Blocks, block_inputs, draw_anchors, make_blocks, visibility
from tests.dspark.small import positions

masks = st.lists(st.integers(0, 1), min_size=1, max_size=40)


def blocks_at(anchors: list[int], in_loss: Tensor, size: int, gamma: float | None = None) -> Blocks:
    ids = torch.arange(100, 100 + len(in_loss))
    return make_blocks(ids[None], in_loss[None], positions(anchors), size, gamma)


def draw(mask: list[int], count: int, seed: int = 0, epoch: int = 0, sample: str = "a") -> list[int]:
    drawn: list[int] = draw_anchors(np.array(mask, dtype=np.uint8), count, seed, epoch, sample).tolist()
    return drawn


def candidates(mask: list[int]) -> list[int]:
    return [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]


def test_an_anchor_needs_itself_and_its_next_token_supervised() -> None:
    assert draw([1, 1, 0, 1, 0, 0, 1, 1, 1], count=9) == [0, 6, 7]


@given(masks, st.integers(1, 50), st.integers(0, 5))
def test_anchors_are_distinct_ascending_candidates_as_many_as_there_are(mask: list[int], count: int, seed: int) -> None:
    drawn = draw(mask, count, seed)
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(candidates(mask))
    assert len(drawn) == min(count, len(candidates(mask)))


def test_the_draw_depends_on_seed_epoch_and_sample_and_on_nothing_else() -> None:
    mask = [1] * 60
    first = draw(mask, 8, seed=1, epoch=2, sample="a")
    torch.manual_seed(5)
    np.random.default_rng(5)
    assert draw(mask, 8, seed=1, epoch=2, sample="a") == first
    assert draw(mask, 8, seed=2, epoch=2, sample="a") != first
    assert draw(mask, 8, seed=1, epoch=3, sample="a") != first
    assert draw(mask, 8, seed=1, epoch=2, sample="b") != first


def test_padding_behind_a_row_does_not_change_its_draw() -> None:
    mask = [0, 0] + [1] * 30
    assert draw(mask + [0] * 17, 6) == draw(mask, 6)


def test_over_many_samples_every_set_of_candidates_is_drawn_equally_often() -> None:
    # Five candidates, two drawn: ten sets. 27.9 is the 99.9th percentile of chi-square with nine degrees of freedom.
    draws = 4000
    counts = Counter(tuple(draw([1] * 6, 2, sample=f"sample-{i}")) for i in range(draws))
    assert set(counts) == set(combinations(range(5), 2))
    expected = draws / 10
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 27.9


def test_a_slot_after_the_first_masked_label_carries_no_weight() -> None:
    in_loss = tensor([0, 1, 1, 0, 1, 1])
    blocks = blocks_at(anchors=[1], in_loss=in_loss, size=3)
    assert blocks.weights_BAK.tolist() == [[[1, 0, 0]]]  # label 2 counts, 3 is masked, 4 lies behind it


def test_slot_k_sits_at_anchor_plus_k_follows_that_token_and_predicts_the_next() -> None:
    blocks = blocks_at(anchors=[0, 2], in_loss=tensor([1, 1, 1, 1, 1, 1]), size=3)
    assert blocks.positions_BAK.tolist() == [[[0, 1, 2], [2, 3, 4]]]
    assert blocks.previous_BAK.tolist() == [[[100, 101, 102], [102, 103, 104]]]
    assert blocks.labels_BAK.tolist() == [[[101, 102, 103], [103, 104, 105]]]
    assert blocks.valid_BAK.all()


def test_slots_whose_label_lies_behind_the_row_carry_no_weight() -> None:
    blocks = blocks_at(anchors=[3], in_loss=tensor([1, 1, 1, 1, 1]), size=4)
    assert blocks.valid_BAK.tolist() == [[[True, False, False, False]]]
    assert blocks.labels_BAK.tolist() == [[[104, 0, 0, 0]]]
    assert blocks.positions_BAK.tolist() == [[[3, 4, 5, 6]]]


def test_slot_k_weighs_exp_of_minus_k_over_gamma() -> None:
    blocks = blocks_at(anchors=[0], in_loss=torch.ones(6), size=4, gamma=2.0)
    assert blocks.weights_BAK[0, 0].tolist() == pytest.approx([1, 0.60653, 0.36788, 0.22313], abs=1e-5)


def test_dummy_blocks_fill_rows_up_and_weigh_nothing() -> None:
    ids = torch.arange(8).view(2, 4)
    blocks = make_blocks(ids, torch.ones(2, 4), positions([0, 1], []), 2, None)
    assert blocks.keep_BA.tolist() == [[True, True], [False, False]]
    assert blocks.weights_BAK[1].sum() == 0
    assert not blocks.valid_BAK[1].any()


def test_a_batch_without_any_anchor_has_one_dummy_block_per_row() -> None:
    blocks = make_blocks(torch.zeros(3, 4, dtype=torch.long), torch.ones(3, 4), positions([], [], []), 2, 4.0)
    assert blocks.keep_BA.tolist() == [[False], [False], [False]]
    assert blocks.weights_BAK.sum() == 0


def test_a_block_reads_its_anchor_and_masks() -> None:
    blocks = blocks_at(anchors=[1, 3], in_loss=torch.ones(6), size=3)
    assert block_inputs(blocks, mask_token_id=7).tolist() == [[101, 7, 7, 103, 7, 7]]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_visibility_is_the_prefix_below_the_anchor_and_the_own_block(anchors: list[list[int]], size: int) -> None:
    length = 11
    shape = (len(anchors), length)
    blocks = make_blocks(torch.zeros(shape, dtype=torch.long), torch.ones(shape), positions(*anchors), size, None)
    visible = visibility(blocks, length)
    width = max(1, *(len(row) for row in anchors))
    assert visible.shape == (len(anchors), 1, width * size, length + width * size)
    for row, own in enumerate(anchors):
        for query in range(width * size):
            block = query // size
            anchor = own[block] if block < len(own) else 0  # a dummy sees no context at all
            context = [column < anchor for column in range(length)]
            slots = [column // size == block for column in range(width * size)]
            assert visible[row, 0, query].tolist() == context + slots
    assert visible.any(-1).all()  # no softmax is empty
    # Training reads ranges, which say the same; the slots of a single block share a line.
    ranged = blocks.sight.mask(size, length, size)
    assert torch.equal(ranged.expand_as(visible), visible)
    assert blocks.reach == max(1, *(max(row, default=0) for row in anchors))


def test_rows_are_filled_with_dummies_up_to_the_least_number_of_blocks() -> None:
    ids = torch.arange(8).view(2, 4)
    found = [make_blocks(ids, torch.ones(2, 4), positions([0, 1], []), 2, None, least=least) for least in (1, 5)]
    assert [blocks.keep_BA.shape[1] for blocks in found] == [2, 5]
    assert found[0].weights_BAK.sum() == found[1].weights_BAK.sum() == 4


def test_used_slots_are_listed_by_the_column_that_they_need_of_the_target() -> None:
    """Rows of four columns, two blocks of two slots: the blocks of row 1 are one with a single label, and a dummy."""
    ids = torch.arange(8).view(2, 4)
    blocks = make_blocks(ids, torch.ones(2, 4), positions([0, 1], [2]), 2, None)
    assert blocks.valid_BAK.tolist() == [[[True, True], [True, True]], [[True, False], [False, False]]]
    # Column 0 and 1 of block 0, 1 and 2 of block 1; column 2 of row 1 is number 6. Column 1 alone has two slots.
    assert blocks.used.index_N.tolist() == [0, 3, 4, 1, 2]
    assert blocks.used.place_P.tolist() == [0, 2, 6, 1]
    assert blocks.used.row_N.tolist() == [0, 1, 2, 3, 3]
    assert blocks.used.first_P.tolist() == [0, 1, 2, 3]
    assert blocks.used.counts == (1, 1, 1, 2)


@given(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 4))
def test_used_slots_are_those_of_the_mask(in_loss: list[list[int]], size: int) -> None:
    anchors = positions(*(candidates(mask) for mask in in_loss))
    blocks = make_blocks(torch.zeros(len(in_loss), 6, dtype=torch.long), tensor(in_loss), anchors, size, 4.0)
    used, columns_BAK = blocks.used, torch.arange(len(in_loss))[:, None, None] * 6 + blocks.columns_BAK
    assert sorted(used.index_N.tolist()) == blocks.valid_BAK.flatten().nonzero().flatten().tolist()
    assert torch.equal(used.place_P[used.row_N], columns_BAK.flatten()[used.index_N])
    assert used.row_N.tolist() == [row for row, count in enumerate(used.counts) for _ in range(count)]
