"""The file of runs: appended to, synced, and refused where it is not understood."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule_profiles import store
from ferrule_profiles.run import Run
from ferrule_runtime.errors import RecordError

MakeRun = Callable[..., Run]


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(text + "\n" for text in texts))
    return path


def test_appended_runs_are_read_in_order(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "runs.jsonl"
    store.append(path, [make_run("w8")])
    first = path.read_bytes()
    store.append(path, [make_run("w4g32"), make_run("fp32")])
    assert path.read_bytes().startswith(first)
    assert [run.bundle.recipe for run in store.read(path)] == ["w8", "w4g32", "fp32"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "no `schema_version`"),
        ('{"schema_version": 1, "x": NaN}', "not JSON: NaN"),
        ('{"schema_version": 99, "kind": "profile"}', "schema 99 is newer than 1"),
        ('{"schema_version": 1, "kind": "score"}', "unknown kind `score`"),
        ('{"schema_version": 1, "kind": "profile"}', "`time`: field required"),
    ],
)
def test_line_that_is_not_understood_is_refused_with_its_number(
    tmp_path: Path, make_run: MakeRun, line: str, said: str
) -> None:
    good = json.dumps(make_run("w8").to_dict())
    path = lines(tmp_path / "runs.jsonl", good, line, good)
    with pytest.raises(RecordError, match=rf"runs.jsonl:2: .*{said}") as caught:
        store.read(path)
    assert caught.value.hint


def test_last_line_that_was_cut_short_is_refused_and_not_joined(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "runs.jsonl"
    store.append(path, [make_run("w8"), make_run("w4g32")])
    path.write_bytes(path.read_bytes()[:-20])
    cut = path.read_bytes()
    with pytest.raises(RecordError, match=r"runs\.jsonl:2: the last line was cut short"):
        store.read(path)
    with pytest.raises(RecordError, match="cut short"):
        store.append(path, [make_run("fp32")])
    assert path.read_bytes() == cut


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such file"):
        store.read(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="cannot be read"):
        store.read(tmp_path / "binary")


def test_full_disk_is_an_error(make_run: MakeRun) -> None:
    with pytest.raises(RecordError, match="No space left"):
        store.append(Path("/dev/full"), [make_run("w8")])


def test_half_a_line_is_taken_back_when_there_is_no_more_room(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "runs.jsonl"
    store.append(path, [make_run("w8")])
    before = path.read_bytes()
    # The kernel takes the first hundred bytes of the next line and then refuses, as a full disk does.
    code = (
        "import resource, sys; from pathlib import Path; from ferrule_profiles import store;"
        "path = Path(sys.argv[1]); runs = store.read(path); size = path.stat().st_size + 100;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)); store.append(path, runs)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_found_before_measuring(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(RecordError, match="no folder"):
        store.check_writable(tmp_path / "none" / "runs.jsonl")
    with pytest.raises(RecordError, match="cannot be"):
        store.check_writable(tmp_path)
    with pytest.raises(RecordError, match="not JSON"):
        store.check_writable(lines(tmp_path / "notes.txt", "my notes"))
    store.append(tmp_path / "runs.jsonl", [make_run("w8")])
    store.check_writable(tmp_path / "runs.jsonl")
    store.check_writable(tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()


def _append_often(path: Path, run: Run) -> None:
    for _ in range(10):
        store.append(path, [run, run])


def test_writers_at_the_same_time_do_not_mix_their_lines(tmp_path: Path, make_run: MakeRun) -> None:
    path = tmp_path / "runs.jsonl"
    context = multiprocessing.get_context("fork" if os.name == "posix" else None)
    writers = [context.Process(target=_append_often, args=(path, make_run(f"w{n}"))) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    recipes = [run.bundle.recipe for run in store.read(path)]
    assert sorted(recipes) == ["w0"] * 20 + ["w1"] * 20 + ["w2"] * 20
    assert recipes[::2] == recipes[1::2]
