"""The plan's memory and its refusals; nothing is started."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark.config import Settings
from jobs.config import load_settings
from jobs.preflight import needs_of, print_plan, remedy
from jobs.rows import prepare_rows
from tests.conftest import tiny_preset


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return tiny_preset(tmp_path_factory.mktemp("plan"), tiny_target)


def advice(preset: Path, part: str, *overrides: str) -> str:
    """What a refusal says where `part` is the largest that a setting lowers."""
    return remedy(
        load_settings(preset, list(overrides)), {"process": 9 * 10**9, part: 2 * 10**9, "object store": 10**9}
    )


@pytest.mark.parametrize(
    ("part", "overrides", "said"),
    [
        ("objective", [], "lower train.logits_mb"),
        ("activations", [], "lower train.anchors, or set train.recompute=true"),
        ("activations", ["train.recompute=true", "train.micro_batch=2"], "lower train.anchors or train.micro_batch"),
        (
            "context",
            ["train.micro_batch=2", "train.pack_tokens=128"],
            "data.max_length or train.micro_batch or train.p",
        ),
        ("micro-batches", [], "lower train.prefetch or data.max_length"),
        ("micro-batches", ["train.prefetch=0"], "lower data.max_length"),
        ("gradients", ["train.workers=2"], "raise train.zero_stage to 2"),
        ("parameters", ["train.workers=2"], "raise train.zero_stage to 3"),
        ("targets", ["targets.max_actors=3"], "lower targets.batch_tokens or targets.max_actors"),
        ("evaluators", [], "lower evaluate.actors"),
    ],
)
def test_a_refusal_names_the_largest_part_that_a_setting_lowers(
    preset: Path, part: str, overrides: list[str], said: str
) -> None:
    text = advice(preset, part, *overrides)
    assert text.startswith(f"{part} take 2.0 GB of it: ")
    assert said in text


@pytest.mark.parametrize("part", ["process", "vocabulary", "gradients"])
def test_what_no_setting_lowers_is_not_named(preset: Path, part: str) -> None:
    # With one rank there is nobody to deal gradients out to.
    assert advice(preset, part) == "object store take 1.0 GB of it: lower ray.object_store_mb"


def test_the_plan_shows_the_parts_of_a_rank(preset: Path) -> None:
    settings = load_settings(preset, [])
    rows = prepare_rows(settings)
    needs = needs_of(settings, rows)
    assert needs.rank.total == sum(needs.rank.parts.values()) == needs.trainer_memory
    assert "in the optimizer step: process 0.5" in printed(settings, rows)
    on_gpu = load_settings(preset, ["train.gpus=1"])
    assert needs_of(on_gpu, rows).rank.parts["process"] == 0
    assert "of GPU memory (" in printed(on_gpu, rows)


def printed(settings: Settings, rows: Any) -> str:
    console = Console(width=300, record=True)
    print_plan(console, settings, rows)
    return console.export_text()
