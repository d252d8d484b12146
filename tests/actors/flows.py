"""Streams on Rays of their own: the cases of `test_flow.py`, each run in a process of its own (`alone`).

There are no trainers here: whoever reads a stream books its rows in a ledger as they do, `booked` adds it up.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow as pa
import ray
from ray.cluster_utils import Cluster

from actors.pipelines import capture_options, one_row_blocks, target_pool, window_table
from actors.placement import TargetWatch, attended
from actors.pools import evaluated
from actors.splits import blocks_of
from benchmarks.stream import EmptyTarget, Flow, flow, position_of
from dspark.config import Settings
from dspark.data.epoch_ledger import EpochLedger, Taken, Tally
from dspark.data.plan import Plan, make_plan
from dspark.errors import InputError
from jobs.config import load_settings

T = TypeVar("T")
LABELS = {"role": "target"}
PLAN = make_plan(5000, 0, 1, 1, None)


def alone(case: Callable[..., T], *arguments: Any) -> T:
    """What `case` returns in a fresh process, which may start its own Ray."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(case, arguments)


def booked(plan: Plan, positions: Sequence[int]) -> Tally:
    """What a reader took beside what the plan holds up to there; the rows of `positions` came in this order."""
    ledger = EpochLedger(len(plan.order))
    for position in positions:
        ledger.take(Taken(0, plan.order[position : position + 1], 0, 0))
    return sum(ledger.tallies(plan, len(positions)).values(), Tally())


def start_ray(store_mb: int) -> None:
    ray.init(address="local", num_cpus=4, object_store_memory=store_mb * 2**20, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False


def slowly_read(preset: Path) -> tuple[Flow, Tally, int]:
    """60 rows of 4 MB with 32 MB in flight, read at 25 a second; the ledger; the bytes that may be in flight."""
    start_ray(512)
    settings = load_settings(preset, ["targets.in_flight_mb=32", "targets.window_rows=4", "train.global_batch=1"])
    found = flow(settings, 60, 4 * 2**20, 0.04)
    return found, booked(make_plan(60, 0, 1, 1, None), found.positions), settings.targets.in_flight_mb * 2**20


class SlowTarget:
    """Ten rows a second, each of which says where it was made."""

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        for position in range(window.column("start")[0].as_py(), window.column("stop")[0].as_py()):
            time.sleep(0.1)
            yield pa.table({"position": [position], "node": [ray.get_runtime_context().get_node_id()]})


class Where:
    """An evaluator that says where it is."""

    def __call__(self, prompts: pa.Table) -> pa.Table:
        return pa.table({"node": [ray.get_runtime_context().get_node_id()] * prompts.num_rows})


def joined_and_lost(preset: Path) -> dict[str, Any]:
    """An evaluation, then a stream from one node; a second one joins; the first is killed, later the second."""
    overrides = [
        "targets.max_actors=2",
        "targets.window_rows=4",
        "train.global_batch=1",
        "ray.target_labels={role: target}",
    ]
    settings = load_settings(preset, overrides)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    first = cluster.add_node(num_cpus=1, labels=LABELS)
    ray.init(address=cluster.address)
    ray.data.DataContext.get_current().enable_progress_bars = False
    (evaluator,) = evaluated(Where, (), [pa.table({"prompt": [0]})], settings)
    rows = _rows(settings)
    positions: list[int] = []
    makers: set[str] = set()

    def take(enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not enough():
            row = next(rows)
            positions.append(row.column("position")[0].as_py())
            makers.add(row.column("node")[0].as_py())
            assert time.monotonic() < deadline, (len(positions), makers)

    take(lambda: len(positions) >= 8)
    alone_at_first = len(makers)
    second = cluster.add_node(num_cpus=2, labels=LABELS)
    take(lambda: len(makers) == 2)
    joined_at = len(positions)
    cluster.remove_node(first, allow_graceful=False)
    take(lambda: len(positions) >= joined_at + 40)
    cluster.remove_node(second, allow_graceful=False)
    since, error = time.monotonic(), ""
    try:
        take(lambda: False)
    except InputError as caught:
        error = str(caught)
    seconds = time.monotonic() - since
    assert positions == sorted(positions), "the rows come in the order of the plan"
    found = {"alone": alone_at_first, "ledger": booked(PLAN, positions), "error": error, "seconds": seconds}
    found["evaluated there"] = evaluator["node"] == first.node_id
    with suppress(Exception):
        ray.shutdown()
        cluster.shutdown()
    return found


def _rows(settings: Settings) -> Iterator[pa.Table]:
    windows = window_table(settings, PLAN, range(len(PLAN.order)), 0)
    dataset = one_row_blocks(windows, SlowTarget, **target_pool(settings))
    dataset.context.execution_options = capture_options(settings)
    (split,) = dataset.streaming_split(1, equal=True)
    return attended(blocks_of(split), TargetWatch(settings))


class Trial:
    """A trainer in the hands of a sweep: it owns its stream."""

    def begin(self, preset: Path) -> int:
        """Takes the first row of its stream and says which one it was."""
        settings = load_settings(preset, ["targets.window_rows=4", "train.global_batch=1"])
        windows = window_table(settings, PLAN, range(len(PLAN.order)), 0)
        dataset = one_row_blocks(windows, EmptyTarget, fn_constructor_args=(64, 64), **target_pool(settings))
        dataset.context.execution_options = capture_options(settings)
        (self.split,) = dataset.streaming_split(1, equal=True)
        self.rows = blocks_of(self.split)
        return position_of(next(self.rows))


def pruned(preset: Path) -> tuple[int, float, Tally]:
    """Producers of a trial that was begun, seconds until the last of them has ended after the trial was killed, and the
    ledger of what the trial had taken."""
    start_ray(256)
    trial: Any = ray.remote(num_cpus=0)(Trial).remote()
    first = ray.get(trial.begin.remote(preset))
    producers = _producers()
    ray.kill(trial)
    since = time.monotonic()
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in producers):
        if time.monotonic() - since > 60:
            break
        time.sleep(0.1)
    return len(producers), time.monotonic() - since, booked(PLAN, [first])


def _producers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "EmptyTarget" in " ".join(process.cmdline()):
                found.append(process)
    return found
