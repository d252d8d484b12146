"""The target in a Ray process: windows of plan rows in, captured tables out, or shards of a cache written."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import torch
from numpy.typing import NDArray

from actors.gauges import Gauges
from dspark.capture import OnlyFinite, capture, prove_capture
from dspark.data.cache import bytes_per_token
from dspark.data.origin import Origin, fault_table
from dspark.data.plan import Plan
from dspark.data.prefetch import ahead
from dspark.data.render import Sample
from dspark.data.rows import sample_at
from dspark.data.shards import ShardTask, is_written, new_shard, write_shard
from dspark.errors import InputError
from dspark.model.warm_start import Bigrams, bigrams_of
from dspark.sections import TargetPoolSettings, TargetSettings
from dspark.target import load_target


class LoadedTarget:
    """A target on this process's device, or why it cannot be had."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings) -> None:
        torch.set_num_threads(pool.threads)
        self.batch_tokens = pool.batch_tokens
        self.fault: str | None = None
        try:
            self.target = load_target(target)
        except InputError as error:
            self.fault = str(error)

    def prove(self, sample: Sample, taps: Sequence[int]) -> None:
        """Raises if what is captured is not what the target computes."""
        if self.fault is None:
            prove_capture(self.target, sample, taps)

    def captured(self, samples: Sequence[Sample], origin: Origin) -> pa.Table:
        """The captured table.

        Raises:
            InputError: the target cannot be had, or cannot compute these.
        """
        if self.fault is not None:
            raise InputError(self.fault)
        return capture(self.target, samples, origin, self.batch_tokens)


class TargetActor:
    """One target on one device. `rows` and `plan` are shared through the object store.

    With `keep`, each window is also written to a cache, as the shard with its number. With `records`, a queue, each is
    told with the seconds that it took, and those that it and the wait for room before it took together. A target that
    cannot be had is told in place of its rows: as an exception it would cost the run a restart of its trainers, and its
    own reason.
    """

    def __init__(
        self,
        target: TargetSettings,
        pool: TargetPoolSettings,
        origin: Origin,
        rows: Any,
        plan: Any,
        keep: ShardTask | None,
        run: str,
        records: Any,
    ) -> None:
        self.origin, self.keep, self.records = origin, keep, records
        self.gauges = Gauges(run)
        self.rows: pa.Table = ray.get(rows)
        self.plan: Plan = ray.get(plan)
        self.target = LoadedTarget(target, pool)
        self.target.prove(sample_at(self.rows, 0), origin.taps)
        self.told = time.perf_counter()

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        """The rows of one window, a table each."""
        first, last = window.column("start")[0].as_py(), window.column("stop")[0].as_py()
        began = time.perf_counter()
        try:
            captured = self._captured(window.column("window")[0].as_py(), slice(first, last))
        except InputError as error:
            captured = fault_table(self.origin, last - first, str(error))
        self._tell(time.perf_counter() - began)
        yield from (captured.slice(row, 1) for row in range(captured.num_rows))

    def _tell(self, worked_s: float) -> None:
        if self.records is not None:
            # Without waiting for the answer: that nobody listens any more is the driver's matter.
            self.records.actor.put.remote({"worked_s": worked_s, "passed_s": time.perf_counter() - self.told})
        self.told = time.perf_counter()

    def _captured(self, number: int, positions: slice) -> pa.Table:
        samples = [sample_at(self.rows, row) for row in self.plan.order[positions].tolist()]
        since = time.perf_counter()
        captured = self.target.captured(samples, self.origin)
        show_capture(self.gauges, captured, time.perf_counter() - since)
        if self.keep is not None:
            self._write(self.keep, number, captured, self.plan.counted[positions])
        return captured

    def _write(self, keep: ShardTask, index: int, captured: pa.Table, counted: NDArray[np.bool_]) -> None:
        if not counted.any() or is_written(keep, index):
            return
        # A row that fills up the epoch's last step has its place in another window. One that is not finite stays as it
        # is: later epochs ask for it too, and give it no weight.
        own = captured.filter(pa.array(counted))
        write_shard(keep, index, own.column("sample_id").to_pylist(), [own])


