"""The arithmetic of the planning table, with numbers that one can follow by hand."""

from pathlib import Path

import pytest

from dspark.config import Settings
from dspark.learning import DrafterSettings, TrainSettings
from dspark.planning import ClusterAssumptions, Machine, Shape, bytes_per_token, scale_of, trainer_operations
from dspark.sections import DataSettings, TargetPoolSettings, TargetSettings

SHAPE = Shape(parameters_b=2.0, embedding_b=0.5, hidden=10, vocab=100, intermediate=20, heads=2, kv_heads=1, head_dim=5)
SETTINGS = Settings(
    name="plan",
    target=TargetSettings(model="somewhere/model"),
    targets=TargetPoolSettings(in_flight_mb=1),
    data=DataSettings(conversations=Path("train.jsonl"), held_out=Path("held_out.jsonl")),
    drafter=DrafterSettings(layers=1, block=2, taps=(0, 2, 4), mask_token_id=7, markov_rank=4),
    train=TrainSettings(global_batch=8, anchors=50),
)
MACHINE = Machine(tflops=1.0, utilisation=0.5, memory_gb=80, per_node=8)
CLUSTER = ClusterAssumptions(
    trainer=MACHINE, target=MACHINE, network_gbit_per_s=8, mean_tokens=100, supervised_share=0.1, presets={}
)


def test_a_token_takes_two_bytes_for_each_value_of_its_states_and_five_for_id_and_mask() -> None:
    assert bytes_per_token(hidden=2560, taps=5) == 2 * 2560 * 6 + 5 == 30_725


def test_operations_of_a_step_are_three_forwards_of_what_is_trained_and_fewer_of_the_frozen_head() -> None:
    # 10 blocks (of 100 tokens 10 are supervised) of 2 slots.
    feature = 3 * 10 * 10 + 10 * 10  # fc of three taps; keys and values, 10 wide together
    layer = (2 * 10 + 10 + 3 * 20) * 10  # queries, output, keys and values, three matrices of the MLP
    attention = 2 * 10 * (50 + 2)
    trained = 100 * feature + 20 * (layer + attention) + 20 * 4 * 100
    head = 20 * 10 * 100
    assert trainer_operations(SHAPE, SETTINGS, 100, 0.1) == 2 * (3 * trained + 2 * head + head) == 640_800


def test_a_row_of_the_table_follows_from_operations_and_assumptions() -> None:
    scale = scale_of("model", SHAPE, SETTINGS, CLUSTER)
    assert scale.bytes_per_token == 85
    assert scale.trainer_tokens_per_s == pytest.approx(0.5e12 / 6_408)
    assert scale.target_tokens_per_s == pytest.approx(125)  # 0.5e12 / (2 x 2e9)
    assert scale.targets_per_trainer == pytest.approx(0.5e12 / 6_408 / 125)
    assert scale.network_bytes_per_s == pytest.approx(85 * 0.5e12 / 6_408)
    assert scale.trainers_per_link == pytest.approx(1e9 / scale.network_bytes_per_s)
    assert scale.object_store_bytes == 2 * 8 * 100 * 85 + 2**20
    assert scale.target_memory_bytes == 5e9
