"""What failed, what it forbids until something changes, and what it needs next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import ToolError
from .messages import Call
from .tools import Tool, with_defaults

__all__ = ["Failure", "Recovery"]

# Causes that no change of the device's state cures: the same call stays refused for the whole run.
_LASTING = ("bad_arguments", "not_permitted", "unknown_tool")
# A tool's own error text is cut here: the prompt carries a digest, not a log.
_MESSAGE_CHARACTERS = 200
# Lengths of the cycles that are looked for, in calls: A→B→A→B and A→B→C→A→B→C.
_PERIODS = (2, 3)


@dataclass(frozen=True)
class Failure:
    """One call that failed.

    Attributes:
      tool: The tool that was called.
      call: The call in canonical form, with defaults.
      cause: What stands in the way, such as `network_off`.
      message: The tool's words, in one short line.
      missing: The condition that does not hold, such as `network`; None when the tool did not say.
      providers: Tools that can bring the missing condition about.
    """

    tool: str
    call: str
    cause: str
    message: str
    missing: str | None = None
    providers: tuple[str, ...] = ()

    def line(self) -> str:
        """Write the failure in one line, for people and for the model."""
        text = f"{self.tool}: {self.cause}: {self.message}"
        if self.missing is None:
            return text
        who = f"{' or '.join(self.providers)} can provide it" if self.providers else "no tool provides it"
        return f"{text} (missing: {self.missing}; {who})"

    def told(self) -> dict[str, Any]:
        """Return the failure as the model is told it."""
        body: dict[str, Any] = {"error": self.cause, "message": self.message}
        if self.missing is not None:
            body |= {"missing": self.missing, "provided_by": list(self.providers)}
        return body


class Recovery:
    """Keeps the failures and changes of one run.

    Attributes:
      changes: Calls that changed the device or sent something, in order.
      repairs: Times the model was asked again since the last change.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.changes: list[Call] = []
        self.repairs = 0
        self._tools = {tool.name: tool for tool in tools}
        self._forbidden: dict[str, Failure] = {}
        self._open: dict[str, Failure] = {}
        self._history: list[tuple[str, str, bool]] = []

    def _key(self, call: Call) -> str:
        tool = self._tools.get(call.name)
        return (with_defaults(tool, call) if tool else call).canonical()

    def _acts(self, name: str) -> bool:
        """Tell whether a tool does more than look. One that is not known may have been meant to."""
        return name not in self._tools or self._tools[name].effect != "read"

    def failed(self, call: Call, error: ToolError) -> Failure:
        """Record that a call was run, or tried, and failed."""
        providers = [t.name for t in self._tools.values() if error.missing in t.provides and t.name != call.name]
        message = " ".join(f"{error}".removeprefix(f"{call.name}: ").split() + error.hint.split())
        if len(message) > _MESSAGE_CHARACTERS:
            message = message[: _MESSAGE_CHARACTERS - 1] + "…"
        failure = Failure(call.name, self._key(call), error.cause, message, error.missing, tuple(providers))
        before = self._forbidden.pop(failure.call, None)
        self._forbidden[failure.call] = before if before and before.cause in _LASTING else failure
        if self._acts(call.name):
            self._open.pop(call.name, None)
            self._open[call.name] = failure
        self._history.append((failure.call, failure.cause, True))
        return failure

    def succeeded(self, call: Call, result: Any) -> None:
        """Record that a call was run and succeeded. One that changes something frees what had failed."""
        self._history.append((self._key(call), json.dumps(result, sort_keys=True), False))
        if not self._acts(call.name):
            return
        self.changes.append(call)
        self.repairs = 0
        self._forbidden = {key: f for key, f in self._forbidden.items() if f.cause in _LASTING}
        # Removing an obstacle is not yet doing what was in its way; any other success is taken as another way round.
        removed_obstacle = any(call.name in failure.providers for failure in self._open.values())
        self._open.pop(call.name, None)
        if not removed_obstacle:
            self._open.clear()

    def refusal(self, call: Call) -> Failure | None:
        """Return the failure that forbids a call: the same call failed, and nothing changed since."""
        return self._forbidden.get(self._key(call))

    def helpers(self, failure: Failure) -> list[Tool]:
        """Return the tools to offer after a failure: providers of what is missing, and of what they miss themselves.

        Empty when nothing is known to help.
        """
        names = set(failure.providers)
        # In the order they failed: a provider's own failure comes after the one it was to cure.
        for other in self._forbidden.values():
            if other.tool in names:
                names |= set(other.providers)
        return [tool for tool in self._tools.values() if tool.name in names]

    @property
    def in_the_way(self) -> tuple[Failure, ...]:
        """What was tried, failed, and was not done since by that or another way; the latest last."""
        return tuple(self._open.values())

    def cycle(self) -> tuple[str, ...]:
        """Return the calls that were just run twice around with the same outcomes, a failure among them."""
        for period in _PERIODS:
            tail = self._history[-2 * period :]
            if len(tail) == 2 * period and tail[:period] == tail[period:] and any(failed for *_, failed in tail):
                return tuple(key for key, *_ in tail[:period])
        return ()

    def report(self) -> str:
        """Say what stands in the way and what was changed all the same, for a person."""
        failures = self.in_the_way or tuple(self._forbidden.values())
        told = [f"in the way: {failure.line()}" for failure in failures]
        changed = ", ".join(call.written() for call in self.changes) or "nothing"
        return "; ".join([*told, f"changed or sent: {changed}"])
