"""Pools of actors whose results the driver itself takes, built from Ray Data.

    batches of rows -> target actors -> shards of a cache
    prompts -> evaluator actors -> results
    conversations -> responder actors -> their answers

Bounded by: Ray Data's own bytes in flight; only facts and results come back. A dead actor: Ray Data restarts it, on
another node if its own is lost, and repeats its batch.

Whoever takes results from a generator here closes it, also after an error: Ray Data cannot end it once Ray has gone.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset

from actors.placement import target_place
from actors.responder import AnswerTask, ResponderActor
from actors.target import ShardActor
from dspark.config import Settings
from dspark.data.shards import ShardTask


def written_shards(
    settings: Settings, task: ShardTask, rows: Any, shards: Mapping[int, Sequence[Sequence[int]]]
) -> Generator[dict[str, Any], None, None]:
    """What each forward added to its shard, as it is written; `shards` holds the rows of each one's forwards.

    Only facts come back: an actor writes its shards itself. `rows`: a list with a reference to the table of token rows.
    """
    pool = settings.targets
    tables = [pa.table({"shard": [index] * len(batches), "batch": batches}) for index, batches in shards.items()]
    # No more actors than shards: each costs the start of a target.
    most = min(len(tables), pool.max_actors or pool.actors)
    written = ray.data.from_arrow(tables).map_batches(
        ShardActor,
        fn_constructor_args=(settings.target, pool, task, rows, settings.cache.max_bad_run),
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=min(pool.actors, most), max_size=most),
        **target_place("targets", pool, settings.ray.target_labels),
    )
    # Facts are handed on at once, not when they have become a block of the usual size.
    written.context.target_max_block_size = 1
    yield from written.iter_rows()


def evaluated(
    actor: type, arguments: tuple[Any, ...], batches: Sequence[pa.Table], settings: Settings
) -> Generator[Any, None, None]:
    """Rows that evaluator actors return for batches of prompts, in the order in which they finish."""
    evaluate = settings.evaluate
    place = target_place("evaluate", evaluate, settings.ray.target_labels)
    results = _pooled(actor, arguments, batches, evaluate.actors, evaluate.widest_pool, place)
    # A prefetched batch would wait for the next one before it is handed over, and be lost with a killed driver.
    tables: Iterable[pa.Table] = results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    for table in tables:
        yield from table.to_pylist()


def answered(
    task: AnswerTask, tables: Sequence[pa.Table], labels: Mapping[str, str]
) -> Generator[pa.Table, None, None]:
    """Tables of outcomes, one for each table of conversations, in the order in which they finish."""
    actors, place = task.prepare.actors, target_place("prepare", task.prepare, labels)
    results = _pooled(ResponderActor, (task,), tables, actors, actors, place)
    yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def _pooled(
    actor: type,
    arguments: tuple[Any, ...],
    tables: Sequence[pa.Table],
    fewest: int,
    most: int,
    place: Mapping[str, Any],
) -> Dataset:
    """What a pool of actors, between two numbers and never more than tables, makes of each table."""
    most = min(most, len(tables))
    return ray.data.from_arrow(list(tables)).map_batches(
        actor,
        fn_constructor_args=arguments,
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=min(fewest, most), max_size=most),
        **place,
    )
