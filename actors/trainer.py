"""One trainer rank inside a Ray Train worker.

    captured rows (this rank's share of a step) -> anchors, blocks and micro-batches, while earlier steps are made
      -> one all-reduce of the weights -> micro-batches: forward, backward -> optimizer step
      -> every `log_every`: one all-reduce of metrics, one record
      -> every `validation.every` and `checkpoint_every`: validation, a checkpoint

Every rank makes the same calls in the same order, whatever its rows hold (`dspark.training.share`). Between two records
nothing here waits for the device; DeepSpeed does in its optimizer step, for the norm of the gradients.
"""

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import ray
import ray.train
import torch
import torch.distributed as dist

from actors.averages import Averages, used
from actors.checkpoints import Progress, restore, save
from actors.deepspeed_alone import DeepSpeedEngine, deepspeed
from actors.placement import TargetWatch, attended
from actors.splits import blocks_of
from actors.stopping import StopWatch
from actors.task import TrainTask
from actors.validation import validate
from actors.zero import backward_scale, make_engine, take_step, whole_state
from dspark.config import Settings
from dspark.data.epoch_ledger import Taken
from dspark.data.origin import origin_of, refuse_fault
from dspark.data.plan import windows
from dspark.errors import InputError, bad_input
from dspark.model.drafter import Drafter
from dspark.model.kinds import AnyDrafter, fresh_drafter
from dspark.model.vocabulary import Vocabulary
from dspark.model.warm_start import start_from_bigrams, start_from_target
from dspark.target_files import DTYPES, default_device, load_vocabulary
from dspark.training.kinds import objective_of
from dspark.training.means import Means, add_means, stack_means, values_of
from dspark.training.ready import ReadyShare, ready_shares
from dspark.training.share import Share, make_share


@dataclass
class Clock:
    """This rank's seconds by phase, and tokens, since the last record; and the learning rate of the newest step.

    `waiting` is what the step waited for its data. `collate` is the work on the data, done meanwhile by other threads,
    and no part of the total: waiting without as much of it is waiting for the target. On a GPU, forward and backward
    are booked as they are handed over, and the time that they take in the phase that next waits for the device.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    steps: int = 0
    rate: float = 0.0

    def restart(self) -> None:
        """Begins a new record."""
        self.seconds.clear()
        self.started, self.tokens, self.steps = time.perf_counter(), 0, 0

    def lap(self, phase: str, since: float) -> float:
        """Books the time since `since` on a phase and returns now."""
        now = time.perf_counter()
        self.book(phase, now - since)
        return now

    def book(self, phase: str, seconds: float) -> None:
        """Books seconds on a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def train_rank(task: TrainTask) -> None:
    """What a Ray Train worker runs (`actors.late.late_rank`).

    An error that a restart cannot mend ends the run instead of being raised: every rank meets it at the same place, and
    rank 0 tells the driver.
    """
    try:
        train(task)
    except InputError as error:
        if dist.get_rank() == 0:
            task.records.put({"error": bad_input(error)})


