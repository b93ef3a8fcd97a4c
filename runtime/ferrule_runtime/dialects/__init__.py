"""Tool-call text formats, one file each: how calls are written, constrained and read back.

Each module defines the names of `Dialect`; the file's name is the dialect's name in a manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from ..errors import BundleError
from ..messages import Call, Message, Want
from ..registry import load_module
from ..tools import Tool

__all__ = ["Dialect", "load_dialect"]


class Dialect(Protocol):
    """What a dialect's module defines."""

    TEMPLATE: str | None
    """A chat template of our own, for models whose template has no tools; None keeps the checkpoint's."""

    STOPS: tuple[str, ...]
    """Control tokens that end a reply, besides those that the checkpoint names."""

    def turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as the template takes them."""
        ...

    def grammar(self, tools: Sequence[Tool], want: Want) -> str | None:
        """Return the Lark grammar of what may be said, or None where anything may."""
        ...

    def parse(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """Split a reply into plain text and calls."""
        ...


def load_dialect(name: str) -> Dialect:
    """Load a dialect by its name.

    Raises:
      BundleError: Unknown dialect.
    """
    return cast(Dialect, load_module("dialect", __name__, name, BundleError))
