"""The file of a drafter's calibration, as serving engines read it: confidence temperatures and the target's step rates.

One JSON object. `temperatures` is one number per slot; `sample_batch_tokens`, `sample_steps_per_sec` and
`max_batch_tokens` are the table of step rates. Either part may be absent; other keys are facts about the measurement
(`dataset`, `num_samples`, `ece_before`, `ece_after`), which decoding does not read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.decoding.schedule import StepRates
from dspark.errors import InputError

_TABLE = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")


@dataclass(frozen=True)
class Calibration:
    """What decoding takes from a calibration file; None: the file has no such part."""

    temperatures: tuple[float, ...] | None = None  # slot by slot; a confidence is sigmoid(logit / temperature)
    rates: StepRates | None = None


def load_calibration(path: Path) -> Calibration:
    """Reads a calibration file.

    Raises:
        InputError: no such file, no JSON object, neither part in it, or numbers that mean nothing.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(
            f"calibration file {path} cannot be read ({error}): write one with `dspark calibrate`"
        ) from error
    if not isinstance(found, dict) or not {"temperatures", *_TABLE} & found.keys():
        raise InputError(
            f"calibration file {path} holds neither `temperatures` nor `sample_batch_tokens`: write one with "
            "`dspark calibrate`"
        )
    return Calibration(_temperatures(found, path), _rates(found, path))


def save_calibration(path: Path, calibration: Calibration, facts: Mapping[str, Any] | None = None) -> None:
    """Writes a calibration file; `facts` are further keys, such as `dataset` and `num_samples`."""
    content: dict[str, Any] = {}
    if calibration.temperatures is not None:
        content["temperatures"] = list(calibration.temperatures)
    if calibration.rates is not None:
        tokens, rates = calibration.rates.tokens, calibration.rates.per_second
        content |= dict(zip(_TABLE, (list(tokens), list(rates), tokens[-1]), strict=True))
    path.write_text(json.dumps({**content, **(facts or {})}, indent=2) + "\n")


def _temperatures(found: Mapping[str, Any], path: Path) -> tuple[float, ...] | None:
    if "temperatures" not in found:
        return None
    numbers = _numbers(found, "temperatures", path)
    if not numbers or min(numbers) <= 0:
        raise InputError(f"calibration file {path} has temperatures {numbers}: each must be a positive number")
    return numbers


def _rates(found: Mapping[str, Any], path: Path) -> StepRates | None:
    present = [key for key in _TABLE if key in found]
    if not present:
        return None
    if "sample_batch_tokens" not in found or "sample_steps_per_sec" not in found:
        raise InputError(
            f"calibration file {path} has {', '.join(present)} alone: a table of step rates needs sample_batch_tokens "
            "and sample_steps_per_sec; measure it with `dspark calibrate --profile`"
        )
    tokens, rates = _numbers(found, "sample_batch_tokens", path), _numbers(found, "sample_steps_per_sec", path)
    if any(count != int(count) for count in tokens):
        raise InputError(f"calibration file {path} has sample_batch_tokens {tokens}: each must be a whole number")
    try:
        return StepRates(tuple(int(count) for count in tokens), rates)
    except InputError as error:
        raise InputError(f"calibration file {path}: {error}") from error


def _numbers(found: Mapping[str, Any], key: str, path: Path) -> tuple[float, ...]:
    numbers = found[key]
    sound = isinstance(numbers, list) and all(
        isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) for number in numbers
    )
    if not sound:
        raise InputError(f"calibration file {path} has {key}={numbers!r}: it must be a list of numbers")
    return tuple(float(number) for number in numbers)
