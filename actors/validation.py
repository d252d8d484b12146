"""The objective on rows that are never trained, while training goes on.

    validation rows -> one target, before the first step (`actors.validation_rows`)
      -> tables in the object store, one per forward of all ranks
      -> every `validate.every` steps: the same blocks, without gradient -> one all-reduce -> `val_...` on every rank

The states are captured once: they stay in the object store, which spills what it cannot hold. Anchors are those of
epoch 0 at every measurement, so values of different steps differ by the weights alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import torch
import torch.distributed as dist

from actors.deepspeed_alone import DeepSpeedEngine
from actors.task import validation_plan
from dspark.config import Settings
from dspark.model.kinds import AnyConfig
from dspark.model.vocabulary import Vocabulary
from dspark.training.means import Means, add_means, stack_means, values_of
from dspark.training.ready import MicroBatch
from dspark.training.share import make_share
from dspark.training.transfer import Transfer


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
