"""A plan or a finding on the screen: one fact per line, behind its label."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.redaction import redacted


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Two columns, the text without secrets."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, text in facts.items():
        table.add_row(f"[bold]{label}", Text(redacted(text)))
    console.print(table)
