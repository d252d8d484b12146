"""Where a training run's captured tables come from: target actors, a cache, or the first and then the second.

live             steps: target actors, every epoch anew
cache            steps: readers of the cache; no target is loaded
live_and_keep    first: target actors, which also write the cache, one shard for each of their windows
                 later: readers of that cache, as soon as this process has joined its ledger

The trainers take tables in plan order from one stream after the other, and never learn which it was.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import pyarrow.compute as pc
import ray
from ray.data import Dataset
from ray.util.queue import Queue

from actors.checkpoint_files import finished_steps, newest_checkpoint
from actors.pipelines import Planned, Source, cache_source, keep_again, shared_source, steps_of, target_source
from dspark.config import Settings
from dspark.data.cache import CacheWriter, bytes_per_token, check_room, expected_bytes
from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.data.manifest import Setting
from dspark.data.plan import windows
from dspark.errors import InputError
from jobs.rows import Rows

Streams = Mapping[str, Callable[[], Dataset]]
_LOOK_S = 1.0


def stream_names(settings: Settings) -> tuple[str, ...]:
    """Names of the streams, in their order."""
    return ("first", "later") if settings.data.source == "live_and_keep" else ("steps",)


@contextmanager
def step_streams(
    settings: Settings, rows: Rows, storage: str, run: str, records: Queue, shared: Sequence[Any] = ()
) -> Iterator[Streams]:
    """The streams by name, each made when Ray Train starts the workers: a restart passes on only what is still missing.

    Targets show their numbers under the name `run`, and put what part of their time they work into `records`. With
    `shared` targets (handles of `SharedTarget`) a live stream borrows those instead of starting its own.

    Raises:
        InputError: the folder of `live_and_keep` is another cache, or cannot be written.
    """
    plan, whole = rows.plan, range(len(rows.plan.order))
    row_bytes = rows.tokens * bytes_per_token(rows.origin) / rows.table.num_rows
    planned = Planned(ray.put(rows.table), ray.put(plan), rows.origin, row_bytes, run, records)

    # What is made here is unpickled by processes that only pass it on: it holds no table, and no value of a module with
    # torch (`actors.late`).
    reference = planned.plan

    def stream(source: Source, covered: range) -> Callable[[], Dataset]:
        return lambda: steps_of(
            settings, ray.get(reference), covered, finished_steps(newest_checkpoint(storage)), source
        )

    if settings.data.source == "cache":
        yield {"steps": stream(cache_source(settings, planned), whole)}
        return
    if settings.data.source == "live":
        live = shared_source(settings, planned, shared) if shared else target_source(settings, planned, None)
        yield {"steps": stream(live, whole)}
        return
    first = range(int(np.searchsorted(plan.epochs, 0, side="right")))
    with kept_cache(settings, rows, kept_rows(settings, rows)) as writer:
        keeping = target_source(settings, planned, writer.task)
        if lost := _lost(settings, rows, writer, finished_steps(newest_checkpoint(storage))):
            keep_again(settings, plan, lost, keeping)
        with Keeper(writer):
            yield {
                "first": stream(keeping, first),
                "later": stream(cache_source(settings, planned), range(first.stop, whole.stop)),
            }


def kept_rows(settings: Settings, rows: Rows) -> list[list[int]]:
    """Rows of each shard of the cache that `live_and_keep` makes: a shard for each window of the first epoch."""
    plan = rows.plan
    # The last windows may hold nothing but rows that fill up the epoch's last step.
    return [
        [int(plan.order[position]) for position in window if plan.counted[position]]
        for window in windows(plan, settings.targets.window_rows, 0)
        if plan.epochs[window.start] == 0 and plan.counted[window.start]
    ]


def kept_bytes(settings: Settings, rows: Rows, shards: Sequence[list[int]]) -> int:
    """About how many bytes these shards of that cache take, given by their rows."""
    lengths = pc.list_value_length(rows.table.column("input_ids")).to_numpy()
    tokens = sum(int(lengths[shard].sum()) for shard in shards)
    return expected_bytes(rows.origin, _codec(settings), tokens)


def kept_cache(settings: Settings, rows: Rows, shards: Sequence[list[int]]) -> CacheWriter:
    """The writer of that cache, whose shards are given by their rows."""
    pool, ids = settings.targets, rows.sample_ids
    samples = [[ids[row] for row in shard] for shard in shards]
    identity: dict[str, Setting] = {
        "by": "live_and_keep",
        "targets.batch_tokens": pool.batch_tokens,
        "targets.window_rows": pool.window_rows,
    }
    address = settings.cache.address(settings.output, settings.name)
    return CacheWriter(address, rows.origin, _codec(settings), samples, identity)


def _codec(settings: Settings) -> Codec:
    return Codec(settings.cache.storage, settings.cache.taps)


def check_keeping(settings: Settings, rows: Rows, beside: int) -> None:
    """Refuses a run with `live_and_keep` whose cache does not fit on its disk, or whose folder is another cache.

    Touches nothing. `beside` are the bytes of the run's own folder, which may lie on the same disk.

    Raises:
        InputError: how much space there is and is needed, or how the folder differs.
    """
    if settings.data.source != "live_and_keep":
        return
    shards = kept_rows(settings, rows)
    writer = kept_cache(settings, rows, shards)
    writer.check()
    missing = kept_bytes(settings, rows, [shards[index] for index in writer.unfinished()])
    folder = Folder(writer.task.folder)
    check_room(folder.address, missing, beside if folder.shares_disk(settings.output.resolve()) else 0)


def claim_kept(settings: Settings, rows: Rows) -> None:
    """Begins the cache of `live_and_keep`, if that is asked for.

    Raises:
        InputError: its folder cannot be written, or another process is writing it.
    """
    if settings.data.source == "live_and_keep":
        with kept_cache(settings, rows, kept_rows(settings, rows)):
            pass


def _lost(settings: Settings, rows: Rows, writer: CacheWriter, done: int) -> list[int]:
    """Shards that are missing or cut, of windows that the trainers have behind them and will not ask for again."""
    every = windows(rows.plan, settings.targets.window_rows, 0)
    return [index for index in writer.unfinished() if every[index].stop <= done * rows.plan.global_batch]


class Keeper:
    """Completes a cache as soon as its last shard is there, whoever wrote it, while the driver waits for training."""

    def __init__(self, writer: CacheWriter) -> None:
        self.writer = writer
        self.stopped = threading.Event()
        self.error: InputError | None = None
        self.thread = threading.Thread(target=self._follow, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Raises what kept the cache from being completed: readers that wait for it fail with something less clear."""
        self.stopped.set()
        self.thread.join()
        if self.error is not None:
            raise self.error from error

    def _follow(self) -> None:
        last = False
        while not last:
            last = self.stopped.wait(_LOOK_S)
            try:
                if self.writer.all_written:
                    self.writer.finish()
                    return
            except InputError as error:
                self.error = error
                return