def train(task: TrainTask) -> None:
    """Trains from the newest checkpoint of this Ray Train run, or from the start, to the end of the plan."""
    settings = task.settings.train
    torch.set_num_threads(settings.threads)
    device = default_device()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    drafter = _initial_drafter(task)
    vocabulary = load_vocabulary(task.settings.target, device, DTYPES[settings.precision]).narrowed(drafter.kept)
    # Not in a restart: the node that held them may be the one that was lost.
    if isinstance(drafter, Drafter) and task.start is not None and ray.train.get_checkpoint() is None:
        start_from_bigrams(drafter, ray.get(task.start), vocabulary)
    engine = make_engine(objective_of(drafter, task.settings), settings, task.plan.steps)
    averages = Averages.wanted(engine, settings.ema)
    progress = restore(engine, task, averages)
    if progress.over:
        return
    task.begin(dist.get_rank())
    taken: deque[Taken] = deque()
    places = {sample: row for row, sample in enumerate(task.sample_ids)}

    def share_of(captured: tuple[int, pa.Table]) -> Share:
        positions = task.positions(captured[0], dist.get_rank())
        share = make_share(captured[1], positions, task.plan, task.draft, task.settings, pinned=device.type == "cuda")
        taken.append(_taken(captured[1], positions, task, share, places))
        return share

    clock, means, watch = Clock(), list[Means](), StopWatch(task.stop)
    tables = captured_tables(task, [ray.train.get_dataset_shard(name) for name in task.streams], progress.step)
    with closing(ready_shares(tables, share_of, device, settings.prefetch, clock.book)) as shares:
        for done, share in enumerate(shares, progress.step + 1):
            clock.rate = float(engine.get_lr()[0])
            means += [share.counts, *optimizer_step(engine, task.settings, vocabulary, share, clock, watch)]
            if averages is not None:
                averages.follow()
            progress.take(done, taken.popleft())
            progress.over = done == task.plan.steps
            if _due(done, task.settings.validation.every, progress.over):
                since = time.perf_counter()
                measure(engine, task, vocabulary, progress, averages)
                clock.lap("validation", since)
            ends = progress.over or watch.agreed
            saves = _due(done, settings.checkpoint_every, ends)
            # A record at each checkpoint, so that a run that goes on repeats no step of a record.
            if saves or progress.measured or done % settings.log_every == 0:
                record(engine, task, progress, means, clock)
                clock.restart()
                means = []
            if saves:
                save(engine, task, progress, averages)
            if ends:
                return
            if _due(done, task.settings.evaluate.every, False):
                offer(engine, task, done, averages)


def offer(engine: DeepSpeedEngine, task: TrainTask, done: int, averages: Averages | None) -> None:
    """Hands the drafter to the driver, for whoever measures it meanwhile; collective under ZeRO 3."""
    with used(averages):
        state = whole_state(engine)
    if dist.get_rank() == 0:
        # By value: an object of this process would be lost with it, and a measurement may outlive the trainers.
        task.records.put({"step": done, "drafter": state})


def _due(done: int, every: int | None, last: bool) -> bool:
    return every is not None and (done % every == 0 or last)


def _taken(table: pa.Table, positions: range, task: TrainTask, share: Share, places: dict[str, int]) -> Taken:
    """What the ledger books when the share has been trained, from the rows that arrived."""
    ids = table.column("sample_id").to_pylist()
    rows = [places[one] for one, position in zip(ids, positions, strict=True) if task.plan.counted[position]]
    bare, bad = (int(share.counts[name].total) for name in ("rows_without_anchors", "rows_not_finite"))
    return Taken(int(task.plan.epochs[positions[0]]), np.array(rows, np.int64), bare, bad)


def measure(
    engine: DeepSpeedEngine, task: TrainTask, vocabulary: Vocabulary, progress: Progress, averages: Averages | None
) -> None:
    """Validates, with the averages if there are any, and decides whether the run is over; equally on every rank."""
    assert task.validation is not None, "settings with validation.every have rows for it"
    with used(averages):
        tables = map(ray.get, task.validation.captured)
        progress.measured = validate(engine, task.draft, task.settings, vocabulary, task.validation.rows, tables)
    wanted = task.settings.validation
    value = progress.measured.get(f"val_{wanted.metric}", math.nan)
    progress.plateau = progress.plateau.after(progress.step, value, wanted.smaller)
    if wanted.patience is not None and progress.plateau.waited >= wanted.patience:
        progress.over = True


def _initial_drafter(task: TrainTask) -> AnyDrafter:
    kept = None if task.kept is None else torch.from_numpy(task.kept)
    drafter = fresh_drafter(task.draft, task.settings.seed, kept)
    if isinstance(drafter, Drafter) and task.settings.drafter.init == "target":
        start_from_target(drafter, task.settings.target)
    start = task.settings.drafter.start_from
    # The tensors of a run that goes on come from its own checkpoint.
    if start is not None and ray.train.get_checkpoint() is None:
        # Reads any published layout, for which it imports transformers' configurations: most runs do without.
        from dspark.model.inherit import start_from_checkpoint

        start_from_checkpoint(drafter, start)
    return drafter


