"""`dspark tune`: a sweep over settings, and the preset that came out best.

tune.space -> trials, checked -> Ray Tune over Ray Train -> the best again with other seeds -> best.yaml, pictures
"""

from collections.abc import Sequence
from pathlib import Path

import ray
import yaml
from rich.console import Console

from actors.pipelines import check_store
from dspark.config import Settings, dotted
from dspark.errors import InputError
from dspark.target_files import settled
from jobs.checkpoints import with_local_start
from jobs.config import check_files, dump_settings, read_yaml
from jobs.experiment import open_experiment
from jobs.fitting import held_bytes
from jobs.preflight import check_machine, memory_available, needs_of
from jobs.rows import Rows, prepare_rows, replanned
from jobs.session import ray_session
from jobs.sweep import run_sweep
from jobs.sweep_report import BEST, print_sweep, print_trials, write_sweep
from jobs.sweeping import booked, check_places, plan_trials, reachable

# What a sweep that is resumed must have in common with what it has done; where things run may change.
_FIXED = ("seed", "target.model", "target.dtype", "data", "cache.limit", "drafter", "loss", "eagle3", "train",
          "validation", "tune")  # fmt: skip
_FREE = ("tune.concurrent", "tune.confirm", "tune.seeds", "train.threads", "train.cpus", "train.gpus",
         "train.max_failures", "train.prefetch", "train.storage", "train.logits_mb")  # fmt: skip


def tune(settings: Settings, resume: Path | None, dry_run: bool) -> None:
    """Makes the trials and leaves `best.yaml`; with `dry_run` only says which ones, and what they book.

    Raises:
        InputError: anything that a user, a file or the machine can mend, before work starts where it can be known then;
            also if no trial was trained to its end, with the first one's traceback.
    """
    console = Console()
    settings = with_local_start(settings)
    check_files(settings)
    asked, settings = settings, settled(settings)
    trials = plan_trials(settings)
    found = reachable(settings, trials)
    rows = prepare_rows(found[0])
    planned = [(one, _planned(one, rows)) for one in found]
    print_trials(console, settings, rows, trials, booked(settings, found))
    _check_memory(settings, planned)
    if resume is not None:
        _check_same(settings, resume)
    if dry_run:
        return
    experiment = open_experiment(settings, resume)
    with experiment.tracker, ray_session(settings, booked(settings, found)):
        check_places(settings, found, ray.nodes())
        check_store(settings, settings.tune.concurrent * max(held_bytes(its_rows) for _, its_rows in planned))
        steps = max(its_rows.plan.steps for _, its_rows in planned)
        ledger, scores = run_sweep(experiment, rows, trials, found, steps, console)
        write_sweep(experiment, asked, ledger, scores)
        print_sweep(console, ledger, scores)
    console.print(str(experiment.folder / BEST), soft_wrap=True)


def _planned(settings: Settings, rows: Rows) -> Rows:
    """The rows of a trial; raises InputError if its drafter does not fit the target, its checkpoint, or the cache."""
    found = replanned(rows, settings)
    if settings.data.source == "cache" and not set(found.draft.taps) <= set(rows.draft.taps):
        prepare_rows(settings)  # looks for these taps in the cache too
    return found


def _check_memory(settings: Settings, planned: Sequence[tuple[Settings, Rows]]) -> None:
    """Refuses a sweep whose largest trial, or as many of it as run at the same time, this machine cannot hold."""
    largest, its_rows = max(planned, key=lambda one: needs_of(*one).trainer_memory)
    check_machine(largest, its_rows)
    needs, at_once = needs_of(largest, its_rows), settings.tune.concurrent
    wanted, available = needs.target_memory + at_once * needs.trainer_memory + needs.object_store, memory_available()
    if settings.ray.address == "local" and available < wanted:
        raise InputError(
            f"{available / 1e9:.1f} GB of memory are available, {at_once} trials at the same time need about "
            f"{wanted / 1e9:.1f} GB: lower tune.concurrent"
        )


def _check_same(settings: Settings, resume: Path) -> None:
    """Raises InputError if the folder holds no sweep, or one of other settings."""
    path = resume / "settings.yaml"
    if not path.is_file():
        raise InputError(f"--resume {resume}: no settings.yaml there, so it is no run folder")
    before, now = dotted(read_yaml(path)), dotted(yaml.safe_load(dump_settings(settings)))
    for key in dict.fromkeys((*before, *now)):
        fixed = any(key == name or key.startswith(f"{name}.") for name in _FIXED) and key not in _FREE
        if fixed and before.get(key) != now.get(key):
            raise InputError(
                f"--resume {resume}: {key} was {before.get(key)!r} and is {now.get(key)!r} now, so its trials would be "
                "of two kinds: repeat the command with the settings of that sweep, or leave --resume out"
            )


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("tune")
