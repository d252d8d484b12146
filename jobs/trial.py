"""One run of a sweep in a process of Ray Tune: a training like any other, but with what all trials share.

{number, seed, values} -> settings -> Ray Train, on the sweep's rows, targets and validation -> metric -> Ray Tune

Ray Tune may end the process at any measurement, and with it all that it has started. Files are the run's own, in
`trials/03-seed43/`; MLflow is written by the sweep alone.
"""

import math
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from rich.console import Console

from actors.trials import Common
from dspark.config import Settings
from dspark.data.folder import Folder
from dspark.errors import InputError, StoppedError
from dspark.redaction import redacted
from jobs.config import dump_settings
from jobs.experiment import Training
from jobs.fitting import train_drafter
from jobs.records import HISTORY
from jobs.rows import Rows, replanned
from jobs.search import STEP
from jobs.session import quiet_ray
from jobs.sweeping import Values, settings_of

# What a result says beside step and metric.
FINISHED, FAULT = "finished", "fault"
ERROR, LOG = "error.txt", "log.txt"


@dataclass(frozen=True)
class Sweep:
    """What every trial is given. `settings` are those of the sweep, `rows` those of its trial 0."""

    settings: Settings
    rows: Rows
    folder: Path
    common: Common


def run_folder(sweep_folder: Path, number: int, seed: int) -> Path:
    """Where a run keeps its files."""
    return sweep_folder / "trials" / f"{number:02d}-seed{seed}"


def trial_settings(settings: Settings, sweep_folder: Path, values: Values, seed: int) -> Settings:
    """What a run trains with; where checkpoints lie apart from the run, those of a sweep have a folder of its name."""
    found = settings_of(settings, values)
    storage = found.train.storage
    if storage is not None:
        storage = f"{storage.rstrip('/')}/{sweep_folder.name}"
    return found.model_copy(update={"seed": seed, "train": found.train.model_copy(update={"storage": storage})})


def remove_checkpoints(settings: Settings, sweep_folder: Path, number: int, seed: int) -> None:
    """Deletes a run's checkpoints: what stays of a sweep is its best preset, and all of them would fill a disk."""
    folder = run_folder(sweep_folder, number, seed)
    one = trial_settings(settings, sweep_folder, {}, seed)
    parent, _, name = Training(one, folder, Reports("", 0), resumed=False).checkpoints.rpartition("/")
    with suppress(OSError):  # a process that is just being ended may still write into it
        if name in Folder(parent).folders():
            Folder(parent).remove_folder(name)


def run_trial(config: dict[str, Any], sweep: Sweep) -> None:
    """Trains one run to its end, from its newest checkpoint if it has one.

    Raises:
        InputError: the metric is not finite or is not there, or what training raises; also in `error.txt`.
    """
    folder = run_folder(sweep.folder, config["number"], config["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR).unlink(missing_ok=True)
    try:
        with (folder / LOG).open("a") as log, quiet_ray():
            _train(config, sweep, folder, Console(file=log, width=120))
    except StoppedError:
        return  # the sweep knows why, and goes on with this run when it is resumed
    except Exception:  # Ray Tune ends a run by SystemExit
        (folder / ERROR).write_text(redacted(traceback.format_exc()))
        raise


def _train(config: dict[str, Any], sweep: Sweep, folder: Path, console: Console) -> None:
    values: Values = config["values"]
    settings = trial_settings(sweep.settings, sweep.folder, values, config["seed"])
    rows = replanned(sweep.rows, settings)
    (folder / "settings.yaml").write_text(dump_settings(settings))
    reports = Reports(sweep.settings.tune.metric, rows.plan.steps)
    # Records of steps before its checkpoint are told again: a scheduler that begins anew has not heard them.
    training = Training(settings, folder, reports, resumed=(folder / HISTORY).is_file())
    train_drafter(training, rows, console, sweep.common)
    reports.finish()


class Reports:
    """Hands the metric of each record that has it to Ray Tune; that of the last step when the run is over."""

    def __init__(self, metric: str, steps: int) -> None:
        self.metric, self.steps = metric, steps
        self.last: tuple[int, float] | None = None
        self.names: set[str] = set()

    def records(self, records: Iterable[Mapping[str, float]]) -> None:
        """Takes records; comes back when Ray Tune has decided that the run may go on."""
        for record in records:
            self.names |= record.keys()
            if self.metric not in record or (self.last is not None and not math.isfinite(self.last[1])):
                continue
            self.last = int(record["step"]), float(record[self.metric])
            if not math.isfinite(self.last[1]):
                tune.report({STEP: self.last[0], self.metric: math.nan, FAULT: self._fault()})
            elif self.last[0] < self.steps:
                tune.report({STEP: self.last[0], self.metric: self.last[1]})

    def finish(self) -> None:
        """Says that the run is over.

        Raises:
            InputError: its last value is not finite, or no record had the metric.
        """
        if self.last is None or not math.isfinite(self.last[1]):
            raise InputError(self._fault())
        tune.report({STEP: self.last[0], self.metric: self.last[1], FINISHED: True})

    def _fault(self) -> str:
        if self.last is None:
            return f"no record has tune.metric={self.metric}; there are {', '.join(sorted(self.names))}"
        return f"{self.metric} is {self.last[1]} at step {self.last[0]}, which never counts as good"
