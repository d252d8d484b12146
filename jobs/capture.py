"""`dspark capture`: token rows to a cache of hidden states, shard by shard, by target actors on Ray.

rows -> batches by length -> shards -> target actors: forward, write -> ledger, list of skipped samples, manifest
"""

import json
import math
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any

import ray
from rich.console import Console

from actors.pools import written_shards
from dspark.config import Settings
from dspark.data.cache import CacheWriter, check_room
from dspark.data.folder import Folder
from dspark.data.manifest import Manifest
from dspark.errors import InputError
from dspark.redaction import redacted
from jobs.capturing import Capture, check_resumed, measured_rate, plan_capture, print_capture, print_time
from jobs.checkpoints import with_local_start
from jobs.config import check_files
from jobs.progress import stage
from jobs.session import ray_session

SKIPPED = "skipped.jsonl"


def capture(settings: Settings, resume: str | None, dry_run: bool, estimate: bool) -> None:
    """Writes the cache; with `dry_run` only says what would happen, with `estimate` also how long it would take.

    Raises:
        InputError: anything that a user, a file or the machine can mend; finished shards stay.
    """
    console = Console()
    settings = with_local_start(settings)
    check_files(settings)
    work = plan_capture(settings, resume)
    if resume is not None:
        check_resumed(work.address)
    writer = CacheWriter(work.address, work.origin, work.codec, work.shard_ids, work.identity)
    writer.check()
    print_capture(console, work)
    if dry_run or estimate:
        check_room(work.address, work.bytes_of(writer.unfinished()))
        if estimate:
            with ray_session(work.settings, work.booked):
                print_time(console, work, measured_rate(work))
        return
    with writer:
        missing = writer.unfinished()
        check_room(work.address, work.bytes_of(missing))
        if missing:
            with (
                ray_session(work.settings, work.booked),
                closing(written_by_actors(work, writer, missing)) as results,
            ):
                _fill(console, work, missing, results)
        manifest = finish(work, writer)
    _print_result(console, work, manifest)


def written_by_actors(work: Capture, writer: CacheWriter, missing: list[int]) -> Generator[dict[str, Any], None, None]:
    """What each forward added to the missing shards, as they are written."""
    rows = [ray.put(work.rows.table)]
    return written_shards(work.settings, writer.task, rows, {index: work.batches_of(index) for index in missing})


def _fill(console: Console, work: Capture, missing: list[int], results: Iterable[dict[str, Any]]) -> None:
    """Shows what is written."""
    total = dict.fromkeys(("rows", "tokens", "bytes", "skipped"), 0)
    began = math.inf
    with stage(console, "capture", sum(work.rows_of(index) for index in missing)) as bar:
        for result in results:
            if result["fault"]:
                raise InputError(result["fault"])
            total = {name: value + result[name] for name, value in total.items()}
            # The clock runs from the first forward on: to start the actors is no part of the rate.
            began = min(began, result["began"])
            rate = total["tokens"] / max(1e-9, time.time() - began)
            note = f"{total['tokens']:,} tokens  {rate:,.0f} tok/s  {total['bytes'] / 1e9:,.2f} GB"
            bar.update(total["rows"], note + (f"  {total['skipped']} skipped" if total["skipped"] else ""))


def finish(work: Capture, writer: CacheWriter) -> Manifest:
    """The list of skipped samples beside the shards, then the manifest."""
    if not writer.complete and (skipped := writer.skipped()):
        if len(skipped) == work.rows.table.num_rows:
            raise InputError("no sample gave finite states: check the target's weights, or try target.dtype=fp32")
        conversations = work.rows.table.column("conversation_id").to_pylist()
        names = dict(zip(work.rows.sample_ids, conversations, strict=True))
        lines = [
            json.dumps({"sample_id": sample, "conversation": names[sample], "reason": "states are not finite"}) + "\n"
            for sample in skipped
        ]
        Folder(work.address).write(SKIPPED, "".join(lines).encode())
    return writer.finish()


def _print_result(console: Console, work: Capture, manifest: Manifest) -> None:
    def line(text: str) -> None:
        console.print(redacted(text), markup=False, soft_wrap=True)

    if manifest.skipped:
        where = Folder(work.address).where(SKIPPED)
        line(f"{len(manifest.skipped):,} samples were skipped, their states are not finite: {where}")
    line(f"{manifest.rows:,} rows, {manifest.tokens:,} tokens, {manifest.bytes / 1e9:,.2f} GB")
    line(f"data.source=cache cache.folder={work.address}")
    line(work.address)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("capture")
