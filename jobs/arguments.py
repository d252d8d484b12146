"""Arguments and options that several commands share."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from jobs.config import describe_settings

Preset = Annotated[Path, typer.Argument(help="YAML file with the settings of one experiment.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over the preset's, such as loss.l1=0.9.")
]
Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="Folder of a drafter, in any of the layouts of `export`, or models:/NAME@champion, models:/NAME/NUMBER."
    ),
]
TargetName = Annotated[str, typer.Option(help="Local folder, hub id, or smollm2-135m-instruct.")]
Resume = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of an interrupted run to go on with.")]
Store = Annotated[
    str | None,
    typer.Option(
        "--uri", envvar="MLFLOW_TRACKING_URI", show_default="sqlite:///runs/mlflow.db", help="MLflow store to look in."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the settings and the plan, touch nothing.")]


class PresetCommand(TyperCommand):
    """A command on a preset: its help ends with every setting and its default."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        table = Table("key", "default", "meaning", title="Settings", title_justify="left", box=None, pad_edge=False)
        for key, default, description in describe_settings():
            table.add_row(Text(key, style="cyan"), Text(default), Text(description))
        Console().print(table)


def is_override(word: str) -> bool:
    """Whether a word has the form of an override; `./a=b` is a folder."""
    return re.match(r"[A-Za-z_][\w.]*=", word) is not None


def exit_unless(success: bool) -> None:
    """Ends the command with exit code 1 if what it checked does not hold."""
    if not success:
        raise typer.Exit(1)
