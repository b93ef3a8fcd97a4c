"""Runs: figures, their way to JSON and back, and which of them are alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_profiles.run import Figure, Missing, Power, Run, percentile, summarise, unlike, warnings
from ferrule_runtime.errors import RecordError

MakeRun = Callable[..., Run]
numbers = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


def test_median_is_over_launches_and_interval_over_all_repeats() -> None:
    # One slow launch with many repeats must not decide.
    found = summarise([[1.0, 1.2, 1.1], [1.3], [9.0, 9.0, 9.0, 9.0, 9.0]], "s")
    assert isinstance(found, Figure)
    assert found.median == 1.3
    every = [1.0, 1.2, 1.1, 1.3, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert (found.low, found.high) == pytest.approx(np.quantile(every, [0.05, 0.95]))
    assert found.count == 9
    assert found.how == "median of the medians of 3 launches; 5-95 % over 9 values"


def test_one_value_says_that_there_is_no_interval() -> None:
    found = summarise([[2.0]], "s")
    assert isinstance(found, Figure)
    assert found.how == "median of the medians of 1 launch; one value, no interval"


@pytest.mark.parametrize("launches", [[], [[]], [[1.0], []]])
def test_launch_without_values_makes_a_figure_missing(launches: list[list[float]]) -> None:
    assert summarise(launches, "s", "the board was off") == Missing("the board was off")


def test_record_is_read_back_as_it_was(make_run: MakeRun) -> None:
    for power in (Missing("none"), Power("rapl", "packages", simulated=False)):
        run = make_run("w8", joules=(2.0, 0.1), power=power)
        text = json.dumps(run.to_dict())
        again = Run.from_dict(json.loads(text), "here")
        assert json.dumps(again.to_dict()) == text
        assert again.figures == run.figures
        assert again.power == power


@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1, max_size=4), st.text(max_size=20))
def test_any_figure_and_reason_survive_json(make_run: MakeRun, launches: list[list[float]], reason: str) -> None:
    run = make_run("w8", figures={"a": summarise(launches, "s"), "b": Missing(reason)})
    assert Run.from_dict(json.loads(json.dumps(run.to_dict())), "here").figures == run.figures


def test_missing_figure_is_a_null_with_its_reason(make_run: MakeRun) -> None:
    stored = make_run("w8", peak=None).to_dict()["figures"]["peak_rss"]
    assert stored == {"median": None, "reason": "not measured here"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "score"}, "not a record of kind `profile`"),
        ({"schema_version": "1"}, "not a record of kind `profile`"),
        ({"schema_version": 2}, "schema 2 is newer than 1"),
        ({"target": 5}, "`target`: input should be a valid string"),
        ({"bundle": {"name": "x"}}, "`bundle.sha256`: field required"),
        ({"figures": {"load": {"median": "1"}}}, "`figures.load"),
        ({"power": None}, "`power"),
    ],
)
def test_malformed_record_is_refused_with_its_place(make_run: MakeRun, change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError) as caught:
        Run.from_dict({**make_run("w8").to_dict(), **change}, "runs.jsonl:7")
    assert str(caught.value).startswith("runs.jsonl:7: ")
    assert said in str(caught.value)


def test_runs_of_one_board_are_alike(make_run: MakeRun) -> None:
    # Another recipe, time, temperature, and number of repeats are no difference of the machine.
    other = make_run("w4g32", conditions={"celsius": {"cpu-thermal": 60.0}}, settings={"repeat": 9}, time="2026-04-01")
    assert unlike(make_run("w8"), other) == []
    assert unlike(make_run("w8"), make_run("w8", machine={"memory": int((8 << 30) * 1.005)})) == []


POWERSAVE = [{"policy": "policy0", "governor": "ondemand", "mhz": 2400.0, "max_mhz": 2400.0}]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"machine": {"cores": 2}}, "cores"),
        ({"machine": {"memory": 4 << 30}}, "memory"),
        ({"machine": {"memory_limit": 1 << 30}}, "memory_limit"),
        ({"machine": {"packages": {"onnxruntime": "1.31.0"}}}, "packages"),
        ({"conditions": {"clocks": POWERSAVE}}, "governor"),
        ({"settings": {"threads": 1}}, "threads"),
        ({"settings": {"prompts": [512]}}, "prompts"),
        ({"target": "rpi4"}, "target"),
        ({"ferrule": "0.2.0"}, "ferrule"),
    ],
)
def test_differences_of_machine_and_settings_are_named(make_run: MakeRun, change: dict[str, Any], name: str) -> None:
    found = unlike(make_run("w8"), make_run("w8", **change))
    assert [text.partition(":")[0] for text in found] == [name]
    assert " against " in found[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {"load_at_start": 3.0}}, "load 3.00 on 4 cores"),
        ({"conditions": {"clocks": POWERSAVE}}, "governor `ondemand`"),
        ({"conditions": {"clocks": [{**POWERSAVE[0], "governor": "performance", "mhz": 1500.0}]}}, "1500 of 2400 MHz"),
        ({"conditions": {"throttled": ["throttled now"]}}, "throttled now"),
        ({"conditions": {"celsius": {"cpu-thermal": 84.0}}}, "cpu-thermal at 84 C"),
        ({"before": ({"throttle_events": 3},), "after": ({"throttle_events": 5},)}, "throttled itself 2 times"),
        ({"before": ({},)}, "1 launch(es)"),
        ({"power": Power("replay", "simulated", simulated=True)}, "energy is simulated"),
    ],
)
def test_conditions_that_weaken_a_run_are_warned_of(make_run: MakeRun, change: dict[str, Any], said: str) -> None:
    assert warnings(make_run("w8")) == []
    assert any(said in text for text in warnings(make_run("w8", **change)))
