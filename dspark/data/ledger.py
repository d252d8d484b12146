"""The ledger of a prepared folder: every answered conversation is one line, appended when it is finished.

A killed run leaves at most one half line at the end, which is cut off when the ledger is opened again. What stands in a
whole line is never generated twice.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspark.data.dialogue import Answer
from dspark.errors import InputError

IDENTITY = "settings.json"
LEDGER = "answers.jsonl"


@dataclass(frozen=True)
class Outcome:
    """What became of a conversation: its answers, or why it has none."""

    key: str  # the conversation's digest
    answers: tuple[Answer, ...]
    failure: str | None
    seconds: float  # that one responder spent on it

    def line(self) -> str:
        """The outcome as one line of JSON."""
        answers = [{name: value for name, value in asdict(one).items() if value != {}} for one in self.answers]
        return json.dumps(asdict(self) | {"answers": answers}, ensure_ascii=False)


def outcome_of(line: bytes | str) -> Outcome:
    """The outcome in a line of `Outcome.line`."""
    values: dict[str, Any] = json.loads(line)
    return Outcome(**values | {"answers": tuple(Answer(**answer) for answer in values["answers"])})


class Ledger:
    """Outcomes on disk, found by key; only their places are held in memory. One process at a time may write."""

    def __init__(self, folder: Path, write: bool) -> None:
        """
        Raises:
            InputError: a line is damaged, or another process is writing.
        """
        self.path = folder / LEDGER
        self.seconds = 0.0  # that responders have spent on all outcomes
        self.answers = self.tokens = 0
        self._places: dict[str, int] = {}
        self._file = self.path.open("a+b" if write else "rb")
        if write:
            self._lock()
        end = self._read()
        if write:
            self._file.truncate(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: str) -> Outcome:
        self._file.seek(self._places[key])
        return outcome_of(self._file.readline())

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Writes outcomes to the disk; when this returns they survive a kill."""
        for outcome in outcomes:
            assert outcome.key not in self._places, "a conversation was answered twice"
            self._places[outcome.key] = self._file.seek(0, os.SEEK_END)
            self._file.write(outcome.line().encode() + b"\n")
            self._count(outcome)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _count(self, outcome: Outcome) -> None:
        self.seconds += outcome.seconds
        self.answers += len(outcome.answers)
        self.tokens += sum(answer.tokens for answer in outcome.answers)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InputError(f"another process is writing {self.path}: wait for it, or name another folder") from None

    def _read(self) -> int:
        """Finds every outcome; returns where the last whole line ends."""
        place = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                outcome = outcome_of(line)
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"{self.path}, line {number}, is damaged ({error}): remove the line, and its answers are made again"
                ) from error
            self._places[outcome.key] = place
            self._count(outcome)
            place += len(line)
        return place


def check_new(folder: Path) -> None:
    """Passes iff nothing would be overwritten; a folder whose ledger is empty counts as new.

    Raises:
        InputError: the folder holds something already.
    """
    found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    if set(found) == {IDENTITY, LEDGER} and not (folder / LEDGER).stat().st_size:
        return
    if IDENTITY in found:
        raise InputError(f"{folder} holds prepared rows already: add --resume {folder}, or name another folder")
    if found or folder.is_file():
        raise InputError(f"{folder} is not empty ({', '.join(found[:3])}): name a new folder in prepare.folder")


def begin_folder(folder: Path, identity: Mapping[str, Any]) -> None:
    """Makes a new prepared folder that says how its answers are made.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LEDGER).touch()
        write_whole(folder / IDENTITY, json.dumps(identity, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}): set prepare.folder") from error


def check_resumed(folder: Path, identity: Mapping[str, Any]) -> None:
    """Passes iff the folder's answers were made as `identity` says.

    Raises:
        InputError: it is no prepared folder, or its answers were made otherwise; the key is named.
    """
    file = folder / IDENTITY
    if not file.is_file() or not (folder / LEDGER).is_file():
        raise InputError(f"--resume {folder}: no {IDENTITY} and {LEDGER} there, so it is no folder of prepared rows")
    found = json.loads(file.read_text(encoding="utf-8"))
    for key in identity.keys() | found.keys():
        if found.get(key) != identity.get(key):
            raise InputError(
                f"--resume {folder}: its answers were made with {key}={found.get(key)!r}, this run has "
                f"{identity.get(key)!r}: resume with the same settings, or start a new folder"
            )


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is either the old one or the new one, whenever the process dies."""
    partial = partial_of(path)
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def partial_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.partial")


def publish(partial: Path, path: Path) -> None:
    """Puts a written file, once it is on the disk, in its place."""
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(path)
