"""What is only passed on is not imported: processes between the driver and the actors start without torch."""

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import ray

from actors.pipelines import Planned, Source, cache_source, shared_source, target_source
from actors.shared_target import SharedTarget
from dspark.data.origin import Origin
from jobs.config import load_settings
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


@pytest.fixture
def sources(tmp_path: Any, tiny_target: Any, local_ray: None) -> dict[str, Source]:
    settings = load_settings(tiny_preset(tmp_path, tiny_target), [])
    origin = Origin("name", "main", "weights", "render", (0, 2), 8, "fp32")
    planned = Planned(ray.put(None), ray.put(None), origin, 1000.0, "run")
    target: Any = ray.remote(num_cpus=0)(SharedTarget).remote(settings.target, settings.targets)
    found = {
        "target": target_source(settings, planned, None),
        "shared": shared_source(settings, planned, [target]),
        "cache": cache_source(settings, planned),
    }
    return found


@ray.remote(num_cpus=0)
def imported_by(source: list[Source]) -> set[str]:
    """The heavy packages in a fresh process that was handed a source."""
    return HEAVY & set(sys.modules)


def test_a_source_names_a_class_that_is_there_and_brings_nothing_along(sources: dict[str, Source]) -> None:
    for source in sources.values():
        assert callable(getattr(import_module(source.module), source.name))
        fresh = imported_by.options(runtime_env={"env_vars": {"OF": source.name}})  # a process of its own
        assert ray.get(fresh.remote([source])) == set()
