"""From events of `ferrule measure` to figures of memory."""

from __future__ import annotations

from collections.abc import Sequence

from .clock import Launch, named
from .run import Missing, Value, summarise

__all__ = ["memory"]


def memory(launches: Sequence[Launch]) -> dict[str, Value]:
    """Return the peak resident set, and the most that could not have been evicted.

    `peak_rss` is the kernel's own high-water mark. `unevictable` is anonymous and shared memory, the larger of the
    readings when loaded and at the end: between them it may have been higher.

    Args:
      launches: Events of each process.
    """
    figures: dict[str, Value] = {}
    for name in ("peak_rss", "unevictable"):
        readings = [named(launch, "memory") for launch in launches]
        absent = [e["missing"].get(name, "no reason given") for launch in readings for e in launch if e[name] is None]
        if absent:
            figures[name] = Missing(absent[0])
        else:
            figures[name] = summarise([[max(e[name] for e in launch)] if launch else [] for launch in readings], "B")
    return figures
