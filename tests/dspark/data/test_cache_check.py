"""Damage to a cache: every flipped byte is found, and what is faulty is named."""

import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark.data.cache_check import Fault, first_rows, verify
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.errors import InputError
from tests.dspark.caches import SHARDS, length, name, states, write_cache


def faults(folder: Path) -> list[Fault]:
    return verify(Folder(folder), 1, lambda _: None)


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_cache(folder, Codec(storage="planes"))
    return folder


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole cache, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def test_a_cache_as_it_was_written_has_no_fault_and_every_byte_of_it_is_read(cache: Path) -> None:
    read: list[int] = []
    assert verify(Folder(cache), 2, read.append) == []
    assert sum(read) == sum(file.stat().st_size for file in cache.glob("shard-*.parquet"))


@settings(max_examples=40)
@given(st.sampled_from([0, 1, 2]), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@example(2, 0.9790805184927923, 0)  # in the footer: an integer of a width that Arrow has not
def test_every_flipped_bit_of_a_shard_is_found(whole: Path, shard: int, at: float, bit: int) -> None:
    file = whole / f"shard-{shard:06d}.parquet"
    place = int(at * file.stat().st_size)
    flip(file, place, bit)
    try:
        found = faults(whole)
    finally:
        flip(file, place, bit)
    assert [fault.file for fault in found] == [file.name]


def test_a_flipped_bit_of_a_value_is_named_with_its_row_by_verify_and_by_every_reader(cache: Path) -> None:
    reader = CacheReader(str(cache))
    # Row 1 of shard 0 is sample 1; the third of its four states is tap 5.
    flip(cache / "shard-000000.parquet", int(reader._offsets[1, 4]) + 5)
    (found,) = faults(cache)
    assert found.file == "shard-000000.parquet"
    assert found.reason == "has another checksum: row 1 (sample id-1) is damaged in tap_5"
    with pytest.raises(
        InputError, match=r"shard-000000.parquet, row 1 \(sample id-1\): its tap_5 has another checksum"
    ):
        reader.table(["id-0", "id-1"])
    assert CacheReader(str(cache), [2]).table(["id-1"]).num_rows == 1  # the damage is not read
    assert CacheReader(str(cache)).table(["id-2"]).num_rows == 1
    assert CacheReader(str(cache), check=False).table(["id-0"]).num_rows == 1


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_truncated_shard_is_named(cache: Path, size: int) -> None:
    file = cache / "shard-000001.parquet"
    whole_size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:size])
    reason = f"is truncated: {size:,} bytes, the manifest says {whole_size:,}"
    assert faults(cache) == [Fault(file.name, reason)]
    with pytest.raises(InputError, match=rf"shard-000001.parquet has {size:,} bytes, the manifest says {whole_size:,}"):
        CacheReader(str(cache)).table(["id-3"])


def test_a_missing_shard_and_one_too_many_are_named(cache: Path) -> None:
    (cache / "shard-000001.parquet").rename(cache / "shard-000009.parquet")
    assert faults(cache) == [
        Fault("shard-000001.parquet", "is missing"),
        Fault("shard-000009.parquet", "is no shard of this cache"),
    ]
    with pytest.raises(InputError, match=r"shard-000001.parquet cannot be read: .*No such file"):
        CacheReader(str(cache)).table(["id-4"])


def test_a_shard_of_another_origin_is_named_with_the_field(cache: Path, tmp_path: Path) -> None:
    write_cache(tmp_path / "other", Codec(storage="planes"), render="others")
    shutil.copy(tmp_path / "other" / "shard-000002.parquet", cache)
    (found,) = faults(cache)
    assert found.file == "shard-000002.parquet"
    assert found.reason.startswith("is another cache's: it was captured with render='others'")


def test_damage_to_ledger_and_manifest_is_found_before_anything_is_read(cache: Path) -> None:
    flip(cache / "ledger.parquet", 40)
    (found,) = faults(cache)
    assert found.file == "ledger.parquet" and "is not the ledger that manifest.json names" in found.reason
    with pytest.raises(InputError, match="is not the ledger"):
        CacheReader(str(cache))
    text = (cache / "manifest.json").read_text()
    (cache / "manifest.json").write_text(text.replace('"rows": 3', '"rows": 4', 1))
    with pytest.raises(InputError, match=r"manifest.json is damaged: its checksum is another one"):
        faults(cache)
    (cache / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"manifest.json is damaged"):
        CacheReader(str(cache))


def test_the_first_rows_are_told_with_the_norms_of_their_states(cache: Path) -> None:
    rows = list(first_rows(CacheReader(str(cache), [5]), 2))
    assert [(row.sample_id, row.tokens, row.supervised) for row in rows] == [("id-0", 1, 0), ("id-1", 8, 4)]
    assert list(rows[1].norms) == ["tap_5", "final"]
    assert rows[1].norms["tap_5"] == pytest.approx(float(states(1, 5).float().norm(dim=-1).mean()))
    assert [name(number) for number in SHARDS[0]][:2] == [row.sample_id for row in rows] and length(1) == 8
