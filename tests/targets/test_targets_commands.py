import argparse
import json

import pytest

from ferrule_runtime.errors import TargetError
from ferrule_targets.commands import TARGETS
from ferrule_targets.target import load_target, target_names


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    TARGETS.configure(parser)
    return TARGETS.run(parser.parse_args(arguments))


def test_the_table_has_a_row_per_board_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == target_names()
    place = head.index("TITLE")
    assert [row[place:] for row in rows] == [load_target(name).title for name in target_names()]


def test_one_board_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rpi5") == 0
    shown = capsys.readouterr().out
    for part in ("1.00 GiB", "800.0 MiB", "an estimate", "asimddp", "int8", "rpi-pmic", "ssh"):
        assert part in shown


def test_json_says_its_schema_and_gives_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema_version"] == 1
    assert [target["name"] for target in listed["targets"]] == target_names()
    assert run("rpi-zero2", "--json") == 0
    one = json.loads(capsys.readouterr().out)
    assert one["memory"]["ram"] == 512 * 2**20
    assert one in [{"schema_version": 1, "kind": "target", **target} for target in listed["targets"]]


def test_an_unknown_board_is_refused() -> None:
    with pytest.raises(TargetError, match="unknown target `rpi3`"):
        run("rpi3")
