"""An evaluation that lies in a run folder, of one of the drafters that it measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import InputError
from dspark.evaluation.gate import TARGET
from dspark.evaluation.metrics import PromptResult, summarise
from dspark.evaluation.recorded import recorded_of
from dspark.evaluation.summary import SECTIONS, by_origin, main_results
from dspark.model.checkpoints import read_json
from jobs.reporting import RESULT
from jobs.results import DESCRIPTION, ResultsFile

_MARK = "drafter "  # of drafters in a description


@dataclass(frozen=True)
class Measured:
    """An evaluation of one drafter: how it was made, its results, and its numbers as in `result.json`."""

    description: Mapping[str, Any]
    results: Sequence[PromptResult]
    numbers: Mapping[str, Any]

    @property
    def tags(self) -> dict[str, str]:
        """Acceptance and the lossless check as the gate reads them, and the target that they were measured with."""
        return recorded_of(self.results, self.description).tags() | {TARGET: str(self.description["target"])}


def measured_in(folder: Path, drafter: str) -> Measured:
    """The evaluation that a run folder holds of the drafter with this fingerprint.

    Raises:
        InputError: no finished evaluation lies there, or it measured other drafters.
    """
    record, result = folder / DESCRIPTION, folder / RESULT
    for file in (record, result):
        if not file.is_file():
            raise InputError(
                f"{folder} holds no {file.name}, so no finished evaluation: name the run folder of a `dspark evaluate` "
                "or `dspark run`, and finish one that was broken off with --resume"
            )
    description, numbers = read_json(record), read_json(result)
    marks = {key.removeprefix(_MARK): mark for key, mark in description.items() if key.startswith(_MARK)}
    name = next((name for name, mark in marks.items() if mark == drafter), None)
    if name is None:
        measured = ", ".join(f"{name} ({mark})" for name, mark in marks.items())
        raise InputError(
            f"the evaluation in {folder} measured {measured}, not the drafter with the fingerprint {drafter}: evaluate "
            "this one, or name another folder"
        )
    results = [one for one in ResultsFile(folder, description).read() if one.drafter == name]
    own = numbers.get("drafters", {}).get(name)
    if own is None or _rounds(own) != _rounds(_summary(results)):
        raise InputError(
            f"result.json and results.jsonl in {folder} are not of one evaluation, so it was not finished: finish it "
            "with --resume"
        )
    return Measured(description, results, {"command": numbers.get("command"), **own})


def _summary(results: Sequence[PromptResult]) -> dict[str, Any]:
    sections = by_origin(main_results(results)) if results else {}
    return {section: summarise(sections.get(section, [])) for section in SECTIONS}


def _rounds(numbers: Mapping[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Prompts and rounds by section and temperature."""
    return {
        (section, at): (part["overall"]["prompts"], part["overall"]["rounds"])
        for section in SECTIONS
        for at, part in numbers.get(section, {}).items()
    }
