"""Figures in words: the same everywhere, with units and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ferrule_runtime.commandline import human

from .power import ENERGY_FIGURES
from .run import Figure, Power, Run, Value, warnings

__all__ = ["amount", "describe", "interval", "label", "show", "with_interval"]

_LABELS = {
    "prefill": "prefill",
    "first_token": "time to first token",
    "decode": "decode",
    "load": "load",
    "request_to_call": "request to call",
    "request_first_token": "request to first token",
    "peak_rss": "peak RSS",
    "unevictable": "unevictable",
    "energy_per_token": "energy per token",
    "prefill_energy": "energy of the prefill",
    "power": "power while decoding",
}


# Below it a divergence is the rounding of float32 sums, and may even be negative.
_SMALLEST_KL = 1e-6


def label(name: str) -> str:
    """Name a figure for people: `decode@128` is `decode, 128-token prompt`."""
    kind, _, prompt = name.partition("@")
    return _LABELS.get(kind, kind) + (f", {prompt}-token prompt" if prompt else "")


def _digits(value: float) -> str:
    """Write a number with three significant digits; exponents only where it would be long otherwise."""
    if value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def amount(value: float, unit: str, like: float | None = None) -> str:
    """Write a value with its unit: `38.2 tok/s`, `212.4 MiB`, `84.1 ms`.

    Args:
      value: The value.
      unit: Its unit; seconds and joules are written in thousandths below 1.
      like: A value whose scale is used instead of its own.
    """
    if unit == "B":
        return human(value)
    if unit == "nats" and abs(value) < _SMALLEST_KL:
        return f"< {_SMALLEST_KL:g} {unit}"
    if unit in ("s", "J") and 0 < abs(value if like is None else like) < 1:
        return f"{_digits(value * 1e3)} m{unit}"
    return f"{_digits(value)} {unit}".rstrip()


def interval(figure: Figure) -> str:
    """Write a figure's interval, units only where they differ from the median's: `[36.1 to 39.0]`."""
    if figure.count == 1:
        return "[one value]"
    unit = amount(figure.median, figure.unit).partition(" ")[2]
    ends = (amount(value, figure.unit, figure.median).removesuffix(f" {unit}") for value in (figure.low, figure.high))
    return f"[{' to '.join(ends)}]"


def with_interval(figure: Figure) -> str:
    """Write a figure with its interval: `38.2 tok/s [36.1 to 39.0]`."""
    if figure.count == 0 and figure.low == figure.high:  # counted, not measured
        return amount(figure.median, figure.unit)
    return f"{amount(figure.median, figure.unit)} {interval(figure)}"


def show(value: Value) -> str:
    """Write a figure with its interval, or `null` and the reason."""
    return with_interval(value) if isinstance(value, Figure) else f"null: {value.reason}"


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(left) for left, _ in rows)
    return [f"  {left:{width}}  {right}" for left, right in rows]


def describe(run: Run) -> list[str]:
    """Return a run as lines of text: what was measured, every figure, and how much to trust it."""
    facts = run.bundle
    title = f"{facts.name}: {facts.recipe_key}, {human(facts.bytes)}, {facts.bits_per_weight:.2f} bits per weight"
    rows: list[tuple[str, str]] = []
    for name, value in run.figures.items():
        if isinstance(run.power, Power) or name.partition("@")[0] not in ENERGY_FIGURES:
            rows.append((label(name), show(value)))
    if isinstance(run.power, Power):
        rows.append(("energy covers", f"{run.power.source}: {run.power.boundary}"))
    else:
        rows.append(("energy", f"null: {run.power.reason}"))
    how = next((value.how for value in run.figures.values() if isinstance(value, Figure) and value.count > 1), None)
    if how:
        rows.append(("how", f"{how}; load once per launch, memory too"))
    return [title, *_table(rows), *(f"  warning: {text}" for text in warnings(run))]
