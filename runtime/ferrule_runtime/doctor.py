"""`ferrule doctor`: what on this machine helps or hinders an agent, and what to do about it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .bundle import state_folder
from .commandline import emit, human, say
from .probe import Conditions, Machine, conditions, machine

if TYPE_CHECKING:
    import argparse

__all__ = ["Finding", "Verdict", "doctor", "doctor_run"]

Verdict = Literal["ok", "warn", "missing"]

# A Raspberry Pi's firmware starts to slow the cores at 80 degrees; most others later.
_HOT_CELSIUS = 80.0

# Of the cores that an agent would use, the share that other work may take before timings mean little.
_BUSY = 0.3

# A small model of about 100 million weights with Python and its engine does not fit below this.
_LITTLE_MEMORY = 256 << 20


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
      name: What was looked at.
      value: What was found, for people.
      verdict: `ok`; `warn`: it works, but worse than it could; `missing`: it is not there or cannot be known.
      advice: What to do; empty when all is well.
    """

    name: str
    value: str
    verdict: Verdict
    advice: str = ""


def _absent(name: str, reason: str, advice: str) -> Finding:
    return Finding(name, reason, "missing", advice)


def _python(facts: Machine) -> Finding:
    value = f"{facts.python}, {facts.pointer_bits}-bit"
    if facts.pointer_bits == 32:
        return Finding("python", value, "warn", "install a 64-bit system: ONNX Runtime has no 32-bit wheels")
    return Finding("python", value, "ok")


def _package(facts: Machine, name: str, extra: str) -> Finding:
    if version := facts.packages.get(name):
        return Finding(name, version, "ok")
    return _absent(name, "not installed", f"pip install 'ferrule-runtime{extra}'")


def _processor(facts: Machine) -> Finding:
    if facts.cpu is None or facts.features is None:
        reason = facts.missing.get("cpu") or facts.missing["features"]
        return _absent("processor", reason, "mount /proc, or run on Linux")
    dots = {"aarch64": "asimddp", "x86_64": "avx2"}.get(facts.arch or "")
    if dots is None:
        return Finding("processor", facts.cpu, "warn", f"no fast integer kernels are known for `{facts.arch}`")
    if dots not in facts.features:
        advice = f"it lacks `{dots}`: quantised layers run slowly here; compare recipes on this very board"
        return Finding("processor", facts.cpu, "warn", advice)
    return Finding("processor", f"{facts.cpu}, with {dots}", "ok")


def _cores(facts: Machine) -> Finding:
    if facts.cores is None:
        return _absent("cores", facts.missing["cores"], "give --threads yourself")
    if facts.cpu_quota is not None and facts.cpu_quota < facts.cores:
        value = f"{facts.cores}, limited to the time of {facts.cpu_quota:g}"
        return Finding("cores", value, "warn", f"use --threads {max(1, int(facts.cpu_quota))}, or lift the quota")
    return Finding("cores", str(facts.cores), "ok")


def _memory(facts: Machine, now: Conditions) -> Finding:
    if facts.memory is None or now.memory_available is None:
        reason = facts.missing.get("memory") or now.missing["memory_available"]
        return _absent("memory", reason, "mount /proc, or give --memory yourself")
    free, value = now.memory_available, f"{human(now.memory_available)} free of {human(facts.memory)}"
    if facts.memory_limit is not None:
        value += f", limited to {human(facts.memory_limit)} by the control group"
        free = min(free, facts.memory_limit)
    if free < _LITTLE_MEMORY:
        return Finding("memory", value, "warn", f"stop other programs: under {human(_LITTLE_MEMORY)} is left")
    return Finding("memory", value, "ok")


def _governor(now: Conditions) -> Finding:
    found = sorted({clock.governor for clock in now.clocks or () if clock.governor is not None})
    if not found:
        reason = now.missing.get("clocks", "no policy says its governor")
        return _absent("governor", reason, "clocks cannot be checked here (usual in a virtual machine)")
    if found != ["performance"]:
        advice = "for steady timings: echo performance | sudo tee /sys/devices/system/cpu/cpufreq/*/scaling_governor"
        return Finding("governor", ", ".join(found), "warn", advice)
    return Finding("governor", "performance", "ok")


