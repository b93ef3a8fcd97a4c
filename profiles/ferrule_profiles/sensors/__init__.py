"""Power sensors on a board, one file each.

Each module defines `open_sensor(root) -> Sensor`, which raises `NoSensor` with the reason where there is none. A sensor
gives either the power of this moment or the energy counted so far; what it covers is its `boundary`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol

from ferrule_runtime.registry import module_names

__all__ = ["NoSensor", "Quantity", "Sensor", "find_sensor"]

# `power`: watts now. `energy`: joules since some moment, never falling.
Quantity = Literal["power", "energy"]


class NoSensor(Exception):  # noqa: N818 - carries a reason, is not a failure
    """There is no such sensor here, or it may not be read; the text says why."""


class Sensor(Protocol):
    """Something on the board that knows about power."""

    @property
    def name(self) -> str:
        """The name of its file."""
        ...

    @property
    def boundary(self) -> str:
        """What its number covers, and what it does not."""
        ...

    @property
    def quantity(self) -> Quantity:
        """What `read` returns."""
        ...

    @property
    def period(self) -> float:
        """Seconds between samples: as often as it has something new and reading it does not disturb."""
        ...

    def read(self) -> float:
        """Return watts or joules.

        Raises:
          NoSensor: It can no longer be read.
        """
        ...


def find_sensor(root: Path = Path("/")) -> Sensor:
    """Return the first sensor that works here, trying them in the order of their names.

    Raises:
      NoSensor: None does; the text has every sensor's reason.
    """
    reasons = []
    for name in module_names(__name__):
        module = import_module(f"{__name__}.{name.replace('-', '_')}")
        try:
            sensor: Sensor = module.open_sensor(root)
        except NoSensor as reason:
            reasons.append(f"{name}: {reason}")
        else:
            return sensor
    raise NoSensor("no power sensor here (" + "; ".join(reasons) + ")")
