"""Help texts as golden files: a change of the command line shows in review."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

COMMANDS = sorted(point.name for point in entry_points(group="ferrule.commands"))
GOLDEN = Path(__file__).parent / "golden" / "help"


def ferrule(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ferrule_runtime", *arguments], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout


def test_the_list_of_commands(golden: Callable[[str, str], None]) -> None:
    golden("help/ferrule.txt", ferrule("--help"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of(command: str, golden: Callable[[str, str], None]) -> None:
    text = ferrule(command, "--help")
    assert max(map(len, text.splitlines())) <= 100
    golden(f"help/{command}.txt", text)


def test_every_command_has_its_own_line_in_the_list() -> None:
    listed = re.findall(r"^ {4}(\w+) {2,}\S", ferrule("--help"), re.MULTILINE)
    assert listed == COMMANDS


def test_the_commands_are_those_of_the_golden_files() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt") if path.stem != "ferrule") == COMMANDS
