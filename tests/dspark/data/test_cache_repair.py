"""A cache that is complete and has lost something: shards come back with their bytes or not at all."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark.data.cache import CacheWriter
from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.data.shard_record import read_record, record_file
from dspark.data.shards import is_written, write_shard
from dspark.errors import InputError
from tests.dspark.caches import PLAIN, SHARDS, origin_for, planned, table, write_cache


@pytest.mark.parametrize("codec", [PLAIN, Codec(storage="planes", taps="int8_outlier")])
@pytest.mark.parametrize("damage", ["cut", "missing", "killed behind the file"])
def test_of_a_complete_cache_only_damaged_shards_are_written_again(tmp_path: Path, damage: str, codec: Codec) -> None:
    # The target lies in another folder by now.
    elsewhere = replace(origin_for(codec), target="elsewhere")

    def writer() -> CacheWriter:
        return CacheWriter(str(tmp_path), elsewhere, codec, planned(), {"batch_tokens": 64})

    manifest = write_cache(tmp_path, codec)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    damaged = tmp_path / manifest.shards[1].file
    if damage == "missing":
        damaged.unlink()
    else:
        os.truncate(damaged, manifest.shards[1].bytes - 1)
    assert writer().unfinished() == [1]
    with writer() as repairing:
        assert repairing.unfinished() == [1] and not repairing.all_written
        assert [is_written(repairing.task, index) for index in (0, 1, 2)] == [True, False, True]
        with pytest.raises(InputError, match="lacks 1 shards, the first is 1"):
            repairing.finish()
        write_shard(repairing.task, 1, planned()[1], [table(SHARDS[1])])
        assert repairing.all_written
        if damage != "killed behind the file":
            assert repairing.finish() == manifest
    with writer() as again:
        assert again.unfinished() == [] and again.finish() == manifest
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_shard_that_would_come_back_with_other_bytes_is_never_there(tmp_path: Path) -> None:
    before = write_cache(tmp_path)
    for shard in before.shards[1:]:
        (tmp_path / shard.file).unlink()
    other = table(SHARDS[1])
    states = pa.array([bytes(len(value.as_py())) for value in other.column("final")], pa.large_binary())
    other = other.set_column(other.column_names.index("final"), other.schema.field("final"), states)
    with CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {"batch_tokens": 64}) as repairing:
        with pytest.raises(InputError, match=f"{before.shards[1].file} was damaged, .* has other bytes"):
            write_shard(repairing.task, 1, planned()[1], [other])
        assert repairing.unfinished() == [1, 2] and not (tmp_path / before.shards[1].file).exists()
        for index in (1, 2):
            write_shard(repairing.task, index, planned()[index], [table(SHARDS[index])])
        assert repairing.finish() == before


@pytest.mark.parametrize("state", ["is missing", "has 4 bytes"])
def test_a_complete_cache_without_its_ledger_is_no_success(tmp_path: Path, state: str) -> None:
    write_cache(tmp_path)
    ledger = tmp_path / "ledger.parquet"
    ledger.unlink()
    if state != "is missing":
        ledger.write_bytes(b"half")
    writer = CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {"batch_tokens": 64})
    with pytest.raises(InputError, match=f"ledger.parquet {state}"):
        writer.unfinished()
    with pytest.raises(InputError, match=f"ledger.parquet {state}"), writer:
        pass


def test_a_cache_goes_on_under_the_name_that_its_target_had_when_it_was_begun(tmp_path: Path) -> None:
    for target in ("there", "elsewhere"):
        with CacheWriter(str(tmp_path), replace(origin_for(), target=target), PLAIN, planned(), {}) as writer:
            index = writer.unfinished()[0]
            write_shard(writer.task, index, planned()[index], [table(SHARDS[index])])
            found = {pq.read_schema(file).metadata[b"dspark.origin"] for file in tmp_path.glob("shard-*.parquet")}
    assert len(found) == 1 and b"there" in found.pop()


def test_a_damaged_part_of_the_ledger_is_named_wherever_a_bit_is_flipped(tmp_path: Path) -> None:
    with CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {}) as writer:
        assert write_shard(writer.task, 0, planned()[0], [table(SHARDS[0])]) == read_record(Folder(tmp_path), 0)
    part = tmp_path / record_file(0)
    data = bytearray(part.read_bytes())
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        part.write_bytes(data)
        with pytest.raises(InputError, match="is damaged: delete it"):
            read_record(Folder(tmp_path), 0)
        data[at] ^= 1 << at % 8
    for size in range(len(data)):
        part.write_bytes(data[:size])
        with pytest.raises(InputError, match="is damaged: delete it"):
            read_record(Folder(tmp_path), 0)
