"""Power monitors that Linux's hwmon knows: INA219/226-like chips on a supply rail, and a Jetson's INA3221.

Files and units: Linux, Documentation/hwmon/sysfs-interface (microwatts, millivolts, milliamperes).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ferrule_runtime.procfs import Absent, number, read_text

from . import NoSensor, Quantity

__all__ = ["HwmonSensor", "open_sensor"]

# Chips with one shunt each; anything else with a power file (graphics cards, batteries) measures something else.
_SINGLE = ("ina209", "ina219", "ina220", "ina226", "ina230", "ina231", "ina232", "ina233", "ina234", "ina238", "ina260")

# Jetson modules name the channel of their whole input so; the other channels are parts of it.
_JETSON_INPUT = "VDD_IN"


class HwmonSensor:
    """Power of one rail, in watts now."""

    name = "hwmon"
    quantity: Quantity = "power"
    period = 0.05

    def __init__(self, read: Callable[[], float], boundary: str) -> None:
        self.boundary = boundary
        self._read = read

    def read(self) -> float:
        """Return watts."""
        try:
            return self._read()
        except Absent as reason:
            raise NoSensor(str(reason)) from None


def _product(volts: Path, amperes: Path) -> Callable[[], float]:
    return lambda: number(volts) * number(amperes) / 1e6


def _jetson(chip: Path) -> HwmonSensor | None:
    for label in sorted(chip.glob("in*_label")):
        if read_text(label) == _JETSON_INPUT:
            channel = label.name.removeprefix("in").removesuffix("_label")
            read = _product(chip / f"in{channel}_input", chip / f"curr{channel}_input")
            read()
            return HwmonSensor(
                read, "whole input of the Jetson module (VDD_IN); without carrier board and supply; idle included"
            )
    return None


def _single(chip: Path, kind: str) -> HwmonSensor:
    power = chip / "power1_input"
    number(power)
    boundary = f"the rail that the {kind} at {chip.name} is wired into; idle included"
    return HwmonSensor(lambda: number(power) / 1e6, boundary)


def open_sensor(root: Path) -> HwmonSensor:
    """Open the one power monitor of this board.

    Raises:
      NoSensor: There is none, or there are several and nothing says which one feeds the board.
    """
    found = []
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        try:
            kind = read_text(chip / "name")
            if kind == "ina3221" and (sensor := _jetson(chip)):
                found.append(sensor)
            elif kind in _SINGLE:
                found.append(_single(chip, kind))
        except Absent:
            continue
    if not found:
        raise NoSensor("no power monitor in /sys/class/hwmon")
    if len(found) > 1:
        raise NoSensor(f"{len(found)} power monitors in /sys/class/hwmon, and nothing says which one feeds the board")
    return found[0]
