"""Capture through the whole pipeline beside the bare forward of the target: `make bench-capture`.

real conversations -> planned forwards -> one target actor -> shards, ledger, manifest     from the first forward on
                                      └-> the same forwards in this process, nothing kept  before it and after it

Prints a table and, as its last line, one JSON object; exits with 1 where the ratio misses its bound.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dspark.capture import padded_ids
from dspark.data.cache import CacheWriter
from dspark.data.plan import padded_share
from dspark.data.rows import sample_at
from dspark.target import load_target
from jobs.capture import finish, written_by_actors
from jobs.capturing import Capture, plan_capture
from jobs.config import load_settings
from jobs.session import ray_session

PRESET = Path("platform/presets/smollm2_135m.yaml")
AT_LEAST = 0.9


def bare_seconds(work: Capture, batches: Sequence[Sequence[int]]) -> float:
    """The target's forwards over these rows, padded alike; states are thrown away."""
    target = load_target(work.settings.target)
    inputs = [padded_ids([sample_at(work.rows.table, row) for row in batch], target.device) for batch in batches]
    for ids in inputs[:1] + inputs[-1:]:
        target.states(ids, ())
    since = time.perf_counter()
    for ids in inputs:
        target.states(ids, ())
    return time.perf_counter() - since


def pipeline_seconds(work: Capture) -> tuple[float, float, int]:
    """Seconds from the first forward to the manifest, seconds from Ray's start to the first forward, bytes."""
    since = time.time()
    with (
        ray_session(work.settings, work.booked),
        CacheWriter(work.address, work.origin, work.codec, work.shard_ids, work.identity) as writer,
    ):
        results = list(written_by_actors(work, writer, writer.unfinished()))
        manifest = finish(work, writer)
        ended = time.time()
    began = min(result["began"] for result in results)
    return ended - began, began - since, manifest.bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500, help="conversations that are captured, some 108 tokens each")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of the actor, and of the bare forward"
    )
    parser.add_argument("--dtype", default="auto", help="bf16, fp32, or auto: bf16 where it is native")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-capture-") as scratch:
        overrides = [f"cache.folder={scratch}/cache", f"cache.limit={arguments.rows}", "data.max_length=4096"]
        overrides += [f"target.dtype={arguments.dtype}", f"targets.threads={arguments.threads}", "cache.shard_mb=64"]
        work = plan_capture(load_settings(PRESET, overrides), None)
        tokens, half = sum(work.lengths), len(work.batches) // 2
        # Halves before and after: what else the machine does by and by weighs on both sides alike.
        bare = bare_seconds(work, work.batches[:half])
        took, start, size = pipeline_seconds(work)
        bare += bare_seconds(work, work.batches[half:])
    found = {
        "tokens": tokens,
        "padding": padded_share(work.batches, work.lengths),
        "pipeline_tokens_per_s": tokens / took,
        "bare_tokens_per_s": tokens / bare,
        "ratio": bare / took,
        "start_up_s": start,
        "bytes_per_token": size / tokens,
    }
    table = Table("number", "found", "bound")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}", f">= {AT_LEAST:g}" if name == "ratio" else "")
    Console().print(table)
    facts = {"dtype": work.settings.target.dtype, "threads": arguments.threads, "shards": len(work.shards)}
    missed = ["ratio"] if found["ratio"] < AT_LEAST else []
    print(json.dumps({name: round(value, 4) for name, value in found.items()} | facts | {"missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
