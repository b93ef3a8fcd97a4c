"""What the tool-call formats share: reading past thoughts, strict JSON calls, and pieces of grammars."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import ConstraintError, ModelError
from .messages import Call, Message
from .tools import Tool

__all__ = [
    "NUMBER",
    "THINK",
    "json_call_grammar",
    "literal",
    "read_call",
    "read_json",
    "read_json_calls",
    "read_tagged",
    "refuse_keywords",
    "scan",
    "scan_json",
    "spoken",
    "token",
    "turn",
]

# What models that think put around their thoughts (the Qwen3 and Qwen3.5 releases, and those made from them).
THINK = ("<think>", "</think>")

# A number in a Lark grammar: as JSON, but finite as a 64-bit float, in no more digits than one needs.
NUMBER = (
    r"/-?((0|[1-9][0-9]{0,20})(\.[0-9]{1,24})?|"
    r"[0-9](\.[0-9]{1,20})?[eE](-[0-9]{1,3}|\+?([0-9]{1,2}|[12][0-9]{2}|30[0-7])))/"
)

# Reads what starts at a match: the calls, and where the rest goes on. No call: what was passed over is text.
Reader = Callable[[str, "re.Match[str]"], tuple[tuple[Call, ...], int]]

# The keywords of JSON Schema that restrict a value (drafts 4 to 2020-12); all others are remarks.
_RESTRICT = frozenset({
    "type", "enum", "const", "pattern", "format", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "additionalItems",
    "unevaluatedItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems",
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
    "minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
})  # fmt: skip

_SPACE = re.compile(r"\s*")
_LOOKS_LIKE_A_CALL = re.compile(r'[\[\s]*\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"')
# Where a call may begin that carries no tags: a code fence, or a line, followed by an object or a list.
_BARE = r"```[\w-]*\s*(?=[{\[])|^[ \t]*(?=[{\[])"
_FENCE_END = re.compile(r"\s*```(?!\w)")
_BETWEEN = re.compile(r"[\s,;]*(?=\{)")


def turn(message: Message) -> dict[str, Any]:
    """Return one message as the templates of Hugging Face models take it, its calls under `tool_calls`."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        result["name"] = message.name
    if message.calls:
        result["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.calls
        ]
    return result


def scan(text: str, opening: str, read: Reader, think: tuple[str, str] | None) -> tuple[str, tuple[Call, ...]]:
    """Read a reply from left to right: thoughts are dropped, calls are read, the rest is text.

    Args:
      text: The reply.
      opening: Pattern of what a call begins with; `^` is the start of a line.
      read: Reads what begins there.
      think: Tags around thoughts; nothing between them is ever read as a call. None: the format has none.

    Raises:
      ModelError: A thought does not end, or `read` finds a malformed call.
    """
    start, end = (re.escape(tag) for tag in think) if think else (r"(?!)", r"(?!)")
    marks = re.compile(f"(?P<start>{start})|(?P<end>{end})|(?:{opening})", re.MULTILINE)
    said: list[str] = []
    calls: list[Call] = []
    at = 0
    while match := marks.search(text, at):
        said.append(text[at : match.start()])
        if match["start"]:
            assert think is not None
            close = text.find(think[1], match.end())
            if close < 0:
                raise ModelError(f"the reply ends inside a thought of {len(text) - match.end()} characters")
            at = close + len(think[1])
        elif match["end"]:
            # The reply began inside a thought, so all before was part of it.
            said.clear()
            calls.clear()
            at = match.end()
        else:
            found, at = read(text, match)
            calls += found
            if not found:
                said.append(text[match.start() : at])
    said.append(text[at:])
    return "".join(said).strip(), tuple(calls)


def spoken(text: str, think: tuple[str, str] | None) -> str:
    """Return a reply without its thoughts, for one that may not call.

    Raises:
      ModelError: A thought does not end.
    """
    return scan(text, r"(?!)", lambda text, match: ((), match.end()), think)[0]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is written twice")
    return result


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


