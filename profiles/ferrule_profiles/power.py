"""Energy per token: samples of a meter laid beside the marks of what the board did, on one clock."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .clock import Launch, only
from .run import Missing, Power, Value, summarise
from .sensors import NoSensor, Quantity, Sensor

__all__ = ["ENERGY_FIGURES", "FEWEST_SAMPLES", "Samples", "SensorMeter", "TooFewSamples", "energy", "energy_figures"]

# Per prompt length: of a decoded token, of a whole prefill, and the mean power while decoding.
ENERGY_FIGURES = ("energy_per_token", "prefill_energy", "power")

# Samples inside a phase, below which its energy would mostly be a guess about its ends.
FEWEST_SAMPLES = 5


class TooFewSamples(Exception):  # noqa: N818 - carries a reason, is not a failure
    """A phase's energy cannot be told from the samples; the text says why."""


@dataclass(frozen=True)
class Samples:
    """What a meter said during one launch.

    Attributes:
      quantity: Whether `values` are watts at a moment, or joules counted so far.
      times: Nanoseconds on this machine's monotonic clock, increasing.
      values: As many as `times`.
      stopped: Why sampling ended early; empty if it did not.
    """

    quantity: Quantity
    times: tuple[int, ...]
    values: tuple[float, ...]
    stopped: str = ""


def _at(samples: Samples, moment: int) -> float:
    """Return the value at a moment between two samples, on a straight line."""
    above = bisect.bisect_left(samples.times, moment)
    if samples.times[above] == moment:
        return samples.values[above]
    (t0, t1), (v0, v1) = samples.times[above - 1 : above + 1], samples.values[above - 1 : above + 1]
    return v0 + (v1 - v0) * (moment - t0) / (t1 - t0)


def energy(samples: Samples, start: int, end: int) -> float:
    """Return the joules spent between two moments.

    Power is integrated with trapezoids, its value at both ends interpolated; counted energy is subtracted.

    Args:
      samples: What the meter said.
      start: Nanoseconds on the samples' clock.
      end: Likewise, later.

    Raises:
      TooFewSamples: The samples do not reach from start to end, or too few lie between.
    """
    inside = [i for i, moment in enumerate(samples.times) if start < moment < end]
    if len(inside) < FEWEST_SAMPLES:
        cause = f" ({samples.stopped})" if samples.stopped else ""
        raise TooFewSamples(f"{len(inside)} samples in {(end - start) / 1e9:.3f} s, {FEWEST_SAMPLES} are needed{cause}")
    if samples.times[0] > start or samples.times[-1] < end:
        raise TooFewSamples(f"the samples cover only a part of the {(end - start) / 1e9:.3f} s")
    first, last = _at(samples, start), _at(samples, end)
    if samples.quantity == "energy":
        return last - first
    times = [start, *(samples.times[i] for i in inside), end]
    watts = [first, *(samples.values[i] for i in inside), last]
    steps = zip(times, times[1:], watts, watts[1:], strict=False)
    return sum((t1 - t0) / 1e9 * (w0 + w1) / 2 for t0, t1, w0, w1 in steps)


@dataclass
class SensorMeter:
    """A sensor of this machine, sampled by a thread between `start` and `stop`."""

    sensor: Sensor
    _times: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _stopped: str = ""
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def power(self) -> Power:
        """What the samples cover."""
        return Power(self.sensor.name, self.sensor.boundary, simulated=False)

    def start(self) -> None:
        """Begin to sample."""
        self._times, self._values, self._stopped = [], [], ""
        self._end.clear()
        self._thread = threading.Thread(target=self._sample, name=f"sensor {self.sensor.name}", daemon=True)
        self._thread.start()

    def stop(self) -> Samples:
        """End sampling and return what was said since `start`."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        return Samples(self.sensor.quantity, tuple(self._times), tuple(self._values), self._stopped)

    def _sample(self) -> None:
        try:
            while True:
                # Reading can take a while; the value belongs to its middle.
                before = time.monotonic_ns()
                value = self.sensor.read()
                self._times.append((before + time.monotonic_ns()) // 2)
                self._values.append(value)
                if self._end.wait(self.sensor.period):
                    return
        except NoSensor as reason:
            self._stopped = str(reason)


def _phases(launch: Launch, phase: str, prompt: int) -> list[Mapping[str, Any]]:
    marks = only(launch, "marks")["marks"]
    return [mark for mark in marks if mark["phase"] == phase and mark.get("prompt") == prompt]


def _seconds(mark: Mapping[str, Any]) -> float:
    return float(mark["end_ns"] - mark["start_ns"]) / 1e9


def energy_figures(
    launches: Sequence[Launch], samples: Sequence[Samples], prompts: Sequence[int], boot: str | None
) -> dict[str, Value]:
    """Return energy per decoded token, energy of a prefill, and power while decoding, by prompt length.

    Args:
      launches: Events of each process.
      samples: What the meter said during each launch.
      prompts: Prompt lengths in tokens.
      boot: The kernel's name for this machine's boot; marks of another clock cannot be laid beside the samples.
    """
    figures: dict[str, Value] = {}
    foreign = boot is None or any(only(launch, "marks")["boot"] != boot for launch in launches)
    for prompt in prompts:
        names = [f"{name}@{prompt}" for name in ENERGY_FIGURES]
        if foreign:
            figures |= dict.fromkeys(names, Missing("the board's clock is not the meter's"))
            continue
        try:
            pairs = list(zip(launches, samples, strict=True))
            decode = [
                [(m, energy(s, m["start_ns"], m["end_ns"])) for m in _phases(e, "decode", prompt)] for e, s in pairs
            ]
            figures[names[0]] = summarise([[joules / m["tokens"] for m, joules in launch] for launch in decode], "J")
            figures[names[2]] = summarise([[joules / _seconds(m) for m, joules in launch] for launch in decode], "W")
        except TooFewSamples as reason:
            figures[names[0]] = figures[names[2]] = Missing(f"decoding: {reason}")
        try:
            prefill = [[energy(s, m["start_ns"], m["end_ns"]) for m in _phases(e, "prefill", prompt)] for e, s in pairs]
            figures[names[1]] = summarise(prefill, "J")
        except TooFewSamples as reason:
            figures[names[1]] = Missing(f"prefill: {reason}")
    return figures
