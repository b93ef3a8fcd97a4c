"""Work in a process of its own: what it allocates is gone when it is done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import EngineError, FerruleError

__all__ = ["apart", "worker"]

# Longest that a worker may take: minutes are usual on a slow machine, hours are not.
_TIMEOUT_S = 3600

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


def worker(
    module: str,
    what: str,
    given: NDArray[Any],
    arguments: Sequence[object],
    environment: Mapping[str, str] | None = None,
) -> NDArray[np.float32]:
    """Run a worker module of this package, which turns one file of numbers into another, as a process of its own.

    Args:
      module: Run as `python -m ferrule_convert.MODULE IN.npy OUT.npy ARGUMENTS...`.
      what: It does, for messages.
      given: What it reads from IN.npy.
      arguments: The rest of its command line.
      environment: Variables of its own.

    Returns:
      What it wrote to OUT.npy.

    Raises:
      EngineError: It failed, was killed, or took longer than an hour.
    """
    with tempfile.TemporaryDirectory(prefix="ferrule-") as scratch:
        entering, leaving = Path(scratch) / "in.npy", Path(scratch) / "out.npy"
        np.save(entering, given)
        command = [sys.executable, "-m", f"ferrule_convert.{module}", str(entering), str(leaving), *map(str, arguments)]
        try:
            done = subprocess.run(
                command, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
                timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise EngineError(f"{what} took longer than {_TIMEOUT_S} s") from None
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise EngineError(
                f"{what} cannot be run here: {reason[0].removeprefix('error: ')}",
                hint="was the process killed for memory? give it more, or use a smaller model",
            )
        result: NDArray[np.float32] = np.load(leaving)
        return result
