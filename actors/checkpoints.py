"""Training checkpoints through Ray Train: each rank's DeepSpeed shard, the drafter and the progress, in one folder.

Ray Train uploads the ranks' files into `step-00000400/` of the run's storage and registers the folder when all have
arrived; only registered folders are ever loaded.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from ray.train import Checkpoint, Result
from safetensors.torch import save_file

from actors.task import TrainTask
from actors.zero import whole_state
from dspark.errors import InputError

PROGRESS, DRAFTER, TAG = "progress.json", "drafter.safetensors", "deepspeed"


def save(engine: DeepSpeedEngine, task: TrainTask, step: int) -> None:
    """Saves after `step` optimizer steps; every rank calls it at the same step, between two accumulation windows."""
    assert engine.micro_steps % task.settings.train.accumulation == 0, "a checkpoint holds no half-made step"
    state = whole_state(engine)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        engine.save_checkpoint(temporary, tag=TAG)
        if dist.get_rank() == 0:
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / DRAFTER)
            (folder / PROGRESS).write_text(json.dumps({"step": step, "identity": task.identity}, indent=1))
        ray.train.report({"step": step}, Checkpoint.from_directory(temporary), checkpoint_dir_name=f"step-{step:08d}")


def restore(engine: DeepSpeedEngine, task: TrainTask) -> int:
    """Loads the newest registered checkpoint of this run and returns its number of finished steps; 0 without one.

    Raises:
        InputError: the checkpoint was made with other settings that matter, or DeepSpeed finds no state in it.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    done = resumable_steps(checkpoint, task)
    with checkpoint.as_directory() as folder:
        path, _ = engine.load_checkpoint(folder, tag=TAG)
        if path is None:
            raise InputError(
                f"checkpoint {checkpoint.path} holds no DeepSpeed state for this rank: start without --resume"
            )
    return done


def check_identity(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses a checkpoint of another experiment.

    Raises:
        InputError: names the first differing key, what the checkpoint holds and what the run asks for.
    """
    for key, value in wanted.items():
        if found.get(key) != value:
            raise InputError(
                f"the checkpoint was made with {key}={found.get(key)!r}, this run has {value!r}: resume with the same "
                "settings, or start a new run"
            )


def newest_checkpoint(storage: Path) -> Checkpoint | None:
    """The newest registered checkpoint under a run's storage folder, None when there is none yet."""
    if not (storage / "checkpoint_manager_snapshot.json").exists():
        return None
    return Result.from_path(str(storage)).checkpoint


def resumable_steps(checkpoint: Checkpoint | None, task: TrainTask) -> int:
    """Optimizer steps that a checkpoint of this run holds; 0 for None.

    Raises:
        InputError: the checkpoint was made with other settings that matter.
    """
    if checkpoint is None:
        return 0
    progress = _progress(checkpoint)
    check_identity(progress["identity"], json.loads(json.dumps(task.identity)))
    return int(progress["step"])


def finished_steps(checkpoint: Checkpoint | None) -> int:
    """Optimizer steps that a checkpoint holds; 0 for None."""
    if checkpoint is None:
        return 0
    return int(_progress(checkpoint)["step"])


def _progress(checkpoint: Checkpoint) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        progress: dict[str, Any] = json.loads((Path(folder) / PROGRESS).read_text())
    return progress
