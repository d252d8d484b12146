"""Shares made ready ahead of the trainer are those made directly: values, order, errors, end."""

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from dspark.config import Settings
from dspark.data.plan import Plan
from dspark.learning import DrafterSettings, Eagle3Settings, TrainSettings
from dspark.model.config import DraftConfig
from dspark.sections import DataSettings, TargetSettings
from dspark.training.ready import MicroBatch, ReadyShare, ready_shares
from dspark.training.share import Share, make_share
from dspark.training.transfer import Transfer, with_tensors
from tests.dspark.small import SMALL_EAGLE3, small_config
from tests.dspark.training.shares import captured, settings_of

CONFIG = small_config()
CPU = torch.device("cpu")
# Three steps of five rows in micro-batches of two: the last of a step holds one row.
MASKS = [[0, 1, 1, 1, 1, 1], [1, 1], [1, 1, 1, 0], [1] * 9, [0, 0, 1]] * 3
STEPS, ROWS = 3, 5
PLAN = Plan(np.arange(15), np.arange(15) < 13, np.zeros(15, np.int32), ROWS)
THREADS = {"shares", "micro-batches"}


def eagle3_settings(**train: Any) -> Settings:
    return Settings(
        name="small",
        target=TargetSettings(model="none", dtype="fp32"),
        data=DataSettings(conversations=Path("none"), held_out=Path("none"), max_length=16),
        drafter=DrafterSettings(kind="eagle3", block=SMALL_EAGLE3.block, taps=SMALL_EAGLE3.taps),
        eagle3=Eagle3Settings(ttt_length=2, step_loss_decay=0.5),
        train=TrainSettings(precision="fp32", **train),
    )


def share_at(step: int, config: DraftConfig, settings: Settings) -> Share:
    table = captured(config, MASKS, broken=[1, 8]).slice(step * ROWS, ROWS)
    return make_share(table, range(step * ROWS, (step + 1) * ROWS), PLAN, config, settings)


def tensors_of(*values: Any) -> list[Tensor]:
    """All tensors in the values, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for value in values:
        with_tensors(value, keep)
    return found


def assert_equal(found: ReadyShare, share: Share) -> None:
    assert found.tokens == share.tokens
    parts = list(found.micro_batches)
    assert len(parts) == len(share.batches) == len(found.weights) == 3
    assert [type(blocks) for _, blocks in parts] == [type(blocks) for blocks in share.blocks]
    mine, theirs = (
        tensors_of(found.weights, found.counts, *parts),
        tensors_of(share.weights, share.counts, *map(MicroBatch, share.batches, share.blocks)),
    )
    assert len(mine) == len(theirs) >= 1 + 6 + 3 * (5 + 11)  # none is passed over
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("form", ["alone", "packed", "chains"])
def test_shares_made_ahead_equal_those_made_directly_in_order(form: str, depth: int) -> None:
    train: dict[str, Any] = {"global_batch": 10, "micro_batch": 2}
    config: DraftConfig = SMALL_EAGLE3 if form == "chains" else CONFIG
    settings = (
        eagle3_settings(**train)
        if form == "chains"
        else settings_of(CONFIG, pack_tokens=16 if form == "packed" else None, **train)
    )
    booked: dict[str, float] = {}

    def book(phase: str, seconds: float) -> None:
        booked[phase] = booked.get(phase, 0.0) + seconds

    ready = ready_shares(
        (step for step in range(STEPS)), lambda step: share_at(step, config, settings), CPU, depth, book
    )
    found = 0
    for step, share in enumerate(ready):
        expected = share_at(step, config, settings)
        assert expected.counts["rows_not_finite"].total == (1 if step < 2 else 0)
        assert_equal(share, expected)
        found += 1
    assert found == STEPS
    assert booked.keys() == {"waiting", "collate"} and booked["collate"] > 0
    if depth == 0:  # nothing is made meanwhile
        assert booked["waiting"] >= booked["collate"]
    assert not running()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_error_of_a_table_arrives_behind_the_shares_before_it(depth: int) -> None:
    settings = settings_of(CONFIG, global_batch=10, micro_batch=2)

    def tables() -> Generator[int, None, None]:
        yield 0
        raise RuntimeError("the stream of captured rows ended")

    ready = ready_shares(tables(), lambda step: share_at(step, CONFIG, settings), CPU, depth, lambda *_: None)
    assert_equal(next(ready), share_at(0, CONFIG, settings))
    with pytest.raises(RuntimeError, match="the stream of captured rows ended"):
        next(ready)
    assert not running()


def test_an_error_of_a_micro_batch_arrives_in_its_place() -> None:
    """A column that is too short is met when the second micro-batch of the second share is collated."""
    settings = settings_of(CONFIG, global_batch=10, micro_batch=2)

    def make(step: int) -> Share:
        share = share_at(step, CONFIG, settings)
        if step == 1:
            rows = share.batches.rows[1]
            short = rows.table.column("final").to_pylist()
            column = pa.array([short[0][:-2], short[1]], pa.large_binary())
            share.batches.rows[1] = rows._replace(table=rows.table.set_column(4, rows.table.schema.field(4), column))
        return share

    ready = ready_shares((step for step in range(STEPS)), make, CPU, 2, lambda *_: None)
    assert len(list(next(ready).micro_batches)) == 3
    second = next(ready).micro_batches
    next(second)
    with pytest.raises(RuntimeError):
        next(second)
    ready.close()
    assert not running()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trainer_that_stops_early_ends_the_threads_and_the_stream(depth: int) -> None:
    settings = settings_of(CONFIG, global_batch=10, micro_batch=2)
    closed = threading.Event()

    def tables() -> Generator[int, None, None]:
        try:
            yield from [step % STEPS for step in range(1000)]
        finally:
            closed.set()

    ready = ready_shares(tables(), lambda step: share_at(step, CONFIG, settings), CPU, depth, lambda *_: None)
    list(next(ready).micro_batches)
    next(next(ready).micro_batches)  # in the middle of a share
    ready.close()
    assert closed.is_set() and not running()


def running() -> set[str]:
    return THREADS & {thread.name for thread in threading.enumerate()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_micro_batches_reach_a_gpu_unchanged_without_the_host_waiting() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    settings = settings_of(CONFIG, global_batch=10, micro_batch=2)
    table = captured(CONFIG, MASKS, broken=[1, 8]).slice(0, ROWS)
    share = make_share(table, range(ROWS), PLAN, CONFIG, settings, pinned=True)
    transfer = Transfer(device)
    host = list(map(MicroBatch, share.batches, share.blocks))
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = [transfer.begin(part).get() for part in host]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mine, theirs = tensors_of(*moved), tensors_of(*host)
    assert all(tensor.device == device for tensor in mine)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(mine, theirs, strict=True))
