"""Shards: parquet files of captured samples, one row group per sample, and the ledger rows that say where each lies.

tables -> stored form of each value, its CRC-32 -> row groups -> shard file, renamed into place -> its ledger part

Any process writes any shard of a cache. A shard counts once its part of the ledger stands beside it; both are whole
files. With the codec `plain` a shard is the contract's own table, readable by any parquet reader.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from dspark.data.codecs import Codec, pack, relative_errors
from dspark.data.folder import Folder, Sink
from dspark.data.manifest import MANIFEST, read_manifest
from dspark.data.origin import Origin, origin_of, schema_of
from dspark.data.shard_record import (
    LEDGER_SCHEMA,
    Distortion,
    ShardRecord,
    record_bytes,
    record_file,
    shard_file,
    value_columns,
)
from dspark.errors import InputError

_CODEC_KEY = b"dspark.codec"
# A page of parquet counts its bytes in 32 bits, and a value is never split over two.
_LARGEST_VALUE = 2**31 - 2**20
# Bytes of a page's header and of the levels of `input_ids` beside its values; more would be a second page.
_PAGE_OVERHEAD = 128


@dataclass(frozen=True)
class ShardTask:
    """What a process needs to write shards of a cache; small, and it pickles."""

    folder: str
    origin: Origin
    codec: Codec
    complete: bool = False  # the cache has its manifest, and only what it has lost is written


def shard_schema(origin: Origin, codec: Codec) -> pa.Schema:
    """Schema of a shard: the contract's, and how the columns are stored."""
    schema = schema_of(origin)
    stored = json.dumps({"storage": codec.storage, "taps": codec.taps}).encode()
    return schema.with_metadata({**schema.metadata, _CODEC_KEY: stored})


class StoredSample(NamedTuple):
    """One sample as it lies on disk; `values` by column, `distortion` for lossy taps."""

    sample_id: str
    input_ids: NDArray[np.int32]
    loss_mask: pa.Buffer
    values: dict[str, pa.Buffer]
    distortion: dict[str, Distortion]


def write_shard(task: ShardTask, index: int, planned: Sequence[str], tables: Iterable[pa.Table]) -> ShardRecord:
    """Writes shard `index` from captured tables, one after the other; only one of them is in memory.

    `planned` are the ids of the samples that belong to the shard; those that no table brings are recorded as skipped.

    Raises:
        InputError: a table's origin is not the cache's (names the field), a value cannot be stored, the disk is full.
    """
    with new_shard(task, index, planned) as shard:
        for table in tables:
            shard.add(table)
    return shard.record


def is_written(task: ShardTask, index: int) -> bool:
    """Whether a shard is there: with its part of the ledger, or in a cache that is complete."""
    names = Folder(task.folder).sizes().keys()
    return shard_file(index) in names and bool({record_file(index), MANIFEST} & names)


def copy_shard(task: ShardTask, index: int, planned: Sequence[str], samples: Iterable[StoredSample]) -> ShardRecord:
    """`write_shard` of samples that are already in the form in which the cache stores them."""
    with new_shard(task, index, planned) as shard:
        for sample in samples:
            shard.add_stored(sample)
    return shard.record


@contextmanager
def new_shard(task: ShardTask, index: int, planned: Sequence[str]) -> Iterator["NewShard"]:
    """A shard to be filled; at the end it is there, with its part of the ledger, or after an error nothing of it is.

    For whoever has something to say between two tables; errors as in `write_shard`. In a cache that is complete it
    takes the place of one that was damaged: it needs no part of the ledger, but has to be the one that was there.
    """
    folder = Folder(task.folder)
    damaged = read_manifest(folder).shards[index] if task.complete else None
    with folder.create(shard_file(index)) as sink:
        shard = NewShard(task, sink)
        try:
            yield shard
        except BaseException:
            # Closing a writer that has failed fails too, with another error than the first.
            with suppress(Exception):
                shard.close()
            raise
        rows = shard.close()
        if damaged is not None and (sink.size, sink.crc32) != (damaged.bytes, damaged.crc32):
            raise InputError(
                f"{folder.where(damaged.file)} was damaged, and what was written again has other bytes than the "
                "manifest says, as another device, number of threads, or version of torch or pyarrow gives: repeat it "
                "where the cache was written, or write it anew into a new folder"
            )
    found = rows.column("sample_id").to_pylist()
    known = set(found)
    assert len(known) == len(found) and known <= set(planned), f"shard {index} was given samples that are not its own"
    skipped = tuple(sample for sample in planned if sample not in known)
    shard.record = ShardRecord(index, sink.size, sink.crc32, rows, skipped, shard.distortion)
    if damaged is None:
        folder.write(record_file(index), record_bytes(shard.record))


def _packed(task: ShardTask, table: pa.Table) -> Iterator[StoredSample]:
    """The samples of a captured table as they go to disk."""
    found = origin_of(table.schema)
    # What a target gave is exact, whatever the cache will lose of it.
    given = replace(found, codec=task.origin.codec) if found.codec == Codec().in_origin else found
    check_same_origin(given, task.origin, "a captured table")
    for row in range(table.num_rows):
        yield _packed_row(task, table, row)


