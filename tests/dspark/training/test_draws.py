"""Anchors are drawn from (seed, epoch, sample id) alone: uniformly, and whatever else is in the batch."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.training.blocks import draw_anchors
from dspark.training.share import Share
from tests.dspark.small import small_config
from tests.dspark.training.shares import captured, settings_of, share_of

masks = st.lists(st.integers(0, 1), min_size=1, max_size=60)
CONFIG = small_config()
ROWS = [[1] * size for size in (9, 3, 12, 1, 7, 16, 5, 11)]


def draw(mask: list[int], count: int, seed: int, epoch: int, sample_id: str) -> list[int]:
    drawn: list[int] = draw_anchors(np.array(mask, dtype=np.uint8), count, seed, epoch, sample_id).tolist()
    return drawn


@given(masks, st.integers(1, 20), st.integers(0, 2**63), st.integers(0, 99), st.text(max_size=8))
def test_a_draw_is_of_distinct_ascending_supervised_pairs_and_can_be_repeated(
    mask: list[int], count: int, seed: int, epoch: int, sample_id: str
) -> None:
    drawn = draw(mask, count, seed, epoch, sample_id)
    assert all(mask[anchor] == mask[anchor + 1] == 1 for anchor in drawn)
    assert all(first < second for first, second in pairwise(drawn))
    pairs = sum(first and second for first, second in pairwise(mask))
    assert len(drawn) == min(count, pairs)
    assert draw(mask, count, seed, epoch, sample_id) == drawn


@given(masks, st.integers(1, 20), st.integers(1, 9))
def test_what_stands_before_and_behind_the_supervised_part_moves_the_draw_along_and_changes_nothing(
    mask: list[int], count: int, shift: int
) -> None:
    drawn = draw(mask, count, 3, 1, "a")
    assert draw([0] * shift + mask + [0] * shift, count, 3, 1, "a") == [anchor + shift for anchor in drawn]


def anchors_by_sample(share: Share) -> dict[int, list[int]]:
    """Positions of the anchors of each sample, which is known by the length of its document: no two are alike."""
    found: dict[int, list[int]] = {}
    for batch, blocks in zip(share.batches, share.blocks, strict=True):
        for row, starts in enumerate(batch.starts_BS):
            for start in starts.unique():
                own = blocks.keep_BA[row] & (blocks.starts_BA[row] == start)
                size = int((batch.loss_mask_BS[row] & (starts == start)).sum())
                found[ROWS.index([1] * size)] = blocks.positions_BAK[row, own, 0].tolist()
    return found


@settings(max_examples=40)
@given(
    st.permutations(range(len(ROWS))),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 16, 40]),
    st.integers(0, 99),
)
def test_a_sample_has_the_same_anchors_in_any_batch_packed_or_not(
    order: list[int], micro_batch: int, pack_tokens: int | None, seed: int
) -> None:
    """Dealt to any micro-batches in any order, beside any others."""
    train: dict[str, Any] = {"global_batch": 8, "micro_batch": micro_batch, "anchors": 3}
    if micro_batch > 1:
        train["pack_tokens"] = pack_tokens
    run = settings_of(CONFIG, **train).model_copy(update={"seed": seed})
    share = share_of(captured(CONFIG, ROWS).take(order), CONFIG, run)
    expected = {number: draw(ROWS[number], 3, seed, 0, f"row-{number}") for number in order}
    assert anchors_by_sample(share) == expected


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_candidate_is_drawn_equally_often(count: int) -> None:
    """Chi-square with a fixed seed: 26.1 is the 99.9th percentile at 8 degrees of freedom.

    Draws without replacement vary less than independent ones, by (9 - count) / 8, which makes the bound sharper.
    """
    draws, candidates = 3000, 9
    counts = np.zeros(candidates)
    for number in range(draws):
        counts[draw([1] * (candidates + 1), count, 11, number % 5, f"sample-{number}")] += 1
    expected = draws * count / candidates
    variance = (candidates - count) / (candidates - 1)
    assert ((counts - expected) ** 2 / expected).sum() / variance < 26.1


def test_epochs_of_a_sample_are_drawn_independently() -> None:
    """Of 20 candidates 4 are drawn: two epochs share 0.8 on average, with a deviation of 0.73 over one pair."""
    pairs = 1500
    shared = [len(set(draw([1] * 21, 4, 5, 0, f"s{i}")) & set(draw([1] * 21, 4, 5, 1, f"s{i}"))) for i in range(pairs)]
    assert abs(np.mean(shared) - 0.8) < 4 * 0.73 / pairs**0.5
