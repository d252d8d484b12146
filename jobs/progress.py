"""Progress that a person can read: bars that move in a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Where no terminal shows a moving bar, a line is printed each time this share of the work is done.
_LINE_SHARE = 0.1
# Time that is left is worth saying from here on.
_SHOWN_LEFT_S = 2


class Stage:
    """One stage of a job with a known amount of work."""

    def __init__(self, console: Console, bar: Progress, name: str, total: int) -> None:
        self.console, self.bar, self.name, self.total = console, bar, name, total
        self.task = bar.add_task(name, total=total, note="")
        self.printed = 0.0
        self.started = time.perf_counter()

    def rate(self, amount: float) -> float:
        """`amount` per second since the stage began."""
        return amount / max(1e-9, time.perf_counter() - self.started)

    def update(self, done: int, note: str = "") -> None:
        """Shows that `done` of the total is finished; `note` is the live line beside the bar."""
        self.bar.update(self.task, completed=done, note=note)
        share = done / max(1, self.total)
        if not self.console.is_terminal and (share - self.printed >= _LINE_SHARE or share == 1 > self.printed):
            self.printed = share
            left = self.bar.tasks[0].time_remaining if done < self.total else None
            time_left = "" if left is None or left < _SHOWN_LEFT_S else f"  {timedelta(seconds=round(left))} left"
            self.console.print(f"{self.name} {done}/{self.total}  {note}{time_left}")


@contextmanager
def stage(console: Console, name: str, total: int) -> Iterator[Stage]:
    """A stage whose bar stays on the screen when it is finished."""
    bar = Progress(
        TextColumn("[bold]{task.description:<9}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        yield Stage(console, bar, name, total)


def training_note(record: Mapping[str, float]) -> str:
    """Loss, tau and tokens per second of a training record."""
    shown = (("loss", "loss", ".3f"), ("tau", "tau_probabilistic", ".3f"), ("tok/s", "tokens_per_second", ",.0f"))
    return "  ".join(f"{label} {record[key]:{form}}" for label, key, form in shown if key in record)
