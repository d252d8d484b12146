"""`dspark capture` through real Ray: every bit of a planned forward, samples that overflow, folders that do not fit."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.evaluator import EvaluatorActor
from actors.pools import answered, evaluated
from actors.responder import AnswerTask
from dspark.capture import capture as capture_here
from dspark.config import Settings
from dspark.data.cache import CacheWriter
from dspark.data.cache_reader import CacheReader
from dspark.data.plan import padded_share
from dspark.data.rows import sample_at
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError
from dspark.target import load_target
from jobs import cli
from jobs.capture import SKIPPED, capture, finish, written_by_actors
from jobs.capturing import plan_capture
from jobs.config import load_settings
from jobs.rows import prepare_rows
from jobs.train import train
from tests.conftest import tiny_preset
from tests.tiny import tiny_target_folder, tiny_tokenizer


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, local_ray: None
) -> tuple[Path, Settings, list[dict[str, Any]]]:
    """The preset, the settings with which its 33 rows were captured into a cache of two shards, by two actors, and what
    these told of each forward."""
    folder = tmp_path_factory.mktemp("captured")
    preset = tiny_preset(folder, tiny_target, rows=40)
    overrides = [f"cache.folder={folder / 'cache'}", "cache.limit=33", "cache.shard_mb=1", "cache.window_rows=16"]
    settings = load_settings(preset, [*overrides, "drafter.taps=[-1,0,1,2,4]", "targets.max_actors=2"])
    work = plan_capture(settings, None)
    with CacheWriter(work.address, work.origin, work.codec, work.shard_ids, work.identity) as writer:
        news = list(written_by_actors(work, writer, writer.unfinished()))
        finish(work, writer)
    return preset, settings, news


@pytest.fixture(scope="module")
def captured(told: tuple[Path, Settings, list[dict[str, Any]]]) -> tuple[Path, Settings]:
    return told[:2]


def test_the_cache_holds_what_the_target_gives_for_each_planned_forward(captured: tuple[Path, Settings]) -> None:
    _, settings = captured
    torch.set_num_threads(settings.targets.threads)  # as its actors did: the order of a sum is theirs
    work = plan_capture(settings, None)
    assert len(work.shards) == 2 and len(work.batches) > 4
    assert padded_share(work.batches, work.lengths) < 0.05
    reader, target = CacheReader(work.address), load_target(work.settings.target)
    assert reader.sample_ids == tuple(name for shard in work.shard_ids for name in shard)
    assert set(reader.sample_ids) == set(work.rows.sample_ids) and len(reader.sample_ids) == 33
    for batch in work.batches:
        samples = [sample_at(work.rows.table, row) for row in batch]
        expected = capture_here(target, samples, work.origin, settings.targets.batch_tokens)
        assert reader.table([sample.sample_id for sample in samples]).equals(expected, check_metadata=True)


def test_a_complete_cache_is_left_alone(captured: tuple[Path, Settings], capsys: pytest.CaptureFixture[str]) -> None:
    _, settings = captured
    address = str(settings.cache.folder)

    def files() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in Path(address).glob("[a-z]*")}

    before = files()
    capture(settings, address, False, False)
    assert capsys.readouterr().out.splitlines()[-1] == address
    assert files() == before and len(before) == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["drafter.taps=[0,2]"], r"taps=\(-1, 0, 1, 2, 4\), this run needs \(0, 2\)"),
        (["data.max_length=100"], "render="),
        (["targets.batch_tokens=256"], "targets.batch_tokens=512, this run has 256"),
        (["cache.window_rows=8"], "cache.window_rows=16, this run has 8"),
        (["cache.taps=int8_outlier"], "codec='plain'"),
    ],
)
def test_a_folder_of_other_settings_is_refused_by_name(
    captured: tuple[Path, Settings], changes: list[str], named: str
) -> None:
    preset, settings = captured
    same = [f"cache.folder={settings.cache.folder}", "cache.limit=33", "cache.shard_mb=1", "cache.window_rows=16"]
    other = load_settings(preset, [*same, "drafter.taps=[-1,0,1,2,4]", *changes])
    for dry_run in (True, False):
        with pytest.raises(InputError, match=named):
            capture(other, None, dry_run, False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            [],
            r"lacks 7 of 40 samples, such as that of the conversation row-33: .* or set cache\.limit=33, as",
        ),
        (["drafter.taps=[0,3]"], r"lacks taps \[3\]"),
        (["target.dtype=bf16"], "dtype='fp32', this run needs 'bf16'"),
        (["cache.taps=int8_outlier"], "codec='plain', this run needs 'int8_outlier'"),
        (["cache.folder=nowhere"], "holds no manifest.json"),
    ],
)
def test_training_is_refused_before_it_starts_when_the_cache_does_not_fit(
    captured: tuple[Path, Settings], changes: list[str], named: str
) -> None:
    preset, settings = captured
    with pytest.raises(InputError, match=named):
        train(
            load_settings(preset, ["data.source=cache", f"cache.folder={settings.cache.folder}", *changes]), None, True
        )


def test_the_limit_of_a_cache_is_that_of_the_rows_that_are_trained_from_it(captured: tuple[Path, Settings]) -> None:
    preset, settings = captured
    same = ["data.source=cache", f"cache.folder={settings.cache.folder}", "cache.limit=33"]
    rows = prepare_rows(load_settings(preset, same))
    assert rows.sample_ids == plan_capture(settings, None).rows.sample_ids and len(rows.sample_ids) == 33
    assert len(prepare_rows(load_settings(preset, [*same, "cache.limit=5"])).sample_ids) == 5


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preset whose target has no finite state after a `z`, which the rows 5 and 6 of 12 hold."""
    folder = tmp_path_factory.mktemp("overflowing")
    target = tiny_target_folder(folder / "target", "qwen3")
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][tiny_tokenizer().encode("z")[0]] = torch.inf
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    preset = tiny_preset(folder, target, rows=12)
    lines = (folder / "train.jsonl").read_text().splitlines()
    lines[5:7] = [line.replace("say", "zay") for line in lines[5:7]]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return preset


