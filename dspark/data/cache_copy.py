"""New caches from old ones: joined, with fewer taps, or from tables of another layout. Order is kept.

readers -> samples in their stored form, checked -> shards of the new cache -> ledger, manifest

A copy that was killed goes on when the same command is given again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dspark.data.cache import CacheWriter, check_room, expected_bytes, plan_shards
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec, pack, unpack
from dspark.data.folder import Folder
from dspark.data.manifest import Manifest, Setting
from dspark.data.origin import Origin
from dspark.data.raw_cache import RawCache
from dspark.data.shards import ShardTask, StoredSample, check_same_origin, copy_shard, write_shard
from dspark.errors import InputError

OnRows = Callable[[int], None]


@dataclass(frozen=True)
class Copy:
    """What to copy: samples of each reader, in order, in this codec; `settings` tell where they come from."""

    parts: tuple[tuple[CacheReader, tuple[str, ...]], ...]
    codec: Codec
    settings: dict[str, Setting]
    dropped: int = 0

    @property
    def rows(self) -> int:
        return sum(len(ids) for _, ids in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the samples where they are now."""
        return sum(int(reader.stored_bytes(ids).sum()) for reader, ids in self.parts)


def merged(readers: Sequence[CacheReader]) -> Copy:
    """All samples of several caches, one after the other; of equal ones the first stays, and the others are counted.

    Raises:
        InputError: the caches' origins differ; names the field.
    """
    first = readers[0]
    seen: set[str] = set()
    parts = []
    for reader in readers:
        check_same_origin(reader.origin, first.origin, f"the cache {reader.address}")
        kept = tuple(sample for sample in reader.sample_ids if sample not in seen)
        seen.update(kept)
        parts.append((reader, kept))
    settings: dict[str, Setting] = {"merged": " ".join(reader.manifest.plan for reader in readers)}
    dropped = sum(len(reader.sample_ids) for reader in readers) - len(seen)
    return Copy(tuple(parts), first.manifest.codec, settings, dropped)


def without_taps(address: str, keep: Sequence[int]) -> Copy:
    """All samples of a cache with the taps `keep` alone, in this order.

    Raises:
        InputError: the cache lacks one of them, or one is named twice.
    """
    if len(set(keep)) != len(keep):
        raise InputError(f"the taps {list(keep)} to keep name one twice")
    reader = CacheReader(address, keep)
    settings = {**reader.manifest.settings, "taps_of": reader.manifest.plan}
    return Copy(((reader, reader.sample_ids),), reader.manifest.codec, settings)


def write_copy(copy: Copy, out: str, shard_bytes: int, on_rows: OnRows) -> Manifest:
    """Writes a copy as the cache `out`, whose shards take at most `shard_bytes` (or one sample each).

    `on_rows` is told how many samples are there.

    Raises:
        InputError: `out` is another cache or holds other files, a source is damaged, or the disk is full.
    """
    refuse_own_folder(out, [reader.address for reader, _ in copy.parts])
    sources = {sample: reader for reader, ids in copy.parts for sample in ids}
    ids = list(sources)
    sizes = [size for reader, part in copy.parts for size in _sizes(reader, part, copy.codec)]
    planned = plan_shards([[row] for row in range(len(ids))], sizes, 1, shard_bytes)
    shards = [[ids[row] for row in shard] for shard in planned]

    def write(task: ShardTask, index: int) -> None:
        samples = (_recoded(sources[sample], sample, copy.codec) for sample in shards[index])
        copy_shard(task, index, shards[index], samples)

    writer = CacheWriter(out, copy.parts[0][0].origin, copy.codec, shards, copy.settings)
    return _write_all(writer, shards, sizes, write, on_rows)


def write_converted(
    raw: RawCache, rows: Mapping[str, int], origin: Origin, codec: Codec, out: str, shard_bytes: int, on_rows: OnRows
) -> Manifest:
    """Writes samples of a raw cache, by id their numbers in it, as the cache `out`; errors as in `write_copy`."""
    ids = list(rows)
    lengths = [int(raw.lengths[number]) for number in rows.values()]
    sizes = [expected_bytes(origin, codec, length) for length in lengths]
    planned = plan_shards([[row] for row in range(len(ids))], sizes, 1, shard_bytes)
    shards = [[ids[row] for row in shard] for shard in planned]

    def write(task: ShardTask, index: int) -> None:
        tables = (raw.table(origin, [rows[sample]]) for sample in shards[index])
        write_shard(task, index, shards[index], tables)

    writer = CacheWriter(out, origin, codec, shards, {"raw": raw.identity, "raw_target": raw.target})
    return _write_all(writer, shards, sizes, write, on_rows)


def _write_all(
    writer: CacheWriter,
    shards: Sequence[Sequence[str]],
    sizes: Sequence[int],
    write: Callable[[ShardTask, int], None],
    on_rows: OnRows,
) -> Manifest:
    """Writes what is unfinished of a cache, shard after shard, and finishes it."""
    with writer:
        unfinished = writer.unfinished()
        left = sum(len(shards[index]) for index in unfinished)
        # By the mean size of a sample.
        check_room(writer.task.folder, sum(sizes) * left // max(1, len(sizes)))
        done = len(sizes) - left
        for index in unfinished:
            write(writer.task, index)
            done += len(shards[index])
            on_rows(done)
        return writer.finish()


def _sizes(reader: CacheReader, samples: Sequence[str], codec: Codec) -> list[int]:
    """Bytes of samples in the new cache; where they change their form, at most."""
    if reader.manifest.codec == codec:
        return [int(size) for size in reader.stored_bytes(samples)]
    return [expected_bytes(reader.origin, codec, reader.tokens(sample)) for sample in samples]


def refuse_own_folder(out: str, sources: Sequence[str]) -> None:
    """Raises InputError if a copy would be written over what it copies."""
    if Folder(out).address in {Folder(source).address for source in sources}:
        raise InputError(f"{out} is what is to be copied: name another folder")


def _recoded(reader: CacheReader, sample: str, codec: Codec) -> StoredSample:
    """A sample in the stored form of the new cache; forms differ only where nothing is lost."""
    stored = reader.stored(sample)
    held, hidden = reader.manifest.codec, reader.origin.hidden
    values = {}
    for column, value in stored.values.items():
        if held.form(column) == codec.form(column):
            values[column] = value
        else:
            exact = np.empty(len(stored.input_ids) * hidden * 2, np.uint8)
            unpack(held.form(column), np.frombuffer(value, np.uint8), exact, hidden)
            values[column] = pack(codec.form(column), pa.py_buffer(exact), hidden)
    return stored._replace(values=values)