def _packed_row(task: ShardTask, table: pa.Table, row: int) -> StoredSample:
    hidden = task.origin.hidden
    sample = table.column("sample_id")[row].as_py()
    ids = table.column("input_ids")[row].values.to_numpy()
    values: dict[str, pa.Buffer] = {}
    distortion: dict[str, Distortion] = {}
    for column in value_columns(task.origin.taps)[2:]:
        exact = table.column(column)[row].as_buffer()
        assert exact.size == len(ids) * hidden * 2, f"{column} of {sample} has {exact.size} bytes"
        if exact.size > _LARGEST_VALUE:
            raise InputError(
                f"the sample {sample} has {len(ids)} tokens: {column} would take {exact.size:,} bytes, a value on disk "
                f"at most {_LARGEST_VALUE:,}: lower data.max_length"
            )
        form = task.codec.form(column)
        values[column] = pack(form, exact, hidden)
        if form == "int8_outlier":
            errors = relative_errors(exact, values[column], hidden)
            distortion[column] = Distortion(float(errors.max()), float((errors**2).sum()), len(errors))
    return StoredSample(sample, ids, table.column("loss_mask")[row].as_buffer(), values, distortion)


class NewShard:
    """Writes samples to a sink, one row group each. `record` is there once the shard is."""

    record: ShardRecord

    def __init__(self, task: ShardTask, sink: Sink) -> None:
        self._task, self._sink = task, sink
        self._schema = shard_schema(task.origin, task.codec)
        self._columns = value_columns(task.origin.taps)
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._sizes: list[list[int]] = []
        self._crcs: list[list[int]] = []
        self.distortion: dict[str, Distortion] = {}
        self._metadata: list[Any] = []
        self._writer = pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"),
            self._schema,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            data_page_size=_LARGEST_VALUE,
            metadata_collector=self._metadata,
        )

    @property
    def bytes(self) -> int:
        """Written so far."""
        return self._sink.size

    def add(self, table: pa.Table) -> None:
        """Writes the samples of a captured table."""
        for sample in _packed(self._task, table):
            self.add_stored(sample)

    def add_stored(self, sample: StoredSample) -> None:
        """Writes a sample that is in its stored form."""
        self._writer.write_table(self._row(sample), row_group_size=1)

    def close(self) -> pa.Table:
        """Ends the file; the ledger rows of all that was written."""
        self._writer.close()
        return self._ledger(self._metadata[0])

    def _row(self, sample: StoredSample) -> pa.Table:
        """One sample as a table, counted in the ledger."""
        ids, mask = np.asarray(sample.input_ids, dtype="<i4"), sample.loss_mask
        assert mask.size == len(ids), f"{sample.sample_id} has {len(ids)} tokens and {mask.size} of its loss mask"
        stored = [pa.py_buffer(ids.tobytes()), mask, *(sample.values[column] for column in self._columns[2:])]
        self._ids.append(sample.sample_id)
        self._lengths.append(len(ids))
        self._sizes.append([value.size for value in stored])
        self._crcs.append([crc32(value) for value in stored])
        for column, found in sample.distortion.items():
            self.distortion[column] = self.distortion.get(column, Distortion()) + found
        arrays = [
            pa.array([sample.sample_id], pa.string()),
            pa.array([ids], pa.list_(pa.int32())),
            _one_value(pa.binary(), np.int32, mask),
            *(_one_value(pa.large_binary(), np.int64, value) for value in stored[2:]),
        ]
        return pa.table(arrays, schema=self._schema)

    def _ledger(self, metadata: Any) -> pa.Table:
        """Where each value lies: at the end of its column's only page."""
        offsets = []
        for row, sizes in enumerate(self._sizes):
            group = metadata.row_group(row)
            chunks = [group.column(i) for i in range(1, group.num_columns)]
            over = [chunk.total_compressed_size - size for chunk, size in zip(chunks, sizes, strict=True)]
            assert all(0 < extra <= _PAGE_OVERHEAD for extra in over), over
            offsets.append(
                [c.data_page_offset + c.total_compressed_size - size for c, size in zip(chunks, sizes, strict=True)]
            )
        columns = [self._ids, self._lengths, offsets, self._sizes, self._crcs]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, LEDGER_SCHEMA, strict=True)]
        return pa.table(arrays, schema=LEDGER_SCHEMA)


def check_same_origin(found: Origin, needed: Origin, where: str) -> None:
    """Passes iff the origins are equal, where a target may have another name.

    Raises:
        InputError: names the first differing field.
    """
    found.check_fits(needed, where)
    if found.taps != needed.taps:
        raise InputError(f"{where} was captured with taps={found.taps}, this run needs {needed.taps}")


def _one_value(kind: pa.DataType, offset: type[np.integer[Any]], value: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(np.array([0, value.size], dtype=offset)), value])