def test_samples_that_overflow_are_skipped_counted_named_and_no_longer_trained_on(
    overflowing: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(overflowing, [f"cache.folder={overflowing.parent / 'cache'}"])
    capture(settings, None, False, False)
    assert "2 samples were skipped" in capsys.readouterr().out
    skipped = [json.loads(line) for line in (overflowing.parent / "cache" / SKIPPED).read_text().splitlines()]
    assert sorted(entry["conversation"] for entry in skipped) == ["row-5", "row-6"]
    reader = CacheReader(str(settings.cache.folder))
    assert set(reader.manifest.skipped) == {entry["sample_id"] for entry in skipped}
    cached = load_settings(overflowing, ["data.source=cache", f"cache.folder={settings.cache.folder}"])
    rows = prepare_rows(cached)
    assert set(rows.sample_ids) == set(reader.sample_ids) and len(rows.sample_ids) == 10
    assert [(one.id, one.reason) for one in rows.dropped] == [
        ("row-5", "its states were not finite"),
        ("row-6", "its states were not finite"),
    ]


def test_the_estimate_says_rows_bytes_space_and_time_and_writes_nothing(
    captured: tuple[Path, Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, _ = captured
    settings = load_settings(preset, [f"cache.folder={tmp_path / 'new'}", "cache.storage=planes"])
    capture(settings, None, False, True)
    told = " ".join(capsys.readouterr().out.split())
    work = plan_capture(settings, None)
    assert f"40 with {sum(work.lengths):,} tokens" in told
    assert "389 per token" in told and "storage planes" in told and "GB" in told  # (3 taps + final) * 48 * 2 + 5
    assert "tokens/s, measured just now" in told
    assert not (tmp_path / "new").exists()


def test_what_cannot_fit_is_refused_before_anything_is_started_or_loaded(
    captured: tuple[Path, Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No GPU is there: an estimate that began would say so.
    settings = load_settings(captured[0], [f"cache.folder={tmp_path / 'new'}", "targets.gpus=1"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="GB of free space, the cache takes about"):
        capture(settings, None, False, True)


def test_no_actor_with_a_target_waits_for_a_node_that_no_label_selects(
    captured: tuple[Path, Settings], tmp_path: Path
) -> None:
    labels = ["ray.target_labels={role: nobody}", f"cache.folder={tmp_path / 'new'}"]
    settings = load_settings(captured[0], labels)
    needed = r"no place for an actor of {}, .*one needs 1 logical CPUs on a node with labels {{'role': 'nobody'}}"
    for estimate in (True, False):
        with pytest.raises(InputError, match=needed.format("targets")):
            capture(settings, None, False, estimate)
    with pytest.raises(InputError, match=needed.format("evaluate")):
        next(evaluated(EvaluatorActor, (), [], settings))
    task = AnswerTask(settings.target, settings.prepare, None, Sampling(), 64)
    with pytest.raises(InputError, match=needed.format("prepare")):
        next(answered(task, [], settings.ray.target_labels))


def test_a_folder_that_was_not_begun_is_not_resumed(
    captured: tuple[Path, Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark", "capture", str(captured[0]), "--resume", str(tmp_path), "--dry-run"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "no cache was begun there" in capsys.readouterr().err


def test_every_forward_is_told_with_what_it_added(told: tuple[Path, Settings, list[dict[str, Any]]]) -> None:
    _, settings, news = told
    work, manifest = plan_capture(settings, None), CacheReader(str(settings.cache.folder)).manifest
    assert len(work.batches) > 4 and sum(1 for one in news if one["rows"] == 0) == len(work.shards)
    assert sorted(one["rows"] for one in news if one["rows"]) == sorted(map(len, work.batches))
    assert sum(one["tokens"] for one in news) == manifest.tokens == sum(work.lengths)
    assert sum(one["bytes"] for one in news) == manifest.bytes
