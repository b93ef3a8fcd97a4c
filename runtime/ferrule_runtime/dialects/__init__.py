"""Tool-call text formats, one file each: how calls are written, constrained and read back.

Each module defines the names of `Dialect`; the file's name is the dialect's name in a manifest.

Thinking is off in all of them: a model of a few hundred megabytes spends its context on thoughts. The template is told
so, a prompt that still opens a thought has it closed, and a thought that a model writes all the same is neither shown
nor ever read as a call.
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

    CONTROLS: tuple[str, ...]
    """Control tokens that are part of what a reply says: kept when it is decoded, for `parse`."""

    THINK: tuple[str, str] | None
    """What opens and closes a thought; None where the format has none."""

    def turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as the template takes them; calls are the template's to write, under `tool_calls`."""
        ...

    def grammar(self, tools: Sequence[Tool], want: Want, controls: frozenset[str]) -> str | None:
        """Return the Lark grammar of what may be said, or None where anything may.

        Args:
          tools: What may be called.
          want: `call` for exactly one call.
          controls: The control tokens that the tokenizer has; the others are spelled.

        Raises:
          ConstraintError: A tool's schema asks for what the grammar would not keep to.
        """
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        """Split a reply, its control tokens among the text, into plain text and calls.

        Args:
          text: Without the token that ended it.
          tools: What was offered; gives raw text its type where the format has no types.

        Raises:
          ModelError: A call is malformed or cut off.
        """
        ...


def load_dialect(name: str) -> Dialect:
    """Load a dialect by its name.

    Raises:
      BundleError: Unknown dialect.
    """
    return cast(Dialect, load_module("dialect", __name__, name, BundleError))
