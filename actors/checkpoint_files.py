"""What Ray Train has registered of a run's checkpoints (`actors.checkpoints`), and what a kill left; none is loaded.

Without torch and DeepSpeed: Ray Train's controller asks how far a run is, and would import them for nothing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.train import Checkpoint, Result

from actors.retention import PROGRESS, SNAPSHOT
from actors.stages import check_resizable
from dspark.data.folder import Folder
from dspark.errors import InputError

if TYPE_CHECKING:
    from actors.task import TrainTask

DRAFTER, RECORDS = "drafter.safetensors", "records.jsonl"
# Ray Train writes its snapshot in place, so a kill can leave half of one.
SPARE = "checkpoint_manager_snapshot.spare.json"


def newest_checkpoint(storage: str | Path) -> Checkpoint | None:
    """The newest registered checkpoint under a run's storage, a folder or URI; None when there is none yet."""
    if SNAPSHOT not in Folder(storage).sizes():
        return None
    return Result.from_path(str(storage)).checkpoint


def settle_storage(storage: str | Path) -> None:
    """Clears what a kill in mid-save left: half a snapshot, and folders that were never registered or are no more."""
    folder = Folder(storage)
    if SNAPSHOT in folder.sizes():
        try:
            json.loads(folder.read(SNAPSHOT))
        except ValueError:
            if SPARE in folder.sizes():
                folder.write(SNAPSHOT, folder.read(SPARE))
            else:
                folder.remove(SNAPSHOT)
    known: set[str] = set()
    if SNAPSHOT in folder.sizes():
        result = Result.from_path(str(storage))
        registered = [result.checkpoint, *(one for one, _ in result.best_checkpoints or [])]
        known = {Path(one.path).name for one in registered if one is not None}
    for name in folder.folders():
        if name.startswith("step-") and name not in known:
            folder.remove_folder(name)


def spare_snapshot(storage: str) -> None:
    """Copies Ray Train's snapshot before it is written anew; its folders are only removed after that."""
    folder = Folder(storage)
    if SNAPSHOT in folder.sizes():
        folder.write(SPARE, folder.read(SNAPSHOT))


def resumable_steps(checkpoint: Checkpoint | None, task: "TrainTask") -> int:
    """Optimizer steps that a checkpoint of this run holds; 0 for None.

    Raises:
        InputError: the checkpoint was made with other settings that matter, or by a number of ranks that cannot change.
    """
    if checkpoint is None:
        return 0
    facts = progress_of(checkpoint)
    check_identity(facts["identity"], json.loads(json.dumps(task.identity)))
    check_resizable(facts["workers"], task.settings.train)
    return int(facts["step"])


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


def finished_steps(checkpoint: Checkpoint | None) -> int:
    """Optimizer steps that a checkpoint holds; 0 for None."""
    return 0 if checkpoint is None else int(progress_of(checkpoint)["step"])


def progress_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    facts: dict[str, Any] = json.loads(read_file(checkpoint, PROGRESS))
    return facts


def read_file(checkpoint: Checkpoint, name: str) -> bytes:
    """One file of a checkpoint, wherever it lies; the others are not fetched."""
    files = checkpoint.filesystem
    assert files is not None, "a registered checkpoint knows its file system"
    with files.open_input_stream(f"{checkpoint.path}/{name}") as stream:
        data: bytes = stream.read()
    return data


def as_lines(records: Iterable[Mapping[str, float]]) -> str:
    """Records as JSON, one per line."""
    return "".join(json.dumps(entry) + "\n" for entry in records)


def from_lines(text: str) -> list[dict[str, float]]:
    """The records of a text; a line that a kill broke off has no line break and is none."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def recorded(checkpoint: Checkpoint | None) -> list[dict[str, float]]:
    """The records of the steps that a checkpoint holds; none for None."""
    return [] if checkpoint is None else from_lines(read_file(checkpoint, RECORDS).decode())
