"""Every example of README.md and docs/*.md is run, page by page, in a folder of the page's own.

A block of ```python is run as a program. A block of ```console whose first line is `$ ferrule ...` is run line by line
in bash; a line `error: ...` in what it shows means that the command before it must fail and say exactly that.
A block of any kind under `<!-- file: NAME -->` is written to that file first. A block under
`<!-- not run: REASON -->` is skipped, with the reason in the report.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<word>file|not run): (?P<what>[^\n]+?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
SECONDS = 120


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    file: str | None
    not_run: str | None

    @property
    def is_run(self) -> bool:
        return self.kind == "python" or (self.kind == "console" and self.text.startswith("$ ferrule"))


def blocks(page: Path, text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        marks = {word: match["what"] if match["word"] == word else None for word in ("file", "not run")}
        found.append(Block(page, line, match["kind"], match["text"], marks["file"], marks["not run"]))
    return [block for block in found if block.is_run or block.file]


def console(text: str) -> list[tuple[str, list[str]]]:
    """Split a console block into commands, each with the lines that it shows."""
    commands: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif commands[-1][0].endswith("\\") and not commands[-1][1]:
            commands[-1] = (f"{commands[-1][0]}\n{line}", [])
        else:
            commands[-1][1].append(line)
    return commands


def run(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


FOUND = [block for page in PAGES for block in blocks(page, page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    return {page: tmp_path_factory.mktemp(page.stem) for page in PAGES}


@pytest.mark.parametrize("block", FOUND, ids=lambda block: f"{block.page.name}:{block.line}")
def test_the_example_runs(block: Block, folders: dict[Path, Path]) -> None:
    folder = folders[block.page]
    if block.not_run:
        pytest.skip(f"not run: {block.not_run}")
    if block.file:
        (folder / block.file).write_text(block.text, encoding="utf-8")
    if block.kind == "python" and not block.file:
        done = run([sys.executable, "-W", "error", "-c", block.text], folder)
        assert done.returncode == 0, done.stderr
    elif block.kind == "console" and block.is_run:
        for command, shown in console(block.text):
            done = run(["bash", "-euo", "pipefail", "-c", command], folder)
            errors = [line for line in shown if line.startswith(("error: ", "hint: "))]
            expected = (1, 2) if errors else (0,)
            assert done.returncode in expected, f"$ {command}\n{done.stdout}{done.stderr}"
            assert "Traceback" not in done.stderr
            assert [line for line in errors if line not in done.stderr.splitlines()] == [], done.stderr


def test_the_pages_have_examples() -> None:
    assert {"README.md", "adding-a-board.md"} <= {block.page.name for block in FOUND}


def test_blocks_are_found_with_their_marks() -> None:
    text = (
        "<!-- file: a.toml -->\n```toml\nx = 1\n```\n\n```python\nprint(1)\n```\n"
        "<!-- not run: needs a board -->\n```console\n$ ferrule x\n```\n```console\n$ make\n```\n```\nplain\n```\n"
    )
    found = [(block.kind, block.line, block.file, block.not_run) for block in blocks(Path("x.md"), text)]
    assert found == [("toml", 3, "a.toml", None), ("python", 7, None, None), ("console", 11, None, "needs a board")]


def test_a_console_block_is_split_into_commands_and_what_they_show() -> None:
    text = "$ ferrule a \\\n    --b\nshown\nerror: no\n$ ferrule c\n"
    assert console(text) == [("ferrule a \\\n    --b", ["shown", "error: no"]), ("ferrule c", [])]
