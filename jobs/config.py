"""From a preset and dotted overrides to settings, and from settings back to YAML.

preset.yaml -> plain values, relative paths made absolute -> overrides on top -> `Settings`, or one error that lists all
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dspark.config import Settings
from dspark.data.files import SUFFIXES
from dspark.errors import InputError
from dspark.redaction import redacted
from dspark.sections import Section
from jobs.checkpoints import is_registered
from jobs.uploading import check_outputs, in_submitted_job

Values = dict[str, Any]

# Where a relative path in a preset starts: at the preset's folder, or at home, the working directory.
_MODEL, _SOURCE = ("target", "model"), ("prepare", "source")
_PATHS: Mapping[tuple[str, ...], Literal["preset", "home"]] = {
    ("data", "conversations"): "preset",
    ("data", "held_out"): "preset",
    ("data", "validation"): "preset",
    ("evaluate", "benchmarks"): "preset",
    ("evaluate", "calibration"): "home",
    ("drafter", "start_from"): "preset",
    _MODEL: "preset",
    _SOURCE: "preset",
    ("prepare", "folder"): "home",
    ("cache", "folder"): "home",
    ("train", "storage"): "home",
    ("output",): "home",
}
_SHOWN_CHARACTERS = 80


class _Loader(yaml.SafeLoader):
    """Safe YAML, but `1e-3` is a number, and a key that is given twice or is no text is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise yaml.MarkedYAMLError(problem="this key is no text, quote it", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key `{key.value}` is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes each text that `_Loader` would read as a number."""


# YAML 1.1 wants a dot and a signed exponent, so that it reads `lr: 6e-4` as text.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_settings(preset: Path, overrides: Sequence[str], home: Path | None = None) -> Settings:
    """The settings of one experiment.

    Args:
        preset: YAML file; its relative data paths start at its own folder.
        overrides: `a.b=value` each, the value in YAML; a later one wins, and one that names a section replaces it.
        home: where relative paths of overrides and `output` start; None: the working directory.

    Raises:
        InputError: the file or an override cannot be read, or the settings have faults; all faults are listed.
    """
    home = (home or Path.cwd()).absolute()
    # In strict JSON pydantic refuses even its own default when that is a Path, so `output` goes in as text.
    values = {"output": str(Settings.model_fields["output"].default), **read_yaml(preset)}
    values = _absolute(values, preset.expanduser().absolute().parent, home)
    for text in overrides:
        keys, value = _parse_override(text)
        alone: Values = {}
        _assign(alone, keys, value)
        _assign(values, keys, _lookup(_absolute(alone, home, home), keys))
    try:
        # JSON is the strict mode that still knows paths and tuples: "3" is no number there and 1 is no text.
        settings = Settings.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise InputError(_faults(preset, error)) from None
    if in_submitted_job():
        check_outputs(settings, home)
    return settings


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with these values by dotted key, checked as a preset and its overrides are.

    Raises:
        ValidationError: of pydantic, for whoever knows where the values come from; `fault_of` puts it into words.
    """
    changed: Values = settings.model_dump(mode="json")
    home = Path.cwd()
    for key, value in values.items():
        keys, alone = key.split("."), Values()
        _assign(alone, keys, value)
        _assign(changed, keys, _lookup(_absolute(alone, home, home), keys))
    return Settings.model_validate_json(json.dumps(changed, default=str), strict=True)


def dump_settings(settings: Settings) -> str:
    """YAML that `load_settings` reads back as equal settings, except that secrets became `***`."""
    return yaml.dump(redacted(settings.model_dump(mode="json")), Dumper=_Dumper, sort_keys=False)


def check_files(settings: Settings) -> None:
    """Passes iff the data files and folders of the settings are there, and the verification policy has what it needs.

    Raises:
        InputError: lists what is missing.
    """
    faults = [
        f"{key}: there is no file {path}"
        for key, path in (
            ("data.conversations", settings.data.conversations),
            ("data.held_out", settings.data.held_out),
            ("data.validation", settings.data.validation),
            ("evaluate.calibration", settings.evaluate.calibration),
        )
        if path is not None and not path.is_file()
    ]
    folder = settings.evaluate.benchmarks
    if folder is not None and not folder.is_dir():
        faults.append(f"evaluate.benchmarks: there is no folder {folder}")
    start = settings.drafter.start_from
    if start is not None and not is_registered(start) and not start.is_dir():
        faults.append(f"drafter.start_from: there is no folder {start}")
    if faults:
        raise InputError("; ".join(faults) + ": correct the path or make the data first")
    # Here and not above: the command line reads settings without torch.
    from dspark.decoding.policies import choose_policy

    evaluate = settings.evaluate
    choose_policy(evaluate.policy, evaluate.slots, evaluate.threshold, evaluate.calibration)


def describe_settings(section: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of each setting, in the order of their declaration."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from describe_settings(kind, f"{prefix}{name}.")
            continue
        default = "(required)" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        yield prefix + name, default, field.description or ""


def read_yaml(file: Path, what: str = "preset") -> Values:
    """Keys and values of a file; raises InputError that says what is wrong with this `what`."""
    try:
        values = yaml.load(file.expanduser().read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the {what} {file}: {error}; give the path of a YAML file") from None
    except yaml.YAMLError as error:
        raise InputError(f"the {what} {file} is no valid YAML: {error}") from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else _shown(values)
        raise InputError(f"the {what} {file} holds {found}, it needs keys and values such as `seed: 42`")
    return values


def _parse_override(text: str) -> tuple[list[str], Any]:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"override `{text}` needs the form key=value, such as loss.l1=0.9")
    try:
        return keys, yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        reason = str(error).replace("\n", " ")
        raise InputError(
            f"override `{text}`: the value is no valid YAML ({reason}); quote it to keep it text"
        ) from None


def _assign(values: Values, keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = values.get(key)
        values[key] = dict(inner) if isinstance(inner, dict) else {}
        values = values[key]
    values[keys[-1]] = value


def _lookup(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _absolute(values: Values, folder: Path, home: Path) -> Values:
    """The values with their paths made absolute; what is no text is left for the validation to refuse."""
    for keys, start in _PATHS.items():
        found = _lookup(values, keys)
        if not isinstance(found, str) or "://" in found or is_registered(found):
            continue
        path = os.path.normpath((home if start == "home" else folder) / Path(found).expanduser())
        # A target or source that is not written as a path is a hub id or a known name.
        named = keys in (_MODEL, _SOURCE) and not found.startswith((".", "~"))
        if not named or (keys == _SOURCE and (found.endswith(SUFFIXES) or os.path.exists(path))):
            _assign(values, keys, path)
    return values


def _faults(preset: Path, error: ValidationError) -> str:
    faults = [fault_of(details) for details in error.errors(include_url=False)]
    if len(faults) == 1:
        return f"{preset}, with its overrides: {faults[0]}"
    return f"{preset}, with its overrides, has {len(faults)} faults:\n" + "\n".join(f"  {fault}" for fault in faults)


def fault_of(details: ErrorDetails) -> str:
    """What is wrong at one place, and what was needed there."""
    path = ".".join(str(part) for part in details["loc"])
    match details["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key{nearest_key(path)}"
        case "missing":
            return f"{path}: missing, it must be set"
        case "value_error":
            reason = details["msg"].removeprefix("Value error, ")
            return f"{path}: {reason}" if path else reason
        case _:
            return f"{path}: found {_shown(details['input'])}, needed {_needed(details['msg'])}"


def _needed(message: str) -> str:
    # "Input should be a valid integer", "String should match pattern '...'"
    need = message.partition(" should ")[2] or message
    return need.removeprefix("be ") if need.startswith("be ") else f"to {need}"


def nearest_key(path: str) -> str:
    """Which key may have been meant, or which ones there are."""
    known = [key for key, _, _ in describe_settings()]
    sections = {key.rpartition(".")[0] for key in known} - {""}
    leaf = path.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    candidates = same_leaf or get_close_matches(path, [*known, *sections], n=1)
    if candidates:
        return f", did you mean {' or '.join(candidates)}?"
    section = path.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    return f", known here: {', '.join(siblings)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
