"""Shards: parquet files of captured samples, one row group per sample, and the ledger rows that say where each lies.

tables -> stored form of each value, its CRC-32 -> row groups -> shard file, renamed into place -> its part of the ledger

Any process writes any shard of a cache. A shard counts once its part of the ledger stands beside it; both are whole
files. With the codec `plain` a shard is the contract's own table, readable by any parquet reader.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dspark.data.captures import Origin, final_column, origin_of, schema_of, tap_column
from dspark.data.codecs import Codec, pack, relative_errors
from dspark.data.folder import Folder, Sink
from dspark.errors import InputError

_SHARD_KEY, _CODEC_KEY = b"dspark.shard", b"dspark.codec"
# A page of parquet counts its bytes in 32 bits, and a value is never split over two.
_LARGEST_VALUE = 2**31 - 2**20
# Bytes of a page's header and of the levels of `input_ids` beside its values; more would be a second page.
_PAGE_OVERHEAD = 128
# Where the values of a sample lie in its shard, one entry per column of `value_columns`.
LEDGER_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("sizes", pa.list_(pa.int64()), nullable=False),
        pa.field("crc32", pa.list_(pa.uint32()), nullable=False),
    ]
)


@dataclass(frozen=True)
class ShardTask:
    """What a process needs to write shards of a cache; small, and it pickles."""

    folder: str
    origin: Origin
    codec: Codec


@dataclass(frozen=True)
class Distortion:
    """Relative errors of one lossy tap over tokens: their largest, the sum of their squares, their number."""

    largest: float = 0.0
    squares: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Distortion") -> "Distortion":
        return Distortion(
            max(self.largest, other.largest), self.squares + other.squares, self.tokens + other.tokens
        )

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return float((self.squares / self.tokens) ** 0.5) if self.tokens else 0.0


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard: its file, its ledger rows, and the planned samples that it was not given."""

    index: int
    bytes: int
    crc32: int
    rows: pa.Table
    skipped: tuple[str, ...]
    distortion: dict[str, Distortion]

    @property
    def file(self) -> str:
        return shard_file(self.index)

    @property
    def tokens(self) -> int:
        return int(self.rows.column("length").to_numpy().sum())


def shard_file(index: int) -> str:
    """Name of a shard."""
    return f"shard-{index:06d}.parquet"


def record_file(index: int) -> str:
    """Name of a shard's part of the ledger, which is there until the ledger is written."""
    return f"shard-{index:06d}.ledger"


def value_columns(taps: Sequence[int]) -> list[str]:
    """Columns whose place the ledger knows, in the order of the file; the sample's id is in the ledger itself."""
    return ["input_ids", "loss_mask", *(tap_column(tap) for tap in taps), final_column()]


def shard_schema(origin: Origin, codec: Codec) -> pa.Schema:
    """Schema of a shard: the contract's, and how the columns are stored."""
    schema = schema_of(origin)
    stored = json.dumps({"storage": codec.storage, "taps": codec.taps}).encode()
    return schema.with_metadata({**schema.metadata, _CODEC_KEY: stored})


def write_shard(task: ShardTask, index: int, planned: Sequence[str], tables: Iterable[pa.Table]) -> ShardRecord:
    """Writes shard `index` from captured tables, one after the other; only one of them is in memory.

    `planned` are the ids of the samples that belong to the shard; those that no table brings are recorded as skipped.

    Raises:
        InputError: a table's origin is not the cache's (names the field), a value cannot be stored, or the disk is full.
    """
    folder = Folder(task.folder)
    with folder.create(shard_file(index)) as sink:
        rows, distortion = _Rows(task, sink).write(tables)
    found = rows.column("sample_id").to_pylist()
    known = set(found)
    assert len(known) == len(found) and known <= set(planned), f"shard {index} was given samples that are not its own"
    skipped = tuple(sample for sample in planned if sample not in known)
    record = ShardRecord(index, sink.size, sink.crc32, rows, skipped, distortion)
    folder.write(record_file(index), _record_bytes(record))
    return record


