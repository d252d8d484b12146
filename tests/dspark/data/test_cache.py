"""Caches: what is written comes back bit for bit, in any order; what does not belong together is refused by name."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.data.cache import CacheWriter, bytes_per_token, check_room, expected_bytes, plan_shards
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.data.origin import origin_of, tap_column
from dspark.data.shards import is_written, write_shard
from dspark.errors import InputError
from tests.dspark.caches import HIDDEN, PLAIN, SHARDS, TAPS, name, origin_for, planned, table, write_cache

ALL = [number for shard in SHARDS for number in shard]


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> dict[Codec, str]:
    """The same samples in each lossless codec."""
    folders = {codec: str(tmp_path_factory.mktemp(codec.storage)) for codec in (PLAIN, Codec(storage="planes"))}
    for codec, folder in folders.items():
        write_cache(folder, codec)
    return folders


@settings(max_examples=25)
@given(st.lists(st.sampled_from(ALL), max_size=9), st.lists(st.sampled_from(TAPS), unique=True))
def test_any_samples_in_any_order_with_any_taps_come_back_bit_for_bit(
    lossless: dict[Codec, str], numbers: list[int], taps: list[int]
) -> None:
    for folder in lossless.values():
        reader = CacheReader(folder, taps)
        found = reader.table([name(number) for number in numbers])
        found.validate(full=True)
        assert origin_of(found.schema) == reader.origin == origin_for(taps=tuple(taps))
        assert found.num_rows == len(numbers)
        if numbers:
            assert found.equals(table(numbers, taps=tuple(taps)), check_metadata=True)


def test_a_plain_shard_is_the_contracts_table_for_any_parquet_reader(tmp_path: Path) -> None:
    manifest = write_cache(tmp_path)
    for shard, numbers in zip(manifest.shards, SHARDS, strict=True):
        found = pq.read_table(tmp_path / shard.file)
        assert found.equals(table(numbers))
        assert origin_of(found.schema) == origin_for()
        groups = pq.read_metadata(tmp_path / shard.file)
        assert groups.num_row_groups == groups.num_rows == len(numbers)


def test_a_cache_knows_its_samples_their_lengths_and_its_size(tmp_path: Path) -> None:
    manifest = write_cache(tmp_path)
    reader = CacheReader(str(tmp_path))
    assert reader.sample_ids == tuple(f"id-{number}" for number in range(7))
    assert reader.lengths.tolist() == [1, 8, 4, 11, 7, 3, 10]
    assert (manifest.rows, manifest.tokens) == (7, 44)
    assert manifest.bytes == sum((tmp_path / shard.file).stat().st_size for shard in manifest.shards)
    assert sorted(os.listdir(tmp_path)) == [
        ".lock",
        "ledger.parquet",
        "manifest.json",
        *(s.file for s in manifest.shards),
    ]


@pytest.mark.parametrize("codec", [PLAIN, Codec("planes", "int8_outlier")])
def test_a_cache_may_lie_wherever_fsspec_reaches(codec: Codec, tmp_path: Path) -> None:
    address = "memory://caches/one"
    fsspec.filesystem("memory").store.clear()
    write_cache(address, codec)
    write_cache(tmp_path, codec)
    far, near = CacheReader(address, [5, -1]), CacheReader(f"file://{tmp_path}", [5, -1])
    assert far.table(["id-6", "id-0"]).equals(near.table(["id-6", "id-0"]), check_metadata=True)
    assert not [
        file for file in fsspec.filesystem("memory").find("/caches/one") if not file.endswith(("parquet", "json"))
    ]


def test_an_address_of_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(InputError, match="nowhere://x is on no file system that pyarrow or fsspec knows"):
        Folder("nowhere://x")


def test_lossy_taps_stand_in_the_origin_and_their_errors_in_the_manifest(tmp_path: Path) -> None:
    manifest = write_cache(tmp_path, Codec(taps="int8_outlier"))
    found = CacheReader(str(tmp_path)).table([name(number) for number in ALL])
    exact = table(ALL)
    assert found.column("final").equals(exact.column("final"))
    assert not found.column(tap_column(2)).equals(exact.column(tap_column(2)))
    assert all(0 < error["rms"] < error["max"] < 0.01 for error in manifest.errors.values())
    assert list(manifest.errors) == [tap_column(tap) for tap in TAPS]
    with pytest.raises(InputError, match="codec='int8_outlier', this run needs 'plain'"):
        CacheReader(str(tmp_path)).origin.check_fits(origin_for(), "the cache")


def test_byte_planes_are_no_matter_of_the_origin(tmp_path: Path) -> None:
    write_cache(tmp_path, Codec(storage="planes"))
    CacheReader(str(tmp_path), [2]).origin.check_fits(origin_for(taps=(2,)), "the cache")


def test_batches_fill_shards_in_order_and_are_never_divided() -> None:
    batches = [[0, 1], [2], [3, 4], [5], [6]]
    lengths = [3, 3, 2, 9, 9, 4, 4]
    # Sizes 60, 20, 180, 40, 40: the third is larger than a shard, and passes alone.
    assert plan_shards(batches, lengths, 10, 100) == [range(0, 2), range(2, 3), range(3, 5)]
    assert plan_shards([], [], 10, 100) == []


def test_a_planned_sample_that_no_table_brings_is_recorded_as_skipped(tmp_path: Path) -> None:
    with CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {}) as writer:
        write_shard(writer.task, 0, planned()[0], [table([0]), table([2])])
        write_shard(writer.task, 1, planned()[1], [table(SHARDS[1])])
        write_shard(writer.task, 2, planned()[2], [])
        assert writer.unfinished() == []
        manifest = writer.finish()
    assert manifest.skipped == ("id-1", "id-5", "id-6")
    assert CacheReader(str(tmp_path)).sample_ids == ("id-0", "id-2", "id-3", "id-4")


def test_a_writer_goes_on_where_another_stopped(tmp_path: Path) -> None:
    def writer() -> CacheWriter:
        return CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {"batch_tokens": 64})

    with writer() as begun:
        assert begun.unfinished() == [0, 1, 2]
        write_shard(begun.task, 1, planned()[1], [table([3]), table([4])])
        with pytest.raises(InputError, match="lacks 2 shards, the first is 0"):
            begun.finish()
    (tmp_path / ".shard-000000.parquet.1234.partial").write_bytes(b"half")
    (tmp_path / "shard-000002.parquet").write_bytes(b"without its part of the ledger")
    with pytest.raises(InputError, match=r"holds no manifest.json: .* not yet complete"):
        CacheReader(str(tmp_path))
    with writer() as resumed:
        assert resumed.unfinished() == [0, 2]
        assert not list(tmp_path.glob("*.partial"))
        for index in (2, 0):
            write_shard(resumed.task, index, planned()[index], [table(SHARDS[index])])
        resumed.finish()
    assert CacheReader(str(tmp_path)).table([name(n) for n in ALL]).equals(table(ALL))
    with writer() as again:
        assert again.unfinished() == []
        assert again.finish().rows == 7


def test_a_finished_shard_that_was_cut_since_is_written_again(tmp_path: Path) -> None:
    with CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {}) as writer:
        for index in (0, 1, 2):
            record = write_shard(writer.task, index, planned()[index], [table(SHARDS[index])])
        os.truncate(tmp_path / record.file, record.bytes - 1)
        assert writer.unfinished() == [2]
    with CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {}) as again:
        # Who looks at the names alone sees it too.
        assert not again.all_written and [is_written(again.task, index) for index in (0, 1, 2)] == [True, True, False]
        write_shard(again.task, 2, planned()[2], [table(SHARDS[2])])
        again.finish()
    assert CacheReader(str(tmp_path)).table([name(n) for n in ALL]).equals(table(ALL))


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"origin": replace(origin_for(), render="others")}, "render='render', this run needs 'others'"),
        ({"origin": origin_for(taps=(-1, 2))}, r"taps=\(-1, 2, 5\), this run needs \(-1, 2\)"),
        ({"codec": Codec(storage="planes")}, "codec.storage='plain', this run has 'planes'"),
        ({"settings": {"batch_tokens": 32}}, "batch_tokens=64, this run has 32"),
        ({"shards": planned(((0, 1), (2, 3, 4), (5, 6)))}, "plan='"),
    ],
)
def test_a_folder_begun_with_other_settings_is_refused_naming_the_field(
    tmp_path: Path, complete: bool, change: dict[str, Any], message: str
) -> None:
    usual: dict[str, Any] = {
        "origin": origin_for(),
        "codec": PLAIN,
        "shards": planned(),
        "settings": {"batch_tokens": 64},
    }
    if complete:
        write_cache(tmp_path)
    else:
        with CacheWriter(str(tmp_path), **usual):
            pass
    with pytest.raises(InputError, match=message), CacheWriter(str(tmp_path), **usual | change):
        pass


def test_a_second_writer_and_a_folder_of_other_files_are_refused(tmp_path: Path) -> None:
    def writer(folder: Path) -> CacheWriter:
        return CacheWriter(str(folder), origin_for(), PLAIN, planned(), {})

    with writer(tmp_path / "a"), pytest.raises(InputError, match=f"written by another process .process {os.getpid()}"):
        writer(tmp_path / "a").__enter__()
    with writer(tmp_path / "a") as again:
        assert again.unfinished() == [0, 1, 2]
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"holds 1 files .* such as letter.txt"):
        writer(tmp_path).__enter__()


def test_what_a_cache_does_not_hold_is_named(tmp_path: Path) -> None:
    write_cache(tmp_path)
    with pytest.raises(InputError, match=r"lacks taps \[3\]: it holds \[-1, 2, 5\]"):
        CacheReader(str(tmp_path), [2, 3])
    with pytest.raises(InputError, match="does not hold the sample id-9"):
        CacheReader(str(tmp_path)).table(["id-0", "id-9"])


def test_a_table_of_another_origin_enters_no_shard(tmp_path: Path) -> None:
    with (
        CacheWriter(str(tmp_path), replace(origin_for(), render="others"), PLAIN, planned(), {}) as writer,
        pytest.raises(InputError, match="render='render', this run needs 'others'"),
    ):
        write_shard(writer.task, 0, planned()[0], [table([0])])
    assert not list(tmp_path.glob("*shard*"))


def test_states_that_lost_something_enter_no_exact_cache(tmp_path: Path) -> None:
    write_cache(tmp_path / "lossy", Codec(taps="int8_outlier"))
    lossy = CacheReader(str(tmp_path / "lossy")).table(["id-0"])
    with (
        CacheWriter(str(tmp_path / "exact"), origin_for(), PLAIN, planned(), {}) as writer,
        pytest.raises(InputError, match="codec='int8_outlier', this run needs 'plain'"),
    ):
        write_shard(writer.task, 0, planned()[0], [lossy])


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: what a full disk does, but to one test."""
    soft, hard = getrlimit(RLIMIT_FSIZE)
    setrlimit(RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 3000, 9000])
