"""Work in a process of its own: what it allocates is gone when it is done, and what it may take is bounded."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

from ferrule_runtime.errors import FerruleError

__all__ = ["LONG", "Limits", "apart", "within"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Limits:
    """What such a process may take: a template or tokenizer can be made to take everything.

    Attributes:
      seconds: Until it is killed. Tokenizer and grammars of a 248k vocabulary take some seconds.
      memory: Bytes of its own (RLIMIT_DATA), beyond which allocating fails. The same vocabulary takes 350 MB.
    """

    seconds: float = 600
    memory: int = 4 << 30


# Of work through a model's layers: minutes are usual on a slow machine, hours are not.
LONG = Limits(seconds=3600, memory=16 << 30)


def within(limits: Limits, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function of a module in a fresh process, within limits, and return what it returns.

    Raises:
      FerruleError: What the function raised, or the process died or took too long.
    """
    name = f"`{function.__name__}`"
    work = pickle.dumps((sys.path, limits.memory, pickle.dumps((function, args, kwargs))))
    try:
        # A session of its own, so that Ctrl-C reaches the parent alone, which ends it. Libraries print when they panic:
        # that is not for the user.
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=work,
            capture_output=True,
            timeout=limits.seconds,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FerruleError(
            f"{name} took longer than {limits.seconds:g} s in its process",
            hint="a chat template or tokenizer that never ends, or a machine with too much else to do",
        ) from None
    except OSError as error:
        raise FerruleError(f"no process for {name}: {error.strerror}", hint="is there memory left?") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        ended = "was killed" if done.returncode < 0 else "failed"
        raise FerruleError(f"the process of {name} {ended}: {words[0]}", hint="for memory? give it more")
    good, result = pickle.loads(done.stdout)
    if not good:
        raise cast(FerruleError, result)
    return cast(_R, result)


def apart(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function of a module in a fresh process, within the usual limits, and return what it returns.

    A 248k-token vocabulary costs a tokenizer and a constraint 350 MB, which a process keeps once it has had them.

    Raises:
      FerruleError: What the function raised, or the process died or took too long.
    """
    return within(Limits(), function, *args, **kwargs)


def _answer() -> None:
    """Carry out the work that comes in, and send back what it returns or raises: the process's whole life."""
    path, memory, work = pickle.load(sys.stdin.buffer)
    # Results go where standard output went; what is printed goes where errors do.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))
    sys.path[:] = path
    function, args, kwargs = pickle.loads(work)
    try:
        result = (True, function(*args, **kwargs))
    except FerruleError as error:
        result = (False, error)
    with results:
        pickle.dump(result, results)


if __name__ == "__main__":
    _answer()