class ShardActor:
    """One target on one device that writes whole shards of a cache; `rows` as above.

    An error here would reach the driver as the death of an actor, so it is handed over as a result.
    """

    def __init__(
        self, target: TargetSettings, pool: TargetPoolSettings, task: ShardTask, rows: Any, max_bad_run: int
    ) -> None:
        self.task = task
        self.gauges = Gauges(task.folder.rstrip("/").rpartition("/")[2])
        self.rows: pa.Table = ray.get(rows[0])
        self.only_finite = OnlyFinite(max_bad_run)
        self.target = LoadedTarget(target, pool)
        self.target.prove(sample_at(self.rows, 0), task.origin.taps)

    def __call__(self, plan: pa.Table) -> Iterator[pa.Table]:
        """Writes one shard, and says after each forward what has been written since the last one.

        As many tables whatever happens: where a task is repeated after the death of its actor, Ray goes on behind those
        that it has, and would take fewer of them for the end.
        """
        told, expected = 0, plan.num_rows + 1
        try:
            if self.target.fault is not None:
                raise InputError(self.target.fault)
            for news in self._written(plan):
                told += 1
                yield news
        except InputError as error:
            for _ in range(told, expected):
                yield _news(fault=str(error))

    def _written(self, plan: pa.Table) -> Iterator[pa.Table]:
        began = time.time()
        index, batches = plan.column("shard")[0].as_py(), plan.column("batch").to_pylist()
        planned = [self.rows.column("sample_id")[row].as_py() for batch in batches for row in batch]
        # The next forward runs while this one's states are written.
        tables = ahead(batches, self._captured, self._size, limit=1)
        size = 0
        with new_shard(self.task, index, planned) as shard:
            for batch, table in zip(batches, map(self.only_finite, tables), strict=True):
                shard.add(table)
                left_out = len(batch) - table.num_rows
                yield _news(len(batch), tokens_in(table), shard.bytes - size, left_out, began)
                size = shard.bytes
        yield _news(bytes=shard.record.bytes - size, began=began)

    def _captured(self, batch: list[int]) -> pa.Table:
        since = time.perf_counter()
        samples = [sample_at(self.rows, row) for row in batch]
        captured = self.target.captured(samples, self.task.origin)
        show_capture(self.gauges, captured, time.perf_counter() - since)
        return captured

    def _size(self, batch: list[int]) -> int:
        return bytes_per_token(self.task.origin) * sum(len(self.rows.column("input_ids")[row]) for row in batch)


def show_capture(gauges: Gauges, captured: pa.Table, seconds: float) -> None:
    """Counts what a target captured, and how long it took."""
    gauges.add("dspark_captured_rows", captured.num_rows)
    gauges.add("dspark_captured_tokens", tokens_in(captured))
    gauges.add("dspark_captured_bytes", captured.nbytes)
    gauges.add("dspark_capture_seconds", seconds)


def tokens_in(captured: pa.Table) -> int:
    """Tokens of all samples of a captured table."""
    return int(pc.sum(pc.list_value_length(captured.column("input_ids"))).as_py() or 0)


def _news(
    rows: int = 0, tokens: int = 0, bytes: int = 0, skipped: int = 0, began: float = math.inf, fault: str = ""
) -> pa.Table:
    """One row: what was written, when the shard's first forward began, and what went wrong, if anything did."""
    return pa.table(
        {"rows": [rows], "tokens": [tokens], "bytes": [bytes], "skipped": [skipped], "began": [began], "fault": [fault]}
    )


class ProbeActor:
    """A target that is timed before a capture."""

    def __init__(self, target: TargetSettings, pool: TargetPoolSettings) -> None:
        torch.set_num_threads(pool.threads)
        self.target, self.batch_tokens = load_target(target), pool.batch_tokens

    def seconds(self, rows: pa.Table, batches: list[list[int]], origin: Origin) -> float:
        """How long these forwards take; the first one, which is also the warm-up, is run twice."""
        started = 0.0
        for batch in [batches[0], *batches]:
            capture(self.target, [sample_at(rows, row) for row in batch], origin, self.batch_tokens)
            started = started or time.perf_counter()
        return time.perf_counter() - started


class BigramActor:
    """A target for one question before training: what it predicts after single tokens."""

    def ready(self) -> None:
        """Returns once the actor has its place."""

    def bigrams(
        self, target: TargetSettings, pool: TargetPoolSettings, prompt: list[int], counts_V: NDArray[np.int64]
    ) -> Bigrams:
        """The states after `prompt` and each token that was counted."""
        torch.set_num_threads(pool.threads)
        tokens_N = np.flatnonzero(counts_V)
        return bigrams_of(load_target(target), prompt, torch.from_numpy(tokens_N), torch.from_numpy(counts_V[tokens_N]))
