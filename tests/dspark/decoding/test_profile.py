"""Passes that are timed: their shapes by hand, and a table measured on a tiny target."""

import pytest

from dspark.decoding.profile import measure_step_rates, pass_shapes
from tests.dspark.decoding.decoders import TAPS, tiny_target


def test_shapes_begin_with_one_token_and_end_with_every_draft_of_every_request() -> None:
    assert pass_shapes(batch=1, block=3) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert pass_shapes(batch=4, block=2) == [(1, 1), (2, 1), (4, 1), (4, 2), (4, 3)]


@pytest.mark.parametrize("batch", [1, 3, 6, 8])
def test_every_pass_has_more_tokens_than_the_one_before(batch: int) -> None:
    tokens = [rows * width for rows, width in pass_shapes(batch, block=4)]
    assert tokens == sorted(set(tokens))
    assert (tokens[0], tokens[-1]) == (1, batch * 5)


def test_the_table_holds_a_rate_for_each_number_of_tokens() -> None:
    rates = measure_step_rates(tiny_target(), TAPS, [(1, 1), (2, 1), (8, 100)], context=5, repeats=3)
    assert rates.tokens == (1, 2, 800)
    assert rates.at(1) > 1.5 * rates.at(800)
