"""FunctionGemma's tool calls, in control tokens of its own.

    <start_function_call>call:NAME{text:<escape>any text<escape>,number:3,list:[true,false]}<end_function_call>

Texts stand between `<escape>` tokens, names do not; arguments are in alphabetical order, as the published template
sorts them (ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices). The format has no thoughts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..calls import read_json, scan, turn
from ..errors import ModelError
from ..messages import Call, Message, Want
from ..tools import Tool
from ._gemma_grammar import CALL_END, CALL_START, ESCAPE, gemma_grammar

__all__ = ["CONTROLS", "STOPS", "TEMPLATE", "THINK", "grammar", "parse", "turns"]

TEMPLATE = None
# The second: after its calls, the model waits for the results and opens them itself.
STOPS = ("<end_of_turn>", "<start_function_response>", "<eos>")
CONTROLS = (CALL_START, CALL_END, ESCAPE)
THINK: tuple[str, str] | None = None

# The model was trained to call functions behind exactly this sentence (the page named above).
_ACTIVATION = "You are a model that can do function calling with the following functions"

_HEAD = re.compile(r"\s*call:([^{}<>\s]+)\s*\{")
_TAIL = re.compile(rf"\s*(?:{CALL_END}|\Z)")
_KEY = re.compile(rf"\s*(?:{ESCAPE}(.*?){ESCAPE}|([^:{{}}\[\],<>]+?))\s*:", re.DOTALL)
_WORD = re.compile(r"\s*([^,\]}<\s]+)\s*")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
# Deeper than any schema; a reply of brackets must not exhaust the stack.
_DEEPEST = 32


def _response(message: Message) -> dict[str, Any]:
    """Return one result as a mapping, which is what the model reads."""
    try:
        body = json.loads(message.content)
    except ValueError:
        body = message.content
    return {"name": message.name, "response": body if isinstance(body, dict) else {"result": body}}


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the template takes them: a developer's turn first, results of one turn together."""
    result: list[dict[str, Any]] = []
    system = ""
    for message in messages:
        if message.role == "system":
            system += f"{message.content}\n"
        elif message.role == "tool":
            if not result or result[-1]["role"] != "tool":
                result.append({"role": "tool", "content": []})
            result[-1]["content"].append(_response(message))
        else:
            result.append(turn(message))
    return [{"role": "developer", "content": f"{system}{_ACTIVATION}"}, *result]


def grammar(tools: Sequence[Tool], want: Want, controls: frozenset[str]) -> str | None:
    """Return a grammar of exactly one call of one of the tools for `call`; anything may be said otherwise.

    Raises:
      ConstraintError: There are no tools, or a schema asks for what the format cannot be held to.
    """
    return gemma_grammar(tools, controls) if want == "call" else None


class _Reader:
    """A place in a text, moved on as values are read."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def error(self, what: str) -> ModelError:
        return ModelError(f"a tool call {what}: {self.text[self.at : self.at + 80]!r}")

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    def takes(self, mark: str) -> bool:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise self.error(f"is nested deeper than {_DEEPEST}")
        if self.takes(ESCAPE):
            end = self.text.find(ESCAPE, self.at)
            if end < 0:
                raise self.error("is cut off in a text")
            found, self.at = self.text[self.at : end], end + len(ESCAPE)
            return found
        if self.takes("{"):
            return self.members(depth)
        if self.takes("["):
            return self.items(depth)
        if (word := self.take(_WORD)) is None:
            raise self.error("lacks a value")
        if word[1] in _WORDS:
            return _WORDS[word[1]]
        number, end = read_json(word[1])
        if isinstance(number, bool) or not isinstance(number, int | float) or end != len(word[1]):
            raise self.error(f"has the value {word[1]!r}, which is neither a number nor between {ESCAPE}")
        return number

    def items(self, depth: int) -> list[Any]:
        result: list[Any] = []
        if self.takes("]"):
            return result
        while True:
            result.append(self.value(depth + 1))
            if self.takes("]"):
                return result
            if not self.takes(","):
                raise self.error("has a list that does not go on")

    def members(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self.takes("}"):
            return result
        while True:
            if (found := self.take(_KEY)) is None:
                raise self.error("lacks a name")
            key = found[2] if found[1] is None else found[1]
            if key in result:
                raise self.error(f"has `{key}` twice")
            result[key] = self.value(depth + 1)
            if self.takes("}"):
                return result
            if not self.takes(","):
                raise self.error(f"does not go on after `{key}`")


def _read(text: str, match: re.Match[str]) -> tuple[tuple[Call, ...], int]:
    reader = _Reader(text, match.end())
    if (head := reader.take(_HEAD)) is None:
        raise reader.error("names no function")
    arguments = reader.members(0)
    if reader.take(_TAIL) is None:
        raise reader.error(f"of `{head[1]}` is followed by something else")
    return (Call(head[1], arguments),), reader.at


def parse(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
    """Read calls; the last token of a call may be missing at the very end. The format has types: tools are not needed.

    Raises:
      ModelError: A call is malformed or cut off.
    """
    return scan(text, CALL_START, _read, THINK)
