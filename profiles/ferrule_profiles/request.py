"""What a run says about one request: a prompt of so many tokens, and so many tokens decoded for the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule_runtime.errors import RecordError, UsageError

from .run import Figure, Missing, Run, Value

__all__ = [
    "QUANTITIES",
    "Candidate",
    "Quantity",
    "Request",
    "candidates",
    "common_request",
    "describe_latency",
    "fidelity_value",
]

# Tokens of a call with two short arguments, with what comes before it: about what the tool-use suites ask for.
_CALL_TOKENS = 60


@dataclass(frozen=True)
class Request:
    """The request that recipes are compared by.

    Attributes:
      prompt: Tokens to prefill; one of the measured lengths.
      tokens: Tokens decoded behind it.
    """

    prompt: int
    tokens: int = _CALL_TOKENS


def common_request(runs: Sequence[Run], prompt: int | None = None) -> Request:
    """Return the request that all runs can answer for: the longest prompt that all measured, unless one is given.

    Raises:
      RecordError: No prompt length was measured by all.
      UsageError: The given one was not.
    """
    lengths = set.intersection(*(set(run.settings.get("prompts", ())) for run in runs))
    if not lengths:
        raise RecordError("no prompt length was measured in all runs", hint="profile them with the same --prompt")
    if prompt is not None and prompt not in lengths:
        raise UsageError(
            f"no figures for a prompt of {prompt} tokens", hint=f"measured: {', '.join(map(str, sorted(lengths)))}"
        )
    return Request(prompt if prompt is not None else max(lengths))


def _exact(value: float, unit: str) -> Figure:
    return Figure(value, value, value, unit, (), "exact")


def _combine(first: Value, second: Value, how: str, unit: str, join: Callable[[float, float], float]) -> Value:
    """Join two figures; the interval joins the two worst and the two best ends, so it is wide rather than narrow."""
    for value in (first, second):
        if isinstance(value, Missing):
            return value
    assert isinstance(first, Figure)
    assert isinstance(second, Figure)
    ends = [join(a, b) for a in (first.low, first.high) for b in (second.low, second.high)]
    return Figure(join(first.median, second.median), min(ends), max(ends), unit, (), how)


def _latency(run: Run, request: Request) -> Value:
    measured = run.figures.get("request_to_call")
    if isinstance(measured, Figure):
        return measured
    first, decode = run.figure(f"first_token@{request.prompt}"), run.figure(f"decode@{request.prompt}")
    how = f"time to first token + {request.tokens} tokens / decode rate"
    return _combine(first, decode, how, "s", lambda seconds, rate: seconds + request.tokens / rate)


def latency_parts(run: Run, request: Request) -> tuple[Value, Value]:
    """Return the time to the first token, and the whole latency that it is a part of."""
    first = run.figures.get("request_first_token")
    if not isinstance(first, Figure):
        first = run.figure(f"first_token@{request.prompt}")
    return first, _latency(run, request)


def describe_latency(run: Run, request: Request) -> str:
    """Say what the latency of a run is of: a whole request that was timed, or one put together from its parts."""
    whole = run.settings.get("request", {})
    if isinstance(run.figures.get("request_to_call"), Figure):
        return f"a request of {whole['prompt']} tokens answered by a call of {whole['tokens']}"
    return f"a prompt of {request.prompt} tokens and {request.tokens} decoded ones"


def _energy(run: Run, request: Request) -> Value:
    prefill, token = run.figure(f"prefill_energy@{request.prompt}"), run.figure(f"energy_per_token@{request.prompt}")
    how = f"energy of the prefill + {request.tokens} tokens"
    return _combine(prefill, token, how, "J", lambda joules, each: joules + request.tokens * each)


def fidelity_value(run: Run, name: str) -> Value:
    """Return one fidelity figure of the bundle's manifest, such as `kl` or `top1`, or why there is none."""
    fidelity: Mapping[str, Any] = run.fidelity
    value = fidelity.get(name)
    if value is None:
        return Missing(str(fidelity.get("skipped", f"the manifest has no `{name}`")))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _exact(float(value), "nats" if name == "kl" else "")
    raise RecordError(f"run of {run.time}: fidelity `{name}` is `{value}`, not a number", hint="convert again")


@dataclass(frozen=True)
class Quantity:
    """Something that recipes are compared by.

    Attributes:
      label: Its name for people.
      unit: Of its values.
      less: Whether less is better.
      best: What the better one is said to have.
      of: Reads it from a run.
    """

    label: str
    unit: str
    less: bool
    best: str
    of: Callable[[Run, Request], Value]


QUANTITIES: Mapping[str, Quantity] = {
    "latency": Quantity("latency", "s", True, "the lowest latency", _latency),
    "first_token": Quantity(
        "time to first token", "s", True, "the earliest token", lambda run, r: run.figure(f"first_token@{r.prompt}")
    ),
    "decode": Quantity("decode", "tok/s", False, "the fastest decode", lambda run, r: run.figure(f"decode@{r.prompt}")),
    "memory": Quantity("peak RSS", "B", True, "the least peak RSS", lambda run, _: run.figure("peak_rss")),
    "size": Quantity("size", "B", True, "the smallest size", lambda run, _: _exact(run.bundle.bytes, "B")),
    "fidelity": Quantity(
        "KL to float", "nats", True, "the least KL to float", lambda run, _: fidelity_value(run, "kl")
    ),
    "energy": Quantity("energy per task", "J", True, "the least energy", _energy),
}


@dataclass(frozen=True)
class Candidate:
    """A run among those to choose from.

    Attributes:
      name: What it is called among them, unlike any other: its recipe, or bundle and recipe key.
      run: The run.
      values: Every quantity, by its name in `QUANTITIES`.
    """

    name: str
    run: Run
    values: Mapping[str, Value]


def candidates(runs: Sequence[Run], request: Request) -> list[Candidate]:
    """Read every quantity of every run for one request."""
    recipes = [run.bundle.recipe for run in runs]
    alike = len(set(recipes)) < len(recipes)
    return [
        Candidate(
            f"{run.bundle.name} ({run.bundle.recipe_key}, {run.bundle.form})" if alike else run.bundle.recipe,
            run,
            {name: quantity.of(run, request) for name, quantity in QUANTITIES.items()},
        )
        for run in runs
    ]
