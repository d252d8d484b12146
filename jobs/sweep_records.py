"""What the runs of a sweep report, as Ray Tune passes it on: into the ledger, into MLflow and onto the screen."""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from actors.tracking import Tracker
from dspark.redaction import redacted
from jobs.outcomes import Ledger, Outcome
from jobs.progress import Stage
from jobs.records import HISTORY, read_history
from jobs.trial import ERROR, FAULT, FINISHED, Sweep, remove_checkpoints, run_folder


def has_fault(trial_id: str, result: Mapping[Any, Any]) -> bool:
    """Whether a run is to be ended for what it says of itself."""
    return FAULT in result


class Follower(tune.Callback):
    """Takes every measurement of every run: into the ledger, into MLflow, a child run each, and onto the screen."""

    def __init__(
        self, sweep: Sweep, tracker: Tracker, ledger: Ledger, bar: Stage, steps: int, asked: threading.Event
    ) -> None:
        self.sweep, self.tracker, self.ledger, self.bar, self.steps = sweep, tracker, ledger, bar, steps
        self.asked, self.done = asked, 0
        self.children: dict[tuple[int, int], Tracker] = {}
        self.logged: dict[tuple[int, int], int] = {}
        self.since: dict[tuple[int, int], float] = {}
        self.places = sweep.common.places

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        self.places.give_back()

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._begin(Outcome(*_key(trial), trial.config["values"]))

    def _begin(self, run: Outcome) -> None:
        """Opens a run's MLflow run, and its line in the ledger; it may have one from before."""
        key = run.number, run.seed
        known = self.ledger.outcomes.get(key, run)
        self.places.began(self._folder(key).name)
        child = self.tracker.child(self._folder(key).name, known.mlflow_run_id)
        if known.mlflow_run_id is None:
            child.params({"trial": key[0], "seed": key[1], **known.values})
        self.children[key], self.since[key] = child, time.monotonic() - known.seconds
        self.logged[key] = 0
        self.ledger.put(replace(known, state="running", mlflow_run_id=child.run_id))

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        key, metric = _key(trial), self.sweep.settings.tune.metric
        self._log(key)
        if FAULT not in result and metric in result:
            self._put(key, self.ledger.outcomes[key].measured(int(result["step"]), float(result[metric])))
        self._show()

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        key, last = _key(trial), trial.last_result or {}
        known = self.ledger.outcomes[key]
        if FAULT in last:
            self._end(key, replace(known, state="failed", reason=last[FAULT]))
        elif FINISHED in last:
            self._end(key, replace(known, state="finished"))
        elif not self.asked.is_set():
            self._end(key, replace(known, state="stopped"))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        key = _key(trial)
        if key not in self.children:  # it failed before it started
            self._begin(Outcome(*key, trial.config["values"]))
        error = self._folder(key) / ERROR
        if not error.is_file():  # its process is gone, and Ray knows why
            error.parent.mkdir(parents=True, exist_ok=True)
            error.write_text(redacted(str(trial.get_error())))
        reason = error.read_text().strip().rpartition("\n")[2]
        self._end(key, replace(self.ledger.outcomes[key], state="failed", reason=reason))

    def settle(self, handed: Iterable[Outcome]) -> None:
        """Books as failed what Ray Tune was given and has neither started nor ended, unless it was asked to stop."""
        for run in () if self.asked.is_set() else handed:
            key = run.number, run.seed
            known = self.ledger.outcomes.get(key)
            if key in self.children or known is None:
                if key not in self.children:
                    self._begin(run)
                self._end(key, replace(self.ledger.outcomes[key], state="failed", reason="Ray Tune gave it up"))

    def close(self) -> None:
        """Ends the MLflow runs of trials that were broken off."""
        for key, child in self.children.items():
            self.places.ended(self._folder(key).name)
            child.end("KILLED")
        self.children.clear()

    def _put(self, key: tuple[int, int], outcome: Outcome) -> None:
        self.ledger.put(replace(outcome, seconds=time.monotonic() - self.since[key]))

    def _end(self, key: tuple[int, int], outcome: Outcome) -> None:
        self._log(key)
        self._put(key, outcome)
        child = self.children.pop(key)
        child.tags({"dspark.trial_state": outcome.state})
        child.end("FAILED" if outcome.state == "failed" else "FINISHED")
        self.places.ended(self._folder(key).name)
        remove_checkpoints(self.sweep.settings, self.sweep.folder, *key)
        self.done += self.steps
        value = "" if outcome.value is None else f", {self.ledger.tune.metric} {outcome.value:.4f} at {outcome.step}"
        self.bar.console.print(
            f"{outcome.shown}: {outcome.state}{value}{f' ({outcome.reason})' if outcome.reason else ''}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        self._show()

    def _log(self, key: tuple[int, int]) -> None:
        """Records of a run that MLflow has not been given by this process."""
        history = read_history(self._folder(key) / HISTORY)
        fresh = [record for record in history if record["step"] > self.logged[key]]
        if fresh:
            self.children[key].records(fresh)
            self.logged[key] = int(fresh[-1]["step"])

    def _folder(self, key: tuple[int, int]) -> Path:
        return run_folder(self.sweep.folder, *key)

    def _show(self) -> None:
        running = [self.ledger.outcomes[key] for key in self.children]
        best = self.ledger.ranked(self.sweep.settings.seed)
        note = "  ".join(f"{one.number}: {one.value:.3f}" for one in running if one.value is not None)
        if best:
            note += f"  best {best[0].value:.3f} (trial {best[0].number})"
        self.bar.update(self.done + sum(min(one.step, self.steps) for one in running), note.strip())

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray Tune keeps a copy of each part, which nobody reads.
        return dict, ()


def _key(trial: TuneTrial) -> tuple[int, int]:
    return trial.config["number"], trial.config["seed"]
