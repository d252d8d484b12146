"""Items made ahead by a thread: in order, bounded, with their errors, and with an end."""

import threading
from collections.abc import Generator

import pytest
import torch

from dspark.training.prefetch import prefetched

NAME = "prefetch under test"
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])


class Source:
    """Makes 0, 1, ... and records when it was closed; `announced` is how many items its reader has asked for."""

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size, self.fails_at = size, fails_at
        self.announced = 0
        self.ahead: list[int] = []
        self.threads: set[str] = set()
        self.reached = {number: threading.Event() for number in range(size)}
        self.closed = threading.Event()

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(self.size):
                self.ahead.append(number + 1 - self.announced)
                self.threads.add(threading.current_thread().name)
                self.reached[number].set()
                if number == self.fails_at:
                    raise KeyError("the first cause")
                yield number
        finally:
            self.closed.set()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


@DEPTHS
@pytest.mark.parametrize("size", [0, 1, 9])
def test_all_items_arrive_in_order_and_never_more_are_made_than_the_depth_allows(depth: int, size: int) -> None:
    source, found = Source(size), []
    items = prefetched(source.items(), depth, NAME)
    source.announced += 1
    while (item := next(items, None)) is not None:
        found.append(item)
        source.announced += 1
    assert found == list(range(size))
    assert all(ahead <= depth for ahead in source.ahead)
    assert not alive() and source.closed.is_set()
    assert source.threads <= {threading.current_thread().name if depth == 0 else NAME}


def test_items_are_made_while_their_reader_is_busy() -> None:
    source = Source(9)
    items = prefetched(source.items(), 3, NAME)
    assert next(items) == 0
    assert source.reached[3].wait(timeout=60)
    items.close()
    assert not source.reached[4].is_set()


@DEPTHS
def test_an_error_arrives_as_it_is_behind_the_items_before_it(depth: int) -> None:
    found = []
    with pytest.raises(KeyError, match="the first cause") as caught:
        for item in prefetched(Source(5, fails_at=3).items(), depth, NAME):
            found.append(item)
    assert found == [0, 1, 2]
    assert "items" in [entry.name for entry in caught.traceback]  # where it was raised, in the other thread
    assert not alive()


@DEPTHS
def test_a_reader_that_stops_early_ends_the_thread_and_closes_the_source(depth: int) -> None:
    source = Source(99)
    outer = prefetched(prefetched(source.items(), depth, NAME), depth, NAME)
    assert [next(outer), next(outer)] == [0, 1]
    outer.close()
    assert source.closed.is_set() and not alive()


def test_the_thread_computes_alone_and_leaves_its_readers_threads_as_they_are() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert list(prefetched((torch.get_num_threads() for _ in range(1)), 1, NAME)) == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