def captured_tables(
    task: TrainTask, streams: Sequence[ray.data.DataIterator], start: int
) -> Generator[tuple[int, pa.Table], None, None]:
    """(step, this rank's rows) from `start` on; earlier steps of the first window were captured for its bits only.

    Streams follow each other: one begins to work when the one before is used up.
    """
    plan = task.plan
    remaining = windows(plan, task.settings.targets.window_rows, start * plan.global_batch)
    first = remaining[0].start // plan.global_batch if remaining else plan.steps
    share = task.settings.train.share
    # Blocks as they come, a row each: together they are a table without a copy.
    rows = chain.from_iterable(map(partial(_rows, task), task.streams, streams))
    for step in range(first, plan.steps):
        found = list(islice(rows, share))
        if len(found) < share:
            raise RuntimeError(f"the stream of captured rows ended at step {step} of {plan.steps}")
        if step >= start:
            table = pa.concat_tables(found)
            _check_rows(task, step, table)
            yield step, table
        del found  # or the rows of a step would stay while the next one's are waited for


def _rows(task: TrainTask, name: str, stream: ray.data.DataIterator) -> Iterator[pa.Table]:
    """This rank's rows of one stream, a table each."""
    from_targets = task.settings.data.source != "cache" and name != "later"
    rows = blocks_of(stream)
    return attended(rows, TargetWatch(task.settings)) if from_targets else rows


def _check_rows(task: TrainTask, step: int, table: pa.Table) -> None:
    """Raises InputError if the rows could not be had, RuntimeError if they are not those of the plan."""
    refuse_fault(table)
    origin_of(table.schema).check_fits(task.origin, "the stream of captured rows")
    planned = [task.sample_ids[task.plan.order[position]] for position in task.positions(step, dist.get_rank())]
    received = table.column("sample_id").to_pylist()
    if received != planned:
        raise RuntimeError(f"step {step} received rows {received}, the plan has {planned}: the stream lost its order")


def optimizer_step(
    engine: DeepSpeedEngine,
    settings: Settings,
    vocabulary: Vocabulary,
    share: ReadyShare,
    clock: Clock,
    watch: StopWatch,
) -> list[Means]:
    """All micro-batches of one step and the update. Returns this rank's metrics, not yet reduced."""
    denominators = watch.summed(share.weights)
    if settings.loss.denominator == "global":
        denominators = denominators.sum().expand_as(denominators)
    means = []
    for (batch, blocks), denominator in zip(share.micro_batches, denominators, strict=True):
        since = time.perf_counter()
        objective = engine(vocabulary, batch, blocks, denominator)
        since = clock.lap("forward", since)
        engine.backward(objective.loss * backward_scale(settings.train, settings.loss))
        since = clock.lap("backward", since)
        take_step(engine)
        clock.lap("step", since)
        means.append(objective.means)
    clock.tokens += share.tokens
    clock.steps += 1
    return means


def record(engine: DeepSpeedEngine, task: TrainTask, progress: Progress, means: list[Means], clock: Clock) -> None:
    """Reduces the metrics since the last record: to the driver, with the validation, and into later checkpoints.

    Raises:
        InputError: the loss is not finite; raised on every rank, since all hold the reduced value.
    """
    sums = add_means(means)
    counted = torch.tensor([[clock.tokens, 1.0]], dtype=torch.float64, device=engine.device)
    pairs = torch.cat([stack_means(sums), counted])
    dist.all_reduce(pairs)
    values = values_of([*sums, "tokens"], pairs)
    if not math.isfinite(values.get("loss", 0.0)):
        raise InputError(
            f"the loss is {values['loss']} at step {progress.step}: lower train.lr, or look for bad rows in the data"
        )
    if dist.get_rank() == 0:
        elapsed = time.perf_counter() - clock.started
        tokens = values.pop("tokens") * dist.get_world_size()
        values |= progress.measured
        values |= {f"seconds_{phase}": seconds / clock.steps for phase, seconds in sorted(clock.seconds.items())}
        values |= {
            "seconds_total": elapsed / clock.steps,
            "waiting_share": clock.seconds.get("waiting", 0.0) / elapsed,
            "tokens_per_second": tokens / elapsed,
            "grad_norm": float(engine.get_global_grad_norm() or 0.0),
            "lr": clock.rate,
        }
        progress.records.append({"step": progress.step, **values})
        task.report(progress.records[-1], clock.steps)
