"""Calibration files: what is written is read again, and what means nothing is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.decoding.calibration_file import Calibration, load_calibration, save_calibration
from dspark.decoding.schedule import StepRates
from dspark.errors import InputError

RATES = StepRates((1, 8), (20.0, 9.5))


@pytest.mark.parametrize("wanted", [Calibration((1.5, 0.5)), Calibration(None, RATES), Calibration((2.0,), RATES)])
def test_what_is_saved_is_loaded_and_facts_stand_beside_it(tmp_path: Path, wanted: Calibration) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(path, wanted, {"dataset": "held out", "num_samples": 7})
    assert load_calibration(path) == wanted
    written = json.loads(path.read_text())
    assert (written["dataset"], written["num_samples"]) == ("held out", 7)
    assert written.get("max_batch_tokens") == (8 if wanted.rates else None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "neither `temperatures` nor"),
        ({"dataset": "x"}, "neither `temperatures` nor"),
        ({"temperatures": [1.0, 0.0]}, "each must be a positive number"),
        ({"temperatures": []}, "each must be a positive number"),
        ({"temperatures": [1.0, "2"]}, "must be a list of numbers"),
        ({"temperatures": [float("nan")]}, "must be a list of numbers"),
        ({"sample_batch_tokens": [1, 2]}, "sample_batch_tokens alone"),
        ({"sample_batch_tokens": [1, 2.5], "sample_steps_per_sec": [2, 1]}, "each must be a whole number"),
        ({"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [2, 1]}, "rising token counts"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        load_calibration(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("temperatures")
    for name in ("text", "missing"):
        with pytest.raises(InputError, match="write one with `dspark calibrate`"):
            load_calibration(tmp_path / name)
