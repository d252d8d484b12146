"""The command line: reads settings, then calls the module of the command.

A module is imported when its command runs, so that `dspark --help` needs neither torch nor Ray.
"""

import shlex
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from dspark.config import Settings
from dspark.errors import InputError, StoppedError, bad_input
from dspark.redaction import redacted
from jobs.arguments import Checkpoint, DryRun, Overrides, Preset, PresetCommand, Resume, is_override
from jobs.cache import commands as cache_commands
from jobs.checkpoints import local_checkpoint
from jobs.config import dump_settings, load_settings
from jobs.file_commands import commands as file_commands
from jobs.registry import commands as registry_commands
from jobs.uploading import in_submitted_job

# The exit code for "try again" in sysexits.h: schedulers tell it from a failure.
STOPPED = 75

app = typer.Typer(
    help="Trains drafters for speculative decoding of your own language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(file_commands)
app.add_typer(cache_commands, name="cache")
app.add_typer(registry_commands, name="registry")


@app.command(cls=PresetCommand)
def run(preset: Preset, overrides: Overrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Train a drafter, measure it against plain decoding, register it and write the report."""
    settings = _settings(preset, overrides or [], dry_run)
    from jobs.run import run

    run(settings, resume, dry_run)


@app.command(cls=PresetCommand)
def prepare(preset: Preset, overrides: Overrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Let the target answer conversations anew: rows for training, validation and held-out."""
    settings = _settings(preset, overrides or [], dry_run)
    from jobs.prepare import prepare

    prepare(settings, resume, dry_run)


@app.command(cls=PresetCommand)
def capture(
    preset: Preset,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or address of an interrupted capture to go on with.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the plan, time a few forwards, write nothing.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Write the target's hidden states to a cache, which `train` reads with data.source=cache."""
    settings = _settings(preset, overrides or [], dry_run)
    from jobs.capture import capture

    capture(settings, resume, dry_run, estimate)


@app.command(cls=PresetCommand)
def train(
    preset: Preset,
    overrides: Overrides = None,
    resume: Resume = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default="none", help="With --dry-run: plan for machines like those of FILE."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Capture the target's hidden states and train a drafter on them."""
    settings = _settings(preset, overrides or [], dry_run and cluster is None)
    if cluster is not None:
        if not dry_run:
            raise InputError("--cluster plans for machines that need not be there: give --dry-run too")
        from jobs.scaling import print_scaling

        print_scaling(Console(), cluster, preset, settings)
        return
    from jobs.train import train

    train(settings, resume, dry_run)


@app.command(cls=PresetCommand)
def tune(preset: Preset, overrides: Overrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Train many drafters that differ in the settings of tune.space, and write the best preset."""
    settings = _settings(preset, overrides or [], dry_run)
    from jobs.tune import tune

    tune(settings, resume, dry_run)


@app.command(cls=PresetCommand)
def evaluate(
    preset: Preset,
    drafters: Annotated[
        list[str],
        typer.Argument(
            metavar="DRAFTER... [KEY=VALUE]...",
            help="Folders of drafters, in any of the layouts of `export`, or models:/NAME@champion, "
            "models:/NAME/NUMBER; and settings over the preset's.",
        ),
    ],
    resume: Resume = None,
    dry_run: DryRun = False,
) -> None:
    """Decode prompts with drafters and without: acceptance, speed and identity, side by side."""
    overrides = [text for text in drafters if is_override(text)]
    folders = [Path(text) for text in drafters if text not in overrides]
    settings = _settings(preset, overrides, dry_run)
    if not folders:
        raise InputError("`dspark evaluate` needs at least one DRAFTER: the folder of a checkpoint, behind the preset")
    from jobs.evaluate import evaluate

    evaluate(settings, [local_checkpoint(folder, settings) for folder in folders], resume, dry_run)


@app.command(cls=PresetCommand)
def calibrate(
    preset: Preset,
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure the target's passes per second by tokens in a pass, too.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Fit the confidence head's temperatures to held-out rounds, and say how good its numbers are."""
    settings = _settings(preset, overrides or [], dry_run)
    from jobs.calibrate import calibrate

    calibrate(settings, local_checkpoint(checkpoint, settings), profile, dry_run)


@app.command()
def simulate(
    run: Annotated[Path, typer.Argument(help="Folder that `calibrate --profile` made.")],
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="the run's", help="Other step rates and temperatures.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Confidence of the threshold policy.")] = 0.5,
    requests: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="powers of two", help="Requests decoded together; may be given repeatedly."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Replay recorded rounds at any load: tokens per second of each way to choose verification lengths."""
    from jobs.simulate import simulate

    simulate(run, calibration, threshold, requests, dry_run)


@app.command()
def submit(
    command: Annotated[
        Literal["run", "prepare", "capture", "train", "tune", "evaluate", "calibrate"] | None,
        typer.Argument(metavar="COMMAND", help="run, prepare, capture, train, tune, evaluate or calibrate."),
    ] = None,
    preset: Annotated[Path | None, typer.Argument(help="YAML file in the checkout.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFTER]... [KEY=VALUE]...", help="Folders of drafters, and settings, as COMMAND has."
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="That of calibrate.")] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Interrupted run to go on with, on storage of all nodes.")
    ] = None,
    stop: Annotated[str | None, typer.Option(metavar="ID", help="End this job instead.")] = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Dashboard of the cluster.")
    ] = "http://127.0.0.1:8265",
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds to wait for a cluster that is starting.")] = 120,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print files and entrypoint, send nothing.")] = False,
) -> None:
    """Run a command as a job of a Ray cluster, follow its log and end with its exit code."""
    if (stop is None) == (command is None) or (command is not None and preset is None):
        raise InputError("submit needs COMMAND and PRESET, or --stop ID alone: see `dspark submit --help`")
    from jobs import submit

    if command is None or preset is None:
        submit.stop(address, str(stop), timeout_s)
        return
    if profile and command != "calibrate":
        raise InputError(f"{command} has no --profile, only calibrate has: leave it out")
    words = (words or []) + ["--profile"] * profile
    raise typer.Exit(submit.submit(address, command, preset, words, resume, timeout_s, dry_run))


def main() -> None:
    """`dspark ...`: exits 0 only on success, 2 on bad input, 75 when stopped and resumable, 130 when interrupted."""
    _run(sys.argv[1:])


def command_main(name: str) -> None:
    """`python -m jobs.<name> ...`, the same as `dspark <name> ...`."""
    _run([name.replace("_", "-"), *sys.argv[1:]])


def _run(arguments: list[str]) -> None:
    sys.excepthook = _print_defect
    threading.excepthook = lambda ended: _print_defect(
        ended.exc_type, ended.exc_value or ended.exc_type(), ended.exc_traceback
    )
    try:
        app(arguments, prog_name="dspark")
    except StoppedError as error:
        submitted = ["submit"] if in_submitted_job() else []
        words = ["dspark", *submitted, *_without_resume(arguments), "--resume", error.folder]
        command = redacted(shlex.join(words))
        Console(stderr=True, highlight=False).print(f"{error}; to go on: {command}", soft_wrap=True, markup=False)
        sys.exit(STOPPED)
    except Exception as error:
        fault = bad_input(error)
        if fault is None:
            raise
        Console(stderr=True, highlight=False).print(
            Text.assemble(("error: ", "bold red"), redacted(fault)), soft_wrap=True
        )
        sys.exit(2)


def _settings(preset: Path, overrides: Sequence[str], shown: bool) -> Settings:
    """The settings of a command, printed as YAML without secrets where they are to be `shown`."""
    settings = load_settings(preset, overrides)
    if shown:
        Console(highlight=False, markup=False, emoji=False).print(dump_settings(settings), soft_wrap=True)
    return settings


def _print_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback without secrets: the messages of clients hold the addresses that they asked."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def _without_resume(arguments: list[str]) -> list[str]:
    """The command's arguments but for the folder that it resumed."""
    at = next((place for place, text in enumerate(arguments) if text.partition("=")[0] == "--resume"), len(arguments))
    end = at + (1 if "=" in "".join(arguments[at : at + 1]) else 2)
    return [*arguments[:at], *arguments[end:]]


if __name__ == "__main__":
    main()
