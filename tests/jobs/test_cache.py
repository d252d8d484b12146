"""`dspark cache`: what it prints, what it writes, and its exit codes."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dspark.capture import capture
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.origin import Origin
from dspark.data.render import Sample, sample_id
from dspark.sections import TargetSettings
from dspark.target import load_target
from dspark.target_files import fingerprint
from jobs import cli
from tests.dspark.caches import name, table, write_cache
from tests.dspark.raw_caches import write_raw
from tests.tiny import tiny_target_folder

COMMANDS = ["info", "head", "verify", "merge", "drop-taps", "convert"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Exit code of `dspark cache ...`."""
    monkeypatch.setattr(sys, "argv", ["dspark", "cache", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli.app, ["cache", command, "--help"])
    assert result.exit_code == 0
    assert f"Usage: root cache {command}" in result.output
    listed = CliRunner().invoke(cli.app, ["cache", "--help"]).output
    assert f" {command} " in listed


def test_info_and_head_tell_what_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    manifest = write_cache(tmp_path, Codec("planes", "int8_outlier"))
    assert run(monkeypatch, "info", tmp_path) == 0
    told = {
        line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1].strip() for line in capsys.readouterr().out.splitlines()
    }
    assert told["target"] == "name, revision main, weights weights"
    assert told["states"] == "taps -1, 2, 5 and final (post_norm), width 64, computed in bf16"
    assert (told["rows"], told["tokens"], told["settings"]) == ("7, 0 planned ones skipped", "44", "batch_tokens=64")
    assert told["bytes"] == f"{manifest.bytes:,} bytes in 3 shards, {manifest.bytes / 44:,.0f} per token"
    assert told["storage"] == "planes, taps int8_outlier"
    assert told["errors"].startswith(f"tap_-1: rms {manifest.errors['tap_-1']['rms']:.2e}, largest ")
    assert run(monkeypatch, "head", tmp_path, "-n", "2") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["sample", "tokens", "supervised", "tap_-1", "tap_2", "tap_5", "final"]
    assert [line[:3] for line in lines[1:3]] == [["id-0", "1", "0"], ["id-1", "8", "4"]]


def test_verify_exits_1_and_names_each_faulty_shard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_cache(tmp_path)
    assert run(monkeypatch, "verify", tmp_path) == 0
    assert "3 shards, 7 rows" in capsys.readouterr().out
    (tmp_path / "shard-000000.parquet").unlink()
    (tmp_path / "shard-000002.parquet").write_bytes(b"short")
    assert run(monkeypatch, "verify", tmp_path) == 1
    faults = capsys.readouterr().err.splitlines()
    assert faults[0] == "damaged: shard-000000.parquet is missing"
    assert faults[1].startswith("damaged: shard-000002.parquet is truncated: 5 bytes")
    assert "writes them again" in faults[2]
    assert run(monkeypatch, "verify", tmp_path / "nothing") == 2
    assert "holds no manifest.json" in capsys.readouterr().err


def test_merge_and_drop_taps_write_what_they_said_and_nothing_on_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a, b, joined, few = (tmp_path / part for part in ("a", "b", "joined", "few"))
    write_cache(a, shards=[(0, 1)])
    write_cache(b, shards=[(1, 2)])
    assert run(monkeypatch, "merge", a, b, joined, "--dry-run") == 0
    assert "3, 1 duplicates dropped" in capsys.readouterr().out
    assert not joined.exists()
    assert run(monkeypatch, "merge", a, b, joined) == 0
    assert run(monkeypatch, "drop-taps", joined, few, "--keep", "5,-1") == 0
    assert CacheReader(str(few)).table([name(n) for n in (0, 1, 2)]).equals(table([0, 1, 2], taps=(5, -1)))
    assert run(monkeypatch, "merge", a, joined) == 2
    assert "name at least two caches" in capsys.readouterr().err
    assert run(monkeypatch, "drop-taps", joined, few, "--keep", "5;1") == 2
    assert "--keep '5;1': numbers with commas" in capsys.readouterr().err


def test_a_converted_raw_cache_is_the_targets_own_and_another_target_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_target: Path
) -> None:
    target = load_target(TargetSettings(model=str(tiny_target), dtype="bf16"))
    rows = [np.arange(size, dtype=np.int32) + 60 for size in (9, 5, 12)]
    masks = [(ids % 3 > 0).astype(np.uint8) for ids in rows]
    samples = [Sample(sample_id(i, m), "c", None, i, m) for i, m in zip(rows, masks, strict=True)]
    origin = Origin("published/name", "main", fingerprint(tiny_target), "theirs", (0, 3), 48, "bf16")
    captured = capture(target, samples, origin, 64)
    raw, out = write_raw(tmp_path / "raw", [captured]), tmp_path / "out"
    arguments: list[str | Path] = ["convert", raw, out, "--target", tiny_target, "--render", "theirs"]
    assert run(monkeypatch, *arguments, "--dry-run") == 0
    assert not out.exists()
    assert run(monkeypatch, *arguments) == 0
    capsys.readouterr()
    reader = CacheReader(str(out))
    reader.origin.check_fits(origin, "the cache")
    assert reader.table([sample.sample_id for sample in samples]).equals(captured)
    other = tiny_target_folder(tmp_path / "other", seed=1)
    shutil.rmtree(out)
    assert run(monkeypatch, "convert", raw, out, "--target", other) == 2
    assert "stored states are not those of" in capsys.readouterr().err
    assert not out.exists()
    assert run(monkeypatch, "convert", raw, out, "--target", other, "--no-prove", "--storage", "planes") == 0
    assert CacheReader(str(out)).origin.render.startswith("raw-")
