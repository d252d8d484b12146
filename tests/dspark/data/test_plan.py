"""The plan: whole steps, every row once per epoch, and batches that depend on nothing but the plan."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.data.plan import (
    Plan,
    capture_batches,
    epoch_order,
    largest_step,
    make_plan,
    padded_share,
    planned_batches,
    windows,
)

row_counts = st.integers(1, 40)
batch_sizes = st.integers(1, 12)
row_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def test_33_rows_at_two_per_step_make_34_positions_of_which_33_count() -> None:
    plan = make_plan(33, seed=0, epochs=1, global_batch=2, max_steps=None)
    assert (len(plan.order), sum(plan.counted), plan.steps) == (34, 33, 17)
    assert not plan.counted[-1] and plan.counted[:-1].all()


@given(row_counts, st.integers(1, 3), batch_sizes)
def test_each_epoch_counts_every_row_once_and_ends_with_a_whole_step(rows: int, epochs: int, batch: int) -> None:
    plan = make_plan(rows, 7, epochs, batch, None)
    assert len(plan.order) == len(plan.counted) == len(plan.epochs) == plan.steps * batch
    for epoch in range(epochs):
        counted = [
            row for row, counts, e in zip(plan.order, plan.counted, plan.epochs, strict=True) if counts and e == epoch
        ]
        assert sorted(counted) == list(range(rows))
        assert np.count_nonzero(plan.epochs == epoch) % batch == 0
    assert (np.diff(plan.epochs) >= 0).all()
    assert set(plan.order) == set(range(rows))


@given(row_counts, batch_sizes)
def test_padding_stands_in_the_last_step_of_an_epoch_only(rows: int, batch: int) -> None:
    plan = make_plan(rows, 7, 2, batch, None)
    for step in range(plan.steps):
        positions = range(step * batch, (step + 1) * batch)
        counted = [plan.counted[i] for i in positions]
        last = step + 1 == plan.steps or plan.epochs[positions[-1]] != plan.epochs[positions[-1] + 1]
        assert all(counted) or last
        assert any(counted)


@given(row_counts, batch_sizes, st.integers(1, 20))
def test_max_steps_cuts_the_same_plan_short(rows: int, batch: int, max_steps: int) -> None:
    whole = make_plan(rows, 3, 4, batch, None)
    cut = make_plan(rows, 3, 4, batch, max_steps)
    assert cut.steps == min(max_steps, whole.steps)
    end = len(cut.order)
    for found, every in ((cut.order, whole.order), (cut.counted, whole.counted), (cut.epochs, whole.epochs)):
        assert np.array_equal(found, every[:end])
    assert (cut.identity == whole.identity) == (end == len(whole.order))


def test_epochs_are_shuffled_anew_and_the_seed_decides_how() -> None:
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert epoch_order(50, 0, 1).tolist() == orders[1].tolist()


@given(row_counts, batch_sizes, st.integers(1, 30), st.integers(0, 200))
def test_windows_are_the_same_under_any_start_and_never_of_two_epochs_nor_across_a_step(
    rows: int, batch: int, window: int, start: int
) -> None:
    plan = make_plan(rows, 0, 2, batch, None)
    start = min(start, len(plan.order) - 1)
    every = windows(plan, window, 0)
    assert [position for part in every for position in part] == list(range(len(plan.order)))
    for part in every:
        first, last = part.start % batch, part.stop % batch
        assert (first == last == 0) or part.start // batch == (part.stop - 1) // batch
    assert all(len({plan.epochs[position] for position in part}) == 1 for part in every)
    resumed = windows(plan, window, start)
    assert resumed == every[len(every) - len(resumed) :]
    assert start in resumed[0]


def test_a_window_has_about_the_rows_that_were_asked_for() -> None:
    plan = make_plan(40, 0, 1, 4, None)
    assert [len(part) for part in windows(plan, 17, 0)] == [16, 16, 8]
    assert [len(part) for part in windows(plan, 4, 0)] == [4] * 10
    assert [len(part) for part in windows(plan, 3, 0)] == [3, 1] * 10
    assert [len(part) for part in windows(plan, 1, 0)] == [1] * 40


@given(row_lengths, st.integers(1, 200))
def test_capture_batches_hold_every_row_once_within_the_tokens(lengths: list[int], tokens: int) -> None:
    batches = capture_batches(lengths, tokens)
    assert Counter(row for batch in batches for row in batch) == Counter(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[row] for row in batch)
        assert padded <= tokens or len(batch) == 1
    assert capture_batches(lengths, tokens) == batches


@pytest.mark.parametrize(
    ("lengths", "tokens", "batches"),
    [
        ([3, 9, 4, 4], 12, [[1], [2, 3, 0]]),  # 4+4+3 padded to 4 are 12 tokens
        ([3, 9, 4, 4], 11, [[1], [2, 3], [0]]),
        ([5, 5, 5], 1, [[0], [1], [2]]),  # a row longer than the budget goes alone
        ([2, 2, 2], 6, [[0, 1, 2]]),  # equal lengths keep their order
    ],
)
def test_capture_batches_join_rows_of_like_length(lengths: list[int], tokens: int, batches: list[list[int]]) -> None:
    assert capture_batches(lengths, tokens) == batches


def test_planned_forwards_sort_within_windows_of_consecutive_rows() -> None:
    lengths = [1, 4, 2, 9, 3, 3]
    assert planned_batches(lengths, window_rows=3, batch_tokens=8) == [[1, 2], [0], [3], [4, 5]]
    assert planned_batches(lengths, window_rows=6, batch_tokens=9) == [[3], [1, 4], [5, 2, 0]]


def test_the_largest_step_is_that_of_most_tokens_rows_that_fill_it_up_included() -> None:
    plan = Plan(np.array([0, 1, 2, 1, 0, 0]), np.array([True] * 5 + [False]), np.zeros(6, np.int32), 2)
    assert largest_step(plan, [5, 1, 3]) == 10


def test_the_padded_share_counts_what_is_computed_and_thrown_away() -> None:
    assert padded_share([[0, 1], [2]], [4, 2, 6]) == pytest.approx(2 / 14)
    assert padded_share([[0], [1], [2]], [4, 2, 6]) == 0