def _temperature(now: Conditions) -> Finding:
    known = {zone: value for zone, value in (now.celsius or {}).items() if value is not None}
    if not known:
        reason = now.missing.get("celsius", "no zone can be read now")
        return _absent("temperature", reason, "heat cannot be seen here; watch for timings that drift")
    zone = max(known, key=lambda name: known[name])
    value = f"{known[zone]:.1f} C ({zone})"
    if known[zone] >= _HOT_CELSIUS:
        return Finding("temperature", value, "warn", "let it cool, or add a heat sink or a fan")
    return Finding("temperature", value, "ok")


def _throttling(now: Conditions) -> Finding:
    if now.throttled:
        advice = "check the power supply" if "under-voltage" in " ".join(now.throttled) else "check the cooling"
        return Finding("throttling", ", ".join(now.throttled), "warn", f"{advice}, then restart the board")
    if now.throttled is not None:
        return Finding("throttling", "none since boot", "ok")
    if now.throttle_events:
        return Finding("throttling", f"{now.throttle_events} times since boot", "warn", "check the cooling")
    if now.throttle_events == 0:
        return Finding("throttling", "none since boot", "ok")
    return _absent("throttling", now.missing["throttled"], "it cannot be seen here; watch for timings that drift")


def _load(facts: Machine, now: Conditions) -> Finding:
    if now.load is None:
        return _absent("load", now.missing["load"], "mount /proc")
    cores = facts.cores or 1
    if now.load > _BUSY * cores:
        return Finding("load", f"{now.load:.2f} on {cores} cores", "warn", "stop other work before you measure")
    return Finding("load", f"{now.load:.2f} on {cores} cores", "ok")


def _power(root: Path) -> Finding:
    name = "power sensor"
    packages = sorted((root / "sys/class/powercap").glob("intel-rapl:[0-9]*/energy_uj"))
    rails = sorted((root / "sys/class/hwmon").glob("hwmon*/power[0-9]*_input"))
    if packages and os.access(packages[0], os.R_OK):
        return Finding(name, "RAPL (processor packages)", "ok")
    if rails:
        return Finding(name, f"hwmon ({len(rails)} inputs)", "ok")
    if (root / "usr/bin/vcgencmd").exists():
        return Finding(name, "vcgencmd (a Raspberry Pi 5 has rail sensors)", "ok")
    if packages:
        advice = "sudo chmod a+r /sys/class/powercap/*/energy_uj, until the next boot"
        return Finding(name, "RAPL is there, but only root may read it", "warn", advice)
    return _absent(name, "none found", "energy will be null; attach a meter")


def _state(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        return Finding("state folder", str(folder), "ok")
    advice = "set FERRULE_STATE to a folder you may write: without it every start hashes the bundle again"
    return Finding("state folder", f"{folder} cannot be written", "warn", advice)


def doctor(root: Path = Path("/")) -> list[Finding]:
    """Look at everything that decides whether and how well an agent runs here.

    Args:
      root: Where /proc and /sys are; the interpreter, its packages and the state folder are this process's.
    """
    facts, now = machine(root), conditions(root)
    return [
        _python(facts),
        _package(facts, "numpy", ""),
        _package(facts, "onnxruntime", "[onnx]"),
        _processor(facts),
        _cores(facts),
        _memory(facts, now),
        _governor(now),
        _temperature(now),
        _throttling(now),
        _load(facts, now),
        _power(root),
        _state(state_folder()),
    ]


def doctor_run(options: argparse.Namespace) -> int:
    """Print the findings; the exit status is 0, whatever they are, since the verdicts are the result."""
    findings = doctor()
    if options.json:
        emit("doctor", {"findings": [dataclasses.asdict(finding) for finding in findings]})
        return 0
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"{finding.verdict:7}  {finding.name:{width}}  {finding.value}")
        if finding.advice:
            say(f"{'':7}  {'':{width}}  -> {finding.advice}")
    return 0
