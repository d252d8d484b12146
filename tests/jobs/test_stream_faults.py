"""Runs that lose a target, a trainer or a whole node and go on, with the losses of an undisturbed run at every step."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from safetensors.torch import load_file, save_file

from jobs.config import load_settings
from jobs.train import train
from tests.conftest import tiny_preset
from tests.jobs.runs import assert_each_row_once, finish, losses, start, wait_for_step
from tests.jobs.soak import endless, soak, soak_preset
from tests.tiny import tiny_target_folder, tiny_tokenizer

pytestmark = pytest.mark.faults
STEPS, SOAK_S = 300, 120.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, list[tuple[int, float]]]:
    """A preset, and step and loss of the records of its undisturbed run."""
    preset = soak_preset(tmp_path_factory.mktemp("whole"), tiny_target, STEPS)
    finish(start(*endless(preset)))
    folder = load_settings(preset, []).output / "latest"
    expected = losses(folder)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert_each_row_once(folder, 2 * STEPS)
    return preset, expected


@pytest.mark.timeout(900)
def test_two_minutes_of_kills_every_20_seconds_cost_no_row_and_no_loss(
    whole: tuple[Path, list[tuple[int, float]]],
) -> None:
    preset, expected = whole
    found = soak(preset, STEPS, SOAK_S)
    assert found.complete, found
    assert {*found.kills} == {"target", "trainer", "driver"}
    assert sorted(found.losses) == [step for step, _ in expected]
    assert [found.losses[step] for step, _ in expected] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_a_lost_node_with_target_and_trainer_costs_a_restart_from_the_last_checkpoint(
    whole: tuple[Path, list[tuple[int, float]]], tmp_path: Path
) -> None:
    preset, expected = whole
    # The head has no place for either, so that both go down with the first node and come up on the second.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 * 2**20})
    node: dict[str, Any] = {"num_cpus": 6, "object_store_memory": 100 * 2**20}
    first = cluster.add_node(**node)
    try:
        run = start(*endless(preset), f"output={tmp_path}", f"ray.address={cluster.address}")
        wait_for_step(run, tmp_path, 5)
        cluster.add_node(**node)
        wait_for_step(run, tmp_path, 15)
        cluster.remove_node(first, allow_graceful=False)
        finish(run)
    finally:
        cluster.shutdown()
    found = losses(tmp_path / "latest")
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    assert_each_row_once(tmp_path / "latest", 2 * STEPS)


@pytest.fixture(scope="module")
def target_without_z(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that has no states from a `Z` on. Its head is its own: a tied one would have no logits at all."""
    target = tiny_target_folder(tmp_path_factory.mktemp("target") / "model", "qwen3")
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][tiny_tokenizer().encode("Z")[0]] = math.nan
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_row_of_nan_and_ranks_without_anchors_hang_nobody_and_are_counted(
    target_without_z: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], local_ray: None
) -> None:
    keeping = {"source": "live_and_keep"}
    preset = tiny_preset(tmp_path, target_without_z, rows=7, data=keeping, train={"workers": 2, "epochs": 2})
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    rows[3] = rows[3].replace("say 3", "Zay 3")
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    settings = load_settings(preset, [])
    train(settings, None, False)
    folder = settings.output / "latest"
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    # Of an epoch's four steps with a row for each rank, one has the row of nan, and the last one a row that only fills
    # it up. The second epoch comes from the cache that the first one left.
    assert len(history) == 8 and all(math.isfinite(record["loss"]) for record in history)
    for epoch in (history[:4], history[4:]):
        counts = sorted(record["rows_not_finite"] for record in epoch)
        assert counts[:3] == [0, 0, 0] and counts[3] in (0.5, 1)
    assert_each_row_once(folder, 14, not_finite=2)
    printed = " ".join(capsys.readouterr().out.split())
    assert "of the rows had states that are not finite" in printed
    assert "14 rows expected, 14 trained, 0 repeated, 0 missing; 0 without anchors, 2 not finite" in printed
