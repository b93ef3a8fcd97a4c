"""Message-level models, one file each: messages and tools in, a reply out.

Each module defines `load(argument, ...)`; the agent loop knows nothing below this line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..messages import Message, Reply, Want
from ..tools import Tool

__all__ = ["Model"]


class Model(Protocol):
    """Something that replies to messages."""

    @property
    def label(self) -> str:
        """What speaks, for people and traces; says so when it is simulated."""
        ...

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], want: Want) -> Reply:
        """Say what comes next.

        Args:
          messages: The conversation so far, system message first.
          tools: The tools that may be called now.
          want: What may be said: one call, text, or either.

        Raises:
          ContextError: The prompt does not fit the context.
          ModelError: What came out cannot be used.
        """
        ...
