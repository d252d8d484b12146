"""`dspark train`: conversations to a drafter, online, without a cache."""

from pathlib import Path

from rich.console import Console

from dspark.config import Settings
from dspark.target_files import settled
from jobs.checkpoints import with_local_start
from jobs.config import check_files
from jobs.evaluating import chosen_policy
from jobs.experiment import check_resumed, open_experiment
from jobs.fitting import fit_drafter
from jobs.preflight import check_machine, print_plan
from jobs.rows import prepare_rows
from jobs.session import ray_session
from jobs.streams import claim_kept


def train(settings: Settings, resume: Path | None, dry_run: bool) -> None:
    """Trains a drafter and leaves it in the run's folder; with `dry_run` only says what would happen, or why it cannot.

    Raises:
        InputError: anything that a user, a file or the machine can mend, before work starts where it can be known then.
    """
    console = Console()
    settings = with_local_start(settings)
    check_files(settings)
    settings = settled(settings)
    rows = prepare_rows(settings)
    print_plan(console, settings, rows)
    check_machine(settings, rows)
    if settings.evaluate.every is not None:
        chosen_policy(settings.evaluate, rows.draft)
    check_resumed(settings, resume)
    if dry_run:
        return
    claim_kept(settings, rows)
    experiment = open_experiment(settings, resume)
    with experiment.tracker, ray_session(settings):
        fitted = fit_drafter(experiment, rows, console)
        experiment.tracker.artifact(experiment.folder / "settings.yaml")
        console.print(f"{fitted.steps} steps trained; {training_summary(fitted.history)}")
    console.print(str(experiment.drafter), soft_wrap=True)


def training_summary(history: list[dict[str, float]]) -> str:
    """The last record in words."""
    last = history[-1]
    return f"last loss {last['loss']:.4f}, tau {last['tau_probabilistic']:.3f}" if last else "nothing was logged"


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("train")
