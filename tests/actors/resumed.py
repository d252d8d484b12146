"""Real DeepSpeed ranks for tests that stop, write a checkpoint and go on, with as many ranks or with others."""

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from actors.averages import Averages, used
from actors.checkpoints import Progress, read, write
from actors.deepspeed_alone import DeepSpeedEngine, deepspeed
from actors.stopping import StopWatch
from actors.task import TrainTask, validation_plan
from actors.trainer import Clock, optimizer_step
from actors.validation import validate
from actors.zero import make_engine, whole_state
from dspark.config import Settings
from dspark.data.epoch_ledger import Taken, Tally
from dspark.data.origin import origin_of
from dspark.data.plan import make_plan
from dspark.training.kinds import objective_of
from dspark.training.means import add_means, stack_means, values_of
from dspark.training.ready import ready_shares
from dspark.training.share import make_share
from tests.actors.ranks import CONFIG, MASKS, ROWS, Deal, _join
from tests.dspark.small import small_drafter, small_vocabulary
from tests.dspark.training.shares import captured

STEPS, SAVED, DECAY = 3, 1, 0.5
STAGES = (0, 1, 2, 3)
RESIZED = (0, 1, 2)


@dataclass
class Outcome:
    """What a run did from a step on: losses and gradient norms, averaged weights at the end, ledger, validation."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    averaged: dict[str, Tensor] = field(default_factory=dict)
    ledger: Tally = field(default_factory=Tally)
    measured: dict[str, float] = field(default_factory=dict)


def deal_of(workers: int, stage: int) -> Deal:
    """Four micro-batches are accumulated, whatever the number of ranks."""
    return Deal(workers=workers, micro_batch=ROWS // workers // 4, stage=stage)


def _engine_and_task(deal: Deal) -> tuple[DeepSpeedEngine, TrainTask]:
    settings = deal.settings
    table = captured(CONFIG, MASKS)
    ids = tuple(table.column("sample_id").to_pylist())
    plan = make_plan(len(MASKS), 0, 2, ROWS, None)
    engine = make_engine(objective_of(small_drafter(CONFIG), settings), settings.train, steps=100)
    return engine, TrainTask(settings, CONFIG, plan, ids, origin_of(table.schema), None, None, None)


def go(deal: Deal, start: Path | None, saved: Path | None, averaging: bool, measuring: bool) -> Outcome:
    """Trains to the end, from a checkpoint's folder or from the beginning, and saves on the way; collective."""
    (engine, task), settings = _engine_and_task(deal), deal.settings
    averages = Averages.wanted(engine, DECAY if averaging else None)
    progress = Progress.begin(len(MASKS)) if start is None else read(engine, task, averages, start)
    vocabulary, rank, outcome = small_vocabulary(CONFIG), dist.get_rank(), Outcome()
    table, share, clock, watch = captured(CONFIG, MASKS), ROWS // deal.workers, Clock(), StopWatch(None)
    places = [[step * ROWS + rank * share + row for row in range(share)] for step in range(progress.step, STEPS)]
    order = [int(row) for row in task.plan.order]
    shares = ready_shares(
        ([order[at] for at in own] for own in places),
        lambda rows: make_share(table.take(rows), range(share), task.plan, CONFIG, settings),
        engine.device,
        settings.train.prefetch,
        clock.book,
    )
    for step, own in enumerate(shares, progress.step + 1):
        means = optimizer_step(engine, settings, vocabulary, own, clock, watch)
        if averages is not None:
            averages.follow()
        rows = np.array([order[at] for at in places[step - 1 - STEPS]], np.int64)
        progress.take(step, Taken(int(task.plan.epochs[(step - 1) * ROWS]), rows, 0, 0))
        sums = add_means(means)
        pairs = stack_means(sums)
        dist.all_reduce(pairs)
        outcome.losses.append(values_of(list(sums), pairs)["loss"])
        outcome.norms.append(float(engine.get_global_grad_norm()))
        if measuring:
            with used(averages):
                outcome.measured = _measured(engine, settings)
        if step == SAVED and saved is not None:
            write(engine, task, progress, averages, saved)
    progress.add_up(engine.device)
    outcome.ledger = sum(progress.ledger.tallies(task.plan, STEPS).values(), Tally())
    with used(averages):
        outcome.averaged = whole_state(engine)
    return outcome


def _measured(engine: DeepSpeedEngine, settings: Settings) -> dict[str, float]:
    table = captured(CONFIG, MASKS[:5], seed=11)
    plan = validation_plan(5, settings.train)
    size = plan.global_batch
    steps = [plan.order[at : at + size] for at in range(0, len(plan.order), size)]
    tables = (table.take([int(row) for row in rows]) for rows in steps)
    return validate(engine, CONFIG, settings, small_vocabulary(CONFIG), 5, tables)


def run_all(folder: Path) -> dict[str, Outcome]:
    """Rank 0's outcomes by `<from>/<to>/<stage>`: ranks that saved (0: none did, it is whole) and that went on."""
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_rank, args=(folder,), nprocs=2, start_method="forkserver")  # type: ignore[attr-defined, no-untyped-call]
    found: dict[str, Outcome] = torch.load(folder / "outcomes.pt", weights_only=False)
    return found


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Outcome] = {}
    for phase, workers in enumerate((2, 1, 2)):
        if rank >= workers:
            continue
        _join(rank, workers, folder / f"store-{phase}")
        for stage in STAGES:
            deal, own = deal_of(workers, stage), folder / f"saved-{workers}-{stage}"
            if phase < 2:
                own.mkdir(exist_ok=True)
                found[f"0/{workers}/{stage}"] = go(deal, None, own, True, True)
                found[f"{workers}/{workers}/{stage}"] = go(deal, own, None, True, False)
            if phase > 0 and stage in RESIZED:
                other = folder / f"saved-{3 - workers}-{stage}"
                found[f"{3 - workers}/{workers}/{stage}"] = go(deal, other, None, False, False)
        deepspeed.comm.destroy_process_group()
    if rank == 0:
        torch.save(found, folder / "outcomes.pt")
