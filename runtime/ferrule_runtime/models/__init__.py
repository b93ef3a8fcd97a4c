"""Message-level models, one file each: messages and tools in, a reply out.

Each module defines `load(argument) -> Model`, reached as `--model KIND:ARGUMENT` by its file's name; the agent loop
knows nothing below this line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from ..errors import UsageError
from ..messages import Message, Reply, Want
from ..registry import load_module
from ..tools import Tool

__all__ = ["Model", "load_model"]


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


def load_model(spec: str) -> Model:
    """Load a model by `KIND:ARGUMENT`, such as `scripted:policy.toml` or `local:my-bundle`.

    Raises:
      UsageError: Not of that form, or an unknown kind.
    """
    kind, colon, argument = spec.partition(":")
    module = load_module("model", __name__, kind, UsageError)
    if not colon or not argument:
        raise UsageError(f"model `{spec}` names nothing to load", hint=f"write {kind}:ARGUMENT")
    return cast(Model, module.load(argument))
