"""The drafter of a finished training, in the published layout."""

from typing import Any

import torch
from safetensors.torch import load

from actors.checkpoint_files import DRAFTER, finished_steps, newest_checkpoint, read_file
from actors.retention import best_checkpoint
from dspark.config import Settings
from dspark.target_files import DTYPES, load_vocabulary, load_whole_config
from jobs.experiment import Experiment
from jobs.rows import Rows


def export_drafter(experiment: Experiment, rows: Rows) -> None:
    """Writes a checkpoint's drafter with the target's embedding and head, in the published layout.

    The last checkpoint's, or the best one's with `train.keep_best`.
    """
    # With the configurations of transformers, which trials of a sweep do without.
    from dspark.model.checkpoints import save_drafter

    settings = experiment.settings
    dtype = DTYPES[settings.train.precision]
    checkpoint, wanted = newest_checkpoint(experiment.checkpoints), settings.validation
    if settings.train.keep_best is not None:
        best = best_checkpoint(experiment.checkpoints, f"val_{wanted.metric}", wanted.smaller)
        checkpoint = best or checkpoint
    assert checkpoint is not None, "training has just left one"
    state = load(read_file(checkpoint, DRAFTER))
    if not experiment.drafter.exists():
        save_drafter(
            experiment.drafter,
            state,
            rows.draft,
            load_vocabulary(settings.target, torch.device("cpu"), dtype),
            load_whole_config(settings.target),
            settings.train.anchors if settings.drafter.kind == "dspark" else None,
            dtype,
            drafter_facts(settings, rows, finished_steps(checkpoint)),
        )


def drafter_facts(settings: Settings, rows: Rows, steps: int) -> dict[str, Any]:
    """What a drafter's folder says of its making, beyond the published keys."""
    return {
        "target": {
            "name": rows.origin.target,
            "revision": rows.origin.revision,
            "fingerprint": rows.origin.fingerprint,
            "architectures": list(load_whole_config(settings.target).architectures or []),
        },
        "data": {"conversations": settings.data.conversations.name, "fingerprint": rows.fingerprint},
        "start_from": rows.start,
        "render": rows.origin.render,
        "rows": rows.table.num_rows,
        "plan": rows.plan.identity,
        "steps": steps,
        "loss": (settings.loss if settings.drafter.kind == "dspark" else settings.eagle3).model_dump(mode="json"),
        "seed": settings.seed,
    }
