"""Profiling through a link: real processes on this machine that measure a tiny engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ferrule_profiles.clock import read_events, speed
from ferrule_profiles.launches import Plan, profile
from ferrule_profiles.memory import memory
from ferrule_profiles.meters import Meter, open_meter
from ferrule_profiles.run import Figure, Missing, Power, Run
from ferrule_runtime.errors import BundleError, FerruleError, LinkError, RecordError, UsageError
from ferrule_runtime.measure_options import Options
from ferrule_targets.links import Link

NO_METER = Missing("no meter here")
OPTIONS = Options(prompts=(8, 16), decode=5, repeat=2, threads=1)


def run(
    link: Link, *bundles: Path, launches: int = 2, meter: Meter | Missing = NO_METER
) -> tuple[list[Run], list[str]]:
    told: list[str] = []
    return profile(bundles, link, Plan(OPTIONS, launches, "host"), meter, told.append), told


@pytest.fixture
def profiled(make_bundle: Callable[..., Path], tiny_board: Callable[..., Link]) -> tuple[list[Run], list[str]]:
    return run(tiny_board(), make_bundle("one"), make_bundle("two"))


def test_every_figure_has_the_values_of_every_launch_and_repeat(profiled: tuple[list[Run], list[str]]) -> None:
    (one, _), _ = profiled
    for prompt in (8, 16):
        for name in ("prefill", "first_token", "decode"):
            figure = one.figure(f"{name}@{prompt}")
            assert isinstance(figure, Figure)
            assert [len(launch) for launch in figure.values] == [2, 2], name
    decode = one.figure("decode@8")
    assert isinstance(decode, Figure)
    assert 0 < decode.high < 500, "every token takes at least 2 ms"
    for name in ("load", "peak_rss", "unevictable"):
        figure = one.figure(name)
        assert isinstance(figure, Figure)
        assert [len(launch) for launch in figure.values] == [1, 1]
    load = one.figure("load")
    assert isinstance(load, Figure)
    assert load.low >= 0.25, "opening counts as loading"


def test_run_carries_what_it_depends_on(profiled: tuple[list[Run], list[str]]) -> None:
    (one, two), _ = profiled
    assert (one.bundle.name, two.bundle.name) == ("one", "two")
    assert one.target == "host"
    assert one.board == "local:"
    assert one.fidelity == {"kl": 0.01}
    assert one.machine["cores"] >= 1
    assert len(one.before) == len(one.after) == 2
    assert one.settings["prompts"] == [8, 16]
    assert one.settings["context"] == 21
    assert one.settings["launches"] == 2
    assert one.command[0] == sys.executable
    assert one.power == NO_METER
    assert isinstance(one.figure("energy_per_token@8"), Missing)
    assert Run.from_dict(json.loads(json.dumps(one.to_dict())), "x").figures == one.figures


def test_launches_of_bundles_take_turns(profiled: tuple[list[Run], list[str]]) -> None:
    assert profiled[1] == ["one: launch 1 of 2", "two: launch 1 of 2", "one: launch 2 of 2", "two: launch 2 of 2"]


def replay(tmp_path: Path) -> Meter:
    path = tmp_path / "samples.csv"
    path.write_text("seconds,watts\n" + "".join(f"{i / 500},3\n" for i in range(15000)))
    return open_meter(f"replay:{path}")


def test_energy_is_that_of_the_meter_and_says_simulated(
    tmp_path: Path, make_bundle: Callable[..., Path], tiny_board: Callable[..., Link]
) -> None:
    (one,), _ = run(tiny_board(), make_bundle("one"), launches=1, meter=replay(tmp_path))
    assert isinstance(one.power, Power)
    assert one.power.simulated
    power, token, decode = (one.figure(f"{name}@8") for name in ("power", "energy_per_token", "decode"))
    assert isinstance(power, Figure)
    assert isinstance(token, Figure)
    assert isinstance(decode, Figure)
    assert power.median == pytest.approx(3.0)
    for joules, rate in zip(token.values[0], decode.values[0], strict=True):
        assert joules == pytest.approx(3.0 / rate, rel=1e-6)


def test_energy_is_missing_when_the_board_has_another_clock(
    tmp_path: Path, make_bundle: Callable[..., Path], tiny_board: Callable[..., Link]
) -> None:
    (one,), _ = run(tiny_board("foreign-clock"), make_bundle("one"), launches=1, meter=replay(tmp_path))
    assert one.figure("energy_per_token@8") == Missing("the board's clock is not the meter's")


@pytest.mark.parametrize(
    ("mode", "kind", "said", "hint"),
    [
        ("fails", UsageError, "ended with status 2: 300 tokens do not fit", "give a shorter --prompt"),
        ("stops", RecordError, "before the end", "see its own output"),
        ("chatters", RecordError, "line 3 is not an event: `loading...`", "same version"),
        ("other-bundle", RecordError, "measured another bundle", "copy the bundle"),
        ("newer", RecordError, "schema 99, newer than 1", "update ferrule"),
    ],
)
def test_board_that_misbehaves_is_refused(
    make_bundle: Callable[..., Path],
    tiny_board: Callable[..., Link],
    mode: str,
    kind: type[FerruleError],
    said: str,
    hint: str,
) -> None:
    with pytest.raises(kind) as caught:
        run(tiny_board(mode), make_bundle("one"))
    assert said in str(caught.value)
    assert hint in caught.value.hint


def test_damaged_bundle_is_refused_before_anything_runs(
    make_bundle: Callable[..., Path], tiny_board: Callable[..., Link]
) -> None:
    good, bad = make_bundle("one"), make_bundle("two")
    (bad / "weights.bin").write_bytes(b"1" * 1000)
    told: list[str] = []
    with pytest.raises(BundleError, match="sha256"):
        profile([good, bad], tiny_board(), Plan(OPTIONS, 1, "host"), NO_METER, told.append)
    assert told == []


def test_launch_that_takes_too_long_is_ended(make_bundle: Callable[..., Path], tiny_board: Callable[..., Link]) -> None:
    plan = Plan(OPTIONS, 1, "host", timeout=0.05)
    with pytest.raises(LinkError, match="took longer"):
        profile([make_bundle("one")], tiny_board(), plan, NO_METER, lambda _: None)


def test_manifest_without_a_recipe_key_is_refused(
    make_bundle: Callable[..., Path], tiny_board: Callable[..., Link]
) -> None:
    with pytest.raises(RecordError, match="does not say 'key'"):
        run(tiny_board(), make_bundle("one", recipe={"name": "w8"}), launches=1)


def events(*seconds: float) -> Sequence[dict[str, Any]]:
    found = [{"event": "open", "seconds": 0.5}, {"event": "load", "seconds": 1.5}]
    for value in seconds:
        found += [
            {"event": "prefill", "prompt": 100, "tokens": 100, "seconds": value},
            {"event": "first_token", "prompt": 100, "seconds": value * 1.1},
            {"event": "decode", "prompt": 100, "tokens": 10, "seconds": value},
        ]
    return found


def test_speeds_are_tokens_over_seconds() -> None:
    found = speed([events(2.0, 4.0), events(5.0)], [100])
    medians = {name: value.median for name, value in found.items() if isinstance(value, Figure)}
    assert medians == pytest.approx({"prefill@100": 28.75, "first_token@100": 4.4, "decode@100": 2.875, "load": 2.0})


def test_unevictable_is_the_larger_reading_and_missing_has_its_reason() -> None:
    readings = [
        {"event": "memory", "peak_rss": 900, "unevictable": 700, "missing": {}},
        {"event": "memory", "peak_rss": 950, "unevictable": 600, "missing": {}},
    ]
    found = memory([readings, readings])
    assert {name: value.median for name, value in found.items() if isinstance(value, Figure)} == {
        "peak_rss": 950, "unevictable": 700,
    }  # fmt: skip
    without = {**readings[0], "unevictable": None, "missing": {"unevictable": "no `RssAnon`"}}
    assert memory([[without, readings[1]]])["unevictable"] == Missing("no `RssAnon`")
    assert memory([[]])["peak_rss"] == Missing("nothing was measured")


def test_events_are_read_line_by_line() -> None:
    text = '{"event": "plan", "schema_version": 1}\n{"event": "machine_after", "schema_version": 1}\n'
    assert [event["event"] for event in read_events(text, "x")] == ["plan", "machine_after"]
    with pytest.raises(RecordError, match="stopped after 0 events"):
        read_events("", "x")
