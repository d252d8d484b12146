"""What a submitted job takes along from the checkout, and which paths mean something on the cluster.

checkout -(.gitignore, .rayignore)-> files, sent with the job -> a copy on the node that dies with the job
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark.config import Settings
from dspark.errors import InputError

# Ray refuses uploads of 100 MB; what is needed takes two.
LARGEST_MB = 50
_NAMED_FOLDERS = 3
# Ray sets this for the process that a submitted job starts.
_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True)
class Upload:
    """Bytes of each file that goes along, by path relative to `root`."""

    root: Path
    files: Mapping[Path, int]

    @property
    def total(self) -> int:
        return sum(self.files.values())


def collect_upload(root: Path) -> Upload:
    """The files that Ray packs from a checkout, found by Ray's own walk.

    Raises:
        InputError: `root` is no checkout, or its files come to more than `LARGEST_MB`.
    """
    from ray._private.runtime_env.packaging import _dir_travel

    root = root.resolve()
    if not (root / "jobs" / "cli.py").is_file() or not (root / ".rayignore").is_file():
        raise InputError(f"{root} is no checkout of this project (no jobs/cli.py and .rayignore): submit from one")
    files: dict[Path, int] = {}

    def add(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(root)] = path.stat().st_size

    excludes: list[Callable[[Path], bool]] = []
    _dir_travel(root, excludes, add, include_gitignore=os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1")
    upload = Upload(root, files)
    if upload.total > LARGEST_MB * 10**6:
        raise InputError(
            f"the upload from {root} has {upload.total / 1e6:.0f} MB, at most {LARGEST_MB} MB go along; the largest "
            f"folders: {_largest(files)}. Move them out of the checkout or name them in .rayignore"
        )
    return upload


def _largest(files: Mapping[Path, int]) -> str:
    folders: Counter[Path] = Counter()
    for path, size in files.items():
        folders[path.parent] += size
    return ", ".join(f"{path} ({size / 1e6:.0f} MB)" for path, size in folders.most_common(_NAMED_FOLDERS))


def in_submitted_job() -> bool:
    """Whether this process is the driver of a submitted job: its working directory is a copy that Ray deletes."""
    return _IN_JOB in os.environ


def check_outputs(settings: Settings, checkout: Path) -> None:
    """Raises InputError that lists every output of the settings that would be written into the checkout's copy."""
    outputs = {
        "output": settings.output,
        "cache.folder": settings.cache.folder,
        "prepare.folder": settings.prepare.folder,
        "train.storage": settings.train.storage,
        "tracking.uri": _database(settings.tracking.uri),
    }
    inside = [
        f"{key}={place}"
        for key, place in outputs.items()
        if place is not None
        and (path := _on_disk(str(place))) is not None
        and (checkout / path).is_relative_to(checkout)
    ]
    if inside:
        raise InputError(
            f"{', '.join(inside)}: a submitted job works in a copy of the checkout that is deleted with it; give an "
            "absolute folder that all nodes see, such as output=/shared/runs"
        )


def _on_disk(place: str) -> Path | None:
    """Where a path or the address of a file lies; None: on a server."""
    place = place.removeprefix("file://")
    return None if "://" in place else Path(place)


def _database(uri: str | None) -> str | None:
    """The file of an SQLite address; None of any other."""
    scheme = "sqlite:///"
    return uri.removeprefix(scheme) if uri is not None and uri.startswith(scheme) else None


def check_inputs(settings: Settings, upload: Upload) -> None:
    """Raises InputError that lists every input below the checkout that does not go along with the job."""
    inputs = {
        "data.conversations": settings.data.conversations,
        "data.held_out": settings.data.held_out,
        "data.validation": settings.data.validation,
        "evaluate.calibration": settings.evaluate.calibration,
        "prepare.source": settings.prepare.source,
        "evaluate.benchmarks": settings.evaluate.benchmarks,
        "drafter.start_from": settings.drafter.start_from,
        "target.model": settings.target.model,
    }
    left = []
    for key, value in inputs.items():
        path = Path(str(value))
        if value is None or not path.is_absolute() or not path.is_relative_to(upload.root):
            continue
        place = path.relative_to(upload.root)
        # A folder whose weights or shards stay behind is of no use to the job, so all that it holds must go along.
        found = [file.relative_to(upload.root) for file in path.rglob("*") if file.is_file()] or [place]
        if any(file not in upload.files for file in found):
            left.append(f"{key}={place}")
    if left:
        raise InputError(
            f"{', '.join(left)}: not among the files that go along with a job (.gitignore and .rayignore leave it "
            "out, or it is not there); put it on storage that all nodes see and give its absolute path"
        )
