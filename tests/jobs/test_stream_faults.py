"""Runs that lose a target, a trainer or a whole node and go on, with the losses of an undisturbed run at every step."""

import time
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from jobs.config import load_settings
from tests.jobs.soak import endless, losses, parts, soak_preset, start

pytestmark = pytest.mark.faults
STEPS = 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, list[tuple[int, float]]]:
    """A preset, and step and loss of the records of its undisturbed run."""
    preset = soak_preset(tmp_path_factory.mktemp("whole"), tiny_target)
    run = start(*endless(preset), f"train.max_steps={STEPS}")
    output, errors = run.communicate(timeout=280)
    assert run.returncode == 0, errors[-3000:]
    assert "the trainers waited" in output or "waiting" in output
    expected = losses(load_settings(preset, []).output / "latest")
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    return preset, expected


def wait_for_step(run: Any, output: Path, step: int) -> None:
    """Returns as soon as the run has a record of that step."""
    deadline = time.monotonic() + 240
    file = output / "latest" / "history.jsonl"
    while not file.exists() or not (found := losses(output / "latest")) or found[-1][0] < step:
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"step {step} was not made"
        time.sleep(0.05)


def finished(run: Any, output: Path, expected: list[tuple[int, float]]) -> None:
    _, errors = run.communicate(timeout=280)
    assert run.returncode == 0, errors[-3000:]
    found = losses(output / "latest")
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_a_killed_target_and_a_killed_trainer_are_replaced_and_every_row_is_trained_once(
    whole: tuple[Path, list[tuple[int, float]]], tmp_path: Path
) -> None:
    preset, expected = whole
    run = start(*endless(preset), f"train.max_steps={STEPS}", f"output={tmp_path}")
    for part, step in (("target", 8), ("trainer", 25)):
        wait_for_step(run, tmp_path, step)
        (process,) = parts(run, part)  # type: ignore[arg-type]
        process.kill()
    finished(run, tmp_path, expected)


def test_a_lost_node_with_target_and_trainer_costs_a_restart_from_the_last_checkpoint(
    whole: tuple[Path, list[tuple[int, float]]], tmp_path: Path
) -> None:
    preset, expected = whole
    # The head has no place for either, so that both go down with the first node and come up on the second.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 * 2**20})
    node: dict[str, Any] = {"num_cpus": 6, "object_store_memory": 100 * 2**20}
    first = cluster.add_node(**node)
    try:
        run = start(
            *endless(preset), f"train.max_steps={STEPS}", f"output={tmp_path}", f"ray.address={cluster.address}"
        )
        wait_for_step(run, tmp_path, 5)
        cluster.add_node(**node)
        wait_for_step(run, tmp_path, 15)
        cluster.remove_node(first, allow_graceful=False)
        finished(run, tmp_path, expected)
    finally:
        cluster.shutdown()
