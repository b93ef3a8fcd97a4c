"""ChatML turns with JSON tool calls, for models whose own template knows no tools.

The template is ours, not the publisher's. A call is one JSON object between `<tool_call>` tags, as Hermes-style models
write it; a result goes back as a user turn between `<tool_response>` tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..errors import ModelError
from ..messages import Call, Message, Want
from ..tools import Tool

__all__ = ["STOPS", "TEMPLATE", "grammar", "parse", "turns"]

STOPS = ("<|im_end|>", "<|endoftext|>")

TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
{{- '\n\nYou can call these tools:\n<tools>\n' }}
{%- for tool in tools %}
{{- tool.function | tojson + '\n' }}
{%- endfor %}
{{- '</tools>\nTo call one, answer with nothing but:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def _write(call: Call) -> str:
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with their calls written out in the text."""
    result = []
    for message in messages:
        parts = [message.content] if message.content else []
        parts += [_write(call) for call in message.calls]
        result.append({"role": message.role, "content": "\n".join(parts), "name": message.name})
    return result


def grammar(tools: Sequence[Tool], want: Want) -> str | None:
    """Return a grammar of exactly one call of one of the tools for `call`; anything may be said otherwise."""
    if want != "call":
        return None
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
    return f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {schema}\n'


def _read(body: str) -> Call:
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except ValueError as error:
        raise ModelError(f"a tool call is not JSON: {error}: {body[:80]!r}") from None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ModelError(f"a tool call has no name: {body[:80]!r}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ModelError(f"the arguments of `{value['name']}` are not an object: {body[:80]!r}")
    return Call(value["name"], arguments)


def parse(text: str) -> tuple[str, tuple[Call, ...]]:
    """Read the calls between tags; the rest is text. An end tag may be missing at the very end.

    Raises:
      ModelError: What stands between tags is no call.
    """
    calls = tuple(_read(match[1]) for match in _TAGGED.finditer(text))
    return _TAGGED.sub("", text).strip(), calls
