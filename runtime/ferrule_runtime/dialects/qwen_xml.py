"""Qwen3.5's tool calls: tags around each argument, its value as raw text.

    <tool_call>
    <function=NAME>
    <parameter=ARG>
    VALUE
    </parameter>
    </function>
    </tool_call>

The text says nothing of types, so a value is read by the tool's schema: what the schema takes for a number is a number.
A value that the schema does not take stays text, for the check of the arguments to refuse by name. Where a schema takes
texts and something else, what reads as the other is the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..calls import THINK, read_json, read_tagged, scan, turn
from ..errors import ModelError
from ..messages import Call, Message, Want
from ..tools import Tool
from ._xml_grammar import xml_grammar

__all__ = ["CONTROLS", "STOPS", "TEMPLATE", "THINK", "grammar", "parse", "turns"]

TEMPLATE = None
STOPS = ("<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>")
CONTROLS = (*_TAGS, *THINK)

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_FUNCTION_END = re.compile(r"\s*(?:</function>|\Z)")
_CALL_END = re.compile(r"\s*(?:</tool_call>|\Z)")
_STRAY_END = re.compile(r"\s*</tool_call>")
_JSON = re.compile(r"\s*(?=[{\[])")
# Template filters write Python's words, models often JSON's.
_BOOLEANS = {"True": True, "true": True, "False": False, "false": False}
_NULLS = ("None", "null")
_NOTHING = object()


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the template takes them."""
    return [turn(message) for message in messages]


def grammar(tools: Sequence[Tool], want: Want, controls: frozenset[str]) -> str | None:
    """Return a grammar of exactly one call of one of the tools for `call`; anything may be said otherwise.

    Raises:
      ConstraintError: There are no tools, or a schema asks for what raw text cannot be held to.
    """
    return xml_grammar(tools, controls) if want == "call" else None


def _resolve(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a reference into the tool's own schema, where it is one."""
    for _ in range(8):
        path = schema.get("$ref")
        if not isinstance(path, str) or not path.startswith("#/"):
            return schema
        found: Any = whole
        for key in path[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}


def _kinds(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema takes, as far as it says; empty where it says nothing."""
    schema = _resolve(schema, whole)
    if "enum" in schema or "const" in schema:
        return set()
    kind = schema.get("type")
    if kind is not None:
        return {kind} if isinstance(kind, str) else set(kind)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            options = [_kinds(option, whole) for option in schema[key]]
            return set().union(*options) if all(options) else set()
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _whole_json(text: str) -> Any:
    try:
        value, end = read_json(text)
    except ModelError:
        return _NOTHING
    return value if not text[end:].strip() else _NOTHING


def _same(value: Any, text: str) -> bool:
    """Tell whether a text writes a value of an enum."""
    if isinstance(value, str):
        return value == text
    if value is None:
        return text in _NULLS
    if isinstance(value, bool):
        return _BOOLEANS.get(text) is value
    found = _whole_json(text)
    return found is not _NOTHING and not isinstance(found, bool) and bool(found == value)


def _typed(text: str, kinds: set[str], where: str) -> Any:
    """Read a value as one of some types; text where it is none of them."""
    word = text.strip()
    if "null" in kinds and word in _NULLS:
        return None
    if "boolean" in kinds and word in _BOOLEANS:
        return _BOOLEANS[word]
    found = _whole_json(word)
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if number and kinds & {"integer", "number"}:
        return found
    if ("object" in kinds and isinstance(found, dict)) or ("array" in kinds and isinstance(found, list)):
        return found
    if kinds and kinds <= {"object", "array", "null"}:
        raise ModelError(f"{where} is no JSON {' or '.join(sorted(kinds - {'null'}))}: {text[:80]!r}")
    return text


def _value(text: str, schema: Mapping[str, Any] | None, whole: Mapping[str, Any], where: str) -> Any:
    """Read one raw value by its schema; None where the tool has no such argument."""
    if schema is None:
        return text
    resolved = _resolve(schema, whole)
    options = [resolved["const"]] if "const" in resolved else resolved.get("enum", ())
    for option in options:
        if _same(option, text) or (not isinstance(option, str) and _same(option, text.strip())):
            return option
    if options:
        return text
    kinds = _kinds(schema, whole)
    if not kinds:
        # The schema takes anything: what is JSON is JSON.
        kinds = {"null", "boolean", "number", "object", "array", "string"}
    return _typed(text, kinds, where)


def _read_arguments(text: str, at: int, name: str, whole: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    properties = whole.get("properties", {})
    while found := _PARAMETER.match(text, at):
        key = found[1].strip()
        end = text.find("</parameter>", found.end())
        if end < 0:
            raise ModelError(f"argument `{key}` of `{name}` is cut off: {text[found.end() :][-80:]!r}")
        if key in arguments:
            raise ModelError(f"argument `{key}` of `{name}` is written twice")
        raw = text[found.end() : end].removesuffix("\n")
        arguments[key] = _value(raw, properties.get(key), whole, f"argument `{key}` of `{name}`")
        at = end + len("</parameter>")
    return arguments, at


def parse(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
    """Read calls; JSON in place of the inner tags is read as well, and an outer tag may be missing.

    The end tags of call and function may be missing at the very end, but not that of an argument: its value could have
    been cut off.

    Raises:
      ModelError: A call is malformed or cut off.
    """
    schemas = {tool.name: tool.parameters for tool in tools}

    def read(text: str, match: re.Match[str]) -> tuple[tuple[Call, ...], int]:
        tagged = match[0] == _TAGS[0]
        at = match.end() if tagged else match.start()
        if tagged and _JSON.match(text, at):
            return read_tagged(text, at, _TAGS[1])
        function = _FUNCTION.match(text, at)
        if function is None:
            raise ModelError(f"a tool call names no function: {text[at : at + 80]!r}")
        name, at = function[1].strip(), function.end()
        arguments: Any
        if _JSON.match(text, at):
            arguments, at = read_json(text, at)
            if not isinstance(arguments, dict):
                raise ModelError(f"the arguments of `{name}` are not an object: {str(arguments)[:80]!r}")
        else:
            arguments, at = _read_arguments(text, at, name, schemas.get(name, {}))
        end = _FUNCTION_END.match(text, at)
        if end is None:
            raise ModelError(f"a call of `{name}` holds what is no argument: {text[at : at + 80]!r}")
        close = (_CALL_END if tagged else _STRAY_END).match(text, end.end())
        if tagged and close is None:
            raise ModelError(f"a call of `{name}` is followed by something else: {text[end.end() :][:80]!r}")
        return (Call(name, arguments),), close.end() if close else end.end()

    return scan(text, r"<tool_call>|<function=", read, THINK)
