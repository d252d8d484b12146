"""A run on disk: its folder, its settings, its MLflow run, and how it is found again."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import yaml

from dspark.config import Settings, dotted
from dspark.errors import InputError
from dspark.redaction import redacted
from jobs.commit import git_commit
from jobs.config import dump_settings

if TYPE_CHECKING:  # trials of a sweep have no MLflow run, and start sooner without MLflow
    from actors.tracking import Tracker

RECORD, SETTINGS = "run.json", "settings.yaml"


class RecordLog(Protocol):
    """Takes the records of a training, each with its `step`."""

    def records(self, records: Iterable[Mapping[str, float]]) -> None: ...


@dataclass(frozen=True)
class Training:
    """A drafter in the making. `folder` is absolute: workers run elsewhere."""

    settings: Settings
    folder: Path
    log: RecordLog
    resumed: bool

    @property
    def checkpoints(self) -> str:
        """Ray Train's storage of this run: a folder in the run's own, or of the run's name in `train.storage`."""
        storage = self.settings.train.storage
        return str(self.folder / "train") if storage is None else f"{storage.rstrip('/')}/{self.folder.name}"

    @property
    def drafter(self) -> Path:
        """The finished drafter in the published layout; of `dspark evaluate` the one that it measures, in its own."""
        return self.folder / "drafter"


@dataclass(frozen=True)
class Experiment(Training):
    """An open run with its MLflow run, which also takes the records."""

    tracker: "Tracker"


def check_resumed(settings: Settings, resume: Path | None) -> None:
    """Raises InputError if the folder to resume is no run of this project."""
    if resume is not None and not (resume / RECORD).is_file():
        output = settings.output.resolve()
        raise InputError(f"--resume {resume}: no {RECORD} there, so it is no run folder: name one under {output}")


def open_experiment(settings: Settings, resume: Path | None) -> Experiment:
    """A new run folder `output/name-time`, or the one to resume; `output/latest` points to it.

    Raises:
        InputError: the folder to resume is no run of this project, or the output folder cannot be written.
    """
    from actors.tracking import Tracker

    output = settings.output.resolve()
    check_resumed(settings, resume)
    if resume is not None:
        folder = resume.resolve()
        run_id = json.loads((folder / RECORD).read_text())["mlflow_run_id"]
    else:
        folder, run_id = _new_folder(output, settings.name), None
    tracker = Tracker(settings.tracking, output, folder.name, run_id)
    commit = git_commit()
    record = {"mlflow_run_id": tracker.run_id, "mlflow_uri": redacted(tracker.uri), "git_commit": commit}
    (folder / SETTINGS).write_text(dump_settings(settings))
    (folder / RECORD).write_text(json.dumps(record, indent=1))
    if commit is not None:
        tracker.tags({"mlflow.source.git.commit": commit})  # MLflow's own name: its pages show it
    if resume is None:
        tracker.params(dotted(yaml.safe_load(dump_settings(settings))))
    _point(output / "latest", folder)
    return Experiment(settings, folder, tracker, resume is not None, tracker)


def _new_folder(output: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        for attempt in range(100):
            folder = output / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise InputError(f"output={output} cannot be written ({error.strerror}): choose another folder") from error
    raise InputError(f"output={output} already holds a hundred runs of this second")


def _point(link: Path, folder: Path) -> None:
    """Makes `link` point to `folder`, atomically."""
    fresh = link.with_name(f".{link.name}-{os.getpid()}")
    fresh.symlink_to(folder.name if folder.parent == link.parent else folder)
    fresh.replace(link)
