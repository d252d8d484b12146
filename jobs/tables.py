"""What a run prints at its end: the numbers of each drafter, and how sure the differences between drafters are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark.evaluation.comparison import best_of
from dspark.evaluation.definitions import DEFINITIONS
from dspark.evaluation.summary import SECTIONS

Row = Mapping[str, Any]
_SHOWN = 5  # texts that differ from plain decoding, those with the widest gaps


def print_results(console: Console, result: Mapping[str, Any]) -> None:
    """The table of a run, with the definition of its main number under it; then the comparison of several drafters."""
    drafters: Mapping[str, Row] = result["drafters"]
    for name, drafter in drafters.items():
        _print_drafter(console, drafter, f", {name}" if len(drafters) > 1 else "")
    for label, key in (("acceptance length", "acceptance_length"), ("accepted", "accepted_per_proposed"),
                       ("tok/s", "tokens_per_second"), ("speed-up", "speedup")):  # fmt: skip
        console.print(f"[dim]{label}: {DEFINITIONS[key]}")
    if any(drafter["benchmarks"] for drafter in drafters.values()):
        console.print(f"[dim]mean: {DEFINITIONS['by_group']}")
    if len(drafters) > 1:
        print_comparison(console, result["comparison"])
    for name, drafter in drafters.items():
        greedy = (drafter["held_out"] or drafter["benchmarks"]).get("t0")
        if greedy is not None and greedy["overall"]["identical"] is not None:
            of = f", {name}" if len(drafters) > 1 else ""
            counts = greedy["overall"]["identical"]
            console.print(f"identical to plain decoding at temperature 0{of}: {counts[0]} of {counts[1]}")
            _print_differences(console, greedy["overall"]["differences"])


def _print_differences(console: Console, differences: Sequence[Row]) -> None:
    for one in differences[:_SHOWN]:
        console.print(
            f"  {one['id']} differs from token {one['place']} on, where the top-2 gap is {one['gap']:.3g} "
            f"({one['roundings']:.1f} roundings)"
        )
    if len(differences) > _SHOWN:
        console.print(f"  and {len(differences) - _SHOWN} more with narrower gaps, in result.json")
    if differences:
        console.print(f"[dim]{DEFINITIONS['differences']}")


def print_comparison(console: Console, comparison: Mapping[str, Mapping[str, Row]]) -> None:
    """Acceptance lengths of all drafters with their intervals; a star marks the longest of a row and its equals."""
    table = Table(title="acceptance length on the same prompts", title_justify="left")
    table.add_column("prompts", no_wrap=True)
    parts = [(origin, part) for origin, temperatures in comparison.items() for part in temperatures.values()]
    names = list(next(iter(parts[0][1]["scopes"].values()))["lengths"])
    for name in names:
        table.add_column(name, justify="right")
    for origin, part in parts:
        for scope, found in part["scopes"].items():
            best = best_of(found)
            cells = [_with_interval(found["lengths"][name], name in best) for name in names]
            table.add_row(f"{origin.replace('_', '-')}, T={part['temperature']:g}, {scope}", *cells)
        table.add_section()
    console.print(table)
    console.print(f"[dim]interval: {DEFINITIONS['interval']}")
    console.print("[dim]*: the longest of its row, and those that are within noise of it")
    console.print(f"[dim]within noise: {DEFINITIONS['within_noise']}")


def _with_interval(row: Row, starred: bool) -> str:
    if row["value"] is None:
        return "-"
    interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['value']:.3f}{interval}{'*' if starred else ' '}"


def _print_drafter(console: Console, drafter: Row, of: str) -> None:
    table = Table(title=f"speculative decoding against plain decoding of the same target{of}", title_justify="left")
    table.add_column("prompts", no_wrap=True)
    for column in ("n", "acceptance length", "accepted", "plain tok/s", "spec. tok/s", "speed-up"):
        table.add_column(column, justify="right")
    for section in SECTIONS:
        for summary in drafter[section].values():
            for name, row, style in _rows(summary):
                table.add_row(f"T={summary['temperature']:g}, {name}", *_cells(row), style=style)
            table.add_section()
    sizes = list(dict.fromkeys(row["batch"] for row in drafter["batches"]))
    for row in drafter["batches"] if len(sizes) > 1 else []:
        origin = row["prompts_of"].replace("_", "-")
        table.add_row(f"T={row['temperature']:g}, {origin}, batch {row['batch']}", *_cells(row))
    console.print(table)


def _rows(summary: Row) -> Iterator[tuple[str, Row, str]]:
    for domain, row in summary["by_domain"].items():
        yield domain, row, ""
    for group, row in summary["by_group"].items():
        yield f"mean of {row['benchmarks']} {group}", row, "italic"
    yield "all", summary["overall"], "bold"


def _cells(row: Row) -> list[str]:
    speed = row.get("tokens_per_second", {})
    values = (
        (row.get("prompts"), "d"),
        (row["acceptance_length"], ".3f"),
        (row.get("accepted_per_proposed"), ".1%"),
        (speed.get("plain"), ".1f"),
        (speed.get("speculative"), ".1f"),
        (row["speedup"], ".2f"),
    )
    return ["-" if value is None else format(value, form) for value, form in values]
