"""A scripted model: plays a policy from a TOML file. No model runs; every reply says so.

A policy is a list of rules, looked through in order. A rule says when it applies and what is then said:

    about = "what the policy shows"        # optional

    [[rule]]
    when = "start"                          # the request has just been made
    call = { name = "set_wifi", arguments = { on = true } }

    [[rule]]
    when = { failed = "network_off", tool = "send_message" }
    say = "There is no network."

`when` is one of `start`, `failed`, `succeeded`, `refused` (the loop did not run the last call), `asked_again` (the loop
sent the last text back), or a table: `{ failed = CAUSE }` with or without `tool = NAME`, `{ succeeded = TOOL }`,
`{ refused = TOOL }`. Exactly one of `call` and `say` follows. A rule is used once, unless it has `repeat = true`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError, UsageError
from ..messages import Call, Message, Reply, Usage, Want
from ..registry import unknown
from ..tools import Tool

__all__ = ["LABEL", "Event", "Rule", "ScriptedModel", "load", "parse"]

LABEL = "scripted (simulated)"
_EVENTS = ("start", "failed", "succeeded", "refused", "asked_again")
_RULE_KEYS = ("when", "call", "say", "repeat")
_FORM = "the rules' form is written at the top of ferrule_runtime/models/scripted.py"


@dataclass(frozen=True)
class Event:
    """What has just happened in a conversation: one of the events that rules wait for."""

    kind: str
    tool: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return (
            f"`{self.kind}`" + (f" of `{self.tool}`" if self.tool else "") + (f": {self.cause}" if self.cause else "")
        )


@dataclass(frozen=True)
class Rule:
    """One line of a policy.

    Attributes:
      kind: The event it waits for.
      tool: The tool the event must be of; empty for any.
      cause: The cause of the failure; empty for any.
      call: The call to make, or None.
      say: The text to say when there is no call.
      repeat: Whether it may be used again.
    """

    kind: str
    tool: str
    cause: str
    call: Call | None
    say: str
    repeat: bool

    def matches(self, event: Event) -> bool:
        """Tell whether the rule waits for this event."""
        return self.kind == event.kind and self.tool in ("", event.tool) and self.cause in ("", event.cause)


class ScriptedModel:
    """Plays a policy. A conversation that starts anew starts the policy anew."""

    def __init__(self, rules: Sequence[Rule], name: str) -> None:
        self._rules = tuple(rules)
        self._name = name
        self._used: set[int] = set()

    @property
    def label(self) -> str:
        """What speaks: a script, not a model."""
        return LABEL

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], want: Want) -> Reply:
        """Say what the first unused rule for the last event says.

        Raises:
          ModelError: No rule waits for what happened, or the rule's answer is of a kind not wanted now.
        """
        event = _last_event(messages)
        if event.kind == "start":
            self._used.clear()
        for number, rule in enumerate(self._rules):
            if number in self._used or not rule.matches(event):
                continue
            given = "call" if rule.call else "text"
            if want not in ("either", given):
                raise ModelError(
                    f"{self._name}: rule {number + 1} gives a {given} where a {want} is wanted", hint=_FORM
                )
            if not rule.repeat:
                self._used.add(number)
            usage = Usage(simulated=True)
            return Reply("", (rule.call,), usage=usage) if rule.call else Reply(rule.say, raw=rule.say, usage=usage)
        raise ModelError(
            f"{self._name}: no unused rule for {event}", hint=f"{len(self._used)} of {len(self._rules)} rules were used"
        )


def _last_event(messages: Sequence[Message]) -> Event:
    """Read what has just happened from a conversation.

    Raises:
      ModelError: The conversation does not end with something to reply to.
    """
    last = messages[-1] if messages else None
    if last is not None and last.role == "user":
        return Event("asked_again" if any(m.role == "assistant" for m in messages) else "start")
    if last is None or last.role != "tool":
        raise ModelError(
            "the conversation has nothing to reply to", hint="it must end with a request or a tool message"
        )
    try:
        body = json.loads(last.content)
    except ValueError:
        body = None
    if isinstance(body, dict):
        if "refused" in body:
            return Event("refused", last.name)
        if "error" in body:
            return Event("failed", last.name, str(body["error"]))
        if "result" in body:
            return Event("succeeded", last.name)
    raise ModelError(f"a message of tool `{last.name}` is in a form that is not known", hint="see messages.Message")


def load(path: str | Path) -> ScriptedModel:
    """Read a policy from a TOML file.

    Raises:
      UsageError: The file cannot be read, or is malformed; says the line or the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"policy {path} cannot be read: {reason}", hint="give the path of a TOML file") from None
    return parse(text, str(path))


