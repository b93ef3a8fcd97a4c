"""`ferrule profile`, `pick` and `report` as a user types them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule_profiles import store
from ferrule_profiles.commands import PICK
from ferrule_profiles.pick import PREFERENCES
from ferrule_profiles.run import Run
from ferrule_profiles.words import amount, describe, interval, label
from ferrule_runtime.__main__ import main

MakeRun = Callable[..., Run]
MIB = 1 << 20
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, make_run: MakeRun) -> Path:
    path = tmp_path / "runs.jsonl"
    store.append(path, [
        make_run("w8", first=1.0, decode=15.0, peak=300 * MIB, size=150 * MIB, kl=0.005),
        make_run("w4g32", first=0.8, decode=20.0, peak=200 * MIB, size=90 * MIB, kl=0.2),
    ])  # fmt: skip
    return path


def test_pick_says_one_sentence_and_a_line_for_every_other(runs: Path, capsys: Capture) -> None:
    assert main(["pick", str(runs), "--target", "rpi5", "--max-kl", "0.1", "--max-memory", "400MiB"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("ship `w8`: ")
    assert "peak RSS 303.0 MiB at the most (limit 400.0 MiB), KL to float 0.00500 nats (limit 0.100 nats)" in out[0]
    assert out[1:] == ["  not `w4g32`: KL to float 0.200 nats is over --max-kl 0.100 nats by 0.100 nats"]


def test_pick_as_json_can_be_shown_by_report(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["pick", str(runs), "--target", "rpi5", "--min-decode", "10tok/s", "--json"]) == 0
    text = capsys.readouterr().out
    stored = json.loads(text)
    assert (stored["schema_version"], stored["kind"], stored["recipe"]) == (1, "pick", "w4g32")
    choice, page = tmp_path / "pick.json", tmp_path / "report.html"
    choice.write_text(text)
    assert main(["report", str(runs), "-o", str(page), "--pick", str(choice), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 2
    assert "Ship <code>w4g32</code>" in page.read_text()


def test_report_picks_through_the_same_options(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(runs), "-o", str(page), "--target", "rpi5", "--max-kl", "0.1"]) == 0
    assert capsys.readouterr().out.startswith(f"{page}: 2 runs, ")
    assert "Ship <code>w8</code>" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["pick", "RUNS", "--target", "rpi5", "--max-memory", "10MiB"], 1, "no recipe of 2 on `rpi5` meets the limits"),
        (["pick", "RUNS", "--target", "rpi5", "--max-accuracy-loss", "5pt"], 1, "no score for `w8`, `w4g32`"),
        (["pick", "RUNS", "--target", "rpi4"], 1, "unknown target among the runs `rpi4`"),
        (["pick", "none.jsonl", "--target", "rpi5"], 1, "none.jsonl: no such file"),
        (["pick", "RUNS"], 2, "--target"),
        (["pick", "RUNS", "--target", "rpi5", "--max-memory", "700"], 2, "`700` has no unit"),
        (["pick", "RUNS", "--target", "rpi5", "--max-first-token", "soon"], 2, "`soon` is not an amount in s"),
        (["pick", "RUNS", "--target", "rpi5", "--max-kl", "nan"], 2, "`nan` is not an amount in nats"),
        (["pick", "RUNS", "--target", "rpi5", "--prefer", "speed"], 2, "invalid choice"),
        (["report", "RUNS", "-o", "x.html", "--max-kl", "1"], 2, "limits need a --target"),
        (["report", "RUNS", "-o", "x.html", "--max-kl", "1", "--pick", "p.json"], 2, "a choice that was made"),
        (["report", "RUNS", "-o", "x.html", "--pick", "none.json"], 1, "none.json: cannot be read"),
        (["profile", "none"], 1, "none: no such bundle"),
        (["profile", "none", "--board", "ssh://pi"], 2, "cannot be profiled yet"),
        (["profile", "none", "--meter", "ppk2:x"], 2, "unknown kind of meter `ppk2`"),
        (["profile", "none", "-o", "no/such/runs.jsonl"], 1, "no folder no/such"),
    ],
)
def test_bad_input_is_an_error_with_a_hint(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main([str(runs) if word == "RUNS" else word for word in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "hint: " in captured.err


def test_preferences_on_the_command_line_are_those_that_there_are() -> None:
    parser = argparse.ArgumentParser()
    PICK.configure(parser)
    choices = next(action.choices for action in parser._actions if action.dest == "prefer")
    assert list(choices or ()) == list(PREFERENCES)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (38.21, "tok/s", "38.2 tok/s"),
        (1234.5, "tok/s", "1234 tok/s"),
        (9.996, "s", "10.00 s"),
        (0.0421, "s", "42.1 ms"),
        (0.0004, "J", "0.400 mJ"),
        (0.0, "s", "0 s"),
        (222699520.0, "B", "212.4 MiB"),
        (-1.1e-9, "nats", "< 1e-06 nats"),
        (0.27849, "nats", "0.278 nats"),
        (2.5e7, "", "2.5e+07"),
    ],
)
def test_amounts_have_three_digits_and_a_unit_for_people(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_interval_is_on_the_scale_of_its_median(make_run: MakeRun) -> None:
    figure = make_run("w8", first=[0.95, 0.98, 1.2]).figures["first_token@128"]
    assert interval(figure) == "[953 to 1178]"  # type: ignore[arg-type]  # a figure, since numbers were given


def test_a_run_in_words_names_every_figure_or_why_not(make_run: MakeRun) -> None:
    text = "\n".join(describe(make_run("w8", peak=None, conditions={"throttled": ["throttled now"]})))
    assert "time to first token, 128-token prompt  500 ms [496 to 504]" in text
    assert "peak RSS                               null: not measured here" in text
    assert "energy                                 null: no meter" in text
    assert "warning: the firmware says: throttled now" in text
    assert label("load") == "load"
