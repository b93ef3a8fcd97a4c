"""From events of `ferrule measure` to figures of speed.

A launch is the list of events that one process printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrule_runtime.errors import RecordError
from ferrule_runtime.measure import SCHEMA_VERSION

from .run import Missing, Value, summarise

__all__ = ["Event", "Launch", "named", "only", "read_events", "speed"]

# What passes from opening a bundle until it can be asked.
_LOADING = ("open", "load", "ready")

Event = Mapping[str, Any]
Launch = Sequence[Event]


def read_events(text: str, where: str) -> list[Event]:
    """Read what `ferrule measure` printed.

    Args:
      text: JSON lines.
      where: What printed it, for errors.

    Raises:
      RecordError: A line is not an event, an event is of a newer schema, or the last one is not there.
    """
    events: list[Event] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            event = json.loads(line)
            known = isinstance(event["event"], str) and isinstance(event["schema_version"], int)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise RecordError(
                f"{where}: line {number} is not an event: `{line[:60]}`",
                hint="is `ferrule-runtime` on the board of the same version?",
            )
        if event["schema_version"] > SCHEMA_VERSION:
            raise RecordError(
                f"{where}: an event of schema {event['schema_version']}, newer than {SCHEMA_VERSION}",
                hint="update ferrule on this machine",
            )
        events.append(event)
    if not events or events[-1]["event"] != "machine_after":
        raise RecordError(f"{where}: it stopped after {len(events)} events, before the end", hint="see its own output")
    return events


def named(launch: Launch, name: str, **where: Any) -> list[Event]:
    """Return the events of one name whose values are as given."""
    return [e for e in launch if e["event"] == name and all(e.get(key) == value for key, value in where.items())]


def only(launch: Launch, name: str, **where: Any) -> Event:
    """Return the one event of a name.

    Raises:
      RecordError: There is none, or more than one.
    """
    found = named(launch, name, **where)
    if len(found) != 1:
        raise RecordError(f"{len(found)} events `{name}` where one was expected")
    return found[0]


def _per_launch(
    launches: Sequence[Launch], name: str, prompt: int, value: Callable[[Event], float]
) -> list[list[float]]:
    return [[value(event) for event in named(launch, name, prompt=prompt)] for launch in launches]


def _rate(event: Event) -> float:
    return float(event["tokens"]) / float(event["seconds"])


def speed(launches: Sequence[Launch], prompts: Sequence[int]) -> dict[str, Value]:
    """Return prefill and decode rates and time to first token by prompt length, time to load, and of a whole request.

    Loading is once per process: from opening the bundle to an engine and constraint that are ready, imports included.

    Args:
      launches: Events of each process.
      prompts: Prompt lengths in tokens.
    """
    figures: dict[str, Value] = {}
    for prompt in prompts:
        figures[f"prefill@{prompt}"] = summarise(_per_launch(launches, "prefill", prompt, _rate), "tok/s")
        first = _per_launch(launches, "first_token", prompt, lambda event: float(event["seconds"]))
        figures[f"first_token@{prompt}"] = summarise(first, "s")
        figures[f"decode@{prompt}"] = summarise(_per_launch(launches, "decode", prompt, _rate), "tok/s")
    loads = [[sum(event["seconds"] for name in _LOADING for event in named(launch, name))] for launch in launches]
    figures["load"] = summarise(loads, "s")
    for figure, key in (("request_to_call", "seconds"), ("request_first_token", "first_seconds")):
        calls = [[float(event[key]) for event in named(launch, "call")] for launch in launches]
        figures[figure] = summarise(calls, "s") if all(calls) else Missing("no whole request was timed")
    return figures
