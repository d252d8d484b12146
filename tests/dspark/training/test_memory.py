"""The estimate of a rank's memory: a case by hand, how it moves with the settings, and one measured step."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark.config import Settings
from dspark.learning import TrainSettings
from dspark.training.activations import Load, layer_tensors
from dspark.training.memory import arena_bytes, held_by_engine, largest_load, rank_memory, step_moments
from tests.dspark.small import SMALL, SMALL_EAGLE3, small_config

REPOSITORY = Path(__file__).parents[3]
BIG = replace(SMALL, hidden=64, intermediate=128, vocab=10_000, draft_vocab=10_000, layers=4)
CHAINS = replace(SMALL_EAGLE3, hidden=64, intermediate=128, vocab=10_000, draft_vocab=4_000)


def settings_of(kind: str = "dspark", **train: Any) -> Settings:
    drafter: dict[str, Any] = {"kind": kind, "taps": [-1, 2], "block": 3}
    if kind == "dspark":
        drafter, train = drafter | {"mask_token_id": 29}, {"anchors": 8} | train
    return Settings.model_validate(
        {
            "name": "small",
            "target": {"model": "small"},
            "data": {"conversations": "rows.jsonl", "held_out": "held_out.jsonl", "max_length": 100},
            "drafter": drafter,
            "train": {"precision": "fp32", "global_batch": 16, **train},
        }
    )


def total(config: Any = BIG, lengths: tuple[int, ...] = (2000,), gpu: bool = False, **train: Any) -> int:
    settings = settings_of("dspark" if config is not CHAINS else "eagle3", **train)
    return rank_memory(config, settings, largest_load(config, settings, lengths), 10**6, True, gpu).total


def test_a_query_of_a_small_layer_keeps_its_tensors_and_nothing_else() -> None:
    # H 16, 4 heads and 2 key heads of width 6, I 24; each value is 4 bytes.
    hidden, queries, keys, inner = 4 * 16, 4 * 24, 4 * 12, 4 * 24
    found = layer_tensors(SMALL, 4)
    assert sum(found.values()) == (
        hidden + 4 + hidden  # input, number of its norm, normed
        + 2 * queries + 4 * 4 + queries + 4 * 4  # projected and rotated, numbers of heads, result, log sums
        + 3 * keys + 2 * 4  # keys projected and rotated, values, numbers of heads
        + hidden + 4 + hidden + 3 * inner  # residual, number, normed; gate, up, product
    )  # fmt: skip


def test_the_arena_holds_all_slots_if_it_may_and_never_more_than_the_budget() -> None:
    load = Load(rows=1, columns=10, groups=4, slots=3, used=12, places=8)
    # A slot has its logits; a column the target's, the bias and its gradient: 30 tokens of 4 bytes each. A bias that
    # differs between the slots of a column is added to their logits.
    assert arena_bytes(SMALL, 1, load, 4) == 12 * 120 + 8 * 360
    assert arena_bytes(small_config("none"), 1, load, 4) == 12 * 120 + 8 * 120
    assert arena_bytes(small_config("gated"), 1, load, 4) == 12 * 120 + 8 * 120
    large = replace(load, used=12_000, places=8_000)
    assert arena_bytes(BIG, 1, large, 4) == 2**20


def test_an_engine_holds_master_weights_moments_and_gradients_as_the_stage_deals_them() -> None:
    def held(stage: int, precision: str = "bf16") -> tuple[int, ...]:
        train = TrainSettings.model_validate({"workers": 4, "zero_stage": stage, "precision": precision})
        found = held_by_engine(train, 100, gpu=False)
        return found.parameters, found.gradients, found.optimizer, found.step

    assert held(0, "fp32") == (400, 400, 800, 400)
    assert held(0) == (200, 200, 1200, 200 + 400)
    assert held(1) == (200, 400, 300, 400 + 200)
    assert held(2) == (200, 100, 300, 100 + 200)
    assert held(3) == (50 + 200, 100, 300, 2 * 100 + 200)  # its own part, and what is gathered for the layers


@pytest.mark.parametrize("config", [BIG, CHAINS], ids=["blocks", "chains"])
@pytest.mark.parametrize("gpu", [False, True])
def test_more_work_needs_more_memory(config: Any, gpu: bool) -> None:
    base = total(config, gpu=gpu, micro_batch=2, logits_mb=1)
    if config is BIG:
        assert total(config, gpu=gpu, micro_batch=2, logits_mb=1, anchors=2000) > base
    assert total(config, (4000,), gpu, micro_batch=2, logits_mb=1) > base
    assert total(config, gpu=gpu, micro_batch=4, logits_mb=1) > base
    assert total(config, gpu=gpu, micro_batch=2, logits_mb=1, prefetch=9) > base
    assert total(config, gpu=gpu, micro_batch=2, logits_mb=2) > base


def test_more_layers_need_more_memory_and_recomputed_ones_less() -> None:
    assert total(replace(BIG, layers=5), anchors=500) > total(BIG, anchors=500)
    for config in (BIG, CHAINS):
        for gpu in (False, True):
            more = {"anchors": 9000} if config is BIG else {}
            full = total(config, (9000,), gpu, logits_mb=1, **more)
            assert total(config, (9000,), gpu, logits_mb=1, **more, recompute=True) < full


def test_each_stage_of_zero_needs_no_more_than_the_one_before() -> None:
    for precision in ("fp32", "bf16"):
        stages = [total(workers=4, zero_stage=stage, precision=precision) for stage in (0, 1, 2)]
        assert stages == sorted(stages, reverse=True), precision
        assert stages[0] > stages[-1]
    assert total(workers=8, zero_stage=2) < total(workers=4, zero_stage=2)


def test_the_objective_does_not_grow_with_the_anchors_beyond_its_budget() -> None:
    def objective(anchors: int) -> int:
        settings = settings_of(anchors=anchors, logits_mb=1)
        load = largest_load(BIG, settings, [5000])
        rows = load.used * BIG.hidden * 4 * 3 + load.places * (BIG.hidden + 2 * BIG.markov_rank) * 4
        parts = step_moments(BIG, settings.train, load, 10**6)["the loss"]
        return parts["objective"] - rows

    assert objective(4000) == objective(1000) == 2**20 + BIG.draft_vocab * BIG.markov_rank * 4


def test_packing_makes_rows_of_its_own_size() -> None:
    settings = settings_of(micro_batch=8, pack_tokens=100)
    load = largest_load(BIG, settings, [50, 25, 25])  # a mean of 33 tokens: 267 in a micro-batch
    assert (load.rows, load.columns, load.groups) == (3, 100, 24)  # 3 documents with 8 blocks each in a row


def test_the_estimate_of_a_small_step_is_near_what_it_takes() -> None:
    case = {"layers": 2, "vocab": 8000, "length": 128, "span": None, "dtype": "fp32", "anchors": 64, "side": "a"}
    order = json.dumps({**case, "repetitions": 1, "threads": 1})
    done = subprocess.run(
        [sys.executable, "benchmarks/step_case.py", order],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["estimate"] == pytest.approx(found["peak"], rel=0.25)