def parse(text: str, where: str) -> ScriptedModel:
    """Read a policy from TOML text.

    Args:
      text: The policy.
      where: What it is called in errors.

    Raises:
      UsageError: It is malformed; says the line or the key.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"policy {where} is not TOML: {str(error)[:1].lower()}{str(error)[1:]}", hint=_FORM) from None
    _only(raw, ("about", "rule"), where)
    if not isinstance(raw.get("about", ""), str):
        raise _wrong(where, "about", "text")
    rules = raw.get("rule")
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, dict) for rule in rules):
        raise _wrong(where, "rule", "one or more tables `[[rule]]`")
    return ScriptedModel([_rule(rule, where, f"rule[{n}]") for n, rule in enumerate(rules, start=1)], where)


def _wrong(where: str, key: str, wanted: str) -> UsageError:
    return UsageError(f"policy {where}: `{key}` must be {wanted}", hint=_FORM)


def _only(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            error = unknown("key", key, keys, UsageError)
            raise UsageError(f"policy {where}: {error}", hint=error.hint)


def _rule(raw: Mapping[str, Any], where: str, key: str) -> Rule:
    _only(raw, _RULE_KEYS, f"{where}, {key}")
    event = _when(raw.get("when"), where, f"{key}.when")
    if ("call" in raw) == ("say" in raw):
        raise _wrong(where, key, "with exactly one of `call` and `say`")
    say = raw.get("say", "")
    if not isinstance(say, str) or ("say" in raw and not say.strip()):
        raise _wrong(where, f"{key}.say", "a text that is not empty")
    repeat = raw.get("repeat", False)
    if not isinstance(repeat, bool):
        raise _wrong(where, f"{key}.repeat", "true or false")
    call = _call(raw["call"], where, f"{key}.call") if "call" in raw else None
    return Rule(event.kind, event.tool, event.cause, call, say, repeat)


def _when(raw: Any, where: str, key: str) -> Event:
    if isinstance(raw, str):
        if raw not in _EVENTS:
            error = unknown("event", raw, _EVENTS, UsageError)
            raise UsageError(f"policy {where}, {key}: {error}", hint=error.hint)
        return Event(raw)
    if not isinstance(raw, dict) or not all(isinstance(value, str) and value for value in raw.values()):
        raise _wrong(where, key, "the name of an event, or a table of names")
    keys = set(raw)
    if keys in ({"failed"}, {"failed", "tool"}):
        return Event("failed", raw.get("tool", ""), raw["failed"])
    if keys in ({"succeeded"}, {"refused"}):
        (kind,) = keys
        return Event(kind, raw[kind])
    raise _wrong(where, key, "{ failed = CAUSE, tool = NAME }, { succeeded = TOOL } or { refused = TOOL }")


def _call(raw: Any, where: str, key: str) -> Call:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not raw["name"]:
        raise _wrong(where, key, "a table with a `name` and its `arguments`")
    _only(raw, ("name", "arguments"), f"{where}, {key}")
    arguments = raw.get("arguments", {})
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError):
        raise _wrong(where, f"{key}.arguments", "text, numbers, true or false, and lists or tables of these") from None
    if not isinstance(arguments, dict):
        raise _wrong(where, f"{key}.arguments", "a table")
    return Call(raw["name"], arguments)
