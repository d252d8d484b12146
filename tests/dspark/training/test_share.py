"""A rank's share of a step by hand: what its rows add to anchors, tokens and counts, and which rows add nothing."""

from typing import Literal

import pytest

from dspark.learning import Eagle3Settings
from dspark.training.chains import Chains
from dspark.training.means import Means
from tests.dspark.small import SMALL_EAGLE3, small_config
from tests.dspark.training.shares import captured, chain_settings_of, settings_of, share_of

CONFIG = small_config()
# Pairs of supervised neighbours: 4, 1 and 2.
MASKS = [[0, 1, 1, 1, 1, 1], [1, 1], [1, 1, 1, 0]]


def counts_of(counts: Means) -> dict[str, tuple[float, float]]:
    """(total, rows) of each count."""
    return {name: (mean.total.item(), mean.weight.item()) for name, mean in counts.items()}


def test_a_row_in_which_nothing_can_be_trained_is_counted() -> None:
    masks = [[0, 1, 1, 1], [0, 1, 0, 0]]
    share = share_of(captured(CONFIG, masks), CONFIG, settings_of(CONFIG, global_batch=2))
    assert counts_of(share.counts)["rows_without_anchors"] == (1, 2)


def test_a_share_counts_its_tokens_and_the_anchors_that_its_rows_have_and_give() -> None:
    share = share_of(captured(CONFIG, MASKS), CONFIG, settings_of(CONFIG, anchors=3, global_batch=3))
    assert [len(batch.input_ids_BS) for batch in share.batches] == [1, 1, 1]
    assert [blocks.keep_BA.sum().item() for blocks in share.blocks] == [3, 1, 2]
    assert share.weights.tolist() == pytest.approx([blocks.weights_BAK.sum().item() for blocks in share.blocks])
    assert share.tokens == 6 + 2 + 4
    assert counts_of(share.counts) == {
        "anchors_available": (7, 3),
        "anchors_used": (6, 3),
        "rows_not_finite": (0, 3),
        "rows_without_anchors": (0, 3),
    }


@pytest.mark.parametrize("pack_tokens", [None, 16])
def test_a_row_that_only_fills_the_step_gives_no_anchors_and_counts_nowhere(pack_tokens: int | None) -> None:
    settings = settings_of(CONFIG, global_batch=4, micro_batch=2, pack_tokens=pack_tokens)
    table = captured(CONFIG, [*MASKS, [1] * 9], broken=[3])
    share = share_of(table, CONFIG, settings, counted=[True, True, False, False])
    assert len(share.batches) == 2
    assert [blocks.keep_BA.sum().item() for blocks in share.blocks] == [5, 0]
    assert share.weights[1] == 0 and share.weights[0] > 0
    assert share.tokens == 6 + 2
    # The last row is not finite, and is none of those that count.
    assert counts_of(share.counts) == {
        "anchors_available": (5, 2),
        "anchors_used": (5, 2),
        "rows_not_finite": (0, 2),
        "rows_without_anchors": (0, 2),
    }


def test_a_share_of_nothing_but_filling_rows_weighs_nothing() -> None:
    settings = settings_of(CONFIG, global_batch=3)
    share = share_of(captured(CONFIG, MASKS, broken=[0]), CONFIG, settings, counted=[False] * 3)
    assert (len(share.batches), share.tokens) == (3, 0)
    assert not share.weights.any()
    assert set(counts_of(share.counts).values()) == {(0, 0)}


def test_a_row_that_is_not_finite_is_counted_and_trains_nothing() -> None:
    settings = settings_of(CONFIG, global_batch=3, micro_batch=3)
    share = share_of(captured(CONFIG, MASKS, broken=[0]), CONFIG, settings)
    (batch,), (blocks,) = share.batches, share.blocks
    assert blocks.keep_BA.sum(1).tolist() == [0, 1, 2]
    assert batch.taps_BSLH.isfinite().all() and batch.final_BSH.isfinite().all()
    assert not batch.taps_BSLH[0].any() and batch.taps_BSLH[1, :2].any()
    assert share.tokens == 6 + 2 + 4
    assert counts_of(share.counts) == {
        "anchors_available": (3, 3),
        "anchors_used": (3, 3),
        "rows_not_finite": (1, 3),
        "rows_without_anchors": (0, 3),
    }


@pytest.mark.parametrize(("normaliser", "weights"), [("sequences", [1, 1]), ("published", [6, 4])])
def test_chains_of_a_share_weigh_by_the_sequences_or_the_tokens_that_take_part(
    normaliser: Literal["sequences", "published"], weights: list[float]
) -> None:
    chains = Eagle3Settings(ttt_length=2, step_loss_decay=0.5, normaliser=normaliser)
    settings = chain_settings_of(SMALL_EAGLE3, chains, global_batch=4, micro_batch=2)
    table = captured(SMALL_EAGLE3, [*MASKS, [1] * 9], broken=[1])
    share = share_of(table, SMALL_EAGLE3, settings, counted=[True, True, True, False])
    assert all(isinstance(blocks, Chains) for blocks in share.blocks)
    # Row 1 is not finite, row 3 fills the step. Anchors 1 to 4 of row 0; of row 2 anchor 1, position 0 has no row.
    assert [blocks.keep_BA.sum(1).tolist() for blocks in share.blocks] == [[4, 0], [1, 0]]
    assert share.weights.tolist() == weights
    assert share.tokens == 6 + 2 + 4
    assert counts_of(share.counts) == {
        "anchors_available": (6, 3),
        "anchors_used": (5, 3),
        "rows_not_finite": (1, 3),
        "rows_without_anchors": (0, 3),
    }
