"""Pictures of the MLflow UI as a browser shows it, into docs/pictures: `make screenshots DB=runs/mlflow.db`.

copy of an SQLite store -> `mlflow ui` on loopback -> Chromium, without a window -> a PNG for each page

A page that does not show the runs that it should is an error, and its picture is not kept.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from mlflow import MlflowClient
from mlflow.entities import Experiment, Run

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_START_S, _PAGE_S = 300.0, 300.0
# How long a page may work before it is drawn, in its own time, which stands still while it waits for the server.
_SETTLE_MS = 30_000
_SIZE = "1600,1000"
_COMPARED = 12
# The first of these that the runs have is drawn.
_METRICS = ("val_tau_probabilistic", "tau_probabilistic", "loss")
_PARENT = "mlflow.parentRunId"


@dataclass(frozen=True)
class Page:
    """A page of the UI, and the words that it shows once it has loaded."""

    name: str
    address: str  # behind the server's
    words: tuple[str, ...]


def browser() -> str:
    """The path of Chromium.

    Raises:
        SystemExit: there is none.
    """
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit(f"no browser is installed (looked for {', '.join(_BROWSERS)}): apt-get install chromium")
    return found


@contextmanager
def served(store: Path) -> Iterator[str]:
    """The address of an MLflow UI on a copy of the store, so that runs may go on writing to it."""
    with tempfile.TemporaryDirectory(prefix="dspark-ui-") as folder:
        copy = Path(folder) / "mlflow.db"
        with (
            closing(sqlite3.connect(f"file:{store.resolve()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{copy}", "--workers", "1"]
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], cwd=folder, start_new_session=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait(f"http://127.0.0.1:{port}/health", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def _wait(address: str, server: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError) as error:
            if server.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"`mlflow ui` does not answer at {address}: {error}") from error
        time.sleep(0.3)


def pages(client: MlflowClient, name: str | None) -> list[Page]:
    """The pages of an experiment: its runs, the newest finished one, several side by side, a registered model."""
    experiment = _experiment(client, name)
    runs = list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"]))
    if not runs:
        raise SystemExit(f"the experiment {experiment.name} has no runs: train one first")
    children = [run for run in runs if _PARENT in run.data.tags]
    parents = [run for run in runs if run not in children]
    newest = next((run for run in runs if run.info.status == "FINISHED" and run.data.metrics), runs[0])
    place = f"/#/experiments/{experiment.experiment_id}/runs"
    found = [
        Page("mlflow-runs", place, tuple(_name(run) for run in parents[:3])),
        Page("mlflow-run", f"{place}/{newest.info.run_id}", (_name(newest), *sorted(newest.data.params)[:1])),
    ]
    compared = (children or runs)[:_COMPARED]
    found.append(_curves(experiment, compared))
    if len(compared) > 1:
        found.append(_comparison(experiment, compared))
    models = client.search_registered_models(max_results=1)
    return found + [Page("mlflow-model", f"/#/models/{quote(model.name)}", (model.name,)) for model in models]


def _curves(experiment: Experiment, runs: Sequence[Run]) -> Page:
    """A metric of several runs over their steps. A run's own page draws its charts only when somebody scrolls."""
    metric = next((name for name in _METRICS if name in runs[0].data.metrics), _METRICS[-1])
    shown = f"metric={quote(json.dumps(metric))}&plot_metric_keys={quote(json.dumps([metric]))}&x_axis=step"
    layout = f"plot_layout={quote(json.dumps({'autosize': True}))}&line_smoothness=1&deselected_curves=[]"
    return Page("mlflow-metrics", f"/#/metric?{_query(experiment, runs)}&{shown}&{layout}", (metric, _name(runs[0])))


def _comparison(experiment: Experiment, runs: Sequence[Run]) -> Page:
    return Page("mlflow-compare", f"/#/compare-runs?{_query(experiment, runs)}", tuple(_name(run) for run in runs[:2]))


def _query(experiment: Experiment, runs: Sequence[Run]) -> str:
    ids, place = (quote(json.dumps(found)) for found in ([run.info.run_id for run in runs], [experiment.experiment_id]))
    return f"runs={ids}&experiments={place}"


def _experiment(client: MlflowClient, name: str | None) -> Experiment:
    found = [one for one in client.search_experiments() if name in (None, one.name) and one.name != "Default"]
    if not found:
        raise SystemExit(f"the store has no experiment {name or 'beside Default'}: give one of its own by --experiment")
    return max(found, key=lambda one: one.last_update_time or 0)


def _name(run: Run) -> str:
    return str(run.info.run_name)


def draw(chromium: str, server: str, page: Page, folder: Path) -> Path:
    """The page as a PNG.

    Raises:
        SystemExit: it does not show what it should.
    """
    fresh, place = folder / f".{page.name}.png", folder / f"{page.name}.png"
    with tempfile.TemporaryDirectory(prefix="dspark-browser-") as profile:
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
             f"--window-size={_SIZE}", f"--virtual-time-budget={_SETTLE_MS}", f"--screenshot={fresh}", "--dump-dom",
             server + page.address],
            capture_output=True, text=True, timeout=_PAGE_S, check=False,
        )  # fmt: skip
    missing = [word for word in page.words if word not in done.stdout]
    if missing or not fresh.is_file():
        fresh.unlink(missing_ok=True)
        raise SystemExit(f"{server}{page.address} does not show {missing or 'anything'}:\n{done.stderr[-2000:]}")
    return fresh.replace(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, default=Path("runs/mlflow.db"), help="SQLite file of MLflow")
    parser.add_argument("--experiment", help="by name; without it the one that changed last")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where the pictures go")
    arguments = parser.parse_args()
    if not arguments.store.is_file():
        raise SystemExit(
            f"there is no {arguments.store}: run `make demo` or `dspark tune` first, or name its mlflow.db"
        )
    chromium = browser()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with served(arguments.store) as server:
        for page in pages(MlflowClient(server), arguments.experiment):
            print(draw(chromium, server, page, arguments.folder), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
