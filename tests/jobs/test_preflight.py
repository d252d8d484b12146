"""The plan's memory and its refusals; nothing is started."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dspark.config import Settings
from dspark.data.cache import expected_bytes
from dspark.data.codecs import Codec
from dspark.decoding.policies import Fixed
from dspark.errors import InputError
from jobs.config import load_settings
from jobs.following import step_task
from jobs.preflight import needs_of, print_plan, remedy
from jobs.rows import prepare_rows
from jobs.streams import kept_bytes, kept_rows
from jobs.train import train
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


def test_the_plan_says_where_states_come_from_and_what_a_cache_of_them_takes(preset: Path) -> None:
    rows = prepare_rows(load_settings(preset, []))
    per_token = "389 bytes per token"  # (3 taps + final) * 48 * 2 + 5
    live = printed(load_settings(preset, []), rows)
    assert per_token in live and "from targets, nothing on disk" in live
    cached = printed(load_settings(preset, ["data.source=cache", "cache.folder=/some/states"]), rows)
    assert per_token in cached and "from the cache /some/states" in cached and "nothing on disk" not in cached
    keeping = load_settings(preset, ["data.source=live_and_keep", "cache.folder=/some/states"])
    kept = printed(keeping, rows)
    assert "which keep it in a cache" in kept and " GB in /some/states (" in kept and "nothing on disk" not in kept
    assert kept_bytes(keeping, rows, kept_rows(keeping, rows)) == expected_bytes(rows.origin, Codec(), rows.tokens)
    short = load_settings(preset, ["data.source=live_and_keep", "train.max_steps=1", "cache.limit=9"])
    its_rows = prepare_rows(short)
    (shard,) = kept_rows(short, its_rows)
    assert its_rows.sample_ids == rows.sample_ids[:9] and len(shard) == 2


def test_a_dry_run_refuses_a_cache_that_could_not_be_kept_and_touches_nothing(
    preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, other = tmp_path / "new", tmp_path / "other"
    keeping = load_settings(preset, ["data.source=live_and_keep", f"cache.folder={new}", f"output={tmp_path}/runs"])
    train(keeping, None, True)
    assert not list(tmp_path.iterdir())
    free = needs_of(keeping, prepare_rows(keeping)).disk + 1000
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        with pytest.raises(InputError, match=r"the cache takes about 0\.0 GB, the run on the same disk 0\.0 GB: free"):
            train(keeping, None, True)
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(InputError, match=r"no cache of this kind begins with, such as letter\.txt"):
        train(load_settings(preset, ["data.source=live_and_keep", f"cache.folder={other}"]), None, True)
    with pytest.raises(InputError, match=r"no run\.json there"):
        train(load_settings(preset, []), other, True)


@pytest.mark.parametrize("setting", ["shard_mb=64", "window_rows=256", "max_bad_run=3"])
def test_what_only_a_capture_does_is_refused_where_training_keeps_its_cache(preset: Path, setting: str) -> None:
    with pytest.raises(InputError, match=f"data.source=live_and_keep has no cache.{setting.partition('=')[0]}: its"):
        load_settings(preset, ["data.source=live_and_keep", f"cache.{setting}"])
    load_settings(preset, [f"cache.{setting}"])


def test_a_drafter_is_followed_by_the_policy_of_the_settings_if_it_can_serve_it(preset: Path) -> None:
    settings = load_settings(preset, ["evaluate.every=8", "evaluate.slots=2"])
    assert step_task(settings, prepare_rows(settings)).policy == Fixed(2)
    with pytest.raises(InputError, match="policy fixed with 9 slots: the drafter has 4"):
        train(load_settings(preset, ["evaluate.every=8", "evaluate.slots=9"]), None, True)
    plain = ["drafter.confidence=false", "loss.confidence=0", "evaluate.policy=threshold", "evaluate.threshold=0.5"]
    with pytest.raises(InputError, match="policy threshold needs confidences"):
        train(load_settings(preset, ["evaluate.every=8", *plain]), None, True)
