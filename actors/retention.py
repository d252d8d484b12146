"""Which checkpoints of a run stay: the newest, those with the best metric, or both.

Ray Train keeps by one rule, age or a score, and the newest in any case. Where several stay for their age and others for
their metric, it keeps all that it has registered, and `thin_out` empties those that neither rule wants.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ray.train import Checkpoint, CheckpointConfig, Result

from dspark.config import Settings
from dspark.data.folder import Folder

T = TypeVar("T")
PROGRESS, LEDGER = "progress.json", "ledger.npz"
# Ray Train's own record of registered folders.
SNAPSHOT = "checkpoint_manager_snapshot.json"


def checkpoint_rule(settings: Settings) -> CheckpointConfig:
    """What Ray Train is told to keep."""
    train, wanted = settings.train, settings.validation
    if train.keep_best is None:
        return CheckpointConfig(num_to_keep=train.kept_by_age)
    if train.kept_by_age > 1:
        return CheckpointConfig()
    return CheckpointConfig(train.keep_best, f"val_{wanted.metric}", "min" if wanted.smaller else "max")


def thin_out(storage: str | Path, settings: Settings) -> None:
    """Empties the checkpoints that are neither among the newest nor among the best, if Ray Train keeps all.

    Their folders remain, with `progress.json`: Ray Train does not go on where one that it has registered is missing.
    """
    train, wanted = settings.train, settings.validation
    if train.keep_best is None or train.kept_by_age == 1 or SNAPSHOT not in Folder(storage).sizes():
        return
    try:
        registered = json.loads(Folder(storage).read(SNAPSHOT))["checkpoint_results"]
    except ValueError:
        return  # it is being written, in place: the next checkpoint comes here again
    whole = [(one["checkpoint_dir_name"], one["metrics"]) for one in registered]
    whole = sorted((one for one in whole if _is_whole(storage, one[0])), key=lambda one: one[1]["step"])
    kept = {name for name, _ in whole[-train.kept_by_age :]}
    kept |= set(_best_first(whole, f"val_{wanted.metric}", wanted.smaller)[: train.keep_best])
    for name, _ in whole:
        if name not in kept:
            _empty(Folder(f"{storage}/{name}"))


def best_checkpoint(storage: str | Path, metric: str, smaller: bool) -> Checkpoint | None:
    """Of the whole checkpoints that carry the metric, the one with the best; of equal ones the first."""
    registered = Result.from_path(str(storage)).best_checkpoints or []
    whole = [one for one in registered if _is_whole(storage, Path(one[0].path).name)]
    best = _best_first(whole, metric, smaller)
    return best[0] if best else None


def _best_first(measured: Sequence[tuple[T, Mapping[str, float]]], metric: str, smaller: bool) -> list[T]:
    """Those that carry the metric, the best first."""
    values = [
        (metrics[metric] if smaller else -metrics[metric], place)
        for place, (_, metrics) in enumerate(measured)
        if math.isfinite(metrics.get(metric, math.nan))
    ]
    return [measured[place][0] for _, place in sorted(values)]


def _is_whole(storage: str | Path, name: str) -> bool:
    return LEDGER in Folder(f"{storage}/{name}").sizes()


def _empty(folder: Folder) -> None:
    folder.remove(LEDGER)  # first: what a kill leaves half emptied is no longer whole
    for name in folder.sizes():
        if name != PROGRESS:
            folder.remove(name)
    for name in folder.folders():
        folder.remove_folder(name)
