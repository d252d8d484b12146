"""MLflow: one run per experiment, written by the driver alone, and the registry of drafters."""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from dspark.errors import StoppedError
from dspark.sections import TrackingSettings

# Tags that say which process writes a run.
_HOST, _PID, _STARTED = "dspark.driver_host", "dspark.driver_pid", "dspark.driver_started"
_CLOCK_S = 2.0
_METRICS_PER_CALL, _PARAMS_PER_CALL, _LONGEST_PARAM = 1000, 100, 500


def default_uri(output: Path) -> str:
    """The SQLite store that is used when no tracking URI is set: a file in the output folder."""
    return f"sqlite:///{(output.resolve() / 'mlflow.db')}"


def end_dead_runs(client: MlflowClient, experiment: str) -> list[str]:
    """Marks runs of this machine as KILLED whose driver is gone without having ended them; returns their ids.

    A driver on another machine cannot be seen from here, so its runs are left as they are.
    """
    filter_string = f"attributes.status = 'RUNNING' and tags.`{_HOST}` = '{socket.gethostname()}'"
    dead, page = [], None
    while True:
        runs = client.search_runs([experiment], filter_string=filter_string, page_token=page)
        dead += [run.info.run_id for run in runs if not _lives(run.data.tags)]
        page = runs.token
        if not page:
            break
    for run_id in dead:
        client.set_terminated(run_id, status="KILLED")
    return dead


def _driver_tags() -> dict[str, str]:
    started = psutil.Process().create_time()
    return {_HOST: socket.gethostname(), _PID: str(os.getpid()), _STARTED: f"{started:.2f}"}


def _lives(tags: Mapping[str, str]) -> bool:
    """Whether the process of these tags is there; its start time tells it from a later one of the same number."""
    try:
        process = psutil.Process(int(tags[_PID]))
        # The start is counted from a boot time that the clock's corrections move.
        same = abs(process.create_time() - float(tags[_STARTED])) < _CLOCK_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


class Tracker:
    """The MLflow run of one experiment; as a context manager it ends the run with the right state, whatever happens."""

    def __init__(self, settings: TrackingSettings, output: Path, run_name: str, run_id: str | None = None) -> None:
        self.uri = settings.uri or default_uri(output)
        self.client = MlflowClient(tracking_uri=self.uri)
        experiment = self._experiment(settings, output)
        end_dead_runs(self.client, experiment)
        if run_id is None:
            run_id = self.client.create_run(experiment, run_name=run_name, tags=_driver_tags()).info.run_id
        else:
            self.client.update_run(run_id, status="RUNNING")
        self.run_id: str = run_id
        self.tags(_driver_tags())

    def _experiment(self, settings: TrackingSettings, output: Path) -> str:
        found = self.client.get_experiment_by_name(settings.experiment)
        if found is not None:
            return str(found.experiment_id)
        # Without a server MLflow would put artifacts under the working directory of whoever started first.
        artifacts = None if settings.uri else (output.resolve() / "mlartifacts").as_uri()
        return str(self.client.create_experiment(settings.experiment, artifact_location=artifacts))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ray turns the signal that stops a submitted job into a SystemExit.
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | StoppedError)
        state: Literal["FINISHED", "FAILED", "KILLED"] = (
            "FINISHED" if kind is None else "KILLED" if interrupted else "FAILED"
        )
        self.end(state)

    def end(self, state: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Ends the run."""
        self.client.set_terminated(self.run_id, status=state)

    def child(self, name: str, run_id: str | None = None) -> "Tracker":
        """A run nested in this one, or the one with `run_id` gone on with; whoever asks for it ends it."""
        own = copy(self)
        if run_id is None:
            tags = {**_driver_tags(), MLFLOW_PARENT_RUN_ID: self.run_id}
            experiment = self.client.get_run(self.run_id).info.experiment_id
            own.run_id = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        else:
            own.run_id = run_id
            self.client.update_run(run_id, status="RUNNING")
            own.tags(_driver_tags())
        return own

    def last_step(self, name: str) -> int:
        """The newest step for which the run has a value of this metric; 0 if it has none."""
        return max((metric.step for metric in self.client.get_metric_history(self.run_id, name)), default=0)

    def params(self, values: Mapping[str, Any]) -> None:
        """Logs settings by dotted name; long ones are cut, since the whole settings are an artifact."""
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in values.items()]
        for at in range(0, len(params), _PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=params[at : at + _PARAMS_PER_CALL])

    def records(self, records: Iterable[Mapping[str, float]]) -> None:
        """Logs per-step records (each with its `step`) in batches; numbers that are not finite are left out."""
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now, int(record["step"]))
            for record in records
            for name, value in record.items()
            if name != "step" and abs(value) < float("inf")
        ]
        for at in range(0, len(metrics), _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[at : at + _METRICS_PER_CALL])

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in values.items()])

    def artifact(self, path: Path, place: str | None = None) -> None:
        """Copies a file, or a folder's content, into the run's artifacts under `place`."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        log(self.run_id, str(path), place)

    def register(self, name: str, folder: Path, tags: Mapping[str, str]) -> int:
        """Registers a drafter folder as the next version of a model; returns the version's number."""
        self.artifact(folder, "drafter")
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self.client.get_run(self.run_id).info.artifact_uri}/drafter"
        version = self.client.create_model_version(name, source=source, run_id=self.run_id, tags=dict(tags))
        return int(version.version)
