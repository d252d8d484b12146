"""What is known of one finished shard: where each of its values lies. Beside it until the ledger joins them all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

from dspark.data.folder import Folder
from dspark.data.origin import final_column, tap_column
from dspark.errors import InputError

_SHARD_KEY = b"dspark.shard"
_MARK_BYTES = 4
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
class Distortion:
    """Relative errors of one lossy tap over tokens: their largest, the sum of their squares, their number."""

    largest: float = 0.0
    squares: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Distortion") -> "Distortion":
        return Distortion(max(self.largest, other.largest), self.squares + other.squares, self.tokens + other.tokens)

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


def record_bytes(record: ShardRecord) -> bytes:
    """The content of a shard's part of the ledger."""
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
    return data + _mark(data)


def _mark(data: bytes) -> bytes:
    """What stands behind a part's content: its CRC-32, for what it says of the shard goes into the manifest."""
    return crc32(data).to_bytes(_MARK_BYTES, "little")


def read_record(folder: Folder, index: int) -> ShardRecord:
    """The record of a shard whose part of the ledger is there.

    Raises:
        InputError: that part is damaged.
    """
    found = folder.read(record_file(index))
    data = found[:-_MARK_BYTES]
    if found != data + _mark(data):
        raise InputError(f"{folder.where(record_file(index))} is damaged: delete it, and the shard is written again")
    table = pq.read_table(pa.BufferReader(data))
    facts = json.loads(table.schema.metadata[_SHARD_KEY])
    rows = table.replace_schema_metadata(None).cast(LEDGER_SCHEMA)
    distortion = {column: Distortion(*numbers) for column, numbers in facts["distortion"].items()}
    return ShardRecord(index, facts["bytes"], facts["crc32"], rows, tuple(facts["skipped"]), distortion)