class _Rows:
    """Writes tables to a sink, sample by sample."""

    def __init__(self, task: ShardTask, sink: Sink) -> None:
        self._task, self._sink = task, sink
        self._schema = shard_schema(task.origin, task.codec)
        self._columns = value_columns(task.origin.taps)
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._sizes: list[list[int]] = []
        self._crcs: list[list[int]] = []
        self._distortion: dict[str, Distortion] = {}

    def write(self, tables: Iterable[pa.Table]) -> tuple[pa.Table, dict[str, Distortion]]:
        """The ledger rows of all that was written, and the errors of lossy taps."""
        metadata: list[Any] = []
        writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"),
            self._schema,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            data_page_size=_LARGEST_VALUE,
            metadata_collector=metadata,
        )
        try:
            for table in tables:
                check_same_origin(origin_of(table.schema), self._task.origin, "a captured table")
                for row in range(table.num_rows):
                    writer.write_table(self._stored(table, row), row_group_size=1)
        finally:
            writer.close()
        return self._ledger(metadata[0]), self._distortion

    def _stored(self, table: pa.Table, row: int) -> pa.Table:
        """One sample as it goes to disk."""
        hidden = self._task.origin.hidden
        sample = table.select(self._schema.names).slice(row, 1)
        ids = np.asarray(sample.column("input_ids")[0].values.to_numpy(), dtype="<i4")
        mask = sample.column("loss_mask")[0].as_buffer()
        values: dict[str, pa.Buffer] = {"input_ids": pa.py_buffer(ids.tobytes()), "loss_mask": mask}
        assert mask.size == len(ids)
        self._ids.append(sample.column("sample_id")[0].as_py())
        self._lengths.append(len(ids))
        for column in self._columns[2:]:
            exact = sample.column(column)[0].as_buffer()
            assert exact.size == len(ids) * hidden * 2, f"{column} of {self._ids[-1]} has {exact.size} bytes"
            if exact.size > _LARGEST_VALUE:
                raise InputError(
                    f"the sample {self._ids[-1]} has {len(ids)} tokens: {column} would take {exact.size:,} bytes, a "
                    f"value on disk at most {_LARGEST_VALUE:,}: lower data.max_length"
                )
            values[column] = self._packed(column, exact)
        self._sizes.append([values[column].size for column in self._columns])
        self._crcs.append([zlib.crc32(values[column]) for column in self._columns])
        columns = [sample.column("sample_id"), sample.column("input_ids"), sample.column("loss_mask")]
        columns += [_one_value(values[column]) for column in self._columns[2:]]
        return pa.table(columns, schema=self._schema)

    def _packed(self, column: str, exact: pa.Buffer) -> pa.Buffer:
        form, hidden = self._task.codec.form(column), self._task.origin.hidden
        stored = pack(form, exact, hidden)
        if form == "int8_outlier":
            errors = relative_errors(exact, stored, hidden)
            seen = Distortion(float(errors.max(initial=0.0)), float((errors**2).sum()), len(errors))
            self._distortion[column] = self._distortion.get(column, Distortion()) + seen
        return stored

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
        return pa.table([pa.array(c, f.type) for c, f in zip(columns, LEDGER_SCHEMA, strict=True)], schema=LEDGER_SCHEMA)


def check_same_origin(found: Origin, needed: Origin, where: str) -> None:
    """Passes iff the origins are equal, where a target may have another name.

    Raises:
        InputError: names the first differing field.
    """
    found.check_fits(needed, where)
    if found.taps != needed.taps:
        raise InputError(f"{where} was captured with taps={found.taps}, this run needs {needed.taps}")


def _one_value(value: pa.Buffer) -> pa.Array:
    offsets: NDArray[np.int64] = np.array([0, value.size], dtype=np.int64)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), value])


def _record_bytes(record: ShardRecord) -> bytes:
    facts = {
        "bytes": record.bytes,
        "crc32": record.crc32,
        "skipped": record.skipped,
        "distortion": {
            column: [found.largest, found.squares, found.tokens] for column, found in record.distortion.items()
        },
    }
    sink = pa.BufferOutputStream()
    pq.write_table(record.rows.replace_schema_metadata({_SHARD_KEY: json.dumps(facts).encode()}), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_record(folder: Folder, index: int) -> ShardRecord:
    """The record of a shard whose part of the ledger is there.

    Raises:
        InputError: that part is damaged.
    """
    data = folder.read(record_file(index))
    try:
        table = pq.read_table(pa.BufferReader(data))
        facts = json.loads(table.schema.metadata[_SHARD_KEY])
        rows = table.replace_schema_metadata(None).cast(LEDGER_SCHEMA)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder.where(record_file(index))} is damaged: delete it, and the shard is written again"
        ) from error
    distortion = {column: Distortion(*numbers) for column, numbers in facts["distortion"].items()}
    return ShardRecord(index, facts["bytes"], facts["crc32"], rows, tuple(facts["skipped"]), distortion)
