"""DeepSpeed settings that are plain arithmetic."""

import pytest

from actors.zero import backward_scale, learning_rate
from dspark.learning import LossSettings, TrainSettings


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    factor = learning_rate(steps=10, warmup=0.2)
    assert [factor(step) for step in range(3)] == [0.5, 1.0, 1.0]
    assert factor(6) == pytest.approx(0.5)
    assert factor(10) == pytest.approx(0.0)
    assert all(factor(step) >= factor(step + 1) for step in range(2, 10))


def test_the_scale_undoes_the_division_by_ranks_and_accumulation() -> None:
    train = TrainSettings(workers=2, global_batch=8, micro_batch=1)
    assert train.accumulation == 4
    assert backward_scale(train, LossSettings()) == 8
    assert backward_scale(train, LossSettings(denominator="micro_batch")) == 2
