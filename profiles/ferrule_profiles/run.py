"""A run: one measured set of values with everything that they depend on. Unlike runs are refused, not averaged."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule_runtime.errors import RecordError

__all__ = [
    "KIND", "SCHEMA_VERSION", "BundleFacts", "Figure", "Launches", "Missing", "Power", "Run", "Value", "percentile",
    "summarise", "unlike", "warnings",
]  # fmt: skip

KIND = "profile"
SCHEMA_VERSION = 1

# Values in the order they were taken, one inner tuple per launch.
Launches = tuple[tuple[float, ...], ...]

# Kernels and firmwares report slightly different totals of the same RAM.
_MEMORY_TOLERANCE = 0.01

# Of the cores that were used, the share that other work may have taken before timings mean little.
_BUSY = 0.3

# A clock this far under its highest, before or after, means that the governor held it back.
_SLOW_CLOCK = 0.9

_HOT_CELSIUS = 80.0


@dataclass(frozen=True)
class Missing:
    """A value that there is not, and why."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as stored: a null where a figure has its median."""
        return {"median": None, "reason": self.reason}


@dataclass(frozen=True)
class Figure:
    """A measured value with its spread.

    Attributes:
      median: Median of the launches' medians, since repeats inside one process are not independent.
      low: 5th percentile over all repeats.
      high: 95th percentile over all repeats.
      unit: Such as `tok/s`, `s`, `B`, `J`.
      values: Every value, by launch.
      how: What median and interval are, in words.
    """

    median: float
    low: float
    high: float
    unit: str
    values: Launches
    how: str

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(map(len, self.values))

    def to_dict(self) -> dict[str, Any]:
        """Return it as stored."""
        return {**dataclasses.asdict(self), "count": self.count}


Value = Figure | Missing


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated linearly between neighbours.

    Args:
      values: At least one.
      share: From 0 to 1. (Hyndman and Fan 1996, definition 7; the default of numpy and R.)
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(launches: Sequence[Sequence[float]], unit: str, absent: str = "nothing was measured") -> Value:
    """Turn the values of several launches into a figure.

    Args:
      launches: Values of each launch; a launch without values makes the figure missing.
      unit: Their unit.
      absent: Why there may be none.
    """
    if not launches or not all(launches):
        return Missing(absent)
    values = tuple(tuple(map(float, launch)) for launch in launches)
    every = [value for launch in values for value in launch]
    spread = "one value, no interval" if len(every) == 1 else f"5-95 % over {len(every)} values"
    plural = "launch" if len(values) == 1 else "launches"
    return Figure(
        median=statistics.median(statistics.median(launch) for launch in values),
        low=percentile(every, 0.05),
        high=percentile(every, 0.95),
        unit=unit,
        values=values,
        how=f"median of the medians of {len(values)} {plural}; {spread}",
    )


@dataclass(frozen=True)
class BundleFacts:
    """Which bundle was measured.

    Attributes:
      name: The bundle's name.
      sha256: SHA-256 of its manifest, which hashes every part.
      recipe: The recipe's name.
      recipe_key: The recipe's name and hash.
      bytes: Size of its files.
      bits_per_weight: What a weight takes in the files, scales and embedding included.
      checkpoint: The published model's name.
      checkpoint_sha256: Hash of its weights.
      form: Shape of the graph.
      engine: What executed it.
      engine_version: Version of the engine's package on the board.
    """

    name: str
    sha256: str
    recipe: str
    recipe_key: str
    bytes: int
    bits_per_weight: float
    checkpoint: str
    checkpoint_sha256: str
    form: str
    engine: str
    engine_version: str | None


