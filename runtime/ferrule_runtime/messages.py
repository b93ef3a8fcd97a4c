"""What is said between the agent loop and a model: messages, calls, replies."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Call", "Message", "Reply", "Role", "Usage", "Want"]

Role = Literal["system", "user", "assistant", "tool"]

# What the loop lets a model say next: exactly one tool call, plain text, or whichever it chooses.
Want = Literal["call", "text", "either"]


def _canonical(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.strip())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {unicodedata.normalize("NFC", str(key)): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value


@dataclass(frozen=True)
class Call:
    """One tool call: a name and its arguments."""

    name: str
    arguments: Mapping[str, Any]

    def canonical(self) -> str:
        """Write the call so that two calls that mean the same read the same.

        Keys sorted, strings trimmed and in Unicode NFC, whole floats as integers; JSON without spaces (RFC 8785's
        order for the keys that tool schemas use).
        """
        return json.dumps(
            {"arguments": _canonical(self.arguments), "name": self.name},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        )

    def written(self) -> str:
        """Write the call for people: `send_message(to="Ana", text="hello")`."""
        pairs = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in self.arguments.items())
        return f"{self.name}({', '.join(pairs)})"


@dataclass(frozen=True)
class Message:
    """One turn of the conversation.

    Attributes:
      role: Who speaks; `tool` carries what became of one call.
      content: The text. For `tool`, a JSON object with one of the keys `result` (what the tool returned), `error`
        (the cause of its failure) and `refused` (why the loop did not run it), and what else helps.
      calls: The calls an assistant turn makes.
      name: For `tool`, the tool whose result this is.
    """

    role: Role
    content: str
    calls: tuple[Call, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Usage:
    """What a reply cost.

    Attributes:
      prompt_tokens: Tokens of the whole prompt.
      new_tokens: Tokens generated.
      seconds: Wall time from the request to the parsed reply.
      first_token_s: Wall time to the first generated token, or None where there was none.
      simulated: True when no model ran.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    simulated: bool = False


@dataclass(frozen=True)
class Reply:
    """What a model said: plain text, or calls; and the raw text they were read from."""

    text: str
    calls: tuple[Call, ...] = ()
    raw: str = ""
    usage: Usage = field(default_factory=Usage)