def test_a_disk_that_is_full_in_mid_write_leaves_no_half_shard(tmp_path: Path, size: int) -> None:
    with CacheWriter(str(tmp_path), origin_for(), PLAIN, planned(), {}) as writer:
        write_shard(writer.task, 1, planned()[1], [table(SHARDS[1])])
        with (
            largest_file(size),
            pytest.raises(InputError, match=r"shard-000000.parquet cannot be written, after .* bytes: File too large"),
        ):
            write_shard(writer.task, 0, planned()[0], [table(SHARDS[0])])
        assert sorted(path.name for path in tmp_path.glob("*shard*")) == ["shard-000001.ledger", "shard-000001.parquet"]
        assert writer.unfinished() == [0, 2]


def test_an_error_of_what_is_written_is_not_told_as_the_disks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"), Folder(tmp_path).create("file") as sink:
        sink.write(b"begun")
        (tmp_path / "elsewhere").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_tables_read_ahead_come_in_order(tmp_path: Path) -> None:
    write_cache(tmp_path)
    batches = [["id-6", "id-1"], ["id-3"], [], ["id-0", "id-2", "id-4"]]
    read = CacheReader(str(tmp_path)).tables(batches, ahead_bytes=1)
    assert [found.column("sample_id").to_pylist() for found in read] == batches
    faulty = CacheReader(str(tmp_path)).tables([["id-1"], ["id-9"]], ahead_bytes=10**6)
    assert next(faulty).column("sample_id").to_pylist() == ["id-1"]
    with pytest.raises(InputError, match="does not hold the sample id-9"):
        next(faulty)


def test_threads_may_share_a_reader(tmp_path: Path) -> None:
    many = list(range(40))  # more shards than a reader keeps open
    write_cache(tmp_path, shards=[(number,) for number in many])
    reader = CacheReader(str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: reader.table([name(number)]), many * 2))
    assert pa.concat_tables(found).equals(table(many * 2))


def test_a_cache_that_cannot_fit_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    origin = origin_for()
    assert bytes_per_token(origin) == 4 * HIDDEN * 2 + 5 == expected_bytes(origin, PLAIN, 1)
    assert expected_bytes(origin_for(Codec("planes", "int8_outlier")), Codec("planes", "int8_outlier"), 100) == round(
        100 * (3 * 0.54 * 128 + 0.72 * 128 + 5)
    )
    check_room(str(tmp_path / "not" / "yet"), 1000)
    check_room("memory://anywhere", 10**18)
    with pytest.raises(InputError, match=r"GB of free space, the cache takes about 1,000,000,000.0 GB"):
        check_room(str(tmp_path), 10**18)
