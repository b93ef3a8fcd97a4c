"""Work in a process of its own: what it allocates is gone when it is done."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from ferrule_runtime.errors import FerruleError

__all__ = ["apart"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _quiet() -> None:
    # Ctrl-C reaches the whole group; the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def apart(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function of a module in a fresh process and return what it returns.

    A 248k-token vocabulary costs a tokenizer and a constraint 350 MB, which a process keeps once it has had them.

    Raises:
      FerruleError: What the function raised, or the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_quiet) as pool:
        try:
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            raise FerruleError(
                f"the process of `{function.__name__}` was killed",
                hint="for memory? give it more",
            ) from None
