"""MLflow: one run per experiment, written by the driver alone.

A run is RUNNING while its driver lives, and no longer: the driver ends it, or the next one that starts finds it dead.
Each metric has one value per step, however often a step is made again after a kill.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from sqlalchemy.exc import SQLAlchemyError

from dspark.errors import InputError, StoppedError
from dspark.redaction import redacted
from dspark.sections import TrackingSettings

# Tags that say which process writes a run, and when it was last known to.
_HOST, _PID, _STARTED = "dspark.driver_host", "dspark.driver_pid", "dspark.driver_started"
_SEEN = "dspark.driver_seen"
_SEEN_EVERY_S, _LOST_AFTER_S = 60.0, 900.0
_CLOCK_S = 2.0
_CONNECT_TIMEOUT_S = 10
# A store that does not answer is asked again after this time, and meanwhile nobody waits for it.
_AGAIN_S = 30.0
_METRICS_PER_CALL, _PARAMS_PER_CALL, _LONGEST_PARAM = 1000, 100, 500

_LOG = logging.getLogger(__name__)


def default_uri(output: Path) -> str:
    """The SQLite store that is used when no tracking URI is set: a file in the output folder."""
    return f"sqlite:///{(output.resolve() / 'mlflow.db')}"


def tracking_uri(settings: TrackingSettings, output: Path) -> str:
    """Where runs and registered drafters are: `tracking.uri`, else MLFLOW_TRACKING_URI, else the SQLite store."""
    return settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(output)


def open_client(uri: str, create: bool) -> MlflowClient:
    """A client of a store; an SQLite file that is not there is made only with `create`.

    Raises:
        InputError: there is no such file, or no server answers. MLflow itself would ask for minutes.
    """
    parts = urlsplit(uri)
    try:
        if parts.scheme in ("http", "https"):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()
        elif parts.scheme == "sqlite" and create:
            sqlite_file(uri).parent.mkdir(parents=True, exist_ok=True)
        elif parts.scheme == "sqlite" and not sqlite_file(uri).is_file():
            raise FileNotFoundError("there is no such file")
        return MlflowClient(tracking_uri=uri)
    except (OSError, ValueError, MlflowException, SQLAlchemyError) as error:
        reason = redacted(str(error).splitlines()[0])
        raise InputError(
            f"the MLflow store {redacted(uri)} cannot be opened ({reason}): start the server, or name another store by "
            "tracking.uri, --uri or MLFLOW_TRACKING_URI"
        ) from None


def sqlite_file(uri: str) -> Path:
    """The file of an SQLite URI."""
    return Path(uri.partition("?")[0].removeprefix("sqlite:///"))


def end_dead_runs(client: MlflowClient, experiment: str) -> list[str]:
    """Marks runs as KILLED whose driver is gone without having ended them; returns their ids.

    A driver of this machine is gone if its process is; one of another machine if it has not shown itself for
    `_LOST_AFTER_S`. Runs of other programs are left as they are.
    """
    dead, page = [], None
    while True:
        runs = client.search_runs([experiment], filter_string="attributes.status = 'RUNNING'", page_token=page)
        dead += [run.info.run_id for run in runs if _HOST in run.data.tags and not _lives(run.data.tags)]
        page = runs.token
        if not page:
            break
    for run_id in dead:
        client.set_terminated(run_id, status="KILLED")
    return dead


def _driver_tags() -> dict[str, str]:
    started = psutil.Process().create_time()
    return {
        _HOST: socket.gethostname(),
        _PID: str(os.getpid()),
        _STARTED: f"{started:.2f}",
        _SEEN: f"{time.time():.0f}",
    }


def _lives(tags: Mapping[str, str]) -> bool:
    """Whether the process of these tags is there; its start time tells it from a later one of the same number."""
    if tags[_HOST] != socket.gethostname():
        return _SEEN not in tags or time.time() - float(tags[_SEEN]) < _LOST_AFTER_S
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
    """The MLflow run of one experiment; as a context manager it ends the run with the right state, whatever happens.

    Within it the metrics of the driver's machine (`system/...`) are logged as well, unless MLflow's own switch
    MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING is false.
    """

    def __init__(self, settings: TrackingSettings, output: Path, run_name: str, run_id: str | None = None) -> None:
        """
        Raises:
            InputError: the store cannot be opened, or does not hold the run `run_id` that is to go on.
        """
        self.uri = tracking_uri(settings, output)
        self.client = open_client(self.uri, create=True)
        experiment = experiment_id(self.client, self.uri, settings.experiment, output)
        end_dead_runs(self.client, experiment)
        self._forget(resumed=run_id is not None)
        if run_id is None:
            run_id = self.client.create_run(experiment, run_name=run_name, tags=_driver_tags()).info.run_id
        else:
            self._reopen(run_id)
        self.run_id: str = run_id
        self._alive = {run_id}  # this run and those nested in it, of which each is its driver's
        self.tags(_driver_tags())
        self._ended = threading.Event()
        self._system: Any = None  # MLflow leaves its monitor untyped

    def _forget(self, resumed: bool) -> None:
        self._resumed = resumed
        self._logged: dict[str, set[int]] = {}
        self._waiting: list[Mapping[str, float]] = []  # records that the store has not taken yet
        self._away_until: float | None = None  # it did not answer, and is left alone until then

    def _reopen(self, run_id: str) -> None:
        try:
            self.client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise InputError(
                f"the MLflow store {redacted(self.uri)} does not hold the run {run_id} that is to go on: set "
                "tracking.uri, or MLFLOW_TRACKING_URI, to the store that it began in"
            ) from None

    def __enter__(self) -> "Tracker":
        threading.Thread(target=self._show_itself, name="tracking", daemon=True).start()
        if os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() != "false":
            logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
            monitor: Any = SystemMetricsMonitor
            self._system = monitor(self.run_id, resume_logging=self._resumed, tracking_uri=self.uri)
            self._system.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._system is not None:
            self._system.finish()
        # Ray turns the signal that stops a submitted job into a SystemExit.
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | StoppedError)
        state: Literal["FINISHED", "FAILED", "KILLED"] = (
            "FINISHED" if kind is None else "KILLED" if interrupted else "FAILED"
        )
        self.end(state)

    def end(self, state: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Ends the run, with the records that the store was away for; it must answer now."""
        self._send(self._waiting)
        self._alive.discard(self.run_id)
        self.client.set_terminated(self.run_id, status=state)

    def child(self, name: str, run_id: str | None = None) -> "Tracker":
        """A run nested in this one, or the one with `run_id` gone on with; whoever asks for it ends it."""
        own = copy(self)
        own._forget(resumed=run_id is not None)
        if run_id is None:
            tags = {**_driver_tags(), MLFLOW_PARENT_RUN_ID: self.run_id}
            experiment = self.client.get_run(self.run_id).info.experiment_id
            own.run_id = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        else:
            own._reopen(run_id)
            own.run_id = run_id
            own.tags(_driver_tags())
        self._alive.add(own.run_id)
        return own

    def _show_itself(self) -> None:
        """Says from time to time that the driver lives: no process of another machine can be looked up from here."""
        while not self._ended.wait(_SEEN_EVERY_S):
            try:
                for run_id in tuple(self._alive):
                    self.client.set_tag(run_id, _SEEN, f"{time.time():.0f}")
            except MlflowException:
                continue  # a server that is away for a while; the next time says the same

    def params(self, values: Mapping[str, Any]) -> None:
        """Logs settings by dotted name; long ones are cut, since the whole settings are an artifact."""
        params = [Param(name, str(redacted(value))[:_LONGEST_PARAM]) for name, value in values.items()]
        for at in range(0, len(params), _PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=params[at : at + _PARAMS_PER_CALL])

    def records(self, records: Iterable[Mapping[str, float]]) -> None:
        """Logs per-step records (each with its `step`), each metric once per step; what a step gave first holds.

        A run that goes on, or whose trainers restart, makes the steps behind its checkpoint again. A store that does
        not answer gets them later: training needs none.
        """
        self._waiting += records
        if self._away_until is not None and time.monotonic() < self._away_until:
            return
        try:
            self._send(self._waiting)
        except MlflowException as error:
            if self._away_until is None:
                reason = redacted((str(error).splitlines() or [type(error).__name__])[0])
                _LOG.warning("MLflow at %s takes no records, they wait: %s", redacted(self.uri), reason)
            self._away_until = time.monotonic() + _AGAIN_S
        else:
            self._waiting, self._away_until = [], None

    def _send(self, records: Iterable[Mapping[str, float]]) -> None:
        new: dict[tuple[str, int], float] = {}
        for record in records:
            step = int(record["step"])
            for name, value in record.items():
                if name != "step" and step not in self._steps_of(name):
                    new.setdefault((name, step), value)
        self._log((name, step, value) for (name, step), value in new.items())
        for name, step in new:
            self._logged[name].add(step)

    def results(self, values: Mapping[str, float], step: int) -> None:
        """Logs what a whole run gave; a run that is measured anew shows its newest values."""
        self._log((name, step, value) for name, value in values.items())

    def _steps_of(self, name: str) -> set[int]:
        """The steps at which the run has a value of this metric."""
        if name not in self._logged:
            past = self.client.get_metric_history(self.run_id, name) if self._resumed else []
            self._logged[name] = {metric.step for metric in past}
        return self._logged[name]

    def _log(self, values: Iterable[tuple[str, int, float]]) -> None:
        """In batches; numbers that are not finite are left out, since the database holds none."""
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, step, value in values if abs(value) < float("inf")]
        for at in range(0, len(metrics), _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[at : at + _METRICS_PER_CALL])

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        self.client.log_batch(self.run_id, tags=[RunTag(name, redacted(value)) for name, value in values.items()])

    def artifact(self, path: Path, place: str | None = None) -> None:
        """Copies a file, or a folder's content, into the run's artifacts under `place`."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        log(self.run_id, str(path), place)


def experiment_id(client: MlflowClient, uri: str, name: str, output: Path) -> str:
    """The experiment of this name, made where it is missing."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # Without a server MLflow would put artifacts under the working directory of whoever started first.
    served = urlsplit(uri).scheme in ("http", "https", "databricks")
    artifacts = None if served else (output.resolve() / "mlartifacts").as_uri()
    return str(client.create_experiment(name, artifact_location=artifacts))
