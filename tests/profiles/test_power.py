"""Energy from samples: the integral, where it must be refused, and a meter that samples a real file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_profiles.meters import open_meter
from ferrule_profiles.power import Samples, SensorMeter, TooFewSamples, energy, energy_figures
from ferrule_profiles.run import Figure, Missing
from ferrule_profiles.sensors.rapl import open_sensor
from ferrule_runtime.errors import FerruleError, RecordError, UsageError

SECOND = 10**9


def ramp(count: int = 11) -> Samples:
    """Power that rises by 2 W a second from 1 W, sampled every 0.1 s."""
    return Samples("power", tuple(i * SECOND // 10 for i in range(count)), tuple(1 + 2 * i / 10 for i in range(count)))


def test_energy_of_a_ramp_is_its_integral() -> None:
    # Integral of 1 + 2t from 0.15 to 0.85: both ends between samples.
    expected = (0.85 + 0.85**2) - (0.15 + 0.15**2)
    assert energy(ramp(), 15 * SECOND // 100, 85 * SECOND // 100) == pytest.approx(expected, rel=1e-12)


@given(
    st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0, 20)), min_size=10, max_size=40),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_energy_agrees_with_a_fine_sum_of_the_same_line(
    steps: list[tuple[float, float]], first: float, second: float
) -> None:
    times = np.cumsum([step for step, _ in steps])
    nanoseconds = [round(t * 1e9) for t in times]
    values = [value for _, value in steps]
    span = nanoseconds[-1] - nanoseconds[0]
    start, end = sorted(nanoseconds[0] + int(share * span) for share in (first, second))
    samples = Samples("power", tuple(nanoseconds), tuple(values))
    try:
        found = energy(samples, start, end)
    except TooFewSamples:
        assert sum(start < t < end for t in nanoseconds) < 5
        return
    grid = np.linspace(start, end, 20001)
    watts = np.interp(grid, nanoseconds, values)
    expected = float(((watts[1:] + watts[:-1]) / 2).sum() * (end - start) / 20000 / 1e9)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


@given(st.integers(16, 50), st.integers(51, 84))
def test_counted_energy_gives_what_constant_power_gives(start: int, end: int) -> None:
    times = tuple(i * SECOND // 100 for i in range(101))
    counted = Samples("energy", times, tuple(7.0 + 3.0 * i / 100 for i in range(101)))
    constant = Samples("power", times, (3.0,) * 101)
    moments = start * SECOND // 100 + 5, end * SECOND // 100 + 5
    if end - start < 6:
        return
    assert energy(counted, *moments) == pytest.approx(energy(constant, *moments))


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        (15, 45, "3 samples in 0.300 s, 5 are needed"),
        (-10, 85, "cover only a part of the 0.950 s"),
        (15, 150, "cover only a part of the 1.350 s"),
    ],
)
def test_phase_that_the_samples_do_not_cover_is_refused(start: int, end: int, said: str) -> None:
    with pytest.raises(TooFewSamples, match=said):
        energy(ramp(), start * SECOND // 100, end * SECOND // 100)


def launch(*marks: tuple[str, int, int], boot: str = "this boot") -> Sequence[dict[str, Any]]:
    """Build a launch of phases with a 128-token prompt; times in hundredths of a second."""
    phases = [
        {"phase": phase, "repeat": 0, "prompt": 128, "start_ns": start * SECOND // 100, "end_ns": end * SECOND // 100}
        | ({"tokens": 10} if phase == "decode" else {})
        for phase, start, end in marks
    ]
    return [{"event": "marks", "boot": boot, "marks": phases}]


def test_energy_per_token_prefill_and_power_are_of_their_phases() -> None:
    samples = Samples("power", tuple(i * SECOND // 100 for i in range(101)), (4.0,) * 101)
    figures = energy_figures([launch(("prefill", 5, 25), ("decode", 25, 75))], [samples], [128], "this boot")
    found = {name: value.median for name, value in figures.items() if isinstance(value, Figure)}
    # 4 W for 0.2 s; 4 W for 0.5 s over 10 tokens.
    assert found == pytest.approx({"prefill_energy@128": 0.8, "energy_per_token@128": 0.2, "power@128": 4.0})


def test_short_prefill_is_missing_while_decoding_is_not() -> None:
    samples = Samples("power", tuple(i * SECOND // 100 for i in range(101)), (4.0,) * 101)
    figures = energy_figures([launch(("prefill", 22, 25), ("decode", 25, 75))], [samples], [128], "this boot")
    assert figures["prefill_energy@128"] == Missing("prefill: 2 samples in 0.030 s, 5 are needed")
    assert isinstance(figures["energy_per_token@128"], Figure)


@pytest.mark.parametrize("boot", ["another boot", None])
def test_marks_of_another_clock_are_refused(boot: str | None) -> None:
    figures = energy_figures([launch(("decode", 25, 75))], [ramp()], [128], boot)
    assert set(figures.values()) == {Missing("the board's clock is not the meter's")}


def test_sensor_that_stops_says_why(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in {"name": "package-0", "max_energy_range_uj": "1000", "energy_uj": "5"}.items():
        (zone / name).write_text(text)
    meter = SensorMeter(open_sensor(tmp_path))
    meter.start()
    time.sleep(0.1)
    (zone / "energy_uj").unlink()
    time.sleep(0.1)
    samples = meter.stop()
    assert len(samples.times) == len(samples.values) >= 1
    assert "no /sys/class/powercap" in samples.stopped
    with pytest.raises(TooFewSamples, match="no /sys/class/powercap"):
        energy(samples, samples.times[-1] + 1, samples.times[-1] + SECOND)


def test_sensor_meter_samples_between_start_and_stop(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in {"name": "package-0", "max_energy_range_uj": "1000000", "energy_uj": "5"}.items():
        (zone / name).write_text(text)
    meter = SensorMeter(open_sensor(tmp_path))
    for energy_uj in ("100", "300"):
        before = time.monotonic_ns()
        meter.start()
        (zone / "new").write_text(energy_uj)
        (zone / "new").rename(zone / "energy_uj")
        time.sleep(0.1)
        samples = meter.stop()
        assert before <= samples.times[0] <= samples.times[-1] <= time.monotonic_ns()
        assert list(samples.times) == sorted(samples.times)
        assert samples.stopped == ""
    assert samples.values[-1] == pytest.approx(295e-6)
    assert not meter.power.simulated


def test_replay_meter_lays_the_file_beside_each_launch_and_says_simulated(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text("seconds,watts\n0,5\n0.5,6\n1.5,5\n")
    meter = open_meter(f"replay:{path}")
    assert meter.power.simulated
    assert "simulated" in meter.power.boundary
    for _ in range(2):
        before = time.monotonic_ns()
        meter.start()
        after = time.monotonic_ns()
        samples = meter.stop()
        assert before <= samples.times[0] <= after
        assert [t - samples.times[0] for t in samples.times] == [0, SECOND // 2, 3 * SECOND // 2]
        assert samples.values == (5.0, 6.0, 5.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: not a header"),
        ("time,watts\n0,1\n", ":1: not a header"),
        ("seconds,watts\n0,x\n", ":2: `0,x` is not two numbers"),
        ("seconds,watts\n0,1,2\n", ":2: `0,1,2` is not two numbers"),
        ("seconds,watts\n1,1\n1,2\n", ":3: `1,2` is not finite, or not later"),
        ("seconds,joules\n0,nan\n", ":2: `0,nan` is not finite"),
    ],
)
def test_replayed_file_that_is_not_samples_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(text)
    with pytest.raises(RecordError) as caught:
        open_meter(f"replay:{path}")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [("nothing", "not the URL of a meter"), ("repaly:x", "unknown kind of meter"), ("replay:", "no file")],
)
def test_meter_that_there_is_not_is_refused(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        open_meter(url)
    assert "replay" in caught.value.hint
    with pytest.raises(FerruleError, match="cannot be read"):
        open_meter("replay:/none.csv")
