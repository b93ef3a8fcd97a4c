"""ChatML turns with JSON tool calls, for models whose own template knows no tools.

The template is ours, not the publisher's. A call is one JSON object between `<tool_call>` tags, as Hermes-style models
write it; a result goes back as a user turn between `<tool_response>` tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..calls import THINK, json_call_grammar, scan_json
from ..messages import Call, Message, Want
from ..tools import Tool

__all__ = ["CONTROLS", "STOPS", "TEMPLATE", "THINK", "grammar", "parse", "turns"]

STOPS = ("<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>")
CONTROLS = (*_TAGS, *THINK)

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
