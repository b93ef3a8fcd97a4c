"""What the team requires.

A limit is checked at the unfavourable end of the interval, and a missing figure meets none. Memory is checked at the
most that was ever seen, since one peak over the limit is enough to end the process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferrule_runtime.errors import FerruleError

from .request import QUANTITIES, Candidate
from .run import Figure, Missing
from .words import amount

__all__ = ["Limits", "NothingFits", "Shortfall", "met", "nothing_fits", "shortfalls"]


class NothingFits(FerruleError):  # noqa: N818 - reads as a sentence where it is raised
    """No recipe meets the limits.

    Attributes:
      nearest: Recipes with what each lacks, the nearest first.
    """

    def __init__(self, message: str, *, nearest: Sequence[tuple[str, str]], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.nearest = tuple(nearest)


@dataclass(frozen=True)
class Limits:
    """What must be met; `None` is no limit.

    Attributes:
      max_memory: Peak RSS, bytes.
      max_first_token: Seconds from a request to its first token.
      min_decode: Tokens per second.
      max_size: Bytes of the bundle.
      max_kl: KL divergence to the float model, nats per token.
      max_energy_per_task: Joules of one request.
      max_accuracy_loss: Points of a suite's score; scores are not recorded yet, so it is refused where limits are used.
    """

    max_memory: float | None = None
    max_first_token: float | None = None
    min_decode: float | None = None
    max_size: float | None = None
    max_kl: float | None = None
    max_energy_per_task: float | None = None
    max_accuracy_loss: float | None = None

    def given(self) -> Iterator[tuple[str, float]]:
        """Yield the limits that are set, by name."""
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                yield name, value


# Limit -> the quantity it bounds.
_BOUNDS = {
    "max_memory": "memory",
    "max_first_token": "first_token",
    "min_decode": "decode",
    "max_size": "size",
    "max_kl": "fidelity",
    "max_energy_per_task": "energy",
}


@dataclass(frozen=True)
class Shortfall:
    """A limit that is not met.

    Attributes:
      share: By what share of the limit; infinite where the figure is missing.
      words: The figure, the limit, and the difference.
    """

    share: float
    words: str


def _worst(limit: str, figure: Figure) -> tuple[float, str]:
    """Return the value that a limit is checked at, and what it is."""
    if figure.count == 0 and figure.low == figure.high:
        return figure.median, ""
    if limit == "max_memory":
        return max(map(max, figure.values)), " at the most"
    return (figure.high, " at the 95 % end") if QUANTITIES[_BOUNDS[limit]].less else (figure.low, " at the 5 % end")


def _shortfall(candidate: Candidate, limit: str, bound: float) -> Shortfall | None:
    quantity, value = QUANTITIES[_BOUNDS[limit]], candidate.values[_BOUNDS[limit]]
    flag = "--" + limit.replace("_", "-")
    if isinstance(value, Missing):
        return Shortfall(
            math.inf, f"{quantity.label} is null ({value.reason}), and a missing figure does not meet {flag}"
        )
    worst, end = _worst(limit, value)
    over = worst - bound if quantity.less else bound - worst
    if over <= 0:
        return None
    sign = "over" if quantity.less else "under"
    return Shortfall(
        over / bound if bound else math.inf,
        f"{quantity.label} {amount(worst, quantity.unit)}{end} is {sign} {flag} {amount(bound, quantity.unit)} "
        f"by {amount(over, quantity.unit)}",
    )


def shortfalls(candidate: Candidate, limits: Limits) -> list[Shortfall]:
    """Return every limit that a candidate does not meet."""
    found = (_shortfall(candidate, limit, bound) for limit, bound in limits.given())
    return [shortfall for shortfall in found if shortfall is not None]


def met(candidate: Candidate, limits: Limits) -> str:
    """Say how a candidate meets every limit, in numbers; empty without limits."""
    parts = []
    for limit, bound in limits.given():
        quantity, value = QUANTITIES[_BOUNDS[limit]], candidate.values[_BOUNDS[limit]]
        assert isinstance(value, Figure), "a missing figure meets no limit"
        worst, end = _worst(limit, value)
        parts.append(f"{quantity.label} {amount(worst, quantity.unit)}{end} (limit {amount(bound, quantity.unit)})")
    return ", ".join(parts)


def nothing_fits(failures: Mapping[str, Sequence[Shortfall]], target: str) -> NothingFits:
    """Return the error that lists every candidate with what it lacks, the nearest first.

    Args:
      failures: What each candidate lacks, by its name.
      target: The kind of board.
    """

    def distance(item: tuple[str, Sequence[Shortfall]]) -> tuple[int, float, str]:
        finite = [short.share for short in item[1] if math.isfinite(short.share)]
        return len(item[1]) - len(finite), max(finite, default=0.0), item[0]

    ranked = sorted(failures.items(), key=distance)
    nearest = [(name, "; ".join(short.words for short in short_of)) for name, short_of in ranked]
    lines = "".join(f"\n  `{name}`: {why}" for name, why in nearest)
    return NothingFits(
        f"no recipe of {len(nearest)} on `{target}` meets the limits; nearest first:{lines}",
        nearest=nearest,
        hint="relax a limit, or convert to a smaller recipe",
    )
