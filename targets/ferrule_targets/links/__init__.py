"""Links: ways to reach a board, one file each; the file's name is the URL's scheme.

Each module defines `connect(url) -> Link`; nothing above knows the wire.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from ferrule_runtime.errors import LinkError, UsageError
from ferrule_runtime.registry import load_module, module_names

__all__ = ["Completed", "Link", "check_timeout", "failure", "last_words", "open_link"]

_PACKAGE = "ferrule_targets.links"
_TAIL_LINES = 5


@dataclass(frozen=True)
class Completed:
    """A command that has ended.

    Attributes:
      argv: What was run.
      code: Its exit status; minus the signal's number where a signal ended it.
      stdout: What it printed, decoded as UTF-8; other bytes as backslash escapes.
      stderr: Likewise.
    """

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    def check(self) -> Completed:
        """Return itself if the command succeeded.

        Raises:
          LinkError: It did not; with its status and the end of what it said.
        """
        if self.code:
            raise failure(self.argv, self.code, self.stderr)
        return self


class Link(Protocol):
    """A way to reach one board. Commands are lists of arguments; no shell is in between."""

    @property
    def url(self) -> str:
        """What was opened, such as `local:`."""
        ...

    @property
    def ferrule(self) -> tuple[str, ...]:
        """The arguments that start `ferrule` on the board; its command and options follow."""
        ...

    def run(self, argv: Sequence[str], timeout: float) -> Completed:
        """Run a command to its end, whatever its status.

        Args:
          argv: The program and its arguments.
          timeout: Seconds it may take; then it is ended, with every process that it started.

        Raises:
          LinkError: The program is not there, or it took longer.
        """
        ...

    def lines(self, argv: Sequence[str], timeout: float) -> Generator[str, None, None]:
        """Run a command and yield its lines while it runs.

        The command starts when the first line is asked for. It is ended, with every process that it started, when
        time is up and when the generator is closed (so use `contextlib.closing` where the loop may be left early).

        Args:
          argv: The program and its arguments.
          timeout: Seconds that the whole command may take.

        Yields:
          Lines of its standard output, without the line's end.

        Raises:
          LinkError: The program is not there, it took longer, or its status was not 0.
        """
        ...

    def push(self, source: Path, destination: str) -> None:
        """Copy a file or folder to the board; at the destination there is the whole of it or nothing.

        Args:
          source: On this machine.
          destination: On the board. A file there is replaced; a folder there is refused.

        Raises:
          LinkError: The copy could not be made.
        """
        ...


def last_words(stderr: str) -> str:
    """Return the last lines that a command said on standard error, as one line for an error's text."""
    said = "; ".join(line.strip() for line in stderr.splitlines()[-_TAIL_LINES:] if line.strip())
    return said or "it said nothing"


def failure(argv: Sequence[str], code: int, stderr: str) -> LinkError:
    """Return the error for a command that failed, with its status and its last words."""
    ended = f"status {code}" if code > 0 else f"signal {-code}"
    return LinkError(f"`{shlex.join(argv)}` ended with {ended}: {last_words(stderr)}")


def check_timeout(timeout: float) -> float:
    """Return the timeout in seconds if it is one; nothing on a board may wait for ever.

    Raises:
      UsageError: Zero, negative, infinite or not a number.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(f"a timeout of {timeout} s", hint="give a number of seconds above 0")
    return timeout


def open_link(url: str) -> Link:
    """Open the link that a URL names, such as `local:`.

    Raises:
      UsageError: No URL, or no such kind of link; the hint names the nearest one.
      LinkError: The board cannot be reached.
    """
    scheme, colon, _ = url.partition(":")
    if not colon:
        known = ", ".join(f"{name}:" for name in module_names(_PACKAGE))
        raise UsageError(f"`{url}` is not the URL of a board", hint=f"known kinds: {known}")
    module = load_module("kind of link", _PACKAGE, scheme, UsageError)
    return cast(Link, module.connect(url))
