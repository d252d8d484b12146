"""The command line: reads settings, then calls the module of the command.

A module is imported when its command runs, so that `dspark --help` needs neither torch nor Ray.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from dspark.errors import InputError
from jobs.cache import commands as cache_commands
from jobs.config import describe_settings, load_settings

app = typer.Typer(
    help="Trains drafters for speculative decoding of your own language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cache_commands, name="cache")

Preset = Annotated[Path, typer.Argument(help="YAML file with the settings of one experiment.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over the preset's, such as loss.l1=0.9.")
]
Checkpoint = Annotated[Path, typer.Argument(help="Folder of a drafter, in any of the layouts of `export`.")]
TargetName = Annotated[str, typer.Option(help="Local folder, hub id, or smollm2-135m-instruct.")]
Resume = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of an interrupted run to go on with.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the settings and the plan, touch nothing.")]


class PresetCommand(TyperCommand):
    """A command on a preset: its help ends with every setting and its default."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        table = Table("key", "default", "meaning", title="Settings", title_justify="left", box=None, pad_edge=False)
        for key, default, description in describe_settings():
            table.add_row(Text(key, style="cyan"), Text(default), Text(description))
        Console().print(table)


@app.command(cls=PresetCommand)
def run(preset: Preset, overrides: Overrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Train a drafter, measure it against plain decoding, register it and write the report."""
    settings = load_settings(preset, overrides or [])
    from jobs.run import run

    run(settings, resume, dry_run)


@app.command(cls=PresetCommand)
def prepare(preset: Preset, overrides: Overrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Let the target answer conversations anew: rows for training, validation and held-out."""
    settings = load_settings(preset, overrides or [])
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
    settings = load_settings(preset, overrides or [])
    from jobs.capture import capture

    capture(settings, resume, dry_run, estimate)


@app.command(cls=PresetCommand)
def train(preset: Preset, overrides: Overrides = None, resume: Resume = None, dry_run: DryRun = False) -> None:
    """Capture the target's hidden states and train a drafter on them."""
    settings = load_settings(preset, overrides or [])
    from jobs.train import train

    train(settings, resume, dry_run)


@app.command(cls=PresetCommand)
def evaluate(preset: Preset, checkpoint: Checkpoint, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Decode held-out prompts with a drafter and without: acceptance, speed and identity."""
    settings = load_settings(preset, overrides or [])
    from jobs.evaluate import evaluate

    evaluate(settings, checkpoint, dry_run)


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
    settings = load_settings(preset, overrides or [])
    from jobs.calibrate import calibrate

    calibrate(settings, checkpoint, profile, dry_run)


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
def inspect(
    file: Annotated[Path, typer.Argument(help="Conversations: .jsonl, .json or .parquet, each also as .gz.")],
    target: TargetName,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row in place of coloured text.")] = False,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens per row; longer rows are cut at the end.")] = 4096,
    limit: Annotated[int | None, typer.Option(min=1, show_default="all", help="Rows shown.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", show_default="not passed", help="`enable_thinking`.")
    ] = None,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks drawn per row.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the anchors.")] = 42,
) -> None:
    """Show how conversations become tokens, and which tokens are supervised."""
    from jobs.inspect import inspect

    inspect(
        file,
        target,
        as_json=as_json,
        max_length=max_length,
        limit=limit,
        thinking=thinking,
        anchors=anchors,
        seed=seed,
    )


@app.command()
def generate(
    checkpoint: Checkpoint,
    target: TargetName,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The user's message.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws above temperature 0.")] = 0,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Compute type of target and drafter.")] = "fp32",
) -> None:
    """Answer one prompt with speculative decoding; accepted draft tokens are marked."""
    from jobs.generate import generate

    generate(
        checkpoint,
        target,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
    )


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="New folder.")],
    to: Annotated[Literal["deepspec", "speculators", "specforge"], typer.Option(help="Layout of the new folder.")],
    source: Annotated[
        Literal["deepspec", "speculators", "specforge", "modelopt"] | None,
        typer.Option("--from", show_default="found out", help="Layout of the checkpoint."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            show_default="not needed", help="Supplies embedding, head and name where the checkpoint lacks them."
        ),
    ] = None,
    drafter_license: Annotated[
        str | None, typer.Option("--license", show_default="not stated", help="The drafter's, for the model card.")
    ] = None,
    target_license: Annotated[str | None, typer.Option(show_default="not stated", help="The target's.")] = None,
    data_license: Annotated[str | None, typer.Option(show_default="not stated", help="The data's.")] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPO", show_default="no upload", help="Upload the folder to this repository; a new one is public."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Write a drafter in the file layout of a serving engine, with a model card."""
    from dspark.evaluation.model_card import Licences
    from jobs.export import export

    licences = Licences(drafter_license, target_license, data_license)
    export(checkpoint, out, to, source, target, licences, push_to_hub, dry_run)


@app.command()
def check_reference(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of reference cases.")],
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Type in which weights and states are computed.")
    ] = "fp32",
) -> None:
    """Compare the drafter and its losses with stored reference cases."""
    from jobs.check_reference import check_reference

    _end(check_reference(folders, dtype))


@app.command()
def doctor() -> None:
    """Check that this machine has what the jobs need."""
    from jobs.doctor import doctor

    _end(doctor())


@app.command()
def submit(
    command: Annotated[
        Literal["run", "prepare", "capture", "train"] | None,
        typer.Argument(metavar="COMMAND", help="run, prepare, capture or train."),
    ] = None,
    preset: Annotated[Path | None, typer.Argument(help="YAML file in the checkout.")] = None,
    overrides: Overrides = None,
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
    raise typer.Exit(submit.submit(address, command, preset, overrides or [], resume, timeout_s, dry_run))


def main() -> None:
    """`dspark ...`: exits 0 only on success, 2 on bad input, 130 when interrupted."""
    _run(sys.argv[1:])


def command_main(name: str) -> None:
    """`python -m jobs.<name> ...`, the same as `dspark <name> ...`."""
    _run([name.replace("_", "-"), *sys.argv[1:]])


def _run(arguments: list[str]) -> None:
    try:
        app(arguments, prog_name="dspark")
    except InputError as error:
        # Ray hands over an error of an actor with a traceback as its text; the error itself is the cause.
        cause = getattr(error, "cause", error)
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(cause)), soft_wrap=True)
        sys.exit(2)


def _end(success: bool) -> None:
    if not success:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
