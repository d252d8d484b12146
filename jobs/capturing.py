"""From settings to what `dspark capture` will do: rows, forwards, shards, bytes, and how long it takes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import ray
from rich.console import Console

from actors.placement import target_place
from actors.target import ProbeActor
from dspark.config import Settings
from dspark.data.cache import JOB, bytes_per_token, expected_bytes, plan_shards
from dspark.data.codecs import Codec
from dspark.data.folder import Folder
from dspark.data.manifest import MANIFEST, Setting
from dspark.data.origin import Origin
from dspark.data.plan import padded_share, planned_batches
from dspark.errors import InputError
from dspark.redaction import redacted
from dspark.target_files import settled
from jobs.facts import print_facts
from jobs.rows import Rows, prepare_rows

_MB = 2**20
# Forwards of the probe: long enough to be warm, short enough to wait for.
_PROBED_TOKENS = 4096


@dataclass(frozen=True)
class Capture:
    """All that is known before the first forward; rows are numbered as in `rows.table`."""

    settings: Settings  # with the precision of the target settled
    rows: Rows
    origin: Origin
    codec: Codec
    address: str
    lengths: list[int]
    batches: list[list[int]]
    shards: list[range]  # of batches

    @property
    def identity(self) -> dict[str, Setting]:
        """What decides the bits beside the origin: bf16 states depend on the rows of their forward."""
        return {
            "by": "capture",
            "targets.batch_tokens": self.settings.targets.batch_tokens,
            "cache.window_rows": self.settings.cache.window_rows,
            "cache.limit": self.settings.cache.limit,
            "cache.shard_mb": self.settings.cache.shard_mb,
        }

    @property
    def booked(self) -> Mapping[str, float]:
        """CPUs and GPUs of the target actors at their most."""
        pool = self.settings.targets
        actors = min(pool.max_actors or pool.actors, max(1, len(self.shards)))
        return {"CPU": actors * pool.cpus, "GPU": actors * pool.gpus}

    @cached_property
    def shard_ids(self) -> list[list[str]]:
        """Planned sample ids of each shard."""
        ids = self.rows.sample_ids
        return [[ids[row] for batch in self.batches_of(index) for row in batch] for index in range(len(self.shards))]

    def batches_of(self, shard: int) -> list[list[int]]:
        """Rows of each forward of a shard."""
        return [self.batches[number] for number in self.shards[shard]]

    def rows_of(self, shard: int) -> int:
        """Number of rows of a shard."""
        return sum(map(len, self.batches_of(shard)))

    def bytes_of(self, shards: Iterable[int]) -> int:
        """About how many bytes these shards take."""
        tokens = sum(self.lengths[row] for shard in shards for batch in self.batches_of(shard) for row in batch)
        return expected_bytes(self.origin, self.codec, tokens)


def plan_capture(settings: Settings, resume: str | None) -> Capture:
    """Reads and renders the rows and deals them to forwards and shards.

    Raises:
        InputError: unusable data or target, or `resume` and `cache.folder` are two folders.
    """
    cache = settings.cache
    address = Folder(cache.address(settings.output, settings.name)).address
    if resume is not None:
        if cache.folder is not None and address != Folder(resume).address:
            raise InputError(f"--resume {resume} and cache.folder={address} are two folders: leave cache.folder out")
        address = Folder(resume).address
    # Whatever training will read from: now the rows are captured, the first `cache.limit` of them.
    live = settings.data.model_copy(update={"source": "live"})
    settings = settled(settings.model_copy(update={"data": live}))
    rows = prepare_rows(settings)
    rows = replace(rows, table=rows.table.slice(0, cache.limit))
    lengths = [len(ids) for ids in rows.table.column("input_ids")]
    batches = planned_batches(lengths, cache.window_rows, settings.targets.batch_tokens)
    codec = Codec(cache.storage, cache.taps)
    origin = replace(rows.origin, codec=codec.in_origin)
    shards = plan_shards(batches, lengths, bytes_per_token(origin), cache.shard_mb * _MB)
    return Capture(settings, rows, origin, codec, address, lengths, batches, shards)


def check_resumed(address: str) -> None:
    """Raises InputError if the folder is neither a cache nor one in the making."""
    if not {JOB, MANIFEST} & Folder(address).sizes().keys():
        raise InputError(f"--resume {address}: no cache was begun there: name its folder, or leave --resume out")


def measured_rate(work: Capture) -> float:
    """Tokens per second of all actors together, measured by one of them on evenly spaced forwards of the plan."""
    settings, pool = work.settings, work.settings.targets
    mean = sum(work.lengths) / len(work.batches)
    count = min(len(work.batches), max(1, round(_PROBED_TOKENS / mean)))
    chosen = [work.batches[int(place)] for place in np.linspace(0, len(work.batches) - 1, count)]
    placed = ray.remote(**target_place("targets", pool, settings.ray.target_labels))
    actor: Any = placed(ProbeActor).remote(settings.target, pool)
    seconds = ray.get(actor.seconds.remote(work.rows.table, chosen, work.origin))
    tokens = sum(work.lengths[row] for batch in chosen for row in batch)
    return tokens / seconds * min(pool.max_actors or pool.actors, len(work.shards))


def print_capture(console: Console, work: Capture) -> None:
    """Rows, tokens, bytes and space on the screen."""
    settings, pool, tokens = work.settings, work.settings.targets, sum(work.lengths)
    per_token, plain = bytes_per_token(work.origin), bytes_per_token(work.origin) * tokens
    expected, free = work.bytes_of(range(len(work.shards))), Folder(work.address).free_bytes()
    actors = f"{pool.actors}" + (f" to {pool.max_actors}" if pool.max_actors else "")
    stored = f"storage {work.codec.storage}, taps {work.codec.taps}"
    lines = {
        "target": f"{settings.target.model}, {settings.target.dtype}, taps {list(work.origin.taps)}",
        "rows": f"{len(work.lengths):,} with {tokens:,} tokens; {len(work.rows.dropped)} dropped",
        "forwards": f"{len(work.batches):,} of at most {pool.batch_tokens:,} tokens, "
        f"{padded_share(work.batches, work.lengths):.1%} padding",
        "actors": f"{actors}, {pool.threads} threads and {pool.gpus:g} GPUs each",
        "bytes": f"{per_token:,} per token, {plain / 1e9:,.3f} GB plain; about {expected / 1e9:,.3f} GB with {stored}, "
        f"in {len(work.shards):,} shards",
        "free": "not known on this file system" if free is None else f"{free / 1e9:,.1f} GB",
        "folder": redacted(work.address),
    }
    print_facts(console, lines)


def print_time(console: Console, work: Capture, rate: float) -> None:
    """How long all of it takes at `rate` tokens per second."""
    minutes = sum(work.lengths) / rate / 60
    print_facts(console, {"time": f"about {minutes:,.1f} minutes at {rate:,.0f} tokens/s, measured just now"})
