"""`replay:FILE`: samples from a CSV file, as if a meter had just said them. Simulated, and its figures say so."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

from ferrule_runtime.errors import RecordError, UsageError

from ..power import Samples
from ..run import Power
from ..sensors import Quantity

__all__ = ["ReplayMeter", "open_meter"]

_COLUMNS: dict[str, Quantity] = {"watts": "power", "joules": "energy"}


class ReplayMeter:
    """A file of samples, replayed from its beginning in every launch."""

    def __init__(self, path: Path, quantity: Quantity, seconds: list[float], values: list[float]) -> None:
        self.power = Power(
            f"replay of {path.name}", "simulated: samples from a file, not from this run", simulated=True
        )
        self._quantity = quantity
        self._seconds = seconds
        self._values = values
        self._start = 0

    def start(self) -> None:
        """Lay the file's first second beside this moment."""
        self._start = time.monotonic_ns()

    def stop(self) -> Samples:
        """Return the whole file."""
        times = tuple(self._start + round(seconds * 1e9) for seconds in self._seconds)
        return Samples(self._quantity, times, tuple(self._values), "the file ended")


def open_meter(rest: str) -> ReplayMeter:
    """Read a file with a header `seconds,watts` or `seconds,joules`.

    Raises:
      UsageError: No file is named.
      RecordError: The file cannot be read, or a line is not two finite numbers with rising seconds.
    """
    if not rest:
        raise UsageError("`replay:` names no file", hint="write replay:samples.csv")
    path = Path(rest)
    hint = "a header `seconds,watts` or `seconds,joules`, then numbers; seconds rise"
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read: {error}", hint=hint) from None
    if not rows or len(rows[0]) != 2 or rows[0][0] != "seconds" or rows[0][1] not in _COLUMNS:
        raise RecordError(f"{path}:1: not a header of samples", hint=hint)
    seconds: list[float] = []
    values: list[float] = []
    for number, row in enumerate(rows[1:], 2):
        try:
            moment, value = map(float, row)
        except ValueError:
            raise RecordError(f"{path}:{number}: `{','.join(row)}` is not two numbers", hint=hint) from None
        if not (math.isfinite(moment) and math.isfinite(value)) or (seconds and moment <= seconds[-1]):
            raise RecordError(f"{path}:{number}: `{','.join(row)}` is not finite, or not later", hint=hint)
        seconds.append(moment)
        values.append(value)
    return ReplayMeter(path, _COLUMNS[rows[0][1]], seconds, values)
