"""`dspark cache ...`: looks at a cache of hidden states, checks it, and makes new ones from it.

info, head: manifest and first rows -> terminal
verify: every byte against the checksums -> faults by file -> exit code 1
merge, drop-taps, convert: what is to be written -> (not with --dry-run) shards, ledger, manifest of a new cache
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.errors import InputError
from jobs.facts import print_facts

if TYPE_CHECKING:  # `dspark --help` needs neither torch nor pyarrow
    from dspark.data.cache_copy import Copy
    from dspark.data.codecs import Codec
    from dspark.data.manifest import Manifest
    from dspark.data.origin import Origin
    from dspark.data.raw_cache import RawCache

commands: typer.Typer = typer.Typer(
    help="Look at a cache of hidden states, check it, or make a new one from it.", no_args_is_help=True
)

Dir = Annotated[
    str, typer.Argument(metavar="DIR", help="Folder of a cache: a path, or a URI such as s3://bucket/cache.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="New folder; one that was begun by the same command goes on.")]
ShardMb = Annotated[int, typer.Option(min=1, help="Largest size of a shard in MiB; one row alone may be larger.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be written, touch nothing.")]


@commands.command()
def info(folder: Dir) -> None:
    """Print where a cache comes from and how large it is."""
    from dspark.data.folder import Folder
    from dspark.data.manifest import read_manifest

    manifest = read_manifest(Folder(folder))
    print_facts(Console(highlight=False), _facts(folder, manifest))


@commands.command()
def head(folder: Dir, rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="Rows shown.")] = 5) -> None:
    """Print the first rows: ids, lengths, and the mean norm of each state over the tokens."""
    from dspark.data.cache_check import first_rows
    from dspark.data.cache_reader import CacheReader

    reader = CacheReader(folder)
    shown = list(first_rows(reader, rows))
    table = Table("sample", "tokens", "supervised", *(shown[0].norms if shown else ()), box=None, pad_edge=False)
    for row in shown:
        norms = (f"{norm:.4g}" for norm in row.norms.values())
        table.add_row(row.sample_id, str(row.tokens), str(row.supervised), *norms)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(shown)} of {len(reader.sample_ids)} rows; under each state its mean norm over the tokens")


@commands.command()
def verify(
    folder: Dir, threads: Annotated[int, typer.Option(min=1, help="Shards that are read at the same time.")] = 4
) -> None:
    """Read every byte and name each file that is missing, truncated, damaged or another cache's; exits 1 then."""
    from dspark.data.cache_check import verify as find_faults
    from dspark.data.folder import Folder
    from dspark.data.manifest import read_manifest

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    place = Folder(folder)
    manifest = read_manifest(place)
    with _bar(console, "bytes", manifest.bytes) as on_bytes:
        faults = find_faults(place, threads, _adding(on_bytes))
    for fault in faults:
        errors.print(Text.assemble(("damaged: ", "bold red"), f"{fault.file} {fault.reason}"), soft_wrap=True)
    if {fault.file for fault in faults} & {shard.file for shard in manifest.shards}:
        errors.print("Delete the damaged shards: the command that wrote the cache writes them again, and them alone.")
    if faults:
        raise typer.Exit(1)
    console.print(
        f"{len(manifest.shards)} shards, {manifest.rows} rows, {_size(manifest.bytes)}: every byte is as written"
    )


@commands.command()
def merge(
    folders: Annotated[list[str], typer.Argument(metavar="DIR DIR... OUT", help="Caches of one origin; a new folder.")],
    shard_mb: ShardMb = 1024,
    dry_run: DryRun = False,
) -> None:
    """Join caches of equal origin; of samples that are in several, the first stays."""
    from dspark.data.cache_copy import merged
    from dspark.data.cache_reader import CacheReader

    if len(folders) < 3:
        raise InputError(f"merge was given {len(folders)} folders: name at least two caches, and the new folder last")
    *sources, out = folders
    copy = merged([CacheReader(source) for source in sources])
    _write(copy, out, shard_mb, dry_run)


@commands.command()
def drop_taps(
    folder: Dir,
    out: Out,
    keep: Annotated[str, typer.Option(metavar="TAPS", help="Taps that stay, in this order, such as 1,9.")],
    shard_mb: ShardMb = 1024,
    dry_run: DryRun = False,
) -> None:
    """Copy a cache with some of its taps; the final states always stay."""
    from dspark.data.cache_copy import without_taps

    try:
        taps = [int(tap) for tap in keep.split(",")]
    except ValueError as error:
        raise InputError(f"--keep {keep!r}: numbers with commas between them are needed, such as 1,9") from error
    _write(without_taps(folder, taps), out, shard_mb, dry_run)


