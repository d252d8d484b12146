"""What is reported while a drafter is trained: history, tracking, progress bar, and drafters to be measured meanwhile.

trainers, every `log_every` steps -> a record ┐
targets, every window -> seconds of work      ┴-> queue -> `history.jsonl`, MLflow, the line of progress
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

from ray.util.queue import Queue

from actors.checkpoint_files import as_lines, from_lines
from jobs.experiment import Training
from jobs.following import Following
from jobs.progress import Stage, training_note
from jobs.whole_file import write_whole

HISTORY = "history.jsonl"
# The last records are short work, but a tracking server that hangs is waited for, one time after the other.
_LAST_S = 300.0


class Records:
    """Takes records from rank 0 while training runs: shows them, writes them to MLflow and to `history.jsonl`.

    A record also says what share of their time the targets waited for room (`targets_waiting_share`), in the windows
    that they have finished since the record before.
    """

    def __init__(
        self, training: Training, queue: Queue, bar: Stage, saved: Sequence[Mapping[str, float]], following: Following
    ) -> None:
        self.training, self.queue, self.bar, self.following = training, queue, bar, following
        self.path = training.folder / HISTORY
        # The steps of later records are made again. Some that the checkpoint has `saved` may have found no driver to
        # take them; of those that did, the file knows more.
        taken = {entry["step"]: entry for entry in read_history(self.path)}
        self.history: list[dict[str, float]] = [dict(taken.get(entry["step"], entry)) for entry in saved]
        self._write()
        # A kill may have come between the file and MLflow, and a sweep begins its comparisons anew.
        training.log.records(self.history)
        self.error: str | None = None
        self.worked_s = self.passed_s = 0.0  # of all targets, since the last record
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="records", daemon=True)

    def __enter__(self) -> "Records":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finished.set()
        self.thread.join(timeout=_LAST_S)
        self.following.finish(wait=kind is None and self.error is None)

    def _follow(self) -> None:
        last = False
        while not last:
            last = self.finished.is_set()
            self.following.look()
            try:
                self._take([self.queue.get(timeout=0.5)])
            except Empty:
                continue

    def _take(self, records: list[dict[str, Any]]) -> None:
        records += self.queue.get_nowait_batch(self.queue.qsize())
        if errors := [entry for entry in records if "error" in entry]:
            self.error = str(errors[0]["error"])
            return
        for entry in records:
            if "drafter" in entry:
                self.following.offer(entry["step"], entry["drafter"])
            elif "worked_s" in entry:
                self.worked_s += entry["worked_s"]
                self.passed_s += entry["passed_s"]
            elif self.passed_s:
                entry["targets_waiting_share"] = 1 - self.worked_s / self.passed_s
                self.worked_s = self.passed_s = 0.0
        records = [entry for entry in records if not {"drafter", "worked_s"} & entry.keys()]
        if not records:
            return
        # A restarted trainer group repeats the steps after its checkpoint; the later record holds.
        first = min(int(entry["step"]) for entry in records)
        kept = [entry for entry in self.history if entry["step"] < first]
        repeats, self.history = len(kept) < len(self.history), kept + records
        if repeats:
            self._write()
        else:
            with self.path.open("a") as file:
                file.write(as_lines(records))
        self.training.log.records(records)
        self.bar.update(int(records[-1]["step"]), training_note(records[-1]))

    def _write(self) -> None:
        """Replaces the file by the history, whole or not at all."""
        write_whole(self.path, as_lines(self.history))


def read_history(path: Path) -> list[dict[str, float]]:
    """The records of a file; none where there is no file yet."""
    return from_lines(path.read_text()) if path.exists() else []
