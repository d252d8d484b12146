"""`dspark evaluate`: acceptance and speed of drafters, side by side, on held-out prompts and benchmarks."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.summary import result_json
from dspark.model.exchange import check_made_for
from dspark.target_files import load_tokenizer, settled
from jobs.config import check_files
from jobs.evaluating import check_identical, evaluate_drafters, planned
from jobs.experiment import open_experiment
from jobs.reporting import target_facts, track_results, write_results
from jobs.results import ResultsFile, description_of
from jobs.rows import PromptRows, prepare_prompts
from jobs.session import ray_session
from jobs.tables import print_results


def evaluate(settings: Settings, checkpoints: Sequence[Path], resume: Path | None, dry_run: bool) -> None:
    """Measures the drafters in the folders `checkpoints` on the same prompts and writes a report of its own.

    Raises:
        InputError: a folder is no drafter of this target, the prompts cannot be read, or the run to `resume` measured
            something else.
    """
    started = time.perf_counter()
    console = Console()
    check_files(settings)
    settings = settled(settings)
    drafters = {name: folder.resolve() for name, folder in zip(drafter_names(checkpoints), checkpoints, strict=True)}
    for folder in drafters.values():
        check_made_for(settings.target, folder)
    tokenizer = load_tokenizer(settings.target)
    prompts = prepare_prompts(settings, tokenizer)
    description = description_of(settings, drafters, prompts)
    if resume is not None:
        ResultsFile(resume.resolve(), description).check(resume)
    _print_plan(console, settings, drafters, prompts)
    if dry_run:
        return
    experiment = open_experiment(settings, resume)
    if not experiment.drafter.is_symlink():
        # So that `latest/drafter` is a drafter after any kind of run.
        experiment.drafter.symlink_to(next(iter(drafters.values())))
    pool = settings.evaluate
    booked = {"CPU": pool.widest_pool * pool.cpus, "GPU": pool.widest_pool * pool.gpus}
    with experiment.tracker:
        with ray_session(settings, booked):
            prepared = time.perf_counter()
            file = ResultsFile(experiment.folder, description)
            results = evaluate_drafters(settings, drafters, prompts, file, console)
        ended = time.perf_counter()
        seconds = {"prepare": prepared - started, "evaluate": ended - prepared, "total": ended - started}
        result = result_json(results, seconds, None, None, [], settings.seed)
        facts = {**target_facts(settings), **{f"drafter {name}": str(folder) for name, folder in drafters.items()}}
        report = write_results(experiment.folder, settings, tokenizer, results, [], result, facts)
        track_results(experiment.tracker, experiment.folder, result, report, 0)
        print_results(console, result)
        check_identical(settings, results)
    console.print(str(report), soft_wrap=True)


def drafter_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder, as short as tells them apart: its own, `drafter` aside, or with those above it.

    Raises:
        InputError: the same folder twice.
    """
    # A run keeps what it made in NAME/drafter.
    parts = [folder.absolute().parts for folder in folders]
    parts = [found[:-1] if found[-1] == "drafter" and len(parts) > 1 else found for found in parts]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(found[-depth:]) for found in parts]
        if len(set(names)) == len(names):
            return [re.sub(r"[^\w.:/ -]", "-", name).lstrip("/") for name in names]
    raise InputError("a drafter is given twice: name each folder once, there is nothing to compare it with")


def _print_plan(console: Console, settings: Settings, drafters: dict[str, Path], prompts: PromptRows) -> None:
    pool, evaluate = settings.evaluate.actors, settings.evaluate
    grows = f" to {evaluate.widest_pool}" if evaluate.widest_pool > pool else ""
    batches = planned(settings, prompts)
    turns = sum(len(one.prompt.later) + 1 for batch in batches for one in batch)
    console.print(
        f"{len(prompts.prompts)} prompts; {turns} answers in {len(batches)} batches (batch size "
        f"{', '.join(map(str, evaluate.batch))}; all temperatures and turns), each plainly and with {len(drafters)} "
        f"drafter{'s' if len(drafters) > 1 else ''}; {pool}{grows} evaluators"
    )
    for name, folder in drafters.items():
        console.print(f"drafter {name}: {folder}", soft_wrap=True)


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("evaluate")
