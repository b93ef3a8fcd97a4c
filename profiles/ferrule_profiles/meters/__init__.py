"""Meters beside a board, one file each; the file's name is the URL's scheme, such as `replay:samples.csv`.

Each module defines `open_meter(rest) -> Meter`, given what follows the scheme's colon.
"""

from __future__ import annotations

from typing import Protocol, cast

from ferrule_runtime.errors import UsageError
from ferrule_runtime.registry import load_module, module_names

from ..power import Samples
from ..run import Power

__all__ = ["Meter", "open_meter"]


class Meter(Protocol):
    """Something that measures power while a board works."""

    @property
    def power(self) -> Power:
        """What it is, what its number covers, and whether it is simulated."""
        ...

    def start(self) -> None:
        """Begin to sample."""
        ...

    def stop(self) -> Samples:
        """End sampling and return what was measured since `start`."""
        ...


def open_meter(url: str) -> Meter:
    """Open the meter that a URL names.

    Raises:
      UsageError: No such kind of meter, or the rest of the URL is not understood.
      RecordError: A replayed file cannot be used.
    """
    scheme, colon, rest = url.partition(":")
    if not colon:
        known = ", ".join(f"{name}:" for name in module_names(__name__))
        raise UsageError(f"`{url}` is not the URL of a meter", hint=f"known kinds: {known}")
    return cast(Meter, load_module("kind of meter", __name__, scheme, UsageError).open_meter(rest))
