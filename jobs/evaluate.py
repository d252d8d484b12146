"""`dspark evaluate`: acceptance and speed of a drafter on held-out prompts and benchmarks."""

import time
from pathlib import Path

from rich.console import Console

from dspark.config import Settings
from dspark.errors import InputError
from dspark.evaluation.report import result_json
from dspark.model.checkpoints import CONFIG, RUN_KEY, read_json
from dspark.target import fingerprint, load_tokenizer, resolve, settled
from jobs.config import check_files
from jobs.evaluating import check_identical, evaluate_drafter
from jobs.experiment import open_experiment
from jobs.reporting import print_results, target_facts, track_results, write_results
from jobs.rows import prepare_prompts
from jobs.session import ray_session


def evaluate(settings: Settings, checkpoint: Path, dry_run: bool) -> None:
    """Measures the drafter in the folder `checkpoint` and writes a report of its own.

    Raises:
        InputError: the folder is no drafter of this target, or the prompts cannot be read.
    """
    started = time.perf_counter()
    console = Console()
    check_files(settings)
    settings = settled(settings)
    checkpoint = checkpoint.resolve()
    check_target(settings, checkpoint)
    tokenizer = load_tokenizer(settings.target)
    prompts = prepare_prompts(settings, tokenizer)
    console.print(f"{len(prompts.prompts)} prompts, {settings.evaluate.actors} evaluators, drafter {checkpoint}")
    if dry_run:
        return
    experiment = open_experiment(settings, None)
    experiment.drafter.symlink_to(checkpoint)  # so that `latest/drafter` is a drafter after any kind of run
    with experiment.tracker:
        with ray_session(settings):
            prepared = time.perf_counter()
            results = evaluate_drafter(settings, checkpoint, prompts, console)
        ended = time.perf_counter()
        seconds = {"prepare": prepared - started, "evaluate": ended - prepared, "total": ended - started}
        result = result_json(results, seconds, None, None, [])
        facts = {**target_facts(settings), "drafter": str(checkpoint)}
        report = write_results(experiment.folder, settings, tokenizer, results, [], result, facts)
        track_results(experiment.tracker, experiment.folder, result, report, 0)
        print_results(console, result)
        check_identical(settings, results)
    console.print(str(report), soft_wrap=True)


def check_target(settings: Settings, checkpoint: Path) -> None:
    """A drafter that this project made says which weights it was made for.

    Raises:
        InputError: the settings name a target with other weights.
    """
    facts = read_json(checkpoint / CONFIG).get(RUN_KEY, {})
    made_for = facts.get("target", {}).get("fingerprint")
    if made_for is not None and made_for != (found := fingerprint(resolve(settings.target))):
        raise InputError(
            f"drafter {checkpoint} was trained for target weights {made_for} ({facts['target']['name']}), "
            f"target.model={settings.target.model!r} has {found}: name the target that it was trained for"
        )


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("evaluate")
