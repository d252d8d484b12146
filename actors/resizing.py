"""A checkpoint for another number of ranks: DeepSpeed's universal form, made from the shards when they are loaded.

DeepSpeed joins the shards parameter by parameter, and every rank cuts its part out of the whole. The rows of a step
stay the same, only dealt to other ranks, so losses agree within the order of the sums.

Elastic training by Ray Train (`num_workers=(min, max)`) is not used: it restarts the group with whatever number of
ranks there is room for, while a step must divide by ranks x micro-batch, and its `DataConfig` deals streams that are
cut for one number of ranks. Here a number of ranks is asked for, with `train.workers` at `--resume`.
"""

import contextlib
import io
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from actors.deepspeed_alone import DeepSpeedEngine


@contextmanager
def universal_shards(engine: DeepSpeedEngine, folder: Path, tag: str, workers: int) -> Iterator[Path]:
    """A folder with the checkpoint as every rank can load it, while the engine expects that form; collective.

    Each machine converts once, into its temporary folder: what Ray fetched belongs to it alone.
    """
    if engine.zero_optimization_stage() == 0:
        yield folder  # every rank holds all of it
        return
    with contextlib.ExitStack() as stack:
        place = [stack.enter_context(tempfile.TemporaryDirectory())] if _first_here() else [""]
        if place[0]:
            _convert(folder / tag, Path(place[0]) / tag)
        places: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
        dist.all_gather_object(places, (_machine(), place[0]))
        shared = next(made for machine, made in places if machine == _machine() and made)
        engine._config.load_universal_checkpoint = True
        try:
            yield Path(shared)
        finally:
            engine._config.load_universal_checkpoint = False
            dist.barrier()


def _first_here() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _machine() -> str:
    return os.environ.get("GROUP_RANK", "") + os.uname().nodename


def _convert(shards: Path, into: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    into.mkdir()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(
            Namespace(
                input_folder=str(shards),
                output_folder=str(into),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
