"""From a drafter's folder to a version in the registry: what is stored, and the tags that tell and gate it.

checkpoint, settings of its run, evaluation of it -> signature, model card, tags -> `actors.registry` -> version

`dspark run` and `dspark register` both come through here.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from actors.registry import FINGERPRINT
from actors.signature import MLMODEL, mlmodel
from dspark.evaluation.gate import TARGET
from dspark.evaluation.model_card import NOT_STATED, CardData, Licences, model_card
from dspark.model.checkpoints import read_json
from dspark.model.exchange import Checkpoint, read_checkpoint
from dspark.model.layout import dtype_name
from dspark.redaction import redacted
from dspark.target_files import fingerprint
from jobs.config import read_yaml
from jobs.experiment import RECORD, SETTINGS
from jobs.export import CARD
from jobs.measured import Measured
from jobs.reporting import RESULT
from jobs.results import DESCRIPTION

_WRITTEN = (CARD, MLMODEL, SETTINGS, DESCRIPTION, RESULT)
# Of a run's settings, what does not decide which drafter it makes.
_ELSEWHERE = ("output", "tracking", "ray")


@dataclass(frozen=True)
class Registration:
    """Files of the checkpoint and texts by name, which are stored together, and the version's tags."""

    files: tuple[Path, ...]
    texts: Mapping[str, str]
    tags: Mapping[str, str]


def registration_of(name: str, checkpoint: Path, run: Path | None, measured: Measured | None) -> Registration:
    """What is registered as the next version of `name`; `run` is the folder of the run that trained it.

    Raises:
        InputError: the folder is no drafter, or a file beside it cannot be read.
    """
    found = read_checkpoint(checkpoint)
    # A registered drafter brings the settings of its run along.
    settings = _settings((run or checkpoint) / SETTINGS)
    numbers = None if measured is None else measured.numbers
    texts = {
        CARD: model_card(
            CardData(
                title=name,
                layout=found.layout.name,
                dtype=dtype_name(found.dtype),
                config=found.config,
                vocabulary=found.layout.vocabulary,
                facts=found.facts,
                licences=Licences(),
                settings=settings,
                result=numbers,
            )
        ),
        MLMODEL: mlmodel(found.config, found.layout.name),
    }
    if settings is not None:
        texts[SETTINGS] = yaml.safe_dump(settings, sort_keys=False)
    if measured is not None:
        texts[DESCRIPTION] = json.dumps(dict(measured.description), indent=1) + "\n"
        texts[RESULT] = json.dumps(dict(measured.numbers), indent=1) + "\n"
    there = (path for path in sorted(checkpoint.iterdir()) if path.is_file() and not path.name.startswith("."))
    files = tuple(path for path in there if path.name not in _WRITTEN)
    tags = {
        **identity_tags(found, checkpoint, settings),
        "git_commit": NOT_STATED if run is None else str(read_json(run / RECORD).get("git_commit") or NOT_STATED),
        **({} if measured is None else measured.tags),
    }
    return Registration(files, redacted(texts), redacted(tags))


def identity_tags(found: Checkpoint, checkpoint: Path, settings: Mapping[str, Any] | None) -> dict[str, str]:
    """Which drafter it is, for which target, made from what; what the folder does not say is left out or not stated."""
    target, data = _section(found.facts, "target"), _section(found.facts, "data")
    tags = {
        "target": target.get("name"),
        "target_revision": target.get("revision"),
        TARGET: target.get("fingerprint"),
        "data": data.get("conversations"),
        "data_fingerprint": data.get("fingerprint"),
        "render_hash": found.facts.get("render"),
        "steps": found.facts.get("steps"),
    }
    known = {key: str(value) for key, value in tags.items() if value is not None}
    return known | {
        "drafter": str(found.config),
        FINGERPRINT: fingerprint(checkpoint),
        "settings_hash": NOT_STATED if settings is None else settings_hash(settings),
    }


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Equal for runs that ask for the same drafter, wherever they work and are tracked."""
    told = {key: value for key, value in settings.items() if key not in _ELSEWHERE}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _section(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = facts.get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def _settings(file: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    if not file.is_file():
        return None
    found = read_yaml(file, "settings of the run that made the drafter,")
    safe: dict[str, Any] = redacted(found)
    return safe