@dataclass(frozen=True)
class Power:
    """Where energy figures come from.

    Attributes:
      source: The sensor or meter.
      boundary: What its number covers, and what it does not.
      simulated: Whether samples came from anywhere but this run.
    """

    source: str
    boundary: str
    simulated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it as stored."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Run:
    """One profile of one bundle on one board.

    Attributes:
      time: When it ended, UTC, ISO 8601.
      ferrule: Version of this toolkit.
      command: What was run on the board, per launch.
      target: The kind of board it ran on.
      board: The board's URL.
      bundle: What was measured.
      fidelity: Distance to the float model, as the bundle's manifest has it.
      settings: Threads, context, chunk, prompts, decode, repeat, launches, seed; the load average before it all.
      machine: Facts of the board that do not change (`ferrule_runtime.probe.Machine`).
      before: Conditions before each launch (`ferrule_runtime.probe.Conditions`).
      after: Conditions after each launch.
      power: Where energy figures come from, or why there are none.
      figures: Values by name, such as `decode@128`; each a figure, or missing with the reason.
    """

    time: str
    ferrule: str
    command: tuple[str, ...]
    target: str
    board: str
    bundle: BundleFacts
    fidelity: Mapping[str, Any]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    before: tuple[Mapping[str, Any], ...]
    after: tuple[Mapping[str, Any], ...]
    power: Power | Missing
    figures: Mapping[str, Value]

    def figure(self, name: str) -> Value:
        """Return a figure, or why it is missing."""
        return self.figures.get(name, Missing(f"`{name}` was not measured"))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as stored; `from_dict` reads it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["command"] = list(self.command)
        values["bundle"] = dataclasses.asdict(self.bundle)
        values["power"] = self.power.to_dict()
        values["figures"] = {name: value.to_dict() for name, value in self.figures.items()}
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **values}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> Run:
        """Read a record.

        Args:
          raw: What `to_dict` made.
          where: File and line, for errors.

        Raises:
          RecordError: Of another kind or a newer schema, or a field is missing or malformed.
        """
        from pydantic import TypeAdapter, ValidationError

        hint = "remove the line, or profile again"
        if raw.get("kind") != KIND or not isinstance(raw.get("schema_version"), int):
            raise RecordError(f"{where}: not a record of kind `{KIND}` with a `schema_version`", hint=hint)
        if raw["schema_version"] > SCHEMA_VERSION:
            raise RecordError(
                f"{where}: schema {raw['schema_version']} is newer than {SCHEMA_VERSION}, the newest known here",
                hint="update ferrule on this machine",
            )
        try:
            # As JSON, because strict reading of Python values would refuse lists for tuples.
            return TypeAdapter(cls).validate_json(json.dumps(raw), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise RecordError(f"{where}: `{field}`: {first['msg'][0].lower()}{first['msg'][1:]}", hint=hint) from None


def _alike(name: str, one: Any, other: Any) -> bool:
    if name == "memory" and isinstance(one, int) and isinstance(other, int):
        return abs(one - other) <= _MEMORY_TOLERANCE * max(one, other)
    return bool(one == other)


def _governors(run: Run) -> Any:
    clocks = run.before[0].get("clocks") if run.before else None
    return {clock["policy"]: clock["governor"] for clock in clocks} if clocks else None


# What of the settings changes the figures; how often things were repeated does not.
_SETTINGS = ("threads", "context", "chunk", "prompts", "decode", "seed", "request")


def unlike(one: Run, other: Run) -> list[str]:
    """Name the facts in which two runs differ so that their figures must not be compared.

    Returns:
      Lines such as ``governor: `ondemand` against `performance` ``; empty when the runs are alike.
    """
    pairs: list[tuple[str, Any, Any]] = [
        ("target", one.target, other.target),
        ("board", one.board, other.board),
        ("ferrule", one.ferrule, other.ferrule),
        ("engine", one.bundle.engine, other.bundle.engine),
    ]
    names = sorted((one.machine.keys() | other.machine.keys()) - {"missing"})
    pairs += [(name, one.machine.get(name), other.machine.get(name)) for name in names]
    pairs.append(("governor", _governors(one), _governors(other)))
    pairs += [(name, one.settings.get(name), other.settings.get(name)) for name in _SETTINGS]
    return [f"{name}: {_short(a)} against {_short(b)}" for name, a, b in pairs if not _alike(name, a, b)]


def _short(value: Any) -> str:
    text = str(value)
    return f"`{text[:57]}...`" if len(text) > 60 else f"`{text}`"


def _clock_warnings(conditions: Mapping[str, Any], when: str) -> list[str]:
    found = []
    for clock in conditions.get("clocks") or ():
        if clock["governor"] not in (None, "performance"):
            found.append(f"governor `{clock['governor']}` {when}: clocks follow the load")
        if clock["mhz"] and clock["max_mhz"] and when == "after" and clock["mhz"] < _SLOW_CLOCK * clock["max_mhz"]:
            found.append(f"{clock['policy']} at {clock['mhz']:.0f} of {clock['max_mhz']:.0f} MHz {when}")
    return found


def warnings(run: Run) -> list[str]:
    """Name the conditions under which a run's figures say less than they seem to."""
    found: list[str] = []
    cores = run.machine.get("cores") or 1
    if len(run.before) < 3:
        found.append(f"{len(run.before)} launch(es): the interval leaves out how processes differ")
    load = run.settings.get("load_at_start")
    if load is not None and load > _BUSY * cores:
        found.append(f"load {load:.2f} on {cores} cores at the start: other work was going on, or had just ended")
    for conditions in run.before:
        found += _clock_warnings(conditions, "before")
    for conditions in run.after:
        found += _clock_warnings(conditions, "after")
        if throttled := conditions.get("throttled"):
            found.append(f"the firmware says: {', '.join(throttled)}")
        for zone, value in (conditions.get("celsius") or {}).items():
            if value is not None and value >= _HOT_CELSIUS:
                found.append(f"{zone} at {value:.0f} C after a launch")
    events = [c["throttle_events"] for c in (*run.before, *run.after) if c.get("throttle_events") is not None]
    if events and max(events) > min(events):
        found.append(f"the processor throttled itself {max(events) - min(events)} times")
    if isinstance(run.power, Power) and run.power.simulated:
        found.append(f"energy is simulated ({run.power.source})")
    return list(dict.fromkeys(found))
