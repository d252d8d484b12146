"""What the cache costs and how fast it reads, beside a raw file that is read through mmap: `make bench-cache`.

SmolLM2's states of real conversations, repeated -> raw file and caches of the same samples -> bytes, speed, memory

Cold = after fsync and POSIX_FADV_DONTNEED on every file. Raw and cache take turns, and the median of the ratios counts.
Prints a table and, as its last line, one JSON object; exits with 1 where a ratio misses its bound.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from dspark import quickstart
from dspark.capture import capture
from dspark.data.cache import CacheWriter, bytes_per_token, plan_shards
from dspark.data.cache_reader import CacheReader
from dspark.data.codecs import Codec
from dspark.data.conversations import Conversation, read_conversations
from dspark.data.manifest import Manifest
from dspark.data.origin import Origin, final_column, origin_of, schema_of, tap_column
from dspark.data.render import Renderer, Sample
from dspark.data.shards import write_shard
from dspark.sections import TargetSettings
from dspark.target import load_target

CONVERSATIONS = Path("platform/data/quickstart.jsonl")
TAPS = (1, 8, 15, 22, 28)
CHATS_PER_ROW = 4
SHARD_BYTES = 128 * 2**20
AHEAD_BYTES = 64 * 2**20
BATCH = 4
RANDOM_SAMPLES = 60
# Bound of each ratio: at most, or at least.
AT_MOST = {
    "plain_bytes": 1.002,
    "planes_bytes": 0.72,
    "cold_random_time": 1.0,
    "two_of_five_taps_bytes": 0.55,
    "writer_memory_growth": 1.1,
    "reader_memory_growth": 1.1,
}
AT_LEAST = {"cold_sequential_speed": 0.9, "warm_sequential_speed": 0.3, "warm_gb_per_s": 2.0}


def real_states(rows: int) -> pa.Table:
    """The quickstart's target over `rows` rows, each of several conversations in a row."""
    target = load_target(TargetSettings(model=quickstart.NAME, dtype="bf16"))
    renderer = Renderer(target.tokenizer, 2048, None)
    chats = read_conversations(CONVERSATIONS, {}, 0.0).rows
    samples = []
    for row in range(rows):
        several = chats[row * CHATS_PER_ROW : (row + 1) * CHATS_PER_ROW]
        joined = tuple(message for chat in several for message in chat.messages)
        sample = renderer.sample(Conversation(str(row), joined, None, row))
        assert isinstance(sample, Sample), sample
        samples.append(sample)
    origin = Origin(quickstart.NAME, "main", target.fingerprint, renderer.settings_hash, TAPS, target.hidden, "bf16")
    return capture(target, samples, origin, 2048)


def repeated(pool: pa.Table, rows: range) -> Iterator[pa.Table]:
    """Tables of one sample each: the pool's, again and again, under new ids."""
    for row in rows:
        table = pool.slice(row % pool.num_rows, 1)
        yield table.set_column(0, pool.schema.field(0), pa.array([sample_id(row)], pa.string()))


def sample_id(row: int) -> str:
    return f"{row:032d}"


def lengths(pool: pa.Table, rows: int) -> list[int]:
    own = pc.list_value_length(pool.column("input_ids")).to_pylist()
    return [own[row % len(own)] for row in range(rows)]


def write(pool: pa.Table, folder: Path, rows: int, codec: Codec, shard_bytes: int) -> Manifest:
    """A cache of `rows` samples."""
    origin = Origin(**{**vars(origin_of(pool.schema)), "codec": codec.in_origin})
    pool = pool.replace_schema_metadata(schema_of(origin).metadata)
    planned = plan_shards([[row] for row in range(rows)], lengths(pool, rows), bytes_per_token(origin), shard_bytes)
    shards = [[sample_id(row) for row in shard] for shard in planned]
    with CacheWriter(str(folder), origin, codec, shards, {}) as writer:
        for index, shard in enumerate(planned):
            write_shard(writer.task, index, shards[index], repeated(pool, shard))
        return writer.finish()


