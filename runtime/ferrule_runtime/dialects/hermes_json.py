"""Hermes-style JSON tool calls, as the templates of Qwen2.5, Qwen3 and their relatives write them.

A call is one JSON object between `<tool_call>` tags. Small models leave the tags out, so a call in a code fence or bare
at the start of a line is read as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..calls import THINK, json_call_grammar, scan_json, turn
from ..messages import Call, Message, Want
from ..tools import Tool

__all__ = ["CONTROLS", "STOPS", "TEMPLATE", "THINK", "grammar", "parse", "turns"]

TEMPLATE = None
STOPS = ("<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>")
CONTROLS = (*_TAGS, *THINK)


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the template takes them."""
    return [turn(message) for message in messages]


def grammar(tools: Sequence[Tool], want: Want, controls: frozenset[str]) -> str | None:
    """Return a grammar of exactly one call of one of the tools for `call`; anything may be said otherwise.

    Raises:
      ConstraintError: There are no tools.
    """
    return json_call_grammar(tools, _TAGS, controls) if want == "call" else None


def parse(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
    """Read the calls between tags, in code fences and bare; the rest is text. JSON has types, so tools are not needed.

    Raises:
      ModelError: A call is malformed.
    """
    return scan_json(text, _TAGS)
