"""The two files that make a folder of shards a cache: the ledger, and the manifest, whose presence says "complete".

manifest.json    Origin, codec, settings, every shard with its bytes and CRC-32, totals, errors of lossy taps
ledger.parquet   one row per sample, in the cache's order: its id, length, shard, and where each of its values lies
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.data.origin import Origin, origin_of, schema_of
from dspark.data.shard_record import LEDGER_SCHEMA, Distortion, ShardRecord
from dspark.errors import InputError

MANIFEST, LEDGER = "manifest.json", "ledger.parquet"
_FORMAT = "dspark-cache"

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class Shard:
    """One file of the cache."""

    file: str
    bytes: int
    crc32: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """What a complete cache says of itself; `settings` are those that decided its bits beside the Origin."""

    origin: Origin
    codec: Codec
    settings: dict[str, Setting]
    plan: str
    shards: tuple[Shard, ...]
    skipped: tuple[str, ...]
    errors: dict[str, dict[str, float]]
    ledger_bytes: int
    ledger_crc32: int

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)


def write_manifest(
    folder: Folder,
    origin: Origin,
    codec: Codec,
    settings: Mapping[str, Setting],
    plan: str,
    records: Sequence[ShardRecord],
) -> Manifest:
    """Ledger, then manifest: with the second, the cache is complete."""
    data = _ledger_bytes(origin, records)
    folder.write(LEDGER, data)
    manifest = Manifest(
        origin=origin,
        codec=codec,
        settings=dict(settings),
        plan=plan,
        shards=tuple(Shard(r.file, r.bytes, r.crc32, r.rows.num_rows, r.tokens) for r in records),
        skipped=tuple(sample for record in records for sample in record.skipped),
        errors=_errors(records),
        ledger_bytes=len(data),
        ledger_crc32=crc32(data),
    )
    folder.write(MANIFEST, _manifest_bytes(manifest))
    return manifest


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a complete cache.

    Raises:
        InputError: there is none, or it is damaged or of another version.
    """
    if MANIFEST not in folder.sizes():
        raise InputError(
            f"{folder.address} holds no {MANIFEST}: it is no cache, or one that is not yet complete; run the command "
            "that writes it again and it goes on"
        )
    where = folder.where(MANIFEST)
    try:
        values: dict[str, Any] = json.loads(folder.read(MANIFEST))
        written = values.pop("crc32")
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{where} is damaged: it is no manifest of this project's caches") from error
    if values.pop("format", None) != _FORMAT:
        raise InputError(f"{where} is no manifest of this project's caches: `dspark cache convert` reads raw caches")
    if crc32(_canonical(values)) != written:
        raise InputError(f"{where} is damaged: its checksum is another one")
    origin = values["origin"]
    return Manifest(
        origin=Origin(**{**origin, "taps": tuple(origin["taps"])}),
        codec=Codec(**values["codec"]),
        settings=values["settings"],
        plan=values["plan"],
        shards=tuple(Shard(**shard) for shard in values["shards"]),
        skipped=tuple(values["skipped"]),
        errors=values["errors"],
        ledger_bytes=values["ledger_bytes"],
        ledger_crc32=values["ledger_crc32"],
    )


def read_ledger(folder: Folder, manifest: Manifest) -> pa.Table:
    """The ledger [samples], in the cache's order, with the columns of `LEDGER_SCHEMA` and `shard`.

    Raises:
        InputError: it is missing, damaged, or another cache's.
    """
    data = folder.read(LEDGER)
    where = folder.where(LEDGER)
    if len(data) != manifest.ledger_bytes or crc32(data) != manifest.ledger_crc32:
        raise InputError(
            f"{where} is not the ledger that {MANIFEST} names: {len(data):,} bytes with checksum "
            f"{crc32(data):08x}, needed {manifest.ledger_bytes:,} with {manifest.ledger_crc32:08x}"
        )
    table = pq.read_table(pa.BufferReader(data))
    origin_of(table.schema).check_fits(manifest.origin, where)
    return table


def damaged_shards(folder: Folder, manifest: Manifest) -> list[int]:
    """Shards whose file is missing or of another size than the manifest says, ascending; reads none of them.

    Raises:
        InputError: the ledger is missing or of another size: nothing that is written again can replace it.
    """
    sizes = folder.sizes()
    if (found := sizes.get(LEDGER)) != manifest.ledger_bytes:
        state = "is missing" if found is None else f"has {found:,} bytes, the manifest says {manifest.ledger_bytes:,}"
        raise InputError(
            f"{folder.where(LEDGER)} {state}: copy it from where the cache came from, or write the cache anew into a "
            "new folder"
        )
    return [index for index, shard in enumerate(manifest.shards) if sizes.get(shard.file) != shard.bytes]


def _ledger_bytes(origin: Origin, records: Sequence[ShardRecord]) -> bytes:
    schema = LEDGER_SCHEMA.append(pa.field("shard", pa.int32(), nullable=False)).with_metadata(
        schema_of(origin).metadata
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False) as writer:
        for record in records:
            shard = pa.array([record.index] * record.rows.num_rows, pa.int32())
            writer.write_table(pa.table([*record.rows.columns, shard], schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _errors(records: Sequence[ShardRecord]) -> dict[str, dict[str, float]]:
    """Largest and root-mean-square relative error of each lossy tap over all tokens."""
    total: dict[str, Distortion] = {}
    for record in records:
        for column, found in record.distortion.items():
            total[column] = total.get(column, Distortion()) + found
    return {column: {"max": found.largest, "rms": found.rms} for column, found in total.items()}


def _manifest_bytes(manifest: Manifest) -> bytes:
    values = json.loads(json.dumps(asdict(manifest)))
    totals = {"rows": manifest.rows, "tokens": manifest.tokens, "bytes": manifest.bytes}
    values |= {"totals": totals}
    return json.dumps({"format": _FORMAT, "crc32": crc32(_canonical(values)), **values}, indent=1).encode()


def _canonical(values: object) -> bytes:
    return json.dumps(values, sort_keys=True).encode()