class Raw:
    """One file of the samples' bytes, and where each tensor begins: what the published code maps and copies from."""

    def __init__(self, pool: pa.Table, file: Path, rows: int) -> None:
        self.file = file
        self.columns = ["input_ids", "loss_mask", *map(tap_column, TAPS), final_column()]
        self.places: list[list[tuple[int, int]]] = []
        with file.open("wb") as out:
            for table in repeated(pool, range(rows)):
                self.places.append([])
                for column in self.columns:
                    value = table.column(column)[0]
                    data = value.values.to_numpy().tobytes() if column == "input_ids" else value.as_buffer()
                    self.places[-1].append((out.tell(), len(data)))
                    out.write(data)
            out.flush()
            os.fsync(out.fileno())

    @property
    def bytes(self) -> int:
        """Of the file, and of an index of 56 bytes a sample."""
        return self.file.stat().st_size + 56 * len(self.places)

    def read(self, rows: Sequence[int]) -> int:
        """Copies every tensor of the samples out of the map; returns the bytes."""
        copied = 0
        with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for row in rows:
                held = [np.frombuffer(mapped, np.uint8, size, at).copy() for at, size in self.places[row]]
                copied += sum(array.nbytes for array in held)
        return copied


def read(reader: CacheReader, rows: Sequence[int], batch: int) -> int:
    """Reads samples in this order, `batch` at a time; returns the tables' bytes."""
    batches = [[sample_id(row) for row in rows[at : at + batch]] for at in range(0, len(rows), batch)]
    return sum(table.nbytes for table in reader.tables(batches, AHEAD_BYTES))


def forget(folder: Path) -> None:
    """Drops the files of a folder from the page cache; they are on the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    begin = time.perf_counter()
    done = work()
    return time.perf_counter() - begin, done


def taking_turns(
    folder: Path, cold: bool, repeats: int, raw: Callable[[], int], ours: Callable[[], int]
) -> tuple[float, float, float]:
    """Median over the turns of: bytes per second of raw, of ours, and the second over the first."""
    turns = []
    if not cold:
        raw(), ours()
    for _ in range(repeats):
        speeds = []
        for work in (raw, ours):
            if cold:
                forget(folder)
            took, done = seconds(work)
            speeds.append(done / took)
        turns.append((*speeds, speeds[1] / speeds[0]))
    first, second, ratio = (statistics.median(column) for column in zip(*turns, strict=True))
    return first, second, ratio


def kernel_number(file: str, field: str) -> int:
    """What the kernel says of this process: bytes in `io`, KB in `status`."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def bytes_read(work: Callable[[], int]) -> int:
    """Bytes that this process's read calls returned, from memory or disk."""
    before = kernel_number("io", "rchar")
    work()
    return kernel_number("io", "rchar") - before


