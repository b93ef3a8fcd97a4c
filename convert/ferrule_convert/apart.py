"""Work in a process of its own: what it allocates is gone when it is done, and what it may take is bounded."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from ferrule_runtime.errors import FerruleError

__all__ = ["Limits", "apart", "within"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Limits:
    """What such a process may take: a template or tokenizer can be made to take everything.

    Attributes:
      seconds: Until it is killed. Tokenizer and grammars of a 248k vocabulary take 4 s on a fast core.
      memory: Bytes of its own (RLIMIT_DATA), beyond which allocating fails. The same vocabulary takes 350 MB.
    """

    seconds: float = 600
    memory: int = 4 << 30


def _answer(results: Connection, words: str, memory: int, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Call a function and send what it returns or raises; the child's whole work."""
    # Ctrl-C reaches the whole group; the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print when they panic or abort is not the user's; the parent quotes its end.
    os.dup2(os.open(words, os.O_WRONLY), 2)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))
    try:
        result = (True, function(*args, **kwargs))
    except FerruleError as error:
        result = (False, error)
    except BaseException as error:  # Rust's panics are no Exceptions
        result = (False, FerruleError(f"`{function.__name__}` failed: {type(error).__name__}: {error}"))
    # A parent that is gone needs no answer.
    with contextlib.suppress(BrokenPipeError):
        results.send(result)


def within(limits: Limits, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function of a module in a fresh process, within limits, and return what it returns.

    Raises:
      FerruleError: What the function raised, or the process died or took too long.
    """
    context = multiprocessing.get_context("spawn")
    try:
        kept = tempfile.NamedTemporaryFile(prefix="ferrule-")  # noqa: SIM115 - entered below, once it is there
    except OSError as error:
        raise FerruleError(f"no temporary file: {error.strerror}", hint="make room, or set TMPDIR") from None
    with kept as words:
        results, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_answer, args=(theirs, words.name, limits.memory, function, args, kwargs), daemon=True
        )
        try:
            process.start()
            theirs.close()
            if not results.poll(limits.seconds):
                raise FerruleError(
                    f"`{function.__name__}` took longer than {limits.seconds:g} s in its process",
                    hint="a chat template or tokenizer that never ends, or a machine with too much else to do",
                )
            good, result = results.recv()
        except (EOFError, OSError):
            said = Path(words.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise FerruleError(
                f"the process of `{function.__name__}` was killed{': ' + said[0] if said else ''}",
                hint="for memory? give it more",
            ) from None
        finally:
            results.close()
            if process.pid is not None:
                process.kill()
                process.join()
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
