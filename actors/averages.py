"""Exponential moving averages of the weights, in fp32, kept where DeepSpeed keeps its fp32 master weights.

Each rank averages its own part of the masters, so that ZeRO deals out the averages as it deals out the masters, and no
rank talks to another. To use the averages they change places with the masters for a while.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor

from actors.deepspeed_alone import DeepSpeedEngine


def master_parts(engine: DeepSpeedEngine) -> list[Tensor]:
    """This rank's fp32 master weights, the tensors that the optimizer steps on."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return [part.data for part in getattr(optimizer, name)]
    # ZeRO 0 in fp32 steps on the parameters themselves.
    return [parameter.data for parameter in engine.module.parameters()]


def publish_masters(engine: DeepSpeedEngine) -> None:
    """Makes the weights of the forward follow the master weights, as after a step; collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        # A forward without a backward leaves layers gathered that wait for one: they would keep the weights of before.
        engine.empty_partition_cache()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


class Averages:
    """`average = decay * average + (1 - decay) * weight` after each step, from the initial weights on."""

    def __init__(self, engine: DeepSpeedEngine, decay: float) -> None:
        self.engine, self.decay = engine, decay
        self.parts = [part.clone() for part in master_parts(engine)]

    @classmethod
    def wanted(cls, engine: DeepSpeedEngine, decay: float | None) -> Self | None:
        """None without a decay."""
        return None if decay is None else cls(engine, decay)

    @torch.no_grad()
    def follow(self) -> None:
        """Takes up the weights after an optimizer step."""
        torch._foreach_lerp_(self.parts, master_parts(self.engine), 1 - self.decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The engine's weights are the averages; afterwards they have their own bits again. Collective."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, master in zip(self.parts, master_parts(self.engine), strict=True):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
        publish_masters(self.engine)

    def load(self, parts: list[Tensor]) -> None:
        """Takes over the parts that this rank has stored."""
        for average, stored in zip(self.parts, parts, strict=True):
            average.copy_(stored)


def used(averages: Averages | None) -> AbstractContextManager[None]:
    """`averages.in_use()`, or nothing at all."""
    return nullcontext() if averages is None else averages.in_use()
