"""Waiting for rows, and what is told when there is no place for a target or a trainer."""

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.placement import attended, check_trainer_places, lost_targets, places_on, target_place
from dspark.errors import InputError
from jobs.config import load_settings
from tests.conftest import tiny_preset

NODE = {"Resources": {"CPU": 5.0, "GPU": 2.0}, "Labels": {"role": "target", "zone": "a"}}


@pytest.mark.parametrize(
    ("needed", "labels", "places"),
    [
        ({"CPU": 2}, {}, 2),
        ({"CPU": 1, "GPU": 1}, {"role": "target"}, 2),
        ({"CPU": 1}, {"role": "trainer"}, 0),
        ({"CPU": 1}, {"rack": "1"}, 0),
        ({"CPU": 0.5}, {"zone": "a"}, 10),
        ({"GPU": 4}, {}, 0),
        ({"TPU": 1}, {}, 0),
    ],
)
def test_a_node_has_places_by_its_scarcest_resource_if_it_has_the_labels(
    needed: dict[str, float], labels: dict[str, str], places: int
) -> None:
    assert places_on(NODE, needed, labels) == places


def test_rows_pass_in_order_and_an_error_of_their_source_too() -> None:
    def rows() -> Iterator[int]:
        yield from (1, 2, 3)
        raise InputError("the disk is full")

    taken = []
    with pytest.raises(InputError, match="the disk is full"):
        for row in attended(rows(), lambda _: None):
            taken.append(row)
    assert taken == [1, 2, 3]
    assert list(attended(iter("ab"), lambda _: None)) == ["a", "b"]


def test_whoever_looks_while_nothing_comes_can_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.placement._LOOK_S", 0.01)

    def rows() -> Iterator[int]:
        yield 1
        time.sleep(60)
        yield 2

    def look(waited_s: float) -> None:
        if waited_s > 0.05:
            raise InputError(lost_targets([NODE, {"Resources": {"CPU": 8.0}}], {"GPU": 4}, {"role": "target"}))

    waiting = attended(rows(), look)
    assert next(waiting) == 1
    with pytest.raises(
        InputError, match=r"needs 4 logical GPUs on a node with labels.*the 2 nodes.*, 1 with these labels"
    ):
        next(waiting)


def node(cpus: float, **labels: str) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": cpus}, "Labels": labels}


def test_trainers_and_targets_that_no_node_could_hold_are_refused_before_they_are_waited_for(
    tmp_path: Path, tiny_target: Path, local_ray: None
) -> None:
    labels = ["ray.trainer_labels={role: trainer}", "train.workers=2", "train.cpus=2", "targets.cpus=3"]
    settings = load_settings(tiny_preset(tmp_path, tiny_target), labels)
    check_trainer_places(settings, [node(4, role="trainer"), node(3)])
    gone = {**node(8, role="trainer"), "Alive": False}
    with pytest.raises(InputError, match=r"train\.workers=2 needs as many places .* \{'role': 'trainer'\}.* has 1"):
        check_trainer_places(settings, [node(3, role="trainer"), node(16), gone])
    # This Ray has one node with 8 CPUs and no label.
    assert target_place("targets", settings.targets, {})["num_cpus"] == 3
    with pytest.raises(
        InputError, match=r"no place for an actor of targets.*one needs 3 .*, 0 with these labels, none"
    ):
        target_place("targets", settings.targets, {"role": "target"})


def test_whoever_books_gpus_for_an_actor_also_says_on_which_nodes() -> None:
    root, booking, anywhere = Path(__file__).parents[2], 0, []
    for file in sorted(file for folder in ("actors", "jobs") for file in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: set[object] = set()
            if isinstance(node, ast.Call):
                names = {keyword.arg for keyword in node.keywords}
            elif isinstance(node, ast.Dict):
                names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            booking += "num_gpus" in names
            if "num_gpus" in names and "label_selector" not in names:
                anywhere.append(f"{file.name}: {ast.unparse(node)}")
    assert booking >= 2 and anywhere == []
