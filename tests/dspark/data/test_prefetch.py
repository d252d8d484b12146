"""Reading ahead: in order, within its bound, and over when the consumer is."""

import threading

import pytest

from dspark.data.prefetch import ahead


class Counted:
    """Computes the double of a key and knows how many keys were begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.changed = threading.Condition()

    def __call__(self, key: int) -> int:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
        return 2 * key

    def reaches(self, count: int, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.begun >= count, timeout_s)


def test_results_come_in_order_and_no_more_than_the_bound_is_ahead() -> None:
    double = Counted()
    results = ahead(range(1, 9), double, lambda key: 10, limit=30)
    assert next(results) == 2
    assert double.reaches(4, 5.0)  # the one that was taken, and three of ten bytes
    assert not double.reaches(5, 0.1)
    assert list(results) == [4, 6, 8, 10, 12, 14, 16]


def test_a_result_that_is_larger_than_the_bound_passes_alone() -> None:
    double = Counted()
    results = ahead([1, 2, 3], double, lambda key: 100, limit=30)
    assert next(results) == 2
    assert double.reaches(2, 5.0)
    assert not double.reaches(3, 0.1)
    assert list(results) == [4, 6]


def test_an_error_comes_in_its_turn() -> None:
    results = ahead([2, 1, 0, 5], lambda key: 4 // key, lambda key: 1, limit=100)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_consumer_that_leaves_ends_the_thread() -> None:
    before = threading.active_count()
    results = ahead(range(1000), Counted(), lambda key: 10, limit=20)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
