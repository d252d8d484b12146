"""A signal as a wish: the first one lets the run save where it is, the second ends the process at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
