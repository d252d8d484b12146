"""Flows between actors, built from Ray Data: what runs where, in which order, bounded by what.

    plan -> windows of rows -> target actors -> captured rows, a block each -> trainer ranks in turn, in plan order
                            or readers of a cache ┘
    batches of rows -> target actors -> shards of a cache
    prompts -> evaluator actors -> results
    conversations -> responder actors -> their answers

Waits for: the oldest window. Bounded by: `targets.in_flight_mb` of the object store. A dead actor: Ray Data restarts
it, on another node if its own is lost, and repeats its windows; rows that were handed on stay, the bits are the same.

What Ray Data does here: the pool and its growth, backpressure in bytes, retries, order, the deal to the ranks. What it
cannot do stands next to the code that does it: blocks of one row (`one_row_blocks`), an actor that has lost its place
for good (`actors.placement`), and the plan (`dspark.data.plan`), since it neither shuffles every epoch by a function of
the seed alone nor goes on in the middle of one.

Whoever takes results from a generator here closes it, also after an error: Ray Data cannot end it once Ray has gone.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset, ExecutionOptions, ExecutionResources

from actors.placement import target_place
from actors.reader import CacheActor
from actors.responder import AnswerTask, ResponderActor
from actors.shared_target import BorrowingActor
from actors.target import ShardActor, TargetActor
from dspark.config import Settings
from dspark.data.captures import Origin, refuse_fault
from dspark.data.plan import Plan, windows
from dspark.data.shards import ShardTask
from dspark.errors import InputError

_MOST_INPUTS = 10_000
# Rows that an actor may have yielded before they are taken up: as many as Ray Data lets it, and where rows are small so
# many that those of all actors are a small part of what may be in flight.
_FEWEST_AHEAD, _PART_AHEAD = 2, 1 / 8


@dataclass(frozen=True)
class Planned:
    """What the actors of a run look rows up in: references to the table of token rows and to the plan.

    In a value of its own, since Ray resolves references only where they are arguments. `row_bytes` is the mean size of
    a captured row. `records` is the run's queue of records, which targets tell of their time; None: nobody asks.
    """

    rows: Any
    plan: Any
    row_bytes: float
    run: str  # the name under which their numbers are shown
    records: Any = None

    def ahead(self, settings: Settings, actors: int) -> int:
        """Rows that each of so many actors may have yielded before they are taken up."""
        room = settings.targets.in_flight_mb * 2**20 * _PART_AHEAD
        return max(_FEWEST_AHEAD, min(settings.targets.window_rows, int(room / (self.row_bytes * actors))))


def captured_steps(
    settings: Settings,
    plan: Plan,
    covered: range,
    first_step: int,
    origin: Origin,
    planned: Planned,
    keep: ShardTask | None,
    shared: Sequence[Any] = (),
) -> Dataset:
    """Captured rows of the plan positions `covered`, from the window that holds `first_step` on.

    Each is a block, and `streaming_split` deals them to the ranks in turn. With `keep`, each window becomes a shard of
    that cache, with the window's number. With `shared` targets, those capture, which other runs use meanwhile.
    """
    window_rows = window_table(settings, plan, covered, first_step)
    if shared:
        return one_row_blocks(
            window_rows,
            BorrowingActor,
            ahead=planned.ahead(settings, len(shared)),
            fn_constructor_args=(tuple(shared), origin, planned.rows, planned.plan),
            compute=row_pool(len(shared), len(shared)),
            num_cpus=0,
        )
    return _captured(settings, window_rows, origin, planned, keep)


def keep_again(
    settings: Settings, plan: Plan, lost: Sequence[int], origin: Origin, planned: Planned, keep: ShardTask
) -> None:
    """Captures the windows with these numbers only for the cache that has lost them; returns when it has them.

    Raises:
        InputError: they cannot be written.
    """
    every = windows(plan, settings.targets.window_rows, 0)
    captured = _captured(settings, _numbered([(number, every[number]) for number in lost]), origin, planned, keep)
    for row in captured.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        refuse_fault(row)


def _captured(
    settings: Settings, window_rows: pa.Table, origin: Origin, planned: Planned, keep: ShardTask | None
) -> Dataset:
    pool = settings.targets
    return one_row_blocks(
        window_rows,
        TargetActor,
        ahead=planned.ahead(settings, pool.max_actors or pool.actors),
        fn_constructor_args=(
            settings.target,
            pool,
            origin,
            planned.rows,
            planned.plan,
            keep,
            planned.run,
            planned.records,
        ),
        **target_pool(settings),
    )


def target_pool(settings: Settings) -> dict[str, Any]:
    """Where the targets of a stream are placed, and how many: between two numbers, as many as find a place."""
    pool = settings.targets
    return {
        "compute": row_pool(pool.actors, pool.max_actors or pool.actors),
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        "label_selector": settings.ray.target_labels,
    }


def row_pool(fewest: int, most: int) -> ActorPoolStrategy:
    """A pool whose actors yield rows, one window at a time where it does not grow.

    Ray Data takes rows up when every task that it has given out has some, or after 0.1 s. Windows that wait for their
    actor have none, so with more than one for each it is always after 0.1 s. Of a pool that grows, they say that it
    should.
    """
    waiting = 1 if fewest == most else None
    return ActorPoolStrategy(min_size=fewest, max_size=most, max_tasks_in_flight_per_actor=waiting)


def cached_steps(
    settings: Settings, plan: Plan, covered: range, first_step: int, origin: Origin, planned: Planned
) -> Dataset:
    """The same rows as `captured_steps`, from the cache; waits for one that is just being completed."""
    return one_row_blocks(
        window_table(settings, plan, covered, first_step),
        CacheActor,
        ahead=planned.ahead(settings, settings.cache.readers),
        fn_constructor_args=(
            settings.cache.address(settings.output, settings.name),
            origin,
            planned.rows,
            planned.plan,
        ),
        compute=row_pool(settings.cache.readers, settings.cache.readers),
        num_cpus=1,
    )


def window_table(settings: Settings, plan: Plan, covered: range, first_step: int) -> pa.Table:
    """Number and first and last position of each window that is still to be passed on, a row each."""
    every = enumerate(windows(plan, settings.targets.window_rows, 0))
    start = first_step * plan.global_batch
    return _numbered([(number, window) for number, window in every if window.start in covered and window.stop > start])


def _numbered(some: Sequence[tuple[int, range]]) -> pa.Table:
    return pa.table(
        {
            "window": pa.array([number for number, _ in some], pa.int64()),
            "start": pa.array([window.start for _, window in some], pa.int64()),
            "stop": pa.array([window.stop for _, window in some], pa.int64()),
        }
    )


def one_row_blocks(window_rows: pa.Table, actor: type, ahead: int = _FEWEST_AHEAD, **options: Any) -> Dataset:
    """What `actor` makes of each window (a row of `window_rows`, one a call), a block for each row that it yields.

    An actor that is `ahead` rows before those that are taken up waits.

    A row is copied once, by its actor into the object store. `repartition`, which cuts blocks to any number of rows,
    would copy all of them once more, in tasks beside the actors. A window in one block would be more than fits in
    flight, and `streaming_split` deals whole blocks.
    """
    if not window_rows.num_rows:
        return ray.data.from_arrow(window_rows)
    # An actor that dies repeats a block of windows from its start: as few in each as the driver can put one by one.
    size = -(-window_rows.num_rows // _MOST_INPUTS)
    inputs = [window_rows.slice(at, size) for at in range(0, window_rows.num_rows, size)]
    captured = ray.data.from_arrow(inputs).map_batches(actor, batch_size=1, batch_format="pyarrow", **options)
    # Ray Data closes a block as soon as it has more bytes than this, and has no setting for rows.
    captured.context.target_max_block_size = 1
    # Its default is 2, which every 0.1 s are few rows of some kilobytes; there is no public name for it.
    captured.context._max_num_blocks_in_streaming_gen_buffer = ahead
    return captured


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
        **target_place("targets", pool, settings.ray.target_labels),
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


def check_store(settings: Settings, held: int, stores: float | None = None) -> None:
    """Raises InputError if the object stores (None: those of the cluster) have no room for what trainers hold at once.

    What was read lies in the store as long as it is used, and Ray Data no longer counts it.
    """
    flight = settings.targets.in_flight_mb * 2**20
    if stores is None:
        stores = float(ray.cluster_resources().get("object_store_memory", 0.0))
    # Ray Data leaves a stream no more than half of them.
    if held + min(flight, stores / 2) > stores:
        raise InputError(
            f"trainers hold the captured rows of two optimizer steps, up to {held / 1e9:.2f} GB, beside "
            f"targets.in_flight_mb={settings.targets.in_flight_mb}; the object stores have {stores / 1e9:.2f} GB: "
            "raise ray.object_store_mb (or the object store of a cluster's nodes), or lower train.global_batch, "
            "data.max_length or targets.in_flight_mb"
        )


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
