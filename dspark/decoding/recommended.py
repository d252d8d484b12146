"""The sampling rule under which a target answers: its own recommendation, or what the settings say over it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.answering import PrepareSettings
from dspark.decoding.sampling import Sampling
from dspark.errors import InputError

KEYS = ("temperature", "top_p", "top_k", "min_p")
_FILE = "generation_config.json"


def read_recommendation(folder: Path) -> Mapping[str, Any]:
    """The target's generation configuration; empty where its folder has none.

    Raises:
        InputError: the file is no JSON object.
    """
    file = folder / _FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}; correct it or remove it") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no object: correct it or remove it")
    return found


def recommended_sampling(settings: PrepareSettings, recommended: Mapping[str, Any], seed: int) -> Sampling:
    """The rule: each value from the settings, else from the target's recommendation, else the neutral one.

    A recommendation that says `do_sample: false` means temperature 0. Without any, the temperature is 1, as in serving
    engines: the law that the target was trained for.
    """
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values |= {key: recommended[key] for key in KEYS if recommended.get(key) is not None}
    if recommended.get("do_sample") is False:
        values["temperature"] = 0.0
    values |= {key: value for key in KEYS if (value := getattr(settings, key)) is not None}
    # Some recommendations write -1 for all tokens.
    top_k = max(0, int(values["top_k"]))
    return Sampling(float(values["temperature"]), top_k, float(values["top_p"]), seed, float(values["min_p"]))
