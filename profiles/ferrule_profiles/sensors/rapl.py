"""RAPL: energy counters of x86 processor packages, through Linux's powercap (Documentation/power/powercap)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ferrule_runtime.procfs import Absent, number, read_text

from . import NoSensor, Quantity

__all__ = ["RaplSensor", "open_sensor"]

_FOLDER = "sys/class/powercap"


@dataclass
class _Zone:
    """One package: its counter in microjoules, which starts again from 0 after `wrap`."""

    path: Path
    wrap: float
    last: float
    counted: float = 0.0

    def count(self) -> float:
        now = _counter(self.path)
        # The counters wrap after minutes to hours; samples are far closer together.
        self.counted += now - self.last if now >= self.last else now + self.wrap - self.last
        self.last = now
        return self.counted


def _counter(path: Path) -> float:
    try:
        return number(path / "energy_uj")
    except Absent as reason:
        hint = "; allow it: sudo chmod a+r /sys/class/powercap/*/energy_uj" if "ermission" in str(reason) else ""
        raise NoSensor(f"{reason}{hint}") from None


class RaplSensor:
    """Energy of all processor packages, counted since this sensor was opened."""

    name = "rapl"
    boundary = (
        "processor packages (cores, caches, memory controller, integrated graphics); "
        "without DRAM, board and power supply; what was idle is included"
    )
    quantity: Quantity = "energy"
    period = 0.02

    def __init__(self, zones: list[_Zone]) -> None:
        self._zones = zones

    def read(self) -> float:
        """Return joules since the sensor was opened."""
        return sum(zone.count() for zone in self._zones) / 1e6


def open_sensor(root: Path) -> RaplSensor:
    """Open the counters of all packages.

    Zones inside a package are parts of it, and `psys` (the platform) holds the packages: neither is added.

    Raises:
      NoSensor: No counters, or only root may read them.
    """
    folder = root / _FOLDER
    zones = []
    for path in sorted(folder.glob("intel-rapl:*")):
        if path.name.count(":") != 1:
            continue
        try:
            if not read_text(path / "name").startswith("package"):
                continue
            wrap = number(path / "max_energy_range_uj")
        except Absent as reason:
            raise NoSensor(str(reason)) from None
        zones.append(_Zone(path, wrap, _counter(path)))
    if not zones:
        raise NoSensor(f"no package in /{_FOLDER}")
    return RaplSensor(zones)
