"""A wish to stop that every trainer follows at the same step.

    signal -> driver -> StopActor -> rank 0 looks once per step -> joins the step's sum of weights -> all ranks

Ranks that asked on their own could hear of it at different steps, and would then wait for each other for ever.
"""

from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor


class StopWatch:
    """A rank's side of it. `flag`: handle of the StopActor; None: nobody can ask."""

    def __init__(self, flag: Any) -> None:
        self.answer = None if flag is None or dist.get_rank() != 0 else flag.wait.remote()
        self.wishes: Tensor | None = None

    def summed(self, weights: Tensor) -> Tensor:
        """The sums of `weights` [n] over the ranks, by one all-reduce that also carries the wish."""
        wish = torch.full_like(weights[:1], float(self._heard()))
        sums = torch.cat([weights, wish])
        dist.all_reduce(sums)
        self.wishes = sums[-1]
        return sums[:-1]

    @property
    def agreed(self) -> bool:
        """Whether the ranks stop behind this step. Waits for the device, so it is read after the optimizer step."""
        return self.wishes is not None and bool(self.wishes > 0)

    def _heard(self) -> bool:
        if self.answer is None:
            return False
        ready, _ = ray.wait([self.answer], timeout=0)
        return bool(ready) and bool(ray.get(self.answer))
