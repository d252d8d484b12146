"""`dspark registry ...`: looks at registered drafters, and moves the champion through the gate.

list, compare: versions and their tags -> tables
record: an evaluation in a run folder -> tags of a version
promote: tags of two versions -> gate -> (not with --dry-run) alias `champion`
rollback: the champions of before -> alias `champion`
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.errors import InputError
from jobs.arguments import Store
from jobs.checkpoints import store_of

if TYPE_CHECKING:  # `dspark --help` needs neither torch nor MLflow
    from actors.registry import Registry
    from dspark.evaluation.gate import Entry, Verdict

commands: typer.Typer = typer.Typer(help="Look at registered drafters, and move the champion.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Registered model.")]
Version = Annotated[str, typer.Argument(help="Number of a version, or an alias.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be changed, touch nothing.")]
_SHORT = 12  # characters of a hash


@commands.command(name="list")
def list_versions(
    name: Annotated[str | None, typer.Argument(show_default="all", help="Registered model.")] = None,
    uri: Store = None,
) -> None:
    """List versions, oldest first, with acceptance at temperature 0 and the lossless check."""
    registry = _registry(uri)
    table = Table("model", "version", "alias", "held out", "benchmarks", "lossless", "target", "commit", box=None)
    for model in [name] if name is not None else registry.names():
        aliases = registry.aliases(model)
        for entry in registry.entries(model):
            own = ", ".join(alias for alias, version in aliases.items() if version == entry.version)
            table.add_row(model, str(entry.version), own, *map(Text, _cells(entry)))
    Console(highlight=False).print(table)


@commands.command()
def compare(
    name: Name,
    versions: Annotated[
        list[str] | None, typer.Argument(metavar="VERSION", show_default="all", help="Numbers or aliases.")
    ] = None,
    uri: Store = None,
) -> None:
    """Show tags of versions side by side; a star marks a row in which they differ."""
    registry = _registry(uri)
    entries = [registry.entry(name, which) for which in versions] if versions else registry.entries(name)
    table = Table("", "tag", *(str(entry.version) for entry in entries), box=None)
    for tag in dict.fromkeys(tag for entry in entries for tag in sorted(entry.tags)):
        values = [entry.tags.get(tag, "-") for entry in entries]
        table.add_row("*" if len(set(values)) > 1 else "", tag, *map(Text, values))
    console = Console(highlight=False)
    console.print(table)
    for entry in entries:
        console.print(f"{entry.uri} came from the run {registry.run_of(name, str(entry.version))}", soft_wrap=True)


@commands.command()
def record(
    name: Name,
    version: Version,
    run: Annotated[Path, typer.Argument(help="Run folder with a finished evaluation of this version.")],
    uri: Store = None,
    dry_run: DryRun = False,
) -> None:
    """Record another evaluation of a version, in the place of the one that it has."""
    from actors.registry import FINGERPRINT
    from jobs.measured import measured_in

    registry = _registry(uri)
    entry = registry.entry(name, version)
    mark = entry.tags.get(FINGERPRINT)
    if mark is None:
        raise InputError(
            f"{entry.uri} has no tag {FINGERPRINT}, so nothing says whether it was measured: register it with "
            "`dspark register`"
        )
    tags = measured_in(run, mark).tags
    console = Console(highlight=False)
    for tag, value in tags.items():
        console.print(f"{tag}: {value}", soft_wrap=True, markup=False)
    if not dry_run:
        registry.record(entry, tags)
    console.print(f"{entry.uri}: {'would be recorded' if dry_run else 'recorded'}")


@commands.command()
def promote(
    name: Name,
    version: Version,
    benchmarks: Annotated[
        list[str] | None,
        typer.Option(
            "--benchmark",
            metavar="NAME",
            show_default="all of the champion at temperature 0",
            help="Compare on this one, such as gsm8k, held_out or t1.held_out; may be given repeatedly.",
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="Tokens per round that it may keep fewer than the champion, on each.")
    ] = 0.02,
    uri: Store = None,
    dry_run: DryRun = False,
) -> None:
    """Make a version the champion, if it is lossless and no worse than the present one."""
    from dspark.evaluation.gate import judge

    registry = _registry(uri)
    entry, champion = registry.entry(name, version), registry.champion(name)
    console = Console(highlight=False)
    if champion is not None and champion.version == entry.version:
        console.print(f"{entry.uri} is the champion already")
        return
    verdict = judge(entry, champion, benchmarks or [], margin)
    _print_verdict(console, entry, champion, verdict)
    if verdict.faults:
        raise InputError(f"{entry.uri} is not promoted: " + "; and ".join(verdict.faults))
    over = "the first champion" if champion is None else f"over version {champion.version}, margin {margin:g}"
    if not dry_run:
        registry.promote(entry, over)
    console.print(f"{entry.uri} {'would be' if dry_run else 'is'} the champion, {over}")


@commands.command()
def rollback(name: Name, uri: Store = None, dry_run: DryRun = False) -> None:
    """Make the champion before the present one champion again."""
    registry = _registry(uri)
    entry = registry.previous(name)
    if not dry_run:
        registry.rollback(entry)
    Console(highlight=False).print(f"{entry.uri} {'would be' if dry_run else 'is'} the champion again")


def _registry(uri: str | None) -> "Registry":
    from actors.registry import Registry

    return Registry(uri or store_of())


def _cells(entry: "Entry") -> list[str]:
    """What `list` says of a version behind its number."""
    from dspark.evaluation.gate import TARGET
    from dspark.evaluation.recorded import recorded_in
    from dspark.sections import BENCHMARKS

    found = recorded_in(entry.tags)
    target, commit = (entry.tags.get(tag, "-")[:_SHORT] for tag in (TARGET, "git_commit"))
    if found is None:
        return ["-", "-", "not checked", target, commit]
    held_out = found.lengths.get("t0.held_out")
    named = {name: found.lengths.get(f"t0.{name}") for name in BENCHMARKS}
    shown = ", ".join(f"{name} {length:.3f}" for name, length in named.items() if length is not None)
    checked = f"{found.identical} of {found.compared} in {found.dtype}"
    return ["-" if held_out is None else f"{held_out:.3f}", shown or "-", checked, target, commit]


def _print_verdict(console: Console, entry: "Entry", champion: "Entry | None", verdict: "Verdict") -> None:
    table = Table("acceptance length on", f"version {entry.version}", title=None, box=None)
    if champion is not None:
        for column in (f"champion, version {champion.version}", "needed", ""):
            table.add_column(column)
    for line in verdict.lines:
        cells = [line.scope, f"{line.candidate:.4f}"]
        if line.champion is not None and line.needed is not None:
            cells += [f"{line.champion:.4f}", f"{line.needed:.4f}", "passed" if line.passed else "too short"]
        table.add_row(*cells)
    if verdict.lines:
        console.print(table)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("registry")
