"""What is only passed on is not imported: processes between the driver and the actors start without torch."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import ray
from ray.util.queue import Queue

from actors.pipelines import Planned, cache_source, shared_source, target_source
from dspark.data.origin import Origin
from jobs.config import load_settings
from jobs.rows import prepare_rows
from jobs.streams import step_streams
from tests.conftest import tiny_preset

# Ray Train's controller, Ray Data's coordinator and the borrowers of a sweep's targets import these.
LIGHT = ("actors.late", "actors.pipelines", "actors.checkpoint_files", "actors.borrowing", "actors.shared_target",
         "actors.stop_actor", "dspark.data.origin", "dspark.data.plan", "dspark.config")  # fmt: skip
HEAVY = {"torch", "transformers", "deepspeed", "mlflow"}


def heavy_after(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has imported after this code."""
    words = [sys.executable, "-c", f"{code}\nimport sys\nprint(*({HEAVY} & set(sys.modules)))"]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split())


def test_what_passes_rows_on_imports_nothing_that_computes() -> None:
    assert heavy_after("".join(f"import {module}\n" for module in LIGHT)) == set()
    assert heavy_after("import torch") == {"torch"}


def test_a_trial_imports_neither_deepspeed_nor_mlflow() -> None:
    assert not {"deepspeed", "mlflow"} & heavy_after("import jobs.trial")


@ray.remote(num_cpus=0)
def imported_by(streams: object) -> set[str]:
    """The heavy packages in a fresh process that was handed streams."""
    return HEAVY & set(sys.modules)


@pytest.mark.parametrize("source", ["live", "cache", "live_and_keep"])
def test_the_streams_of_a_run_bring_nothing_along(
    source: str, tmp_path: Path, tiny_target: Path, local_ray: None
) -> None:
    settings = load_settings(tiny_preset(tmp_path, tiny_target, rows=400), [])
    rows = prepare_rows(settings)
    settings = load_settings(tmp_path / "tiny.yaml", [f"data.source={source}"])
    with step_streams(settings, rows, str(tmp_path / "train"), "run", Queue(actor_options={"num_cpus": 0})) as streams:
        packed = ray.cloudpickle.dumps(dict(streams))
        assert len(packed) < 20_000 < rows.table.nbytes, "the rows travel as a reference"
        fresh = imported_by.options(runtime_env={"env_vars": {"OF": source}})  # a process of its own
        assert ray.get(fresh.remote(dict(streams))) == set()


def test_each_source_names_a_class_that_is_there(tmp_path: Path, tiny_target: Path, local_ray: None) -> None:
    settings = load_settings(tiny_preset(tmp_path, tiny_target), [])
    origin = Origin("name", "main", "weights", "render", (0, 2), 8, "fp32")
    planned = Planned(ray.put(None), ray.put(None), origin, 1000.0, "run")
    makers = (
        target_source(settings, planned, None),
        shared_source(settings, planned, [None]),
        cache_source(settings, planned),
    )
    for source in makers:
        assert callable(getattr(import_module(source.module), source.name))
