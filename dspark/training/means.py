"""Metrics as (sum, weight) pairs: they add over slots, micro-batches and ranks, and are divided once, at the end."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Mean(NamedTuple):
    """A weighted sum and its weight, scalars on one device, detached from any graph."""

    total: Tensor
    weight: Tensor

    def __add__(self, other: "Mean") -> "Mean":  # type: ignore[override]
        return Mean(self.total + other.total, self.weight + other.weight)


Means = dict[str, Mean]


def weighted_mean(values: Tensor, weights: Tensor) -> Mean:
    """Sum of values * weights and sum of weights, in fp32; both [...]."""
    weights = weights.float()
    return Mean((values.detach().float() * weights).sum(), weights.sum())


def add_means(parts: Sequence[Mapping[str, Mean]]) -> Means:
    """Sums of equally named means over micro-batches."""
    sums: Means = {}
    for part in parts:
        for name, mean in part.items():
            sums[name] = sums[name] + mean if name in sums else mean
    return sums


def stack_means(means: Mapping[str, Mean]) -> Tensor:
    """All pairs as one fp64 tensor [names, 2], so that ranks can reduce them in one collective."""
    return torch.stack([torch.stack((mean.total, mean.weight)) for mean in means.values()]).double()


def values_of(names: Sequence[str], pairs: Tensor) -> dict[str, float]:
    """Means by name from reduced pairs [names, 2]; a mean without weight is left out, it was not measured."""
    found = zip(names, pairs.tolist(), strict=True)
    return {name: total / weight for name, (total, weight) in found if weight > 0}
