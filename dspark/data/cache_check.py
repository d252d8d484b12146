"""Whether every byte of a cache is the one that was written, and a look at its first rows.

manifest -> ledger -> each shard: there, of its size, its CRC-32; of a faulty one, whose it is, which rows are damaged
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

from dspark.data.cache_reader import CacheReader
from dspark.data.captures import bf16_column
from dspark.data.folder import Folder
from dspark.data.manifest import LEDGER, Manifest, Shard, read_ledger, read_manifest
from dspark.data.origin import final_column, origin_of, tap_column
from dspark.data.shard_record import value_columns
from dspark.data.shards import check_same_origin
from dspark.errors import InputError

_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Fault:
    """A file of the cache that is not what the manifest says, and why."""

    file: str
    reason: str


def verify(folder: Folder, workers: int, on_bytes: Callable[[int], None]) -> list[Fault]:
    """All faults of a cache, in the order of its files; every byte is read once, in `workers` threads.

    `on_bytes` is told how many bytes were read, from several threads. Memory: some megabytes for each of them.

    Raises:
        InputError: there is no manifest, or it is damaged, so that nothing else can be judged.
    """
    manifest = read_manifest(folder)
    try:
        ledger = read_ledger(folder, manifest)
    except InputError as error:
        return [Fault(LEDGER, str(error))]
    sizes = folder.sizes()
    known = {shard.file for shard in manifest.shards}
    strange = sorted(name for name in sizes.keys() - known if name.endswith(".parquet") and name != LEDGER)

    def check(number: int) -> list[Fault]:
        return list(_shard_faults(folder, manifest, ledger, number, sizes.get(manifest.shards[number].file), on_bytes))

    with ThreadPoolExecutor(workers) as pool:
        faults = [fault for found in pool.map(check, range(len(manifest.shards))) for fault in found]
    return faults + [Fault(name, "is no shard of this cache") for name in strange]


def _shard_faults(
    folder: Folder,
    manifest: Manifest,
    ledger: pa.Table,
    number: int,
    size: int | None,
    on_bytes: Callable[[int], None],
) -> Iterator[Fault]:
    shard = manifest.shards[number]
    if size is None:
        yield Fault(shard.file, "is missing")
        return
    if (other := _foreign(folder, manifest, shard)) is not None:
        yield Fault(shard.file, f"is another cache's: {other}")
    elif size != shard.bytes:
        what = "is truncated" if size < shard.bytes else "is too long"
        yield Fault(shard.file, f"{what}: {size:,} bytes, the manifest says {shard.bytes:,}")
    elif _crc32(folder, shard.file, on_bytes) != shard.crc32:
        rows = list(_damaged_rows(folder, manifest, ledger, number))
        yield Fault(shard.file, f"has another checksum: {'; '.join(rows) or 'damaged outside its rows'}")


def _foreign(folder: Folder, manifest: Manifest, shard: Shard) -> str | None:
    """How a shard's own Origin differs from the cache's; None too if it can no longer be read."""
    try:
        with folder.open(shard.file) as file:
            origin = origin_of(pq.read_schema(file))
        check_same_origin(origin, manifest.origin, "it")
    except InputError as error:
        return str(error)
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):  # sizes and checksums say more of such damage
        return None
    return None


def _crc32(folder: Folder, name: str, on_bytes: Callable[[int], None]) -> int:
    found = 0
    with folder.open(name) as file:
        while data := file.read(_CHUNK_BYTES):
            found = crc32(data, found)
            on_bytes(len(data))
    return found


def _damaged_rows(folder: Folder, manifest: Manifest, ledger: pa.Table, number: int) -> Iterator[str]:
    """Rows of a shard with the columns whose values have another checksum than the ledger's."""
    names = value_columns(manifest.origin.taps)
    with folder.open(manifest.shards[number].file) as file:
        for row, entry in enumerate(ledger.filter(pc.equal(ledger.column("shard"), number)).to_pylist()):
            places = zip(names, entry["offsets"], entry["sizes"], entry["crc32"], strict=True)
            if wrong := [name for name, at, size, crc in places if crc32(file.read_at(size, at)) != crc]:
                yield f"row {row} (sample {entry['sample_id']}) is damaged in {', '.join(wrong)}"


@dataclass(frozen=True)
class Row:
    """One sample of a cache: its size, and the mean norm of each of its states over the tokens."""

    sample_id: str
    tokens: int
    supervised: int
    norms: dict[str, float]


def first_rows(reader: CacheReader, count: int) -> Iterator[Row]:
    """The first samples, read one at a time."""
    origin = reader.origin
    for sample in reader.sample_ids[:count]:
        table = reader.table([sample])
        mask = table.column("loss_mask")[0].as_py()
        norms = {
            name: float(bf16_column(table, name, 0, origin.hidden).float().norm(dim=-1).mean())
            for name in [*map(tap_column, origin.taps), final_column()]
        }
        yield Row(sample, len(mask), sum(mask), norms)
