"""Flows between actors, built from Ray Data: what runs where, in which order, bounded by what.

    plan -> windows of rows -> target actors -> captured blocks, one per rank and step -> trainer ranks in plan order
                            or readers of a cache ┘
    batches of rows -> target actors -> shards of a cache
    prompts -> evaluator actors -> results
    conversations -> responder actors -> their answers

Waits for: the oldest window. Bounded by: `targets.in_flight_mb` of the object store. A dead actor: Ray Data restarts it
and repeats its window.

Whoever takes results from a generator here closes it, also after an error: Ray Data cannot end it once Ray has gone.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset, ExecutionOptions, ExecutionResources

from actors.reader import CacheActor
from actors.responder import AnswerTask, ResponderActor
from actors.target import ShardActor, TargetActor
from dspark.answering import PrepareSettings
from dspark.config import Settings
from dspark.data.captures import Origin, refuse_fault
from dspark.data.plan import Plan, windows
from dspark.data.shards import ShardTask
from dspark.sections import EvaluateSettings


def captured_steps(
    settings: Settings, plan: Plan, covered: range, first_step: int, origin: Origin, rows: Any, keep: ShardTask | None
) -> Dataset:
    """Captured tables of the plan positions `covered`, from the window that holds `first_step` on.

    They are cut so that each block is one rank's share of one optimizer step; `streaming_split` deals them round robin
    because all have equally many rows. `rows` is a reference to the table of token rows, in a list so that Ray passes
    it on unresolved. With `keep`, each window becomes a shard of that cache, with the window's number.
    """
    return _captured(settings, plan, _windows(settings, plan, covered, first_step), origin, rows, keep)


def keep_again(settings: Settings, plan: Plan, lost: Sequence[int], origin: Origin, rows: Any, keep: ShardTask) -> None:
    """Captures the windows with these numbers only for the cache that has lost them; returns when it has them.

    Raises:
        InputError: they cannot be written.
    """
    every = windows(plan, settings.targets.window_rows, 0)
    captured = _captured(settings, plan, [(number, every[number]) for number in lost], origin, rows, keep)
    for table in captured.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        refuse_fault(table)


def _captured(
    settings: Settings,
    plan: Plan,
    numbered: Sequence[tuple[int, range]],
    origin: Origin,
    rows: Any,
    keep: ShardTask | None,
) -> Dataset:
    """The captured tables of windows, cut to one rank's share of one step."""
    pool = settings.targets
    parts = [
        pa.table(
            {
                "row": [plan.order[position] for position in window],
                "counted": [plan.counted[position] for position in window],
                "window": [number] * len(window),
            }
        )
        for number, window in numbered
    ]
    return _cut(
        settings,
        parts,
        TargetActor,
        fn_constructor_args=(settings.target, pool, origin, rows, keep),
        compute=ActorPoolStrategy(min_size=pool.actors, max_size=pool.max_actors or pool.actors),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )


def cached_steps(
    settings: Settings, plan: Plan, covered: range, first_step: int, origin: Origin, sample_ids: Sequence[str]
) -> Dataset:
    """The same tables as `captured_steps`, from the cache; waits for one that is just being completed."""
    parts = [
        pa.table({"sample_id": [sample_ids[plan.order[position]] for position in window]})
        for _, window in _windows(settings, plan, covered, first_step)
    ]
    return _cut(
        settings,
        parts,
        CacheActor,
        fn_constructor_args=(settings.cache.address(settings.output, settings.name), origin),
        compute=ActorPoolStrategy(size=settings.cache.readers),
        num_cpus=1,
    )


def _windows(settings: Settings, plan: Plan, covered: range, first_step: int) -> list[tuple[int, range]]:
    """Number and positions of each window that is still to be passed on."""
    every = enumerate(windows(plan, settings.targets.window_rows, 0))
    start = first_step * plan.global_batch
    return [(number, window) for number, window in every if window.start in covered and window.stop > start]


def _cut(settings: Settings, windows_of_rows: list[pa.Table], actor: type, **options: Any) -> Dataset:
    """What `actor` makes of each window, cut to one rank's share of one step."""
    if not windows_of_rows:
        return ray.data.from_arrow(pa.table({"row": pa.array([], pa.int64())}))
    captured = ray.data.from_arrow(windows_of_rows).map_batches(
        actor, batch_size=None, batch_format="pyarrow", **options
    )
    return captured.repartition(target_num_rows_per_block=settings.train.share)


def written_shards(
    settings: Settings, task: ShardTask, rows: Any, shards: Mapping[int, Sequence[Sequence[int]]]
) -> Generator[dict[str, Any], None, None]:
    """What each forward added to its shard, as it is written; `shards` holds the rows of each one's forwards.

    Only facts come back: an actor writes its shards itself. `rows` as above.
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
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )
    # Facts are handed on at once, not when they have become a block of the usual size.
    written.context.target_max_block_size = 1
    yield from written.iter_rows()


def capture_options(settings: Settings) -> ExecutionOptions:
    """Plan order whatever actor is faster, and bounded bytes between targets and trainers."""
    return ExecutionOptions(
        preserve_order=True,
        resource_limits=ExecutionResources(object_store_memory=settings.targets.in_flight_mb * 2**20),
    )


def evaluated(
    actor: type, arguments: tuple[Any, ...], batches: Sequence[pa.Table], settings: Settings
) -> Generator[Any, None, None]:
    """Rows that evaluator actors return for batches of prompts, in the order in which they finish."""
    evaluate = settings.evaluate
    results = _pooled(actor, arguments, batches, evaluate, evaluate.widest_pool)
    # A prefetched batch would wait for the next one before it is handed over, and be lost with a killed driver.
    tables: Iterable[pa.Table] = results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    for table in tables:
        yield from table.to_pylist()


def answered(task: AnswerTask, conversations: Sequence[pa.Table]) -> Generator[pa.Table, None, None]:
    """Tables of outcomes, one for each of `conversations`, in the order in which they finish."""
    results = _pooled(ResponderActor, (task,), conversations, task.prepare, task.prepare.actors)
    yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def _pooled(
    actor: type,
    arguments: tuple[Any, ...],
    tables: Sequence[pa.Table],
    pool: EvaluateSettings | PrepareSettings,
    most: int,
) -> Dataset:
    """What a pool of actors, `most` at its widest and never more than tables, makes of each table."""
    most = min(most, len(tables))
    return ray.data.from_arrow(list(tables)).map_batches(
        actor,
        fn_constructor_args=arguments,
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=min(pool.actors, most), max_size=most),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )
