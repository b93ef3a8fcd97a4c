"""The same work on every core, its results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import ThreadpoolController

__all__ = ["abreast"]

_T = TypeVar("_T")
_R = TypeVar("_R")

_LIBRARIES = ThreadpoolController()


def abreast(function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """Call a function on each item, in threads, and yield the results in the items' order.

    For work that numpy does outside the interpreter's lock. Its own threads are put to rest meanwhile: they wait for
    each other by spinning, which takes several times as long where cores are shared. No more than one item a core is
    ahead of what was taken, so memory stays bounded however many there are.

    Raises:
      Exception: What the function raised, when its item's turn comes.
    """
    cores = len(os.sched_getaffinity(0))
    waiting: deque[Future[_R]] = deque()
    with _LIBRARIES.limit(limits=1), ThreadPoolExecutor(cores) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
