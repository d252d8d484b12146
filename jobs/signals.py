"""A signal as a wish: the first one lets the run save where it is, the second ends the process at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 0.2


@contextmanager
def stop_signals(console: Console) -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGINT sets; the next of them raises KeyboardInterrupt, and later ones do as before.

    Python lets only the main thread take signals: elsewhere, as under Ray Tune, nothing changes.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def take(number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            restore()
            raise KeyboardInterrupt
        asked.set()
        name = signal.Signals(number).name
        console.print(f"{name}: a checkpoint is made at the end of this step; a second signal ends the run at once")

    before.update({number: signal.signal(number, take) for number in _SIGNALS})
    try:
        yield asked
    finally:
        restore()


def attended_work(work: Callable[[], Any], asked: threading.Event, tell: Callable[[], Any]) -> None:
    """Runs `work` beside this thread, which calls `tell` once when the wish to stop is there; raises what it raises.

    In the main thread Ray Train and Ray Tune take SIGINT for themselves and abort, and no handler runs while they wait.
    """
    ended: Future[Any] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="ray-work", daemon=True).start()
    told = False
    while not ended.done():
        if asked.is_set() and not told:
            tell()
            told = True
        wait([ended], timeout=_LOOK_S)
    ended.result()