def peak_mb(pool: Path, folder: Path, task: str, rows: int) -> float:
    """How far a process of its own grows over what it has after its imports, in MB."""
    command = [sys.executable, __file__, "--child", task, str(pool), str(folder), str(rows)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def child(task: str, pool_file: Path, folder: Path, rows: int) -> None:
    """Writes or reads a cache, and prints its growth."""
    with pa.OSFile(str(pool_file)) as file:
        pool = pa.ipc.open_stream(file).read_all()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kernel_number("status", "VmRSS")
    if task == "write":
        write(pool, folder, rows, Codec(), SHARD_BYTES // 4)
    else:
        del pool
        reader = CacheReader(str(folder))
        order = np.random.default_rng(0).permutation(rows)
        batches = [[sample_id(row) for row in order[at : at + BATCH]] for at in range(0, rows, BATCH)]
        for _ in reader.tables(batches, AHEAD_BYTES):
            time.sleep(0.02)  # slower than the disk, so that all that may be ahead is
    print((kernel_number("status", "VmHWM") - before) / 1024)


def measure(scratch: Path, pool: pa.Table, rows: int, repeats: int) -> dict[str, float]:
    """All numbers, by name."""
    order = list(range(rows))
    picks = [int(row) for row in np.random.default_rng(0).permutation(rows)[:RANDOM_SAMPLES]]
    raw = Raw(pool, scratch / "raw.bin", rows)
    found: dict[str, float] = {"rows": rows, "raw_gb": raw.bytes / 1e9}
    for codec, label in ((Codec("planes"), "planes"), (Codec("plain", "int8_outlier"), "int8_outlier")):
        manifest = write(pool, scratch / label, pool.num_rows, codec, SHARD_BYTES)
        found[f"{label}_bytes"] = manifest.bytes / (bytes_per_token(manifest.origin) * manifest.tokens)
        if manifest.errors:
            found["int8_outlier_rms_error"] = max(error["rms"] for error in manifest.errors.values())
    folder = scratch / "plain"
    took, _ = seconds(lambda: write(pool, folder, rows, Codec(), SHARD_BYTES).bytes)
    found["write_gb_per_s"] = raw.bytes / took / 1e9
    found["plain_bytes"] = sum(file.stat().st_size for file in folder.iterdir()) / raw.bytes
    known = CacheReader(str(folder))
    fresh = iter([CacheReader(str(folder)) for _ in range(4 * repeats)])
    for name, cold in (("cold", True), ("warm", False)):
        # A fresh reader compares every checksum.
        first, second, ratio = taking_turns(
            scratch, cold, repeats, lambda: raw.read(order), lambda: read(next(fresh), order, BATCH)
        )
        found |= {f"raw_{name}_gb_per_s": first / 1e9, f"{name}_gb_per_s": second / 1e9}
        found[f"{name}_sequential_speed"] = ratio
    read(known, order, BATCH)
    took, done = seconds(lambda: read(known, order, BATCH))
    found["warm_again_gb_per_s"] = done / took / 1e9
    planes = CacheReader(str(scratch / "planes"))
    read(planes, range(pool.num_rows), BATCH)
    took, done = seconds(lambda: read(planes, range(pool.num_rows), BATCH))
    found["planes_warm_gb_per_s"] = done / took / 1e9
    first, second, ratio = taking_turns(
        scratch, True, repeats, lambda: raw.read(picks), lambda: read(next(fresh), picks, 1)
    )
    found |= {"raw_random_gb_per_s": first / 1e9, "random_gb_per_s": second / 1e9, "cold_random_time": 1 / ratio}
    few = CacheReader(str(folder), [TAPS[0], TAPS[3]])
    moved, whole = (bytes_read(partial(read, reader, order, BATCH)) for reader in (few, known))
    found["two_of_five_taps_bytes"] = moved / whole
    return found


def memory(scratch: Path, pool: pa.Table, rows: int) -> dict[str, float]:
    """Peak growth of writer and reader for two caches, the second three times the first."""
    file = scratch / "pool.arrow"
    with pa.ipc.new_stream(str(file), pool.schema) as stream:
        stream.write_table(pool)
    found: dict[str, float] = {}
    for task in ("write", "read"):
        small, large = (peak_mb(file, scratch / f"memory-{count}", task, count) for count in (rows // 3, rows))
        role = {"write": "writer", "read": "reader"}[task]
        found |= {f"{role}_small_mb": small, f"{role}_large_mb": large, f"{role}_memory_growth": large / small}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=360, help="samples of the caches that are timed")
    parser.add_argument("--pool", type=int, default=12, help="samples whose states are computed, then repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        task, pool_file, folder, rows = arguments.child
        child(task, Path(pool_file), Path(folder), int(rows))
        return 0
    pool = real_states(arguments.pool)
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-cache-") as scratch:
        found = measure(Path(scratch), pool, arguments.rows, arguments.repeats)
        found |= memory(Path(scratch), pool, arguments.rows)
    missed = [name for name, bound in AT_MOST.items() if found[name] > bound]
    missed += [name for name, bound in AT_LEAST.items() if found[name] < bound]
    bounds = {name: f"<= {bound:g}" for name, bound in AT_MOST.items()}
    bounds |= {name: f">= {bound:g}" for name, bound in AT_LEAST.items()}
    table = Table("number", "found", "bound")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}", bounds.get(name, "") + (" missed" if name in missed else ""))
    Console().print(table)
    print(json.dumps({name: round(value, 4) for name, value in found.items()} | {"missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
