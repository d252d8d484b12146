"""Flows between actors, built from Ray Data: what runs where, in which order, bounded by what.

    plan -> windows of rows -> target actors -> captured rows, a block each -> trainer ranks in turn, in plan order
                            or readers of a cache ┘

Waits for: the oldest window. Bounded by: `targets.in_flight_mb` of the object store. A dead actor: Ray Data restarts
it, on another node if its own is lost, and repeats its windows; rows that were handed on stay, the bits are the same.

What Ray Data does here: the pool and its growth, backpressure in bytes, retries, order, the deal to the ranks. What it
cannot do stands next to the code that does it: blocks of one row (`one_row_blocks`), an actor that has lost its place
for good (`actors.placement`), and the plan (`dspark.data.plan`), since it neither shuffles every epoch by a function of
the seed alone nor goes on in the middle of one.

Without torch: Ray Train's controller makes these flows. `actors.pools` are those whose results the driver takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset, ExecutionOptions, ExecutionResources

from actors.late import late
from dspark.config import Settings
from dspark.data.origin import Origin, refuse_fault
from dspark.data.plan import Plan, windows
from dspark.errors import InputError

if TYPE_CHECKING:
    from dspark.data.shards import ShardTask

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
    origin: Origin
    row_bytes: float
    run: str  # the name under which their numbers are shown
    records: Any = None

    def ahead(self, settings: Settings, actors: int) -> int:
        """Rows that each of so many actors may have yielded before they are taken up."""
        room = settings.targets.in_flight_mb * 2**20 * _PART_AHEAD
        return max(_FEWEST_AHEAD, min(settings.targets.window_rows, int(room / (self.row_bytes * actors))))


@dataclass(frozen=True)
class Source:
    """Actors that make rows of windows: their class, a reference to what each is given, and their pool.

    `ahead` are rows that each may have yielded before they are taken up. It travels through processes that have no use
    for what an actor needs (`actors.late`).
    """

    module: str
    name: str
    arguments: Any
    ahead: int
    pool: Mapping[str, Any]


def target_source(settings: Settings, planned: Planned, keep: "ShardTask | None") -> Source:
    """Targets of the run's own; with `keep`, each window becomes a shard of that cache, with the window's number."""
    pool, rows, plan = settings.targets, planned.rows, planned.plan
    arguments = (settings.target, pool, planned.origin, rows, plan, keep, planned.run, planned.records)
    ahead = planned.ahead(settings, pool.max_actors or pool.actors)
    return Source("actors.target", "TargetActor", ray.put(arguments), ahead, target_pool(settings))


def shared_source(settings: Settings, planned: Planned, shared: Sequence[Any]) -> Source:
    """Targets that other runs use meanwhile: handles of `SharedTarget`."""
    arguments = (tuple(shared), planned.origin, planned.rows, planned.plan)
    pool = {"compute": row_pool(len(shared), len(shared)), "num_cpus": 0}
    return Source("actors.borrowing", "BorrowingActor", ray.put(arguments), planned.ahead(settings, len(shared)), pool)


def cache_source(settings: Settings, planned: Planned) -> Source:
    """Readers of the run's cache; they wait for one that is just being completed."""
    readers = settings.cache.readers
    arguments = (settings.cache.address(settings.output, settings.name), planned.origin, planned.rows, planned.plan)
    pool = {"compute": row_pool(readers, readers), "num_cpus": 1}
    return Source("actors.reader", "CacheActor", ray.put(arguments), planned.ahead(settings, readers), pool)


def steps_of(settings: Settings, plan: Plan, covered: range, first_step: int, source: Source) -> Dataset:
    """Captured rows of the plan positions `covered`, from the window that holds `first_step` on.

    Each is a block, and `streaming_split` deals them to the ranks in turn.
    """
    return _rows_of(window_table(settings, plan, covered, first_step), source)


def keep_again(settings: Settings, plan: Plan, lost: Sequence[int], source: Source) -> None:
    """Captures the windows with these numbers only for the cache that has lost them; returns when it has them.

    Raises:
        InputError: they cannot be written.
    """
    every = windows(plan, settings.targets.window_rows, 0)
    captured = _rows_of(_numbered([(number, every[number]) for number in lost]), source)
    for row in captured.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        refuse_fault(row)


def _rows_of(window_rows: pa.Table, source: Source) -> Dataset:
    given = (source.module, source.name, source.arguments)
    actor = late(source.name)
    return one_row_blocks(window_rows, actor, source.ahead, fn_constructor_args=given, **source.pool)


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