@commands.command()
def convert(
    raw: Annotated[Path, typer.Argument(metavar="RAW", help="Folder with manifest.json, samples.idx and .bin shards.")],
    out: Out,
    target: Annotated[str, typer.Option(help="The target that it was captured from: local folder or hub id.")],
    revision: Annotated[str, typer.Option(help="The target's revision on the hub.")] = "main",
    render: Annotated[
        str | None,
        typer.Option(
            show_default="one of its own", help="Render hash to record: the one that runs which will read it need."
        ),
    ] = None,
    prove: Annotated[
        bool, typer.Option(help="Run the target on one sample and compare its states with the stored ones.")
    ] = True,
    storage: Annotated[Literal["plain", "planes"], typer.Option(help="planes: fewer bytes, slower.")] = "plain",
    taps: Annotated[
        Literal["bf16", "int8_outlier"], typer.Option(help="int8_outlier: half of their bytes, lossy.")
    ] = "bf16",
    shard_mb: ShardMb = 1024,
    dry_run: DryRun = False,
) -> None:
    """Turn a raw cache of the published training code into one of this project, in the same order."""
    from dspark.data.cache_copy import refuse_own_folder, write_converted
    from dspark.data.codecs import Codec
    from dspark.data.raw_cache import RawCache

    source, codec = RawCache(raw), Codec(storage, taps)
    refuse_own_folder(out, [str(raw)])
    origin = _raw_origin(source, codec, target, revision, render)
    rows = {sample: number for number, sample in source.unique()}
    console = Console(highlight=False)
    if prove:
        _prove(source, target, revision, origin)
    tokens = int(source.lengths[list(rows.values())].sum())
    facts = {
        "from": f"{raw}, captured from {source.target}",
        "to": f"{out}, {codec.storage}, taps {codec.taps}",
        "rows": f"{len(rows)}, {len(source.lengths) - len(rows)} duplicates dropped, {tokens:,} tokens",
        "render": origin.render,
        "states": "compared with the target's" if prove else "not compared with the target's",
    }
    print_facts(console, facts)
    if dry_run:
        return
    with _bar(console, "rows", len(rows)) as on_rows:
        manifest = write_converted(source, rows, origin, codec, out, shard_mb * 2**20, on_rows)
    print_facts(console, _facts(out, manifest))


def _raw_origin(source: "RawCache", codec: "Codec", target: str, revision: str, render: str | None) -> "Origin":
    from dspark.data.origin import Origin
    from dspark.sections import TargetSettings
    from dspark.target_files import fingerprint, load_config, resolve

    settings = TargetSettings(model=target, revision=revision)
    config = load_config(settings)
    if config.hidden_size != source.hidden or max(source.taps) >= config.num_hidden_layers - 1:
        raise InputError(
            f"{source.folder} holds states of width {source.hidden} and taps {list(source.taps)}, {target} has width "
            f"{config.hidden_size} and {config.num_hidden_layers} layers: name the target that it was captured from"
        )
    # The published code captures in bf16 whatever the target's files hold.
    return Origin(
        target=target,
        revision=revision,
        fingerprint=fingerprint(resolve(settings)),
        render=render or source.render,
        taps=source.taps,
        hidden=source.hidden,
        dtype="bf16",
        codec=codec.in_origin,
    )


def _prove(source: "RawCache", target: str, revision: str, origin: "Origin") -> None:
    from dspark.capture import states_apart
    from dspark.sections import TargetSettings
    from dspark.target import load_target

    shortest = int(source.lengths.argmin())
    settings = TargetSettings(model=target, revision=revision, dtype="bf16")
    states_apart(load_target(settings), source.table(origin, [shortest]), 0)


def _write(copy: "Copy", out: str, shard_mb: int, dry_run: bool) -> None:
    """Writes a copy, or only says what it would be."""
    from dspark.data.cache_copy import write_copy

    console = Console(highlight=False)
    facts = {
        "from": ", ".join(reader.address for reader, _ in copy.parts),
        "to": out,
        "rows": f"{copy.rows}, {copy.dropped} duplicates dropped",
        "bytes": _size(copy.bytes),
    }
    print_facts(console, facts)
    if dry_run:
        return
    with _bar(console, "rows", copy.rows) as on_rows:
        manifest = write_copy(copy, out, shard_mb * 2**20, on_rows)
    print_facts(console, _facts(out, manifest))


def _facts(folder: str, manifest: "Manifest") -> dict[str, str]:
    """What `info` says of a cache."""
    origin, codec = manifest.origin, manifest.codec
    per_token = manifest.bytes / max(1, manifest.tokens)
    errors = (f"{tap}: rms {found['rms']:.2e}, largest {found['max']:.2e}" for tap, found in manifest.errors.items())
    return {
        "cache": folder,
        "target": f"{origin.target}, revision {origin.revision}, weights {origin.fingerprint}",
        "render": origin.render,
        "states": f"taps {', '.join(map(str, origin.taps))} and final ({origin.final}), width {origin.hidden}, "
        f"computed in {origin.dtype}",
        "rows": f"{manifest.rows:,}, {len(manifest.skipped):,} planned ones skipped",
        "tokens": f"{manifest.tokens:,}",
        "bytes": f"{_size(manifest.bytes)} in {len(manifest.shards)} shards, {per_token:,.0f} per token",
        "storage": f"{codec.storage}, taps {codec.taps}",
        "errors": "\n".join(errors) or "none: lossless",
        "settings": ", ".join(f"{key}={value}" for key, value in manifest.settings.items()) or "none",
        "format": str(origin.format_version),
    }


def _size(count: int) -> str:
    return f"{count:,} bytes" if count < 10**7 else f"{count / 1e9:,.2f} GB"


@contextmanager
def _bar(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    from jobs.progress import stage

    with stage(console, name, total) as bar:
        yield bar.update


def _adding(update: Callable[[int], None]) -> Callable[[int], None]:
    """From "this many more" to "this many in all"; several threads tell it."""
    from threading import Lock

    lock, done = Lock(), [0]

    def add(more: int) -> None:
        with lock:
            done[0] += more
            update(done[0])

    return add


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("cache")
