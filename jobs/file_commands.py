"""Commands on a file or a folder, and `doctor`: they take no preset."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jobs.arguments import Checkpoint, DryRun, Store, TargetName, exit_unless
from jobs.checkpoints import local_checkpoint

commands = typer.Typer()


@commands.command()
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


@commands.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", show_default=False, help="The user's message; else from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Read the message from a file.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Go on asking; so without a message where stdin is a terminal.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(show_default="the drafter's", help="Local folder, hub id, or smollm2-135m-instruct."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", show_default="none", help="System message.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", show_default="not passed", help="`enable_thinking`.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Likeliest tokens drawn from; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Mass of the likeliest tokens drawn from.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws above temperature 0.")] = 0,
    policy: Annotated[
        Literal["fixed", "threshold", "scheduled"],
        typer.Option(help="Drafts that are verified: `--slots` of them, by confidence, or by step rates."),
    ] = "fixed",
    slots: Annotated[
        int | None, typer.Option(min=1, show_default="the block", help="Policy fixed: drafts per round.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, show_default="none", help="Policy threshold: least confidence of a verified draft."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="none", help="What `calibrate` wrote.")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Compute type of target and drafter.")] = "fp32",
    uri: Store = None,
) -> None:
    """Answer a prompt, or chat, with speculative decoding; accepted draft tokens are coloured."""
    from jobs.assistant import Wish
    from jobs.generate import generate

    wish = Wish(
        target=target, system=system, thinking=thinking, max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=seed, policy=policy, slots=slots, threshold=threshold, calibration=calibration,
        dtype=dtype,
    )  # fmt: skip
    generate(local_checkpoint(checkpoint, uri=uri), prompt, file, chat, wish)


@commands.command()
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
    uri: Store = None,
    dry_run: DryRun = False,
) -> None:
    """Write a drafter in the file layout of a serving engine, with a model card."""
    from dspark.evaluation.model_card import Licences
    from jobs.export import export

    licences = Licences(drafter_license, target_license, data_license)
    export(local_checkpoint(checkpoint, uri=uri), out, to, source, target, licences, push_to_hub, dry_run)


@commands.command()
def register(
    checkpoint: Checkpoint,
    name: Annotated[str, typer.Option(help="Registered model; made where it is missing.")],
    evaluation: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            show_default="of the run that the checkpoint lies in",
            help="Run folder with a finished evaluation of this drafter.",
        ),
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            show_default="that of the checkpoint's run, else sqlite:///runs/mlflow.db",
            help="MLflow store.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Make a drafter the next version of a registered model, with card, signature, acceptance and its run."""
    from jobs.register import register

    register(checkpoint, name, evaluation, uri, dry_run)


@commands.command()
def check_reference(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of reference cases.")],
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Type in which weights and states are computed.")
    ] = "fp32",
) -> None:
    """Compare the drafter and its losses with stored reference cases."""
    from jobs.check_reference import check_reference

    exit_unless(check_reference(folders, dtype))


@commands.command()
def doctor() -> None:
    """Check that this machine has what the jobs need."""
    from jobs.doctor import doctor

    exit_unless(doctor())
