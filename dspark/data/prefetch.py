"""Results of a slow function, in order, computed on a background thread, a bounded number of bytes ahead."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass
class _Shelf(Generic[Result]):
    """What the thread has finished and the consumer has not asked for, with its bytes.

    The thread ends in one of three ways: `exhausted`, `failed`, or `closed` by the consumer.
    """

    limit: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[tuple[Result, int]] = field(default_factory=deque)
    held: int = 0
    exhausted: bool = False
    failed: BaseException | None = None
    closed: bool = False

    def reserve(self, size: int) -> bool:
        """Waits for room; an empty shelf takes anything, so that nothing is too large. False: the consumer left."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.held == 0 or self.held + size <= self.limit)
            self.held += size
            return not self.closed

    def put(self, result: Result, size: int) -> None:
        with self.changed:
            self.ready.append((result, size))
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.exhausted, self.failed = error is None, error
            self.changed.notify_all()

    def take(self) -> Result | None:
        """The next result, whose bytes are the consumer's own from now on; None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.ready) or self.exhausted or self.failed is not None)
            if self.ready:
                result, size = self.ready.popleft()
                self.held -= size
                self.changed.notify_all()
                return result
            if self.failed is not None:
                raise self.failed
            return None

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()


def ahead(
    keys: Iterable[Key], compute: Callable[[Key], Result], size: Callable[[Key], int], limit: int
) -> Iterator[Result]:
    """`compute(key)` for each key, in order. Results of at most `limit` bytes, by `size(key)`, are computed or waiting.

    One result that is larger passes alone. An error of `compute` is raised where its result would have come. Closing
    the iterator, or dropping it, ends the thread after the result that it is computing.
    """
    shelf: _Shelf[Result] = _Shelf(limit)
    thread = threading.Thread(target=_fill, args=(shelf, iter(keys), compute, size), daemon=True)
    thread.start()
    try:
        while (result := shelf.take()) is not None:
            yield result
            del result  # or the consumer's last one would be held while it waits for the next
    finally:
        shelf.close()
        thread.join()


def _fill(
    shelf: _Shelf[Result], keys: Iterator[Key], compute: Callable[[Key], Result], size: Callable[[Key], int]
) -> None:
    try:
        for key in keys:
            taken = size(key)
            if not shelf.reserve(taken):
                return
            shelf.put(compute(key), taken)
    except BaseException as error:  # it is the consumer's: raised again in `take`
        shelf.end(error)
    else:
        shelf.end(None)
