"""A sweep on Ray: trials through Ray Tune, then the best ones again with other seeds; this process keeps the records.

trials, one after the other or `tune.concurrent` at a time -> measurements -> Ray Tune's scheduler: go on, or stop
  -> the best `tune.confirm` and trial 0, with other seeds -> the best mean

Waits for: the trials. Bounded by: `tune.concurrent`, whose places are there before the first one starts. A killed sweep
goes on with `--resume`: what has ended stays, a trial that was broken off goes on from its newest checkpoint.
"""

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.util import get_node_ip_address
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from actors.placement import target_place
from actors.places import Places
from actors.shared_target import SharedTarget
from actors.stop_actor import StopActor
from actors.tracking import Tracker
from actors.trials import Common
from actors.validation_rows import captured_validation
from dspark.config import Settings, dotted
from dspark.errors import InputError, StoppedError
from jobs.experiment import Experiment
from jobs.fitting import target_bigrams
from jobs.outcomes import Ledger, Outcome, Score, to_confirm, unfinished
from jobs.progress import stage
from jobs.rows import Rows
from jobs.search import NextRun, OptunaRuns, scheduler_of
from jobs.signals import attended_work, stop_signals
from jobs.sweep_records import Follower, has_fault
from jobs.sweeping import Trial
from jobs.trial import ERROR, Sweep, run_folder, run_trial

_STATE = ".tune"  # Ray Tune's own files, which nobody needs afterwards
# A run that is asked to stop ends without a last measurement.
_RAY_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def run_sweep(
    experiment: Experiment,
    rows: Rows,
    trials: Sequence[Trial],
    found: Sequence[Settings],
    steps: int,
    console: Console,
) -> tuple[Ledger, list[Score]]:
    """Makes all runs that are missing; the ledger, and the trials that finished with every seed, the best first.

    `found` are settings of trials, between them every value that matters here; `steps` is the length of the longest.

    Raises:
        StoppedError: a signal asked for it; what is done stays.
        InputError, RuntimeError: no trial was trained to its end; holds the first traceback.
    """
    settings = experiment.settings
    seeds = range(settings.seed, settings.seed + (settings.tune.seeds if settings.tune.confirm else 1))
    ledger = Ledger.read(experiment.folder, settings.tune)
    with stop_signals(console) as asked:
        sweep = Sweep(settings, rows, experiment.folder, common_of(settings, found, rows, console))
        try:
            _search(sweep, experiment.tracker, ledger, trials, steps, console, asked)
            if ledger.ranked(settings.seed):
                _confirm(sweep, experiment.tracker, ledger, seeds, steps, console, asked)
        finally:
            sweep.common.places.settle()
            # Ray Tune holds what its trials were given for as long as this process lives.
            for target in sweep.common.targets:
                ray.kill(target)
    scores = ledger.scores(seeds)
    if not scores:
        raise all_failed(ledger, experiment.folder)
    return ledger, scores


def _confirm(
    sweep: Sweep,
    tracker: Tracker,
    ledger: Ledger,
    seeds: Sequence[int],
    steps: int,
    console: Console,
    asked: threading.Event,
) -> None:
    again = [
        Outcome(number, seed, ledger.outcomes[number, seeds[0]].values)
        for number in to_confirm(ledger, seeds[0])
        for seed in seeds
        if (number, seed) not in ledger.outcomes or ledger.outcomes[number, seed].state in ("running", "stopped")
    ]
    if again and len(seeds) > 1:
        with stage(console, "confirm", len(again) * steps) as bar:
            follower = Follower(sweep, tracker, ledger, bar, steps, asked)
            _fit(sweep, NextRun(again, asked), len(again), FIFOScheduler(), follower, asked)


