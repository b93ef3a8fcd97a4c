"""The gate of a dialect: calls must survive being written by the template and read back from tokens."""

from __future__ import annotations

import json
from typing import Any

from .errors import BundleError, ModelError
from .messages import Call, Message
from .talk import Talk
from .tools import Tool

__all__ = ["ROUND_TRIP_CALLS", "check_round_trip"]


def _nothing(**_: Any) -> str:
    return ""


def _tool(name: str, properties: dict[str, Any]) -> Tool:
    return Tool(name, f"Tool {name}.", {"type": "object", "properties": properties, "required": []}, _nothing)


_TOOLS = (
    _tool("set_alarm", {"hour": {"type": "integer"}, "label": {"type": "string"}, "volume": {"type": "number"}}),
    _tool("set_light", {"room": {"enum": ["hall", "kitchen"]}, "on": {"type": "boolean"}}),
    _tool(
        "write_note",
        {
            "title": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}}},
        },
    ),
)
ROUND_TRIP_CALLS = (
    # A label of digits must come back as text, an hour of digits as a number.
    Call("set_alarm", {"hour": 7, "label": "0730", "volume": 0.5}),
    Call("set_light", {"room": "kitchen", "on": False}),
    Call(
        "write_note",
        {"title": 'quotes " and \\ and\nlines', "tags": ["a", "ß", "日本"], "place": {"x": 1.5, "y": None}},
    ),
)
_MARK = "result-4711"


def _conversations() -> list[list[Message]]:
    user = Message("user", "Do what is to be done.")
    return [[user], [Message("system", "You are the assistant of this device."), user]]


def check_round_trip(talk: Talk) -> None:
    """Write calls as the bundle's template does, read them back as its dialect does, and compare.

    With and without a system text; one call, several, and one with nested arguments; and a result must reach the model.

    Raises:
      BundleError: The template fails or drops tools or results, or a call does not survive.
    """
    sets = (ROUND_TRIP_CALLS[:1], ROUND_TRIP_CALLS, ROUND_TRIP_CALLS[2:])
    for messages in _conversations():
        for calls in sets:
            raw = talk.written(talk.answer(messages, calls, _TOOLS))
            try:
                text, read = talk.read(raw, _TOOLS, "call")
            except ModelError as error:
                raise BundleError(f"calls do not survive being written and read back: {error}: {raw!r}") from None
            if text or [call.canonical() for call in read] != [call.canonical() for call in calls]:
                raise BundleError(
                    f"{len(calls)} calls do not survive being written and read back: {raw!r} gave {read!r}",
                    hint="template and dialect do not belong together; name another one with --dialect",
                )
        result = Message("tool", json.dumps({"result": _MARK}), name=ROUND_TRIP_CALLS[0].name)
        answered = [*messages, Message("assistant", "", calls=ROUND_TRIP_CALLS[:1]), result]
        if _MARK not in talk.text(answered, _TOOLS):
            raise BundleError(
                "the chat template drops the results of tools", hint="the model would call a tool again and again"
            )
