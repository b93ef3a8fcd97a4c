"""Facts of this machine: what must be alike for two measurements to be compared, and the conditions they ran under.

Everything is read from files under a root, so that a tree of another machine can be read too. Needs the standard
library only. A fact that is absent is `None`, and `missing` says why; it is never zero.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .procfs import Absent, cpu_list, cpu_quota, field, kib, maybe, memory_limit, read_text

__all__ = ["PACKAGES", "Conditions", "CpuClock", "Machine", "conditions", "machine"]

# Packages whose version changes what is measured.
PACKAGES = ("ferrule-runtime", "numpy", "onnxruntime", "llguidance", "tokenizers")

# Main ID register: implementer 0x41 is Arm; parts as in Linux, arch/arm64/include/asm/cputype.h.
_ARM_PARTS = {
    0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72",
    0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77",
    0xD40: "Neoverse-V1", 0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510",
    0xD47: "Cortex-A710", 0xD48: "Cortex-X2", 0xD49: "Neoverse-N2", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3",
    0xD4F: "Neoverse-V2", 0xD80: "Cortex-A520", 0xD81: "Cortex-A720",
}  # fmt: skip

# `vcgencmd get_throttled`, as documented for Raspberry Pi OS: bits 0-3 now, 16-19 since boot.
_THROTTLE_BITS = ("under-voltage", "frequency capped", "throttled", "soft temperature limit")


@dataclass(frozen=True)
class CpuClock:
    """One group of cores that share a clock; MHz."""

    policy: str
    governor: str | None
    mhz: float | None
    max_mhz: float | None


@dataclass(frozen=True)
class Machine:
    """What does not change between two runs on one machine.

    Attributes:
      arch: Instruction set, such as `aarch64`.
      pointer_bits: Width of a pointer in this Python: 32 on a 32-bit system, whatever the processor.
      board: The product's own name, from the device tree or the firmware.
      cpu: Model of the processor; several kinds of core are joined with `+`.
      cores: Logical cores this process may use.
      cpu_quota: Processor time allowed by the control group, in cores.
      features: Instruction set extensions, sorted, as the kernel names them.
      memory: RAM in bytes.
      memory_limit: The tightest limit of the control groups this process is in, bytes.
      max_mhz: Highest clock of each policy.
      kernel: Release of the kernel.
      system: Name of the operating system.
      python: Version of this Python.
      packages: Versions of what executes; those not installed are in `missing` as `packages.NAME`.
      missing: Reason for every fact that is `None`.
    """

    arch: str | None
    pointer_bits: int
    board: str | None
    cpu: str | None
    cores: int | None
    cpu_quota: float | None
    features: tuple[str, ...] | None
    memory: int | None
    memory_limit: int | None
    max_mhz: Mapping[str, float] | None
    kernel: str | None
    system: str | None
    python: str
    packages: Mapping[str, str]
    missing: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-like data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Conditions:
    """What does change: read before and after a measurement.

    Attributes:
      memory_available: Bytes that can be had without swapping.
      clocks: Governor and clock of each policy.
      celsius: Temperature of each thermal zone.
      throttled: What the board's firmware says holds it back, now or since boot; empty when nothing did.
      throttle_events: Times the processor throttled itself since boot, all cores.
      load: Load average of the last minute.
      missing: Reason for every fact that is `None`.
    """

    memory_available: int | None
    clocks: tuple[CpuClock, ...] | None
    celsius: Mapping[str, float | None] | None
    throttled: tuple[str, ...] | None
    throttle_events: int | None
    load: float | None
    missing: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-like data."""
        return dataclasses.asdict(self)