def common_of(settings: Settings, found: Sequence[Settings], rows: Rows, console: Console) -> Common:
    """What the trials share; targets are loaded here, one after the other, and no more of them later."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    flag: Any = ray.remote(num_cpus=0)(StopActor).options(scheduling_strategy=here).remote()
    places = Places(Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here}))
    validation = {}
    if rows.validation is not None:
        taps = tuple(sorted({tap for one in found for tap in one.drafter.taps}))
        ranks, parts = {one.train.workers for one in found}, {one.train.micro_batch for one in found}
        for width, one in {workers * part: (workers, part) for workers in ranks for part in parts}.items():
            train = settings.train.model_copy(update={"workers": one[0], "micro_batch": one[1]})
            as_run = settings.model_copy(update={"train": train})
            measured = captured_validation(as_run, rows.validation, replace(rows.origin, taps=taps))
            ray.wait(list(measured.captured), num_returns=len(measured.captured), fetch_local=False)
            ray.get(measured.captured[0])  # raises what kept the target from being had
            validation[width] = measured
        console.print(f"{rows.validation.num_rows} validation rows captured for all trials", highlight=False)
    bigrams = None
    if any(one.drafter.init == "target" for one in found):
        bigrams = target_bigrams(settings, rows)
        ray.wait([bigrams], fetch_local=False)
    return Common(flag, places, bigrams, validation, _pool(settings) if settings.data.source == "live" else ())


def _pool(settings: Settings) -> tuple[Any, ...]:
    """The targets of a live sweep. Ray restarts one that dies, and repeats the windows that it had."""
    pool = settings.targets
    place = target_place("targets", pool, settings.ray.target_labels)
    actor = ray.remote(**place, max_restarts=-1, max_task_retries=-1)(SharedTarget)
    targets: list[Any] = [actor.remote(settings.target, pool) for _ in range(pool.actors)]
    for fault in ray.get([target.ready.remote() for target in targets]):
        if fault is not None:
            raise InputError(fault)
    return tuple(targets)


def _search(
    sweep: Sweep,
    tracker: Tracker,
    ledger: Ledger,
    trials: Sequence[Trial],
    steps: int,
    console: Console,
    asked: threading.Event,
) -> None:
    settings, section = sweep.settings, sweep.settings.tune
    runs, numbers, optuna = unfinished(ledger, trials, settings.seed), list[int](), None
    ended = [one for one in ledger.outcomes.values() if one.seed == settings.seed and one.state != "running"]
    if section.search == "optuna":
        assert section.trials is not None, "the section asks for it"
        begun = {one.number for one in ledger.outcomes.values()}
        # Trials of Optuna that were broken off are known from the ledger alone.
        runs += [one for one in ledger.outcomes.values() if one.state == "running" and one.number > 0]
        numbers = [number for number in range(1, section.trials) if number not in begun]
        optuna = OptunaRuns(section, settings.seed, ended, dotted(settings.model_dump(mode="json")))
    count = len(runs) + len(numbers)
    if not count:
        return
    grace = section.grace or settings.validation.every or settings.train.log_every
    with stage(console, "search", count * steps) as bar:
        follower = Follower(sweep, tracker, ledger, bar, steps, asked)
        search = NextRun(runs, asked, optuna, settings.seed, numbers)
        _fit(sweep, search, count, scheduler_of(section, grace, steps, ended), follower, asked)


def _fit(
    sweep: Sweep, search: NextRun, count: int, scheduler: TrialScheduler, follower: Follower, asked: threading.Event
) -> None:
    """Has Ray Tune make `count` runs; raises StoppedError if somebody asked to stop meanwhile."""
    for name, value in _RAY_TUNE.items():
        os.environ.setdefault(name, value)
    # On this node, so that a run's files lie where this process reads them.
    places = tune.PlacementGroupFactory([{f"node:{get_node_ip_address()}": 0.001}])
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, sweep=sweep), places),
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=scheduler,
            num_samples=count,
            max_concurrent_trials=sweep.settings.tune.concurrent,
            trial_name_creator=_short_name,
            trial_dirname_creator=_short_name,
            # A process whose run was stopped early is not free in the two seconds that Ray Tune gives it.
            reuse_actors=False,
        ),
        run_config=tune.RunConfig(
            name=_STATE, storage_path=str(sweep.folder), callbacks=[follower], verbose=0, stop=has_fault
        ),
    )
    try:
        if not asked.is_set():
            attended_work(tuner.fit, asked, sweep.common.stop.ask.remote)
            follower.settle(search.handed.values())
    finally:
        follower.close()
        shutil.rmtree(sweep.folder / _STATE, ignore_errors=True)
    if asked.is_set():
        made = sum(one.state != "running" for one in follower.ledger.outcomes.values())
        raise StoppedError(f"stopped with {made} runs made, the others have a checkpoint", str(sweep.folder))


def _short_name(trial: TuneTrial) -> str:
    # By default it holds all values, of which some make no good file name.
    return trial.trial_id


def all_failed(ledger: Ledger, folder: Path) -> InputError | RuntimeError:
    """The first failure, with its traceback; bad input if that is what it was."""
    failed = [one for one in ledger.outcomes.values() if one.state == "failed"]
    if not failed:
        return RuntimeError("no trial was trained to its end, and none failed")
    error = run_folder(folder, failed[0].number, failed[0].seed) / ERROR
    text = error.read_text().strip() if error.is_file() else failed[0].reason
    said = f"{len(failed)} of {len(ledger.outcomes)} runs failed and none was good enough to be the best; the first "
    said += f"one, {failed[0].shown}:\n{text}"
    return InputError(said) if "InputError" in text.rpartition("\n")[2] else RuntimeError(said)
