"""`dspark run`: the whole path, from conversations to a registered drafter and a report.

conversations -> token rows -> target actors -> trainers -> drafter -> evaluator actors -> MLflow, registry, report
"""

import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from actors.placement import target_place
from dspark.config import Settings
from dspark.evaluation.summary import result_json
from dspark.target_files import load_tokenizer, settled
from jobs.checkpoints import with_local_start
from jobs.config import check_files
from jobs.evaluating import check_identical, chosen_policy, evaluate_drafters
from jobs.experiment import Experiment, check_resumed, open_experiment
from jobs.fitting import fit_drafter
from jobs.measured import Measured
from jobs.preflight import check_machine, print_plan
from jobs.register import register_run
from jobs.reporting import run_facts, track_results, typed_command, write_results
from jobs.results import ResultsFile, description_of
from jobs.rows import PromptRows, Rows, prepare_prompts, prepare_rows
from jobs.session import ray_session
from jobs.streams import claim_kept
from jobs.tables import print_results


def run(settings: Settings, resume: Path | None, dry_run: bool) -> None:
    """Trains, measures, registers and reports; with `dry_run` only says what would happen, or why it cannot.

    Raises:
        InputError: anything that a user, a file or the machine can mend, before work starts where it can be known then.
    """
    started = time.perf_counter()
    console = Console()
    settings = with_local_start(settings)
    check_files(settings)
    settings = settled(settings)
    rows = prepare_rows(settings)
    tokenizer = load_tokenizer(settings.target)
    prompts = prepare_prompts(settings, tokenizer)
    print_plan(console, settings, rows)
    check_machine(settings, rows)
    chosen_policy(settings.evaluate, rows.draft)
    check_resumed(settings, resume)
    if dry_run:
        return
    claim_kept(settings, rows)
    experiment = open_experiment(settings, resume)
    with experiment.tracker:
        report = _run(experiment, rows, prompts, console, started)
    console.print(str(report), soft_wrap=True)


def _run(experiment: Experiment, rows: Rows, prompts: PromptRows, console: Console, started: float) -> Path:
    settings, tracker, folder = experiment.settings, experiment.tracker, experiment.folder
    with ray_session(settings):
        # Refused now, not when the drafter is trained.
        target_place("evaluate", settings.evaluate, settings.ray.target_labels)
        prepared = time.perf_counter()
        fitted = fit_drafter(experiment, rows, console)
        trained = time.perf_counter()
        drafters = {"drafter": experiment.drafter}
        file = ResultsFile(folder, description_of(settings, drafters, prompts))
        results = evaluate_drafters(settings, drafters, prompts, file, console)
    ended = time.perf_counter()
    seconds = {
        "prepare": prepared - started,
        "train": trained - prepared,
        "evaluate": ended - trained,
        "total": ended - started,
    }
    facts = run_facts(settings, rows)
    tokenizer = load_tokenizer(settings.target)
    result = result_json(results, seconds, fitted.steps, None, fitted.history, settings.seed)
    result |= {"ledger": asdict(fitted.ledger)}
    if settings.tracking.register_model:
        numbers = {"command": typed_command(), **result["drafters"]["drafter"]}
        result["model_version"] = register_run(experiment, Measured(file.description, results, numbers))
    report = write_results(folder, settings, tokenizer, results, fitted.history, result, facts)
    track_results(tracker, folder, result, report, fitted.steps)
    print_results(console, result)
    check_identical(settings, results)
    return report


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("run")