# Stricter than the library's default: every value must mean one thing and be JSON.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Read one JSON value, white space before it passed over.

    Returns:
      The value, and where it ends.

    Raises:
      ModelError: No JSON there, a key twice in one object, a number that is not finite, or half a character.
    """
    space = _SPACE.match(text, at)
    begin = space.end() if space else at
    try:
        value, end = _DECODER.raw_decode(text, begin)
        # Half a character, as `\\ud800` writes one, could be neither shown nor stored.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value, end
    except (ValueError, RecursionError) as error:
        raise ModelError(f"a tool call is not JSON: {error}: {text[begin : begin + 80]!r}") from None


def read_call(value: Any) -> Call:
    """Turn `{"name": ..., "arguments": {...}}` into a call; the arguments may be JSON in a string, or absent.

    Raises:
      ModelError: No name, or arguments that are no object.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ModelError(f"a tool call has no name: {str(value)[:80]!r}")
    key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
    arguments = value.get(key, {})
    if isinstance(arguments, str):
        arguments, _ = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ModelError(f"the arguments of `{value['name']}` are not an object: {str(arguments)[:80]!r}")
    if extra := value.keys() - {"name", key}:
        raise ModelError(f"a call of `{value['name']}` has the unknown key `{min(extra)}`")
    return Call(value["name"], arguments)


def read_json_calls(value: Any) -> tuple[Call, ...]:
    """Turn one JSON call, or a list of them, into calls.

    Raises:
      ModelError: Something there is no call.
    """
    return tuple(read_call(item) for item in value) if isinstance(value, list) and value else (read_call(value),)


def _is_call(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_call(item) for item in value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return value.keys() in ({"name", "arguments"}, {"name", "parameters"})


def _read_bare(text: str, match: re.Match[str]) -> tuple[tuple[Call, ...], int]:
    """Read calls without tags; JSON that is no call is text."""
    try:
        value, end = read_json(text, match.end())
    except ModelError:
        if _LOOKS_LIKE_A_CALL.match(text, match.end()):
            raise
        return (), match.end() + 1
    if not _is_call(value):
        return (), end
    calls = read_json_calls(value)
    between = _BETWEEN.match(text, end)
    if between:
        more, after = _read_bare(text, between)
        return (calls + more, after) if more else (calls, end)
    fence = _FENCE_END.match(text, end)
    return calls, fence.end() if fence else end


def read_tagged(text: str, at: int, close: str) -> tuple[tuple[Call, ...], int]:
    """Read JSON calls behind an opening tag, and the tag that ends them, which may be missing at the very end.

    Raises:
      ModelError: No call there, or something else before the end tag.
    """
    value, end = read_json(text, at)
    ending = re.compile(rf"\s*(?:{re.escape(close)}|\Z)").match(text, end)
    if ending is None:
        raise ModelError(f"a tool call is followed by something else: {text[end : end + 80]!r}")
    return read_json_calls(value), ending.end()


def scan_json(text: str, tags: tuple[str, str]) -> tuple[str, tuple[Call, ...]]:
    """Read a reply whose calls are JSON: between tags, in a code fence, or bare at the start of a line.

    Raises:
      ModelError: What stands between tags is no call, or a bare one is malformed.
    """

    def read(text: str, match: re.Match[str]) -> tuple[tuple[Call, ...], int]:
        if match[0] == tags[0]:
            return read_tagged(text, match.end(), tags[1])
        return _read_bare(text, match)

    return scan(text, f"{re.escape(tags[0])}|{_BARE}", read, THINK)


def literal(text: str) -> str:
    """Write a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def token(name: str, controls: frozenset[str]) -> str:
    """Write a control token in a Lark grammar: as itself where the tokenizer has it, as a plain string otherwise."""
    return name if name in controls else literal(name)


def refuse_keywords(schema: Mapping[str, Any], understood: frozenset[str], where: str) -> None:
    """Refuse a schema that restricts values by something that the grammar would not keep to.

    Raises:
      ConstraintError: Such a keyword is there.
    """
    if ignored := sorted((schema.keys() & _RESTRICT) - understood):
        raise ConstraintError(
            f"{where}: its schema has `{ignored[0]}`, which this tool-call format cannot hold a model to",
            hint="simplify the schema; an ignored constraint would be worse than none",
        )


def json_call_grammar(tools: Sequence[Tool], tags: tuple[str, str], controls: frozenset[str]) -> str:
    """Return a Lark grammar of exactly one JSON call between tags, written as `json.dumps` writes it.

    Raises:
      ConstraintError: There are no tools.
    """
    if not tools:
        raise ConstraintError("a call is wanted, but there are no tools")
    choices = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": dict(tool.parameters)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    # Fixed separators, those of json.dumps: the model has seen no others, and each place is then forced.
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = json.dumps({"x-guidance": layout, "anyOf": choices}, ensure_ascii=False)
    start, end = (token(tag, controls) for tag in tags)
    return f'start: {start} "\\n" call "\\n" {end}\ncall: %json {schema}\n'
