"""From the `tune` section to trials: their values, checked before anything starts, and what they book.

space -> values of each trial, a function of the seed alone -> settings of each trial, or one error with the full path
"""

import importlib.util
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from actors.placement import check_trainer_places
from dspark.config import Settings, dotted
from dspark.errors import InputError
from dspark.target_files import settled
from dspark.tuning import Space, TuneSettings
from jobs.config import describe_settings, fault_of, nearest_key, with_values

Values = Mapping[str, Any]
# Trials share targets, data and whatever measures them, and a seed is no setting that could be better.
_VARIED = ("drafter", "loss", "eagle3", "train")
# Settings that say what the loss adds up.
_WEIGHTS = ("loss.", "eagle3.", "drafter.block")
_DIGITS = 4
# Of a trial, beside its trainers and readers: Ray Data's own small tasks.
_TRIAL_CPUS = 1


@dataclass(frozen=True)
class Trial:
    """One point of the space. `values` stand over the preset's; those of trial 0 are none."""

    number: int
    values: Values
    settings: Settings

    @property
    def shown(self) -> str:
        """The values as a person would write them."""
        return ", ".join(f"{key}={shown_value(value)}" for key, value in self.values.items()) or "the preset"


def shown_value(value: Any) -> str:
    """A value in few characters."""
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else json.dumps(value, default=str)


def plan_trials(settings: Settings) -> list[Trial]:
    """Trial 0 and all others, or trial 0 alone where Optuna chooses the others as the sweep goes on.

    Raises:
        InputError: a setting that does not exist or cannot vary, a value that it refuses, settings that exclude each
            other, or a sweep that cannot run.
    """
    check_sweep(settings)
    tune = settings.tune
    for key, space in tune.space.items():
        _check_space(settings, key, space)
    rows = [{}] if tune.search == "optuna" else planned_values(tune, settings.seed, _own(settings))
    return [Trial(number, values, settings_of(settings, values)) for number, values in enumerate(rows)]


def planned_values(tune: TuneSettings, seed: int, own: Values) -> list[Values]:
    """The values of each trial; a key's draws do not depend on the other keys. `own` are the preset's, by key."""
    grids = {key: space.grid for key, space in tune.space.items() if space.grid is not None}
    drawn = {key: space for key, space in tune.space.items() if space.grid is None}
    combinations = [dict(zip(grids, found, strict=True)) for found in itertools.product(*grids.values())]
    if not drawn:
        # Trial 0 has its own combination already.
        return [{}, *(found for found in combinations if found != {key: own.get(key) for key in grids})]
    assert tune.trials is not None, "the section asks for it where values are drawn"
    rows: list[Values] = [{}]
    for number in range(1, tune.trials):
        draws = {key: draw(space, random.Random(f"{seed}|{key}|{number}")) for key, space in drawn.items()}
        both = combinations[(number - 1) % len(combinations)] | draws
        rows.append({key: both[key] for key in tune.space})
    return rows


def draw(space: Space, rng: random.Random) -> Any:
    """One value of a space that has no grid, with few digits, so that a table shows all of it."""
    if space.bounds is None:
        return rng.choice(space.values)
    low, high = space.bounds
    if space.loguniform is not None:
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
    else:
        value = rng.uniform(low, high)
    return min(high, max(low, float(f"{value:.{_DIGITS}g}")))


def settings_of(settings: Settings, values: Values) -> Settings:
    """What a trial with these values trains with: its own length, and no sweep in it.

    Raises:
        InputError: the values exclude each other.
    """
    tune = settings.tune
    most = {} if tune.max_steps is None else {"train.max_steps": tune.max_steps}
    try:
        found = with_values(settings, {**most, **values})
    except ValidationError as error:
        faults = "; ".join(fault_of(details) for details in error.errors(include_url=False))
        shown = ", ".join(f"{key}={shown_value(value)}" for key, value in values.items()) or "the preset's own values"
        raise InputError(f"tune.space: a trial with {shown} is impossible: {faults}") from None
    return settled(found.model_copy(update={"tune": TuneSettings()}))


def reachable(settings: Settings, trials: Sequence[Trial]) -> list[Settings]:
    """Settings of trials, between them every value that matters before a sweep begins.

    Where Optuna chooses, each listed value alone and each bound; a value that is only possible beside others is left
    out, and its trial would fail.
    """
    found = [trial.settings for trial in trials]
    if settings.tune.search == "optuna":
        for key, space in settings.tune.space.items():
            for value in space.bounds or space.values:
                try:
                    found.append(settings_of(settings, {key: value}))
                except InputError:
                    continue
    return found


