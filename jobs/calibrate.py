"""`dspark calibrate`: temperatures for the confidence head, and how fast the target's passes are.

held-out prompts -> calibrator actors -> rounds -> temperatures from one half, errors on the other -> calibration.json
                    profiler actor -> step rates ------------------------------------------------------┘
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.tracking import Tracker
from dspark.config import Settings
from dspark.decoding.calibration import half_of
from dspark.decoding.calibration_file import Calibration, save_calibration
from dspark.decoding.schedule import StepRates
from dspark.errors import InputError
from dspark.evaluation.benchmarks import is_benchmark
from dspark.evaluation.calibration_plots import reliability_diagrams
from dspark.evaluation.figures import LIGHT
from dspark.model.config import DSparkConfig
from dspark.model.exchange import check_made_for, read_checkpoint
from dspark.target_files import load_config, load_tokenizer, settled
from jobs.calibrating import (
    ROUNDS,
    Calibrated,
    calibrate_rounds,
    calibration_metrics,
    calibration_numbers,
    decode_rounds,
    print_calibration,
    print_rates,
    profile_rates,
    write_rounds,
)
from jobs.config import check_files
from jobs.experiment import Experiment, open_experiment
from jobs.reporting import RESULT
from jobs.rows import PromptRows, prepare_prompts
from jobs.session import ray_session

CALIBRATION = "calibration.json"


def calibrate(settings: Settings, checkpoint: Path, profile: bool, dry_run: bool) -> None:
    """Calibrates the confidence head of the drafter in the folder `checkpoint`, in a run of its own.

    Raises:
        InputError: no drafter of this target with a confidence head, or too few rounds.
    """
    console = Console()
    check_files(settings)
    settings = settled(settings)
    checkpoint = checkpoint.resolve()
    check_made_for(settings.target, checkpoint)
    draft = _confident(settings, checkpoint)
    _check_length(settings, draft)
    prompts = prepare_prompts(settings, load_tokenizer(settings.target))
    _print_plan(console, settings, checkpoint, prompts, profile)
    if dry_run:
        return
    experiment = open_experiment(settings, None)
    experiment.drafter.symlink_to(checkpoint)  # so that `latest/drafter` is a drafter after any kind of run
    evaluate = settings.evaluate
    booked = {"CPU": evaluate.widest_pool * evaluate.cpus, "GPU": evaluate.widest_pool * evaluate.gpus}
    with experiment.tracker:
        with ray_session(settings, booked):
            recorded = decode_rounds(settings, checkpoint, prompts, console)
            write_rounds(experiment.folder / ROUNDS, recorded)
            calibrated = calibrate_rounds(settings, recorded, draft.block)
            rates = profile_rates(settings, draft, prompts, console) if profile else None
        file = _write(experiment, prompts, calibrated, rates)
        print_calibration(console, calibrated)
        if rates is not None:
            print_rates(console, rates)
        _track(experiment.tracker, experiment.folder, calibrated)
    console.print(str(file), soft_wrap=True)


def _confident(settings: Settings, checkpoint: Path) -> DSparkConfig:
    """The drafter's architecture.

    Raises:
        InputError: it cannot be read, or has no confidence head.
    """
    layers = load_config(settings.target).num_hidden_layers
    draft = read_checkpoint(checkpoint, None, layers, settings.target.model).config
    if not isinstance(draft, DSparkConfig) or not draft.confidence:
        raise InputError(
            f"drafter {checkpoint} has no confidence head, so there is nothing to calibrate: train a DSpark drafter "
            "with drafter.confidence=true and loss.confidence above 0"
        )
    return draft


def _check_length(settings: Settings, draft: DSparkConfig) -> None:
    # One token comes from the prompt pass, and the target's own one on top of the drafts.
    needed = draft.block + 2
    if settings.evaluate.max_new_tokens < needed:
        raise InputError(
            f"evaluate.max_new_tokens={settings.evaluate.max_new_tokens} leaves no room for {draft.block} slots "
            f"to be verified: set it to {needed} or more"
        )


def _print_plan(console: Console, settings: Settings, checkpoint: Path, prompts: PromptRows, profile: bool) -> None:
    halves = [half_of(ids) for ids in prompts.ids]
    evaluate, wanted = settings.evaluate, settings.calibrate.min_rounds
    # A round gives at least one token, and the first token belongs to none.
    most = evaluate.max_new_tokens - 1
    console.print(
        f"{halves.count('fit')} prompts to fit to and {halves.count('report')} to report on, each with at most {most} "
        f"rounds at temperature {settings.calibrate.temperature:g}; at most {evaluate.widest_pool} calibrators, "
        f"drafter {checkpoint}"
    )
    if profile:
        console.print(f"then target passes are timed, of up to {settings.calibrate.requests} requests with all drafts")
    if min(halves.count("fit"), halves.count("report")) * most < wanted:
        raise InputError(
            f"these prompts cannot give calibrate.min_rounds={wanted} rounds in both halves: raise evaluate.prompts_t0 "
            "or evaluate.max_new_tokens, add prompts to data.held_out, or set evaluate.benchmarks"
        )


def dataset_of(settings: Settings, prompts: PromptRows) -> str:
    """What the temperatures belong to: the held-out file, each benchmark, and the sampling temperature."""
    benchmarks = dict.fromkeys(one.domain for one in prompts.prompts if is_benchmark(one.id, one.domain))
    return f"{' and '.join([settings.data.held_out.name, *benchmarks])}, temperature {settings.calibrate.temperature:g}"


def _write(experiment: Experiment, prompts: PromptRows, calibrated: Calibrated, rates: StepRates | None) -> Path:
    """`calibration.json` for engines, `result.json` with every number, and the picture."""
    folder, settings = experiment.folder, experiment.settings
    facts: dict[str, Any] = {
        "dataset": dataset_of(settings, prompts),
        "num_samples": calibrated.fit.rounds[0],
    }
    for when, slots in (("ece_before", calibrated.before), ("ece_after", calibrated.after)):
        errors = [slot.ece for slot in slots]
        if None not in errors:  # engines take numbers alone
            facts[when] = errors
    save_calibration(folder / CALIBRATION, Calibration(calibrated.fit.temperatures, rates), facts)
    result = {"temperature": settings.calibrate.temperature, **calibration_numbers(calibrated)}
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (folder / "plots").mkdir()
    (folder / "plots" / "reliability.png").write_bytes(reliability_diagrams(calibrated.before, calibrated.after, LIGHT))
    return folder / CALIBRATION


def _track(tracker: Tracker, folder: Path, calibrated: Calibrated) -> None:
    tracker.records([{"step": 0, **calibration_metrics(calibrated)}])
    for name in ("settings.yaml", RESULT, CALIBRATION, ROUNDS):
        tracker.artifact(folder / name)
    tracker.artifact(folder / "plots", "plots")


if __name__ == "__main__":
    from jobs.cli import command_main

    command_main("calibrate")
