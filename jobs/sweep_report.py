"""What a sweep prints and leaves behind: plan, table, pictures, the best preset, and the parent run in MLflow."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark.config import Settings, dotted
from dspark.evaluation import sweep_plots
from dspark.evaluation.figures import LIGHT
from dspark.evaluation.sweep_plots import Point
from dspark.tuning import TuneSettings
from jobs.config import dump_settings, with_values
from jobs.experiment import Experiment
from jobs.facts import print_facts
from jobs.outcomes import TABLE, TRIALS, Ledger, Outcome, Score, summary
from jobs.rows import Rows
from jobs.sweeping import Trial, shown_value

BEST, RESULT, PLOTS = "best.yaml", "result.json", "plots"
_SHOWN_TRIALS = 40


def print_trials(
    console: Console, settings: Settings, rows: Rows, trials: Sequence[Trial], books: Mapping[str, float]
) -> None:
    """Space, trials, resources and schedule of a sweep, on the screen."""
    section = settings.tune
    first = trials[0].settings
    count = section.trials if section.search == "optuna" else len(trials)
    scheduler = "none, each trial is trained to its end"
    if section.scheduler == "asha":
        grace = section.grace or settings.validation.every or settings.train.log_every
        scheduler = f"asha from step {grace} on, one of {section.reduction:g} goes on at each rung"
    shared = (
        f"{settings.targets.actors} target actors, loaded once"
        if settings.data.source == "live"
        else f"the cache {settings.cache.address(settings.output, settings.name)}"
    )
    seeds = f"the best {section.confirm} and trial 0 with {section.seeds} seeds" if section.confirm else "none"
    lines = {
        "space": "; ".join(f"{key}: {_space(space)}" for key, space in section.space.items()),
        "trials": f"{count}, {section.search}, at most {section.concurrent} at a time",
        "a trial": f"{rows.plan.steps:,} steps of {first.train.global_batch} rows, {first.train.workers} ranks",
        "metric": f"{section.metric}, {'smaller' if section.smaller else 'larger'} is better",
        "scheduler": scheduler,
        "confirmed": seeds,
        "shared": shared + ("" if rows.validation is None else f", and {rows.validation.num_rows} validation rows"),
        "booked": f"{books['CPU']:g} logical CPUs, {books['GPU']:g} GPUs at most",
        "folder": f"a new one in {settings.output.resolve()}",
    }
    print_facts(console, lines)
    for trial in trials[:_SHOWN_TRIALS]:
        console.print(f"trial {trial.number}: {trial.shown}", highlight=False, markup=False, soft_wrap=True)
    if section.search == "optuna":
        console.print("the others are chosen by Optuna as results come in")
    if len(trials) > _SHOWN_TRIALS:
        console.print(f"and {len(trials) - _SHOWN_TRIALS} more")


def _space(space: Any) -> str:
    ((form, values),) = space.model_dump(mode="json").items()
    return f"{form} {json.dumps(values)}"


def print_sweep(console: Console, ledger: Ledger, scores: Sequence[Score]) -> None:
    """The table of all trials, the best first, then those that were not trained to the end."""
    keys = list(ledger.tune.space)
    means = {score.number: score for score in scores}
    table = Table(title=f"trials by {ledger.tune.metric}", title_justify="left")
    for column in ("trial", *keys, "step", ledger.tune.metric, "mean of seeds", "state"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for one in _by_trial(ledger, scores):
        values = [shown_value(one.values[key]) if key in one.values else "preset" for key in keys]
        score = means.get(one.number)
        table.add_row(
            str(one.number), *values, str(one.step), "-" if one.value is None else f"{one.value:.4f}",
            "-" if score is None else f"{score.mean:.4f} ({len(score.by_seed)})", one.state,
            style="bold" if one.number == scores[0].number else None,
        )  # fmt: skip
    console.print(table)
    for one in ledger.outcomes.values():
        if one.state == "failed":
            console.print(f"{one.shown} failed: {one.reason}", markup=False, highlight=False, soft_wrap=True)
    best, default = scores[0], next((score for score in scores if score.number == 0), None)
    said = f"best: trial {best.number}, mean {ledger.tune.metric} {best.mean:.4f} over {len(best.by_seed)} seeds"
    if default is not None and default is not best:
        said += f"; the preset has {default.mean:.4f}"
    console.print(said, highlight=False)


def _by_trial(ledger: Ledger, scores: Sequence[Score]) -> list[Outcome]:
    """Each trial's run with the first seed: by mean, by value, and then as they began."""
    first = {number: one for (number, _), one in reversed(list(ledger.outcomes.items()))}
    ranked = [score.number for score in scores]
    ranked += [one.number for one in ledger.ranked(next(iter(ledger.outcomes.values())).seed)]
    return [first[number] for number in dict.fromkeys([*ranked, *sorted(first)])]


def write_sweep(experiment: Experiment, asked: Settings, ledger: Ledger, scores: Sequence[Score]) -> None:
    """Writes best.yaml, result.json and the pictures, and all of it into the sweep's MLflow run."""
    folder, best = experiment.folder, scores[0]
    # As the preset says it, `auto` and the number of steps too, but without a sweep in it.
    found = with_values(asked, best.values).model_copy(update={"tune": TuneSettings()})
    head = f"# Trial {best.number} of a sweep: {ledger.tune.metric} {best.mean:.4f}, mean of {len(best.by_seed)} seeds."
    (folder / BEST).write_text(f"{head}\n{dump_settings(found)}")
    result = summary(ledger, scores)
    shares = write_pictures(folder / PLOTS, ledger, dotted(asked.model_dump(mode="json")))
    (folder / RESULT).write_text(json.dumps(result | {"importance": shares}, indent=1) + "\n")
    tracker = experiment.tracker
    tracker.results({"best_mean": best.mean, "best_trial": best.number, "runs": len(ledger.outcomes)}, 0)
    for name in (BEST, RESULT, TRIALS, TABLE, "settings.yaml"):
        tracker.artifact(folder / name)
    tracker.artifact(folder / PLOTS, PLOTS)


def write_pictures(folder: Path, ledger: Ledger, own: Mapping[str, Any]) -> dict[str, float]:
    """Draws the pictures; returns each setting's importance. `own` are the preset's values, by key."""
    folder.mkdir(exist_ok=True)
    seed = next(iter(ledger.outcomes.values())).seed
    runs = [one for one in ledger.outcomes.values() if one.seed == seed and one.curve]
    keys, metric = list(ledger.tune.space), ledger.tune.metric
    points = [
        Point(one.number, {key: one.values.get(key, own.get(key)) for key in keys}, one.value or 0.0,
              one.state == "finished")
        for one in runs
    ]  # fmt: skip
    pictures = {
        "parallel": sweep_plots.parallel_coordinates(points, keys, metric, LIGHT),
        "curves": sweep_plots.learning_curves({f"trial {one.number}": one.curve for one in runs}, metric, LIGHT),
    }
    # Trials that were stopped early are compared with the others where all were alike: at the last common step.
    common = set.intersection(*({step for step, _ in one.curve} for one in runs))
    at = max(common, default=None)
    level = [] if at is None else [replace(p, score=dict(one.curve)[at]) for p, one in zip(points, runs, strict=True)]
    shares = sweep_plots.importances(level, keys)
    if shares:
        pictures["importance"] = sweep_plots.importance_bars(shares, LIGHT)
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(picture)
    return shares