def check_sweep(settings: Settings) -> None:
    """Raises InputError if the settings cannot be swept over, whatever the values."""
    tune = settings.tune
    if not tune.space:
        raise InputError(
            "tune.space is empty: name what varies, such as tune.space.loss.ce='{uniform: [0.1, 1]}' tune.trials=8"
        )
    if tune.metric.startswith("val_") and settings.validation.every is None:
        raise InputError(
            f"tune.metric={tune.metric} is measured on validation rows: set data.validation and validation.every, or "
            "choose a number of the training records, such as tune.metric=tau_probabilistic"
        )
    redefined = sorted(key for key in tune.space if key.startswith(_WEIGHTS))
    if tune.metric in ("loss", "val_loss") and redefined:
        raise InputError(
            f"tune.metric={tune.metric} is not the same number in all trials, since {redefined[0]} varies in what it "
            "adds up: choose tau_probabilistic, val_tau_probabilistic or an acceptance rate"
        )
    if settings.data.source == "live_and_keep":
        raise InputError(
            "data.source=live_and_keep would have every trial write the same cache: write it once with `dspark "
            "capture` and set data.source=cache, or set data.source=live"
        )
    if settings.evaluate.every is not None:
        raise InputError("evaluate.every decodes while a drafter is trained, a trial does not: set evaluate.every=null")
    if settings.targets.max_actors is not None:
        raise InputError("the targets that trials share are a fixed number: set targets.max_actors=null")
    if tune.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise InputError("tune.search=optuna needs the package optuna: run `pip install optuna`, or set it to random")


def _check_space(settings: Settings, key: str, space: Space) -> None:
    known = {name for name, _, _ in describe_settings()}
    if key not in known:
        raise InputError(f"tune.space.{key}: unknown key{nearest_key(key)}")
    if key.partition(".")[0] not in _VARIED or key == "train.storage":
        raise InputError(
            f"tune.space.{key}: trials share it, only settings of {', '.join(_VARIED)} vary: run a sweep for each value"
        )
    if key == "train.max_steps" and settings.tune.max_steps is not None:
        raise InputError("tune.space.train.max_steps and tune.max_steps exclude each other: leave one out")
    keys, tried = tuple(key.split(".")), space.values
    if space.bounds is not None:
        low, high = space.bounds
        # A value inside too, where bounds alone would pass.
        tried = (low, high, low + (high - low) / math.e)
    for value in tried:
        try:
            with_values(settings, {key: value})
        except ValidationError as error:
            # What only the values of other settings forbid is looked for in whole trials.
            own = [one for one in error.errors(include_url=False) if one["loc"][: len(keys)] == keys]
            if own:
                whole = space.bounds is not None and own[0]["type"].startswith("int_")
                more = ": list the values with `choice` or `grid`" if whole else ""
                raise InputError(f"tune.space.{fault_of(own[0])}{more}") from None


def _own(settings: Settings) -> dict[str, Any]:
    return dotted(settings.model_dump(mode="json"))


def booked(settings: Settings, found: Sequence[Settings]) -> dict[str, float]:
    """CPUs and GPUs of a sweep at its most: its targets, and as many trials as run at the same time."""
    pool = settings.targets
    trials = {name: settings.tune.concurrent * max(_trial_books(one)[name] for one in found) for name in ("CPU", "GPU")}
    if settings.data.source == "live":
        return {"CPU": trials["CPU"] + pool.actors * pool.cpus, "GPU": trials["GPU"] + pool.actors * pool.gpus}
    # Before the first trial, a target for the validation rows, and then one for the bigrams.
    return {"CPU": max(trials["CPU"], pool.cpus), "GPU": max(trials["GPU"], pool.gpus)}


def _trial_books(settings: Settings) -> dict[str, float]:
    train = settings.train
    readers = settings.cache.readers if settings.data.source == "cache" else 0
    return {"CPU": train.workers * train.cpus + readers + _TRIAL_CPUS, "GPU": train.workers * train.gpus}


def check_places(settings: Settings, found: Sequence[Settings], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a sweep of which a trial could never start. `nodes` are those of `ray.nodes()`.

    Raises:
        InputError: what the trial needs, what the cluster has, and which setting needs less.
    """
    for one in found:
        check_trainer_places(one, nodes)
    alive = [node for node in nodes if node["Alive"]]
    for name, count in booked(settings, found).items():
        there = sum(node["Resources"].get(name, 0.0) for node in alive)
        if count > there:
            raise InputError(
                f"tune.concurrent={settings.tune.concurrent} trials at the same time and the targets book {count:g} "
                f"logical {name}s, the cluster has {there:g}: lower tune.concurrent, train.workers, "
                f"{'targets.actors' if settings.data.source == 'live' else 'cache.readers'}, or join a larger cluster"
            )