def _gather(readers: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, reader in readers.items():
        try:
            values[name] = reader()
        except Absent as reason:
            values[name], missing[name] = None, str(reason)
    return values, missing


def _board(root: Path) -> str:
    for place in ("proc/device-tree/model", "sys/class/dmi/id/product_name"):
        try:
            if name := read_text(root / place):
                return name
        except Absent:
            continue
    raise Absent("neither /proc/device-tree/model nor /sys/class/dmi/id/product_name names it")


def _cpu(root: Path) -> str:
    text = read_text(root / "proc/cpuinfo")
    if names := re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        return " + ".join(sorted({name.strip() for name in names}))
    makers = re.findall(r"^CPU implementer\s*:\s*(0x[0-9a-fA-F]+)$", text, re.MULTILINE)
    parts = re.findall(r"^CPU part\s*:\s*(0x[0-9a-fA-F]+)$", text, re.MULTILINE)
    if not parts or len(makers) != len(parts):
        raise Absent("/proc/cpuinfo has neither `model name` nor `CPU part`")
    kinds = []
    for maker, part in zip(makers, parts, strict=True):
        known = _ARM_PARTS.get(int(part, 16)) if int(maker, 16) == 0x41 else None
        kinds.append(known or f"implementer {maker} part {part}")
    return " + ".join(f"{kinds.count(kind)}x {kind}" for kind in sorted(set(kinds)))


def _features(root: Path) -> tuple[str, ...]:
    text = read_text(root / "proc/cpuinfo")
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    if not lines:
        raise Absent("/proc/cpuinfo has neither `flags` nor `Features`")
    # A program may land on any core, so only what every core has counts.
    return tuple(sorted(set.intersection(*(set(line.split()) for line in lines))))


def _cores(root: Path) -> int:
    # The mask that sched_getaffinity starts from; it also names cores that are not online.
    allowed = cpu_list(field(root / "proc/self/status", "Cpus_allowed_list"))
    try:
        return len(allowed & cpu_list(read_text(root / "sys/devices/system/cpu/online")))
    except Absent:
        return len(allowed)


def _clocks(root: Path) -> tuple[CpuClock, ...]:
    folder = root / "sys/devices/system/cpu/cpufreq"
    policies = sorted(folder.glob("policy*"), key=lambda path: (len(path.name), path.name))
    if not policies:
        raise Absent("no policy in /sys/devices/system/cpu/cpufreq")
    clocks = []
    for path in policies:
        try:
            governor: str | None = read_text(path / "scaling_governor")
        except Absent:
            governor = None
        # cpufreq counts in kHz.
        now, most = maybe(path / "scaling_cur_freq", 1e-3), maybe(path / "cpuinfo_max_freq", 1e-3)
        clocks.append(CpuClock(path.name, governor, now, most))
    return tuple(clocks)


def _max_mhz(root: Path) -> dict[str, float]:
    known = {clock.policy: clock.max_mhz for clock in _clocks(root) if clock.max_mhz is not None}
    if not known:
        raise Absent("no policy says its highest clock")
    return known


def _celsius(root: Path) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"), key=lambda path: (len(path.name), path.name))
    for zone in zones:
        try:
            kind = read_text(zone / "type")
        except Absent:
            kind = zone.name
        # Thousandths of a degree; a zone cannot be read while its sensor sleeps.
        found[kind if kind not in found else f"{kind} ({zone.name})"] = maybe(zone / "temp", 1e-3)
    if not found:
        raise Absent("no thermal zone in /sys/class/thermal")
    return found


def _throttled(root: Path) -> tuple[str, ...]:
    program = root / "usr/bin/vcgencmd"
    if not program.exists():
        raise Absent("no /usr/bin/vcgencmd (it is a Raspberry Pi's)")
    try:
        done = subprocess.run([program, "get_throttled"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"vcgencmd get_throttled: {error}") from None
    match = re.fullmatch(r"throttled=0x([0-9a-fA-F]+)", done.stdout.strip())
    if done.returncode or not match:
        raise Absent(f"vcgencmd get_throttled: exit {done.returncode}, `{(done.stdout + done.stderr).strip()[:80]}`")
    bits = int(match[1], 16)
    now = [f"{name} now" for bit, name in enumerate(_THROTTLE_BITS) if bits >> bit & 1]
    return (*now, *(f"{name} since boot" for bit, name in enumerate(_THROTTLE_BITS) if bits >> bit + 16 & 1))


def _throttle_events(root: Path) -> int:
    counts = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    known = [value for value in map(maybe, counts) if value is not None]
    if not known:
        raise Absent("no thermal_throttle counters in /sys/devices/system/cpu")
    return int(sum(known))


def _load(root: Path) -> float:
    text = read_text(root / "proc/loadavg")
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        raise Absent(f"/proc/loadavg: `{text[:40]}` does not start with a number") from None


def _system(root: Path) -> str:
    for line in read_text(root / "etc/os-release").splitlines():
        key, _, value = line.partition("=")
        if key == "PRETTY_NAME":
            return value.strip("\"'")
    raise Absent("no PRETTY_NAME in /etc/os-release")


def _arch() -> str:
    if name := platform.machine():
        return name
    raise Absent("the operating system does not say")


def machine(root: Path = Path("/")) -> Machine:
    """Read what does not change between two runs.

    Args:
      root: Where /proc, /sys and /etc are. Versions of Python and packages, and the architecture unless the tree
        says it (/proc/sys/kernel/arch), are of the running interpreter.
    """
    kernel_arch = root / "proc/sys/kernel/arch"
    values, missing = _gather({
        "arch": lambda: read_text(kernel_arch) if kernel_arch.exists() else _arch(),
        "board": lambda: _board(root),
        "cpu": lambda: _cpu(root),
        "cores": lambda: _cores(root),
        "cpu_quota": lambda: cpu_quota(root),
        "features": lambda: _features(root),
        "memory": lambda: kib(root / "proc/meminfo", "MemTotal"),
        "memory_limit": lambda: memory_limit(root),
        "max_mhz": lambda: _max_mhz(root),
        "kernel": lambda: read_text(root / "proc/sys/kernel/osrelease"),
        "system": lambda: _system(root),
    })  # fmt: skip
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing[f"packages.{name}"] = "not installed"
    return Machine(
        **values,
        pointer_bits=struct.calcsize("P") * 8,
        python=".".join(map(str, sys.version_info[:3])),
        packages=packages,
        missing=missing,
    )


def conditions(root: Path = Path("/")) -> Conditions:
    """Read what changes while a machine works; takes a few milliseconds.

    Args:
      root: Where /proc, /sys and /usr/bin/vcgencmd are.
    """
    values, missing = _gather({
        "memory_available": lambda: kib(root / "proc/meminfo", "MemAvailable"),
        "clocks": lambda: _clocks(root),
        "celsius": lambda: _celsius(root),
        "throttled": lambda: _throttled(root),
        "throttle_events": lambda: _throttle_events(root),
        "load": lambda: _load(root),
    })  # fmt: skip
    for clock in values["clocks"] or ():
        parts = {"governor": clock.governor, "mhz": clock.mhz, "max_mhz": clock.max_mhz}
        missing |= {f"clocks.{clock.policy}.{part}": "not said" for part, value in parts.items() if value is None}
    zones = values["celsius"] or {}
    missing |= {f"celsius.{zone}": "cannot be read now" for zone, value in zones.items() if value is None}
    return Conditions(**values, missing=missing)
