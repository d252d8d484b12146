"""How Ray Tune is told which run comes next, and which one is to be stopped.

runs that are planned or were broken off -> Ray Tune; then, with Optuna, what it suggests from all that is known
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from dspark.tuning import Space, TuneSettings
from jobs.outcomes import Outcome
from jobs.sweeping import Values

STEP = "step"


class OptunaRuns:
    """Optuna over the space of a sweep, told of the runs that have ended. `own` are the preset's values, by key."""

    def __init__(self, tune: TuneSettings, seed: int, known: Iterable[Outcome], own: Mapping[str, Any]) -> None:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        def distribution(space: Space) -> Any:
            if space.bounds is None:
                # It knows texts and numbers alone, so each value goes by its place in the list.
                return optuna.distributions.CategoricalDistribution(list(range(len(space.values))))
            return optuna.distributions.FloatDistribution(*space.bounds, log=space.loguniform is not None)

        self.spaces, self.own = tune.space, own
        mode = "min" if tune.smaller else "max"
        places = {key: distribution(space) for key, space in tune.space.items()}
        self.search = OptunaSearch(places, metric=tune.metric, mode=mode, seed=seed)
        for one in known:
            self.learn(one.values, one.value)

    def learn(self, values: Values, value: float | None) -> None:
        """Takes the result of a run that Optuna has not suggested; one outside of the space is of no use to it."""
        point = {key: values.get(key, self.own.get(key)) for key in self.spaces}
        if value is not None and all(_inside(self.spaces[key], found) for key, found in point.items()):
            self.search.add_evaluated_point({key: self._place(key, found) for key, found in point.items()}, value)

    def suggest(self, trial_id: str) -> Values | None:
        """The values of the next run by key; None: not yet."""
        found = self.search.suggest(trial_id)
        return None if found is None else {key: self._value(key, place) for key, place in found.items()}

    def _place(self, key: str, value: Any) -> Any:
        space = self.spaces[key]
        return value if space.bounds is not None else space.values.index(value)

    def _value(self, key: str, place: Any) -> Any:
        space = self.spaces[key]
        return place if space.bounds is not None else space.values[place]


def _inside(space: Space, value: Any) -> bool:
    if space.bounds is None:
        return value in space.values
    return isinstance(value, int | float) and space.bounds[0] <= value <= space.bounds[1]


class NextRun(Searcher):
    """Hands out runs as {number, seed, values}: those that are given, and then one of Optuna for each of `numbers`.

    `asked`: nothing new is begun once somebody wants the sweep to stop.
    """

    def __init__(
        self,
        runs: Iterable[Outcome],
        asked: threading.Event,
        optuna: OptunaRuns | None = None,
        seed: int = 0,
        numbers: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.runs, self.numbers = deque(runs), deque(numbers)
        self.asked, self.optuna, self.seed = asked, optuna, seed
        self.handed: dict[str, Outcome] = {}
        self.suggested: set[str] = set()

    def suggest(self, trial_id: str) -> Any:
        """The next run; `Searcher.FINISHED` where there is none."""
        if self.asked.is_set():
            return Searcher.FINISHED
        if self.runs:
            run = self.runs.popleft()
        elif self.optuna is None or not self.numbers:
            return Searcher.FINISHED
        else:
            values = self.optuna.suggest(trial_id)
            if values is None:
                return None
            self.suggested.add(trial_id)
            run = Outcome(self.numbers.popleft(), self.seed, dict(values))
        self.handed[trial_id] = run
        return {"number": run.number, "seed": run.seed, "values": dict(run.values)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if self.optuna is not None and trial_id in self.suggested:
            self.optuna.search.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if self.optuna is None:
            return
        if trial_id in self.suggested:
            self.optuna.search.on_trial_complete(trial_id, result, error)
        else:
            self.optuna.learn(self.handed[trial_id].values, (result or {}).get(self.optuna.search.metric))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: what a sweep goes on from is its own ledger."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, as nothing was saved."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        # Ray Tune keeps a copy of each part, which nobody reads; an event cannot be copied.
        return dict, ()


def scheduler_of(tune: TuneSettings, grace: int, steps: int, known: Sequence[Outcome]) -> TrialScheduler:
    """What stops trials early, with what runs of this sweep have reached before; `steps` is a trial's length."""
    if tune.scheduler == "none":
        return FIFOScheduler()
    scheduler = ASHAScheduler(
        time_attr=STEP,
        metric=tune.metric,
        mode="min" if tune.smaller else "max",
        max_t=steps,
        grace_period=min(grace, steps),
        reduction_factor=tune.reduction,
    )
    # Ray Tune does not save the rungs of a scheduler: they are filled again by the measurements themselves.
    controller: Any = None
    for one in known:
        stand_in = TuneTrial("run_trial", stub=True)
        scheduler.on_trial_add(controller, stand_in)
        for step, value in one.curve:
            scheduler.on_trial_result(controller, stand_in, {STEP: step, tune.metric: value})
    return scheduler
