"""The power chip of a Raspberry Pi 5, through `vcgencmd pmic_read_adc`: current and voltage of twelve rails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import NoSensor, Quantity

__all__ = ["RpiPmicSensor", "open_sensor", "rail_power"]

# ` VDD_CORE_A current(7)=0.75012000A`, ` VDD_CORE_V volt(15)=0.72021000V`.
_LINE = re.compile(r"^\s*(\w+)_([AV]) (?:current|volt)\(\d+\)=(\d+\.\d+)[AV]$", re.MULTILINE)


def rail_power(text: str) -> float:
    """Add up the rails in watts.

    Rails are paired by name: the numbers in parentheses of current and voltage do not follow one rule. The supply and
    the clock battery have no current, so they are left out.

    Args:
      text: What `vcgencmd pmic_read_adc` printed.

    Raises:
      NoSensor: No rail has both values.
    """
    values = {(rail, kind): float(value) for rail, kind, value in _LINE.findall(text)}
    rails = [rail for rail, kind in values if kind == "A" and (rail, "V") in values]
    if not rails:
        raise NoSensor(f"vcgencmd pmic_read_adc names no rail with current and voltage: `{text.strip()[:60]}`")
    return sum(values[rail, "A"] * values[rail, "V"] for rail in rails)


class RpiPmicSensor:
    """Power of the rails behind the power chip, in watts now."""

    name = "rpi-pmic"
    boundary = (
        "the twelve rails behind the power chip; without its losses, USB, fan and supply, so less than at the plug; "
        "idle included"
    )
    quantity: Quantity = "power"
    # Every reading starts a process of its own.
    period = 0.5

    def __init__(self, program: Path) -> None:
        self._program = program

    def read(self) -> float:
        """Return watts."""
        try:
            done = subprocess.run(
                [self._program, "pmic_read_adc"], capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoSensor(f"vcgencmd pmic_read_adc: {error}") from None
        return rail_power(done.stdout)


def open_sensor(root: Path) -> RpiPmicSensor:
    """Open the power chip.

    Raises:
      NoSensor: This is no Raspberry Pi 5.
    """
    program = root / "usr/bin/vcgencmd"
    if not program.exists():
        raise NoSensor("no /usr/bin/vcgencmd")
    sensor = RpiPmicSensor(program)
    sensor.read()
    return sensor
