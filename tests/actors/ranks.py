"""Real DeepSpeed ranks for tests: processes joined by gloo that make optimizer steps and report what they did."""

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from actors.deepspeed_alone import DeepSpeedEngine, deepspeed
from actors.stopping import StopWatch
from actors.trainer import Clock, optimizer_step
from actors.zero import make_engine, whole_state
from dspark.config import Settings
from dspark.data.plan import Plan
from dspark.sections import Precision
from dspark.target_files import DTYPES
from dspark.training.kinds import objective_of
from dspark.training.ready import ready_shares
from dspark.training.share import Share, make_share
from tests.dspark.small import small_config, small_drafter, small_vocabulary
from tests.dspark.training.shares import captured, settings_of

CONFIG = small_config("gated", layers=1)
# Unequal rows, one of them without any anchor; steps of eight rows.
MASKS = [
    [0, 1, 1, 1, 1, 0, 0, 1, 1], [1, 1, 1], [0, 0, 0, 0], [1] * 12, [0, 1, 1], [1, 1, 0, 1, 1, 1], [0, 0, 1, 1],
    [1] * 7, [1, 1], [1] * 10, [0, 1, 1, 1], [1] * 5, [0, 0, 1, 0, 1, 1], [1, 1, 1, 1], [0, 1], [1] * 8,
]  # fmt: skip
ROWS = 8
CLIP = 0.5


@dataclass(frozen=True)
class Deal:
    """How the rows of a step are dealt, and under which ZeRO stage."""

    workers: int
    micro_batch: int
    stage: int = 1
    pack_tokens: int | None = None
    denominator: str = "global"
    recompute: bool = False
    precision: Precision = "fp32"

    @property
    def settings(self) -> Settings:
        settings = settings_of(
            CONFIG,
            workers=self.workers,
            global_batch=ROWS,
            micro_batch=self.micro_batch,
            pack_tokens=self.pack_tokens,
            zero_stage=self.stage,
            recompute=self.recompute,
            precision=self.precision,
            clip=CLIP,
            warmup=0.0,
            lr=1e-3,
        )
        loss = settings.loss.model_copy(update={"denominator": self.denominator})
        return settings.model_copy(update={"loss": loss})


@dataclass(frozen=True)
class Step:
    """One optimizer step: whole gradients as accumulated before it, their norm as DeepSpeed has it, weights after."""

    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def steps_of(deal: Deal, rank: int) -> list[Step]:
    """The optimizer steps of this rank over all rows; every rank of the group calls it with the same deal."""
    settings, share = deal.settings, ROWS // deal.workers
    plan = Plan(np.arange(len(MASKS)), np.ones(len(MASKS), bool), np.zeros(len(MASKS), np.int32), ROWS)
    engine = make_engine(objective_of(small_drafter(CONFIG), settings), settings.train, steps=100)
    found: dict[str, Tensor] = {}
    update = engine.step

    def recorded() -> None:
        if engine.is_gradient_accumulation_boundary():
            found.update(_gradients(engine))
        update()

    engine.step = recorded
    steps = []
    clock = Clock()
    vocabulary = small_vocabulary(CONFIG).to(engine.device, DTYPES[deal.precision])
    firsts = (step * ROWS + rank * share for step in range(plan.steps))

    def share_at(first: int) -> Share:
        table = captured(CONFIG, MASKS).slice(first, share)
        return make_share(table, range(first, first + share), plan, CONFIG, settings)

    for own in ready_shares(firsts, share_at, engine.device, settings.train.prefetch, clock.book):
        optimizer_step(engine, settings, vocabulary, own, clock, StopWatch(None))
        steps.append(Step(dict(found), float(engine.get_global_grad_norm()), whole_state(engine)))
    return steps


def _gradients(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: safe_get_full_grad(value).clone() for name, value in engine.module.drafter.named_parameters()}


def run_deals(deals: Sequence[Deal], folder: Path) -> dict[Deal, list[Step]]:
    """What rank 0 reports of each deal. Two processes make those of two ranks together, then rank 0 those of one."""
    # The ranks are forked from a process that has imported what they need once, and nothing else has ever run in it.
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_rank, args=(list(deals), folder), nprocs=2, start_method="forkserver")  # type: ignore[attr-defined, no-untyped-call]
    outcome: dict[Deal, list[Step]] = torch.load(folder / "steps.pt", weights_only=False)
    return outcome


def _rank(rank: int, deals: list[Deal], folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[Deal, Any] = {}
    for workers in (2, 1):
        if rank < workers:
            _join(rank, workers, folder / f"store-{workers}")
            found |= {deal: steps_of(deal, rank) for deal in deals if deal.workers == workers}
            deepspeed.comm.destroy_process_group()
    if rank == 0:
        torch.save(found, folder / "steps.pt")


def _join(rank: int, workers: int, store: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
