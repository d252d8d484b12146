"""What streaming itself costs, with a target that computes nothing: `make bench-stream`.

empty target (one actor, rows ready in its memory) -> object store -> one reader in the place of a trainer

1. rows of 32 MB, read as fast as they come: bytes per second, and most bytes held in the object store
2. the same, read slowly: most bytes held in the object store, bytes spilled
3. training steps on small rows that are streamed, beside the same steps on rows in memory

Prints a table and, as its last line, one JSON object; exits with 1 where a number misses its bound.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import torch
from rich.console import Console
from rich.table import Table

from actors.pipelines import capture_options, one_row_blocks, row_pool, window_table
from actors.splits import blocks_of
from actors.store import StoreUse, store_use
from benchmarks.step_case import HIDDEN, TAPS, config_of
from dspark.config import Settings
from dspark.data.origin import Origin, schema_of
from dspark.data.plan import Plan, make_plan
from dspark.model.drafter import new_drafter
from dspark.model.vocabulary import Vocabulary
from dspark.training.objective import DraftObjective
from dspark.training.ready import ready_shares
from dspark.training.share import Share, make_share
from jobs.config import load_settings

PRESET = Path("platform/presets/smollm2_135m.yaml")
ROW_MB, IN_FLIGHT_MB, STORE_MB = 32, 256, 2048
AT_LEAST_GB_PER_S, AT_MOST_OVERHEAD = 1.2, 0.1
_SAMPLE_S = 0.05


def origin_of_width(hidden: int) -> Origin:
    return Origin("empty", "main", "none", "none", TAPS, hidden, "bf16")


class EmptyTarget:
    """Rows of `tokens` tokens whose states are the same zeros every time; the rest is as a target would give it."""

    def __init__(self, hidden: int, tokens: int) -> None:
        self.schema = schema_of(origin_of_width(hidden))
        values: list[Any] = [["row"], [list(range(tokens))], [bytes([1]) * tokens]]
        states = [[bytes(2 * hidden * tokens)]] * (len(self.schema) - len(values))
        columns = [pa.array(one, field.type) for one, field in zip(values + states, self.schema, strict=True)]
        self.row = pa.table(columns, schema=self.schema)

    def __call__(self, window: pa.Table) -> Iterator[pa.Table]:
        for position in range(window.column("start")[0].as_py(), window.column("stop")[0].as_py()):
            name = pa.array([f"row-{position}"], pa.string())
            yield self.row.set_column(0, self.schema.field(0), name)


@contextmanager
def streamed(
    settings: Settings, plan: Plan, actor: type, arguments: tuple[Any, ...], actors: int
) -> Iterator[Generator[pa.Table, None, None]]:
    """Rows of the plan in its order, through everything that lies between targets and one trainer."""
    dataset = one_row_blocks(
        window_table(settings, plan, range(len(plan.order)), 0),
        actor,
        fn_constructor_args=arguments,
        compute=row_pool(actors, actors),
        num_cpus=1,
    )
    dataset.context.execution_options = capture_options(settings)
    (split,) = dataset.streaming_split(1, equal=True)

    def rows() -> Generator[pa.Table, None, None]:
        yield from blocks_of(split)

    with closing(rows()) as taken:
        yield taken


class StoreWatch:
    """Samples the object store while a part runs."""

    def __init__(self) -> None:
        self.before: StoreUse = store_use()
        self.last = self.before
        self.most, self.stopped = 0, threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "StoreWatch":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _follow(self) -> None:
        while not self.stopped.wait(_SAMPLE_S):
            self.last = store_use()
            self.most = max(self.most, self.last.held - self.before.held)

    @property
    def spilled(self) -> int:
        """Bytes spilled since the beginning."""
        return self.last.spilled - self.before.spilled


@dataclass(frozen=True)
class Flow:
    """One stream, read to its end."""

    bytes: int
    seconds: float  # from the first row on
    most_held: int
    spilled: int
    positions: tuple[int, ...]  # of the plan, as the rows came


def position_of(row: pa.Table) -> int:
    """The plan position of a row that an empty target has made."""
    return int(row.column("sample_id")[0].as_py().removeprefix("row-"))


def flow(settings: Settings, rows: int, row_bytes: int, pause_s: float) -> Flow:
    """Streams `rows` rows of `row_bytes`, each looked at once and followed by a pause."""
    tokens = row_bytes // (2 * HIDDEN * (1 + len(TAPS)))
    plan = make_plan(rows, 0, 1, 1, None)
    size, began, positions = 0, 0.0, list[int]()
    with StoreWatch() as watch, streamed(settings, plan, EmptyTarget, (HIDDEN, tokens), 1) as stream:
        for number, row in enumerate(stream):
            began = began or time.perf_counter()
            positions.append(position_of(row))
            assert positions[-1] == number, "the stream keeps the order of the plan"
            size += row.nbytes if number else 0
            del row
            time.sleep(pause_s)
        seconds = time.perf_counter() - began
    return Flow(size, seconds, watch.most, watch.spilled, tuple(positions))


def steps_of(settings: Settings, plan: Plan, tokens: int) -> Callable[[Generator[pa.Table, None, None]], float]:
    """Training steps, one for each row of a stream; the function returns their seconds from the second step on."""
    torch.manual_seed(0)
    draft = config_of(2, 4096, tokens)
    drafter = new_drafter(draft, seed=0)
    table = torch.randn(4096, HIDDEN) / 10
    vocabulary, objective = Vocabulary(table, table), DraftObjective(drafter, settings.loss)

    def share_of(numbered: tuple[int, pa.Table]) -> Share:
        return make_share(numbered[1], range(numbered[0], numbered[0] + 1), plan, draft, settings)

    def numbered(tables: Generator[pa.Table, None, None]) -> Generator[tuple[int, pa.Table], None, None]:
        yield from enumerate(tables)

    def steps(tables: Generator[pa.Table, None, None]) -> float:
        began = 0.0
        shares = ready_shares(numbered(tables), share_of, torch.device("cpu"), settings.train.prefetch, lambda *_: None)
        with closing(shares):
            for share in shares:
                for (batch, blocks), weight in zip(share.micro_batches, share.weights, strict=True):
                    drafter.zero_grad(set_to_none=True)
                    objective(vocabulary, batch, blocks, weight).loss.backward()
                began = began or time.perf_counter()
        return time.perf_counter() - began

    return steps


def overhead(settings: Settings, count: int, tokens: int) -> float:
    """Share by which steps on streamed rows take longer than on rows in memory."""
    plan = make_plan(count, 0, 1, 1, None)
    steps = steps_of(settings, plan, tokens)
    target = EmptyTarget(HIDDEN, tokens)
    whole = window_table(settings, plan, range(len(plan.order)), 0)
    kept = [row for at in range(whole.num_rows) for row in target(whole.slice(at, 1))]

    def memory() -> float:
        return steps(row for row in kept)

    def live() -> float:
        with streamed(settings, plan, EmptyTarget, (HIDDEN, tokens), 1) as rows:
            return steps(rows)

    memory()  # the first step of all makes room and plans
    before, streaming, after = memory(), live(), memory()
    return streaming / ((before + after) / 2) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows and steps: shows that it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    overrides = [f"targets.in_flight_mb={IN_FLIGHT_MB}", "targets.window_rows=8", "train.anchors=64"]
    overrides += ["train.precision=fp32", "train.global_batch=1"]
    settings = load_settings(PRESET, overrides)
    ray.init(
        address="local", num_cpus=4, object_store_memory=STORE_MB * 2**20, include_dashboard=False, log_to_driver=False
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    row_bytes = ROW_MB * 2**20
    fast = flow(settings, 24 if quick else 400, row_bytes, 0.0)
    slow = flow(settings, 24 if quick else 60, row_bytes, 0.1)
    share = overhead(settings, 16 if quick else 150, 256)
    ray.shutdown()
    found = {
        "gb_per_s": fast.bytes / fast.seconds / 1e9,
        "fast_most_held_mb": fast.most_held / 2**20,
        "slow_most_held_mb": slow.most_held / 2**20,
        "spilled_mb": (fast.spilled + slow.spilled) / 2**20,
        "overhead": share,
    }
    bounds = {
        "gb_per_s": f">= {AT_LEAST_GB_PER_S:g}",
        "fast_most_held_mb": f"<= {most_held(settings, row_bytes) / 2**20:g}",
        "slow_most_held_mb": f"<= {most_held(settings, row_bytes) / 2**20:g}",
        "spilled_mb": "<= 0",
        "overhead": f"<= {AT_MOST_OVERHEAD:g}",
    }
    missed = [name for name, bound in bounds.items() if not within(found[name], bound)]
    table = Table("number", "found", "bound")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}", bounds[name])
    Console().print(table)
    facts = {"row_mb": ROW_MB, "in_flight_mb": IN_FLIGHT_MB, "quick": quick}
    print(json.dumps({name: round(value, 4) for name, value in found.items()} | facts | {"missed": missed}))
    return int(bool(missed) and not quick)


def most_held(settings: Settings, row_bytes: int) -> int:
    """Bytes that may lie between one target and one trainer: what is in flight, and the rows at both its ends.

    An actor has four rows handed over but not taken up yet, the reader a few that it has asked for ahead.
    """
    return settings.targets.in_flight_mb * 2**20 + 12 * row_bytes


def within(value: float, bound: str) -> bool:
    sign, limit = bound.split()
    return value >= float(limit) if sign == ">=" else value <= float(limit)


if __name__ == "__main__":
    sys.exit(main())
