"""The linter's configuration does what the layout counts on."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ruff", reason="needs ruff: runs in tox's `lint` environment")

ROOT = Path(__file__).parents[1]


def ruff(code: str) -> str:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--output-format",
        "concise",
        "--stdin-filename",
        "tests/x.py",
        "-",
    ]
    return subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("folder", ["runtime", "convert", "targets", "profiles", "benchmarks"])
def test_a_folder_may_not_be_imported_as_a_package(folder: str) -> None:
    for line in (f"import {folder}", f"import {folder}.ferrule_{folder}", f"from {folder} import ferrule_{folder}"):
        assert f"TID251 `{folder}` is banned: import ferrule_{folder}" in ruff(f"{line}\n")


def test_the_packages_themselves_may_be_imported() -> None:
    assert "TID251" not in ruff("import ferrule_runtime\n")
