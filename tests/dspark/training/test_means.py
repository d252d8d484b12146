"""Means as (sum, weight): they add over parts, and are divided once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from dspark.training.means import Mean, add_means, stack_means, values_of, weighted_mean

numbers = st.lists(st.tuples(st.floats(-8, 8, width=32), st.integers(0, 3)), min_size=1, max_size=12)


def test_a_weighted_mean_of_three_values() -> None:
    mean = weighted_mean(tensor([1.0, 2.0, 6.0]), tensor([1.0, 0.0, 0.5]))
    assert values_of(["x"], stack_means({"x": mean})) == {"x": (1 + 3) / 1.5}


@given(numbers, st.integers(0, 12))
def test_means_of_micro_batches_add_up_to_the_mean_of_the_whole_batch(pairs: list[tuple[float, int]], cut: int) -> None:
    values = torch.tensor([value for value, _ in pairs])
    weights = torch.tensor([weight for _, weight in pairs])
    whole = weighted_mean(values, weights)
    parts = add_means([{"x": weighted_mean(values[part], weights[part])} for part in (slice(cut), slice(cut, None))])
    assert parts["x"].total.item() == pytest.approx(whole.total.item(), abs=1e-4)
    assert parts["x"].weight.item() == whole.weight.item()


def test_means_of_unequal_names_are_kept_side_by_side() -> None:
    one = Mean(tensor(1.0), tensor(2.0))
    sums = add_means([{"a": one}, {"a": one, "b": one}, {}])
    assert list(sums) == ["a", "b"]
    assert stack_means(sums).tolist() == [[2, 4], [1, 2]]


def test_a_mean_of_means_is_not_taken() -> None:
    parts = [{"x": Mean(tensor(1.0), tensor(1.0))}, {"x": Mean(tensor(0.0), tensor(3.0))}]
    assert values_of(["x"], stack_means(add_means(parts))) == {"x": 0.25}


def test_what_was_never_measured_has_no_value() -> None:
    means = {"never": weighted_mean(tensor([5.0]), tensor([0.0])), "zero": weighted_mean(tensor([0.0]), tensor([1.0]))}
    assert values_of(list(means), stack_means(means)) == {"zero": 0.0}


def test_stacked_pairs_are_fp64_in_the_order_of_their_names_and_detached() -> None:
    values = torch.ones(2, requires_grad=True)
    stacked = stack_means({"a": weighted_mean(values, tensor([1, 0])), "b": weighted_mean(values, tensor([2, 1]))})
    assert stacked.tolist() == [[1, 1], [3, 3]]
    assert stacked.dtype == torch.float64
    assert not stacked.requires_grad


def test_bf16_values_are_summed_in_fp32() -> None:
    mean = weighted_mean(torch.full((1000,), 1.0, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bool))
    assert mean.total.item() == 1000  # bf16 cannot hold 257
