"""What the runs of a sweep have come to, on disk after every change: `trials.json`, and `trials.csv` for spreadsheets.

A run is one trial with one seed. The file is what a sweep that is resumed goes on from.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dspark.tuning import TuneSettings
from jobs.sweeping import Trial, Values, shown_value
from jobs.whole_file import write_whole

TRIALS, TABLE = "trials.json", "trials.csv"
# `running` of a sweep that is over was broken off. `stopped`: the scheduler found others better at the same step.
State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep so far. `value` is the metric at `step`; `curve` holds all (step, value)."""

    number: int
    seed: int
    values: Values
    state: State = "running"
    step: int = 0
    value: float | None = None
    seconds: float = 0.0
    reason: str = ""
    mlflow_run_id: str | None = None
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def shown(self) -> str:
        """The run's name among people: its trial, and its seed."""
        return f"trial {self.number}, seed {self.seed}"

    def measured(self, step: int, value: float) -> "Outcome":
        """The run after one more measurement; one of a step that was made before takes its place."""
        return replace(self, step=step, value=value, curve=(*(one for one in self.curve if one[0] < step),
                                                            (step, value)))  # fmt: skip


@dataclass(frozen=True)
class Score:
    """A trial over its seeds, all of which it has finished."""

    number: int
    values: Values
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return sum(self.by_seed.values()) / len(self.by_seed)


@dataclass
class Ledger:
    """All runs of a sweep, by (number, seed), in the order in which they began."""

    folder: Path
    tune: TuneSettings
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, tune: TuneSettings) -> "Ledger":
        """The ledger of a sweep's folder; an empty one where none was begun."""
        ledger, path = cls(folder, tune), folder / TRIALS
        if path.is_file():
            for row in json.loads(path.read_text())["trials"]:
                found = Outcome(**row | {"curve": tuple((int(step), value) for step, value in row["curve"])})
                ledger.outcomes[found.number, found.seed] = found
        return ledger

    def put(self, outcome: Outcome) -> None:
        """Takes a run's new state, and writes all of them."""
        self.outcomes[outcome.number, outcome.seed] = outcome
        rows = [asdict(one) for one in self.outcomes.values()]
        found = {"metric": self.tune.metric, "smaller_is_better": self.tune.smaller, "trials": rows}
        write_whole(self.folder / TRIALS, json.dumps(found, indent=1) + "\n")
        self._write_table()

    def _write_table(self) -> None:
        keys = list(dict.fromkeys(key for one in self.outcomes.values() for key in one.values))
        with (self.folder / TABLE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("trial", "seed", "state", "step", self.tune.metric, "seconds", *keys, "reason"))
            for one in self.outcomes.values():
                # An empty cell: as the preset has it.
                values = [shown_value(one.values[key]) if key in one.values else "" for key in keys]
                value = "" if one.value is None else repr(one.value)
                writer.writerow((one.number, one.seed, one.state, one.step, value, f"{one.seconds:.1f}", *values,
                                 one.reason))  # fmt: skip

    def ranked(self, seed: int) -> list[Outcome]:
        """Runs of a seed that were trained to the end, the best first; a value that is not finite is none."""
        done = [
            one
            for one in self.outcomes.values()
            if one.seed == seed and one.state == "finished" and one.value is not None and math.isfinite(one.value)
        ]
        return sorted(done, key=lambda one: (self._worse(one.value or 0.0), one.number))

    def scores(self, seeds: Sequence[int]) -> list[Score]:
        """Trials that have finished with every one of these seeds, the best mean first."""
        by_number: dict[int, dict[int, Outcome]] = {}
        for seed in seeds:
            for one in self.ranked(seed):
                by_number.setdefault(one.number, {})[seed] = one
        found = [
            Score(number, next(iter(runs.values())).values, {seed: one.value or 0.0 for seed, one in runs.items()})
            for number, runs in by_number.items()
            if len(runs) == len(seeds)
        ]
        return sorted(found, key=lambda score: (self._worse(score.mean), score.number))

    def _worse(self, value: float) -> float:
        return value if self.tune.smaller else -value


def to_confirm(ledger: Ledger, seed: int) -> list[int]:
    """Numbers of the trials that are repeated: the best ones, and trial 0 unless it failed."""
    best = [one.number for one in ledger.ranked(seed)[: ledger.tune.confirm]]
    default = ledger.outcomes.get((0, seed))
    if not best or 0 in best or default is None or default.state == "failed":
        return best
    return [*best, 0]


def unfinished(ledger: Ledger, trials: Iterable[Trial], seed: int) -> list[Outcome]:
    """Runs of the search that have not been made, or were broken off: as new ones, with what is known of them."""
    found = [ledger.outcomes.get((trial.number, seed), Outcome(trial.number, seed, trial.values)) for trial in trials]
    return [one for one in found if one.state == "running"]


def summary(ledger: Ledger, scores: Sequence[Score]) -> dict[str, Any]:
    """The sweep in numbers, for scripts: the best trial, its mean over the seeds, and that of the preset."""
    default = next((score for score in scores if score.number == 0), None)
    states = [one.state for one in ledger.outcomes.values()]
    return {
        "metric": ledger.tune.metric,
        "best": {"trial": scores[0].number, "values": dict(scores[0].values), "mean": scores[0].mean},
        "preset_mean": None if default is None else default.mean,
        "scores": [{"trial": one.number, "mean": one.mean, "by_seed": dict(one.by_seed)} for one in scores],
        "runs": {state: states.count(state) for state in dict.fromkeys(states)},
    }
