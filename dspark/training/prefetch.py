"""Work that is done ahead of its use: a bounded number of items, made by a background thread, in order."""

import threading
from collections.abc import Generator
from queue import SimpleQueue
from typing import TypeVar

import torch

T = TypeVar("T")

# A source that itself waits, for a target say, cannot be interrupted: its thread ends when that wait does, and no
# later than the process.
_JOIN_S = 5.0


class _End:
    """Behind the last item: how the source ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(source: Generator[T, None, None], depth: int, name: str) -> Generator[T, None, None]:
    """The items of `source`, of which up to `depth` are ready or in the making before they are asked for; 0: no thread.

    An exception of the source is raised here, as it is, in the place of the item that it prevents. When this generator
    is closed, the source is closed in its thread and the thread ends.
    """
    if depth == 0:
        yield from source
        return
    room, made, stop = threading.Semaphore(depth), SimpleQueue[T | _End](), threading.Event()

    def make() -> None:
        # torch counts threads by the thread that calls: the reader keeps its number, and this one adds a single core.
        torch.set_num_threads(1)
        end = _End(None)
        try:
            room.acquire()
            while not stop.is_set():
                item = next(source, end)
                if item is end:
                    break
                made.put(item)
                del item  # only its reader may keep it while this thread waits for room
                room.acquire()
            source.close()
        except BaseException as error:
            end.error = error
        made.put(end)

    thread = threading.Thread(target=make, name=name, daemon=True)
    thread.start()
    try:
        while not isinstance(item := made.get(), _End):
            room.release()
            yield item
            del item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        room.release()
        thread.join(timeout=_JOIN_S)
