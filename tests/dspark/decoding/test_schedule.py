"""Verification lengths: literals by hand, and the search against a plain sort of all slots."""

from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.decoding.schedule import StepRates, confident_length, scheduled_lengths
from dspark.errors import InputError

FREE = StepRates((1,), (10.0,))  # a pass costs the same whatever it holds


def test_the_time_of_a_pass_is_linear_in_and_behind_the_table() -> None:
    rates = StepRates((2, 4, 8), (10.0, 5.0, 2.0))
    seconds = [0.1, 0.1, 0.15, 0.2, 0.35, 0.5, 0.5 + 0.075 * 92]
    assert [1 / rates.at(n) for n in (1, 2, 3, 4, 6, 8, 100)] == pytest.approx(seconds)
    assert StepRates((1, 2), (4.0, 5.0)).at(9) == 5.0


def test_where_time_is_proportional_to_tokens_only_a_sure_slot_pays() -> None:
    rates = StepRates((32, 64), (10.0, 5.0))
    assert scheduled_lengths([(0.9,) * 7] * 32, rates) == [0] * 32
    assert scheduled_lengths([(0.9,) * 7] * 300, rates) == [0] * 300


@pytest.mark.parametrize("table", [((), ()), ((1, 1), (2.0, 2.0)), ((0,), (1.0,)), ((1,), (0.0,)), ((1, 2), (1.0,))])
def test_a_table_that_is_none_is_refused(table: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(InputError, match="calibrate --profile"):
        StepRates(*table)


def test_a_slot_under_the_threshold_ends_the_prefix() -> None:
    assert confident_length((0.9, 0.5, 0.4, 0.9), 0.5) == 2
    assert confident_length((), 0.5) == 0


def test_a_free_pass_takes_every_slot_that_may_be_accepted() -> None:
    assert scheduled_lengths([(0.9, 0.1), (0.5,), ()], FREE) == [2, 1, 0]
    assert scheduled_lengths([(0.9, 0.0, 0.9)], FREE) == [1]  # nothing survives an impossible slot


def test_the_search_ends_at_the_first_slot_that_does_not_pay() -> None:
    # 1 token: 1 * 10 = 10; 2 tokens: 1.8 * 6 = 10.8; 3 tokens: (1.8 + 0.72) * 4 = 10.08.
    assert scheduled_lengths([(0.8, 0.9)], StepRates((1, 2, 3), (10.0, 6.0, 4.0))) == [1]
    # The second slot alone would not pay, the third would make up for it: it is never reached.
    assert scheduled_lengths([(0.5, 1.0, 1.0)], StepRates((1, 2, 3, 4), (10.0, 6.0, 6.0, 6.0))) == [0]


def test_a_loaded_machine_spends_its_tokens_on_the_surest_requests() -> None:
    rates = StepRates((2, 3, 4, 5), (10.0, 9.0, 6.0, 4.0))
    assert scheduled_lengths([(0.3, 0.3), (0.95, 0.9)], rates) == [0, 1]


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=5), min_size=1, max_size=6),
    st.lists(st.floats(0.5, 1.0), min_size=31, max_size=31),
)
def test_the_search_equals_a_walk_over_all_slots_by_falling_survival(
    confidences: list[list[float]], shrinking: list[float]
) -> None:
    rates = StepRates(tuple(range(1, 32)), tuple(accumulate(shrinking, mul, initial=8.0))[1:])
    slots = sorted(
        (-survival, slot, request)
        for request, row in enumerate(confidences)
        for slot, survival in enumerate(accumulate(row, mul))
    )
    tokens, expected, lengths = len(confidences), float(len(confidences)), [0] * len(confidences)
    best = expected * rates.at(tokens)
    for negative, slot, request in slots:
        tokens, expected = tokens + 1, expected - negative
        if expected * rates.at(tokens) <= best:
            break
        best, lengths[request] = expected * rates.at(tokens), slot + 1
    assert scheduled_lengths(confidences, rates) == lengths
