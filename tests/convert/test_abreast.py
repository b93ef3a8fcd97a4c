"""Work on every core at once."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_info

from ferrule_convert.abreast import abreast


def test_results_come_in_the_order_of_the_items_whatever_each_takes() -> None:
    def late(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        return item * item

    assert list(abreast(late, range(50))) == [item * item for item in range(50)]
    assert list(abreast(late, [])) == []


def test_no_more_items_are_taken_than_the_cores_need() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    results = abreast(lambda item: item, items())
    assert next(results) == 0
    assert len(taken) <= len(os.sched_getaffinity(0)) + 1


def test_a_failure_comes_when_its_turn_does_and_no_thread_stays() -> None:
    def some(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    before = threading.active_count()
    results = abreast(some, range(10))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert threading.active_count() == before


def test_libraries_get_their_own_threads_back() -> None:
    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info()]

    before = threads()
    assert set(next(iter([threads() for _ in abreast(abs, [1])]))) <= {1}
    assert threads() == before
