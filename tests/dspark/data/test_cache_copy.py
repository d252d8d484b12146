"""New caches from old ones: order, bits and counts; raw caches are read to the last byte or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.data.cache import bytes_per_token
from dspark.data.cache_copy import merged, without_taps, write_converted, write_copy
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.origin import tap_column
from dspark.data.raw_cache import RawCache
from dspark.data.render import sample_id
from dspark.errors import InputError
from tests.dspark.caches import PLAIN, SHARDS, TAPS, name, origin_for, table, write_cache
from tests.dspark.raw_caches import write_raw

SMALL_SHARD = 4000


def ignore(_: int) -> None:
    """Nobody watches."""


def test_merged_caches_keep_their_order_and_the_first_of_equal_samples(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", shards=[(4, 2), (0,)])
    write_cache(tmp_path / "b", Codec(storage="planes"), shards=[(3, 2), (1, 0, 5)])
    copy = merged([CacheReader(str(tmp_path / part)) for part in "ab"])
    assert (copy.rows, copy.dropped) == (6, 2)
    told: list[int] = []
    manifest = write_copy(copy, str(tmp_path / "out"), SMALL_SHARD, told.append)
    reader = CacheReader(str(tmp_path / "out"))
    assert reader.sample_ids == tuple(name(number) for number in (4, 2, 0, 3, 1, 5))
    assert reader.table(reader.sample_ids).equals(table([4, 2, 0, 3, 1, 5]), check_metadata=True)
    assert len(manifest.shards) > 2 and told[-1] == 6
    token = bytes_per_token(origin_for())
    assert all(shard.tokens * token <= SMALL_SHARD or shard.rows == 1 for shard in manifest.shards)
    assert (manifest.codec, manifest.settings["merged"]) == (PLAIN, copy.settings["merged"])


def test_caches_of_another_origin_are_not_merged(tmp_path: Path) -> None:
    write_cache(tmp_path / "a")
    write_cache(tmp_path / "b", fingerprint="others")
    with pytest.raises(InputError, match=r"b was captured with target='name'|fingerprint='others'"):
        merged([CacheReader(str(tmp_path / part)) for part in "ab"])


@pytest.mark.parametrize("codec", [PLAIN, Codec("planes", "int8_outlier")])
def test_a_cache_with_fewer_taps_holds_the_same_bits_in_the_asked_order(tmp_path: Path, codec: Codec) -> None:
    whole = write_cache(tmp_path / "a", codec)
    manifest = write_copy(without_taps(str(tmp_path / "a"), [5, -1]), str(tmp_path / "out"), 10**6, ignore)
    few, all_taps = CacheReader(str(tmp_path / "out")), CacheReader(str(tmp_path / "a"), [5, -1])
    assert few.origin == all_taps.origin == origin_for(codec, (5, -1))
    assert few.table(few.sample_ids).equals(all_taps.table(few.sample_ids), check_metadata=True)
    assert [len(manifest.shards), manifest.rows] == [1, 7]
    for tap, error in manifest.errors.items():
        assert error == pytest.approx(whole.errors[tap])
    assert set(manifest.errors) == (set() if codec == PLAIN else {"tap_5", "tap_-1"})


def test_a_copy_is_refused_over_its_source_and_of_a_tap_named_twice(tmp_path: Path) -> None:
    write_cache(tmp_path / "a")
    with pytest.raises(InputError, match="is what is to be copied"):
        write_copy(without_taps(str(tmp_path / "a"), [5]), f"file://{tmp_path}/a/", 10**6, ignore)
    with pytest.raises(InputError, match=r"\[5, 5\] to keep name one twice"):
        without_taps(str(tmp_path / "a"), [5, 5])


def test_a_raw_cache_keeps_its_order_its_bits_and_one_of_equal_samples(tmp_path: Path) -> None:
    raw = RawCache(write_raw(tmp_path / "raw", [table([3, 0, 6]), table([2, 0])]))
    assert (raw.taps, raw.hidden, raw.lengths.tolist()) == (TAPS, 64, [11, 1, 10, 4, 1])
    rows = {sample: number for number, sample in raw.unique()}
    assert list(rows.values()) == [0, 1, 2, 3]
    manifest = write_converted(raw, rows, origin_for(), PLAIN, str(tmp_path / "out"), SMALL_SHARD, ignore)
    reader = CacheReader(str(tmp_path / "out"))
    found, wanted = reader.table(reader.sample_ids), table([3, 0, 6, 2])
    assert found.drop_columns("sample_id").equals(wanted.drop_columns("sample_id"))
    ids = [np.array(ids, np.int32) for ids in wanted.column("input_ids").to_pylist()]
    masks = [np.frombuffer(mask, np.uint8) for mask in wanted.column("loss_mask").to_pylist()]
    assert list(reader.sample_ids) == [sample_id(*row) for row in zip(ids, masks, strict=True)]
    assert manifest.settings == {"raw": raw.identity, "raw_target": "name"}
    assert not np.array_equal(found.column(tap_column(2)), found.column(tap_column(5)))


def cut(folder: Path, file: str, size: int) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:size])


def padded(folder: Path) -> None:
    data = bytearray((folder / "shard-00000.bin").read_bytes())
    data[4 * 11 + 10] = 0  # the last of the attention mask of the first sample
    (folder / "shard-00000.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "fields", "message"),
    [
        (lambda raw: (raw / "manifest.json").unlink(), {}, r"manifest.json cannot be read \(No such file"),
        (lambda raw: (raw / "manifest.json").write_text("{}"), {}, "is no manifest of a raw cache: KeyError"),
        (ignore, {"hidden_dtype": "float8_e4m3fn"}, "hidden_dtype='float8_e4m3fn', only 'bfloat16' can be converted"),
        (ignore, {"version": 3}, "version=3, only 2 can be converted"),
        (ignore, {"num_samples": 4}, "samples.idx has 168 bytes, 4 samples take 224"),
        (lambda raw: (raw / "samples.idx").unlink(), {}, "samples.idx cannot be read"),
        (lambda raw: (raw / "shard-00000.bin").unlink(), {}, r"shard-00000.bin is missing"),
        (lambda raw: cut(raw, "shard-00000.bin", 9000), {}, "has 9,000 bytes, its samples take"),
        (padded, {}, "sample 0 of .* holds padding"),
    ],
)
def test_a_faulty_raw_cache_is_refused_by_what_is_wrong(
    tmp_path: Path, harm: Callable[[Path], Any], fields: dict[str, Any], message: str
) -> None:
    raw = write_raw(tmp_path / "raw", [table([3, 0, 6])], **fields)
    harm(raw)
    with pytest.raises(InputError, match=message):
        list(RawCache(raw).unique())


def test_a_killed_copy_goes_on_and_one_of_other_sources_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "a")
    write_cache(tmp_path / "b", shards=[(8,)])
    copy = without_taps(str(tmp_path / "a"), [2])
    (tmp_path / "a" / "shard-000001.parquet").rename(tmp_path / "aside")
    with pytest.raises(InputError, match=r"shard-000001.parquet cannot be read"):
        write_copy(copy, str(tmp_path / "out"), 600, ignore)
    there = (tmp_path / "out" / "shard-000000.parquet").stat()
    (tmp_path / "aside").rename(tmp_path / "a" / "shard-000001.parquet")
    with pytest.raises(InputError, match=r"was begun with taps_of="):
        write_copy(without_taps(str(tmp_path / "b"), [2]), str(tmp_path / "out"), 600, ignore)
    write_copy(copy, str(tmp_path / "out"), 600, ignore)
    assert (tmp_path / "out" / "shard-000000.parquet").stat() == there
    numbers = [number for shard in SHARDS for number in shard]
    reader = CacheReader(str(tmp_path / "out"))
    assert reader.table(reader.sample_ids).equals(table(numbers, taps=(2,)))
