"""The results of an evaluation on disk: written batch by batch as they arrive, and taken up by a run that resumes.

evaluation.json says what was measured (settings, drafters, prompts) and results.jsonl holds one prompt and drafter per
line, each with the hash of that description. A line is there whole or, at the end of the file, not at all.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.config import Settings, dotted
from dspark.errors import InputError
from dspark.evaluation.metrics import PromptResult
from dspark.target_files import fingerprint, resolve
from jobs.rows import PromptRows, prompt_thinking
from jobs.whole_file import write_whole

RESULTS, DESCRIPTION = "results.jsonl", "evaluation.json"
# Who decodes and on what is no part of what is measured: results do not depend on it.
_POOL = ("actors", "max_actors", "threads", "cpus", "gpus")
_PROMPTS = "prompts"


def description_of(settings: Settings, drafters: Mapping[str, Path], prompts: PromptRows) -> dict[str, Any]:
    """Everything that decides results, by the key of the setting or the name of the thing; plain JSON."""
    evaluate = settings.evaluate.model_dump(mode="json", exclude=set(_POOL))
    asked = [[prompt.id, prompt.domain, list(prompt.later), ids] for prompt, ids in
             zip(prompts.prompts, prompts.ids, strict=True)]  # fmt: skip
    return {
        "seed": settings.seed,
        "target": fingerprint(resolve(settings.target)),
        "data.max_length": settings.data.max_length,
        "thinking": prompt_thinking(settings),
        **dotted({"evaluate": evaluate}),
        "content of evaluate.calibration": _content(settings.evaluate.calibration),
        **{f"drafter {name}": fingerprint(folder) for name, folder in drafters.items()},
        _PROMPTS: _hash(asked),
    }


class ResultsFile:
    """`results.jsonl` of one run folder, for results of one description."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        self.path, self.description = folder / RESULTS, dict(description)
        self.mark = _hash(description)

    def check(self, resume: Path) -> None:
        """
        Raises:
            InputError: the folder to `resume` holds no evaluation, or one of something else; the first such key is
                named.
        """
        record = self.path.with_name(DESCRIPTION)
        if not record.is_file():
            raise InputError(
                f"--resume {resume}: no {DESCRIPTION} there, so no evaluation was begun in it: name the folder of a "
                "`dspark evaluate` that was broken off"
            )
        before = json.loads(record.read_text())
        for key in dict.fromkeys((*self.description, *before)):
            was, now = (found.get(key, "not there") for found in (before, self.description))
            if was != now:
                raise InputError(
                    f"--resume {resume}: {key} was {json.dumps(was)} and is {json.dumps(now)} now, so its results "
                    "would be of two kinds: repeat the command with the settings, drafters and prompts of that run, or "
                    "leave --resume out"
                )

    def read(self) -> list[PromptResult]:
        """The results of this description that the file holds; those of another one are as good as not there."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")
        # Behind the last line break stands nothing, or a line that was broken off.
        rows = [json.loads(line) for line in lines[:-1] if line]
        return [PromptResult(**row) for row in rows if row.pop("settings", None) == self.mark]

    def begin(self, results: Sequence[PromptResult]) -> None:
        """Replaces the file by one with these results, atomically, and writes the description beside it."""
        for path, text in (
            (self.path.with_name(DESCRIPTION), json.dumps(self.description, indent=1) + "\n"),
            (self.path, self._lines(results)),
        ):
            write_whole(path, text)

    def add(self, results: Sequence[PromptResult]) -> None:
        """Appends results so that they outlive this process."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._lines(results))
            file.flush()
            os.fsync(file.fileno())

    def _lines(self, results: Sequence[PromptResult]) -> str:
        return "".join(json.dumps({"settings": self.mark, **asdict(one)}) + "\n" for one in results)


def _content(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return _hash(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"evaluate.calibration={file} cannot be read ({error.strerror}): name a file that `dspark calibrate` wrote"
        ) from error


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
