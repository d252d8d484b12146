"""Progress that a person can read: bars that move in a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.config import Settings

# Share of its time that one side waits above which the other one is too slow.
_MUCH_WAITING = 0.2
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
    note = "  ".join(f"{label} {record[key]:{form}}" for label, key, form in shown if key in record)
    waiting = record.get("waiting_share", 0.0)
    return note + (f"  waiting {waiting:.0%}" if waiting > _MUCH_WAITING else "")


def not_finite(history: Sequence[Mapping[str, float]]) -> str | None:
    """What to say of rows whose states were not finite; None where there were none."""
    shares = [record["rows_not_finite"] for record in history if "rows_not_finite" in record]
    if not any(shares):
        return None
    return (
        f"{sum(shares) / len(shares):.2%} of the rows had states that are not finite and carried no weight: check the "
        "target's weights, or try target.dtype=fp32"
    )


def which_side(history: Sequence[Mapping[str, float]], settings: Settings) -> str | None:
    """Which side of the stream to grow, from the shares of time that both spend waiting; None where both keep pace."""
    trainers, targets = (_mean_share(history, name) for name in ("waiting_share", "targets_waiting_share"))
    if trainers > max(_MUCH_WAITING, targets):
        cached = settings.data.source == "cache"
        grow = "cache.readers" if cached else "targets.actors (or max_actors), or give each target more threads or GPUs"
        return f"the trainers waited {trainers:.0%} of their time for captured states: raise {grow}"
    if targets > _MUCH_WAITING:
        return (
            f"the targets waited {targets:.0%} of their time for the trainers: raise train.workers (or their threads "
            "or GPUs), or give some of the targets' devices to them"
        )
    return None


def _mean_share(history: Sequence[Mapping[str, float]], name: str) -> float:
    """The first of several is left out: it holds the wait for the other side to start."""
    shares = [record[name] for record in history if name in record]
    shares = shares[1:] or shares
    return sum(shares) / max(1, len(shares))
