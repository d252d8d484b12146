"""The objective on rows that are never trained, while training goes on.

    validation rows -> one target, before the first step -> tables in the object store, one per forward of all ranks
      -> every `validate.every` steps: the same blocks, without gradient -> one all-reduce -> `val_...` on every rank

The states are captured once: they stay in the object store, which spills what it cannot hold. Anchors are those of
epoch 0 at every measurement, so values of different steps differ by the weights alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from actors.task import Validation
from dspark.capture import capture
from dspark.config import Settings
from dspark.data.captures import Origin
from dspark.data.plan import Plan, make_plan
from dspark.data.rows import sample_at, samples_fingerprint
from dspark.learning import TrainSettings
from dspark.model.kinds import AnyConfig
from dspark.model.vocabulary import Vocabulary
from dspark.sections import TargetPoolSettings, TargetSettings
from dspark.target import load_target
from dspark.training.means import Means, add_means, stack_means, values_of
from dspark.training.ready import MicroBatch
from dspark.training.share import make_share
from dspark.training.transfer import Transfer


def validation_plan(rows: int, train: TrainSettings) -> Plan:
    """Every validation row once; a step is one forward of every rank, and rows without weight fill the last one."""
    return make_plan(rows, 0, 1, train.workers * train.micro_batch, None)


class ValidationActor:
    """A target for the validation rows; it goes when they are captured."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings, origin: Origin) -> None:
        torch.set_num_threads(pool.threads)
        self.target, self.origin, self.batch_tokens = load_target(target), origin, pool.batch_tokens

    def ready(self) -> None:
        """Returns once the actor has its place."""

    def table(self, rows: pa.Table, numbers: list[int]) -> pa.Table:
        """The captured table of these rows."""
        return capture(self.target, [sample_at(rows, row) for row in numbers], self.origin, self.batch_tokens)


def captured_validation(settings: Settings, rows: pa.Table, origin: Origin) -> Validation:
    """The validation rows with references to the captured tables of the plan's steps, which this process owns.

    The actor takes its place before trainers can take the last one, and goes with its handle when it has answered.
    """
    pool, plan = settings.targets, validation_plan(rows.num_rows, settings.train)
    actor: Any = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus)(ValidationActor).remote(
        settings.target, pool, origin
    )
    ray.get(actor.ready.remote())
    table = ray.put(rows)
    order = np.asarray(plan.order).reshape(-1, plan.global_batch).tolist()
    mark = f"{samples_fingerprint(rows.column('sample_id').to_pylist())} {settings.validation.metric}"
    return Validation(rows.num_rows, mark, tuple(actor.table.remote(table, numbers) for numbers in order))


def validate(
    engine: DeepSpeedEngine,
    draft: AnyConfig,
    settings: Settings,
    vocabulary: Vocabulary,
    rows: int,
    tables: Iterable[pa.Table],
) -> dict[str, float]:
    """The means over all `rows` validation rows as `val_<name>`, equal on every rank.

    `tables` holds them in plan order. Collective; changes no weight.
    """
    means: list[Means] = []
    rank, size = dist.get_rank(), settings.train.micro_batch
    plan = validation_plan(rows, settings.train)
    transfer, unit = Transfer(engine.device), torch.ones((), device=engine.device)
    with _without_training(engine):
        for step, table in enumerate(tables):
            first = step * plan.global_batch + rank * size
            own = table.slice(rank * size, size)
            share = make_share(own, range(first, first + size), plan, draft, settings)
            part = transfer.begin(MicroBatch(share.batches[0], share.blocks[0])).get()
            means.append(engine(vocabulary, part.batch, part.blocks, unit).means)
    sums = add_means(means)
    pairs = stack_means(sums)
    dist.all_reduce(pairs)
    return {f"val_{name}": value for name, value in values_of(list(sums), pairs).items()}


@contextmanager
def _without_training(engine: DeepSpeedEngine) -> Iterator[None]:
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        engine.train()
