"""One local Ray and one tiny experiment for all tests of actors and jobs."""

import atexit
import json
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml

from tests.tiny import MASK_ID, tiny_target_folder

# Workers start torch on their own: many threads on few cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray Train looks at its workers every two seconds; a run of tests has hardly more work than that between checkpoints.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
# One process less for every run: no machine of these tests announces that it will go.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# How often processes tell Ray their numbers: by default longer than a test.
REPORT_MS = 1000

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "to", "see", "what", "was", "in", "its", "red", "hat")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 layers with its byte-level tokenizer."""
    return tiny_target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this machine with room for two trainers and two targets, for as long as the tests run."""
    import ray

    from jobs.session import start_ray

    start_ray(
        num_cpus=8,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": REPORT_MS},
    )
    yield
    ray.shutdown()


def write_conversations(path: Path, count: int, seed: int = 0) -> Path:
    """`count` short conversations in thirds math, code, chat."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(count):
            question = f"say {i} " + " ".join(rng.choices(WORDS, k=4))
            answer = " ".join(rng.choices(WORDS, k=6 + i % 7))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            row = {"id": f"row-{i}", "domain": ("math", "code", "chat")[i % 3], "messages": messages}
            file.write(json.dumps(row) + "\n")
    return path


@cache
def _empty_store() -> Path:
    """An MLflow store with one experiment and no runs: MLflow takes seconds to make one."""
    from mlflow import MlflowClient

    file = Path(tempfile.mkdtemp()) / "mlflow.db"
    atexit.register(shutil.rmtree, file.parent)
    MlflowClient(f"sqlite:///{file}").create_experiment("dspark", artifact_location="file:///nowhere")
    return file


def _own_store(folder: Path) -> str:
    """The URI of a copy, whose experiment keeps its artifacts in the same folder."""
    file = folder.resolve() / "mlflow.db"
    shutil.copy(_empty_store(), file)
    with closing(sqlite3.connect(file)) as store, store:
        place = (file.parent / "mlartifacts").as_uri()
        store.execute("UPDATE experiments SET artifact_location = ? WHERE name = 'dspark'", (place,))
    return f"sqlite:///{file}"


def tiny_preset(folder: Path, target: Path, rows: int = 33, **sections: Any) -> Path:
    """A preset that trains a tiny drafter in seconds; `sections` replace single keys of its sections."""
    values: dict[str, Any] = {
        "name": "tiny",
        "output": str(folder / "runs"),
        "target": {"model": str(target), "dtype": "fp32"},
        "targets": {"window_rows": 8, "batch_tokens": 512, "in_flight_mb": 64},
        "data": {
            "conversations": str(write_conversations(folder / "train.jsonl", rows)),
            "held_out": str(write_conversations(folder / "held_out.jsonl", 6, seed=1)),
            "max_length": 128,
        },
        "drafter": {
            "layers": 1,
            "block": 4,
            "taps": [0, 2, 4],
            "mask_token_id": MASK_ID,
            "markov_rank": 8,
            "vocab": 200,
        },
        "train": {
            "precision": "fp32",
            "global_batch": 2,
            "anchors": 8,
            "epochs": 1,
            "lr": 1e-3,
            "log_every": 1,
            "checkpoint_every": 10,
            "max_failures": 0,
        },
        "evaluate": {"actors": 1, "max_new_tokens": 8, "prompts_t0": 4, "prompts_t1": 2},
        "tracking": {"uri": _own_store(folder)},
        "ray": {"object_store_mb": 128},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
