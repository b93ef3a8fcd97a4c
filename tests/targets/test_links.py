import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ferrule_runtime.errors import LinkError, UsageError
from ferrule_targets.links import Completed, Link, open_link

PYTHON = sys.executable


@pytest.fixture
def link() -> Link:
    return open_link("local:")


def python(code: str, *arguments: str) -> list[str]:
    return [PYTHON, "-c", code, *arguments]


def gone(pid: int) -> bool:
    """Tell whether a process has ended, giving the kernel a moment."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended; its new parent has not looked yet
            return True
        time.sleep(0.02)
    return False


# Starts a grandchild that would sleep for a minute and keeps its output open; prints the grandchild's pid.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
if sys.argv[1:] == ["stay"]:
    time.sleep(60)
"""


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_status_is_the_programs_own(link: Link, code: int) -> None:
    done = link.run(python(f"import sys; print('out'); print('err', file=sys.stderr); sys.exit({code})"), 30)
    assert (done.code, done.stdout, done.stderr) == (code, "out\n", "err\n")


def test_check_raises_with_the_end_of_what_was_said(link: Link) -> None:
    done = link.run(python("import sys; [print('line', i, file=sys.stderr) for i in range(100)]; sys.exit(9)"), 30)
    with pytest.raises(LinkError, match=r"status 9: line 95; line 96; line 97; line 98; line 99$"):
        done.check()
    assert link.run(python("pass"), 30).check().code == 0


def test_a_program_ended_by_a_signal_says_which(link: Link) -> None:
    done = link.run(python("import os; os.kill(os.getpid(), 9)"), 30)
    assert done.code == -signal.SIGKILL
    with pytest.raises(LinkError, match="signal 9: it said nothing"):
        done.check()


def test_arguments_arrive_unchanged_without_a_shell(link: Link) -> None:
    words = ["$HOME", "a b", "'", '"', ";ls", "*", "ü", ""]
    done = link.run(python("import sys, json; print(json.dumps(sys.argv[1:]))", *words), 30)
    assert done.stdout == '["$HOME", "a b", "\'", "\\"", ";ls", "*", "\\u00fc", ""]\n'


def test_a_missing_program_is_an_error_of_ours(link: Link) -> None:
    with pytest.raises(LinkError, match="`no-such-program` cannot be started here") as caught:
        link.run(["no-such-program"], 5)
    assert "PATH" in caught.value.hint
    with pytest.raises(LinkError, match="cannot be started"):
        next(link.lines(["no-such-program"], 5))


def test_bytes_that_are_no_text_are_shown_escaped(link: Link) -> None:
    done = link.run(python(r"import sys; sys.stdout.buffer.write(b'ok \xff\n')"), 30)
    assert done.stdout == "ok \\xff\n"


def test_ten_megabytes_on_both_outputs_come_whole(link: Link) -> None:
    code = "import sys; sys.stdout.write('o' * 10_000_000); sys.stderr.write('e' * 10_000_000)"
    done = link.run(python(code), 60)
    assert len(done.stdout) == len(done.stderr) == 10_000_000
    assert set(done.stdout) == {"o"}


def test_ten_megabytes_of_lines_come_whole_and_in_order(link: Link) -> None:
    code = "import sys; sys.stdout.writelines(f'{i:09}\\n' for i in range(1_000_000))"
    count = 0
    for count, line in enumerate(link.lines(python(code), 60), start=1):
        assert int(line) == count - 1
    assert count == 1_000_000


def test_lines_come_while_the_program_still_runs(link: Link, tmp_path: Path) -> None:
    # The program goes on only after the test has seen its first line.
    seen = tmp_path / "seen"
    code = (
        "import os, sys, time\nprint('first', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('second\\r\\nno end of line', end='')"
    )
    lines = link.lines(python(code, str(seen)), 30)
    assert next(lines) == "first"
    seen.touch()
    assert list(lines) == ["second", "no end of line"]


def test_a_multibyte_character_may_come_in_two_pieces(link: Link) -> None:
    code = (
        "import sys, time\nsys.stdout.buffer.write(b'\\xe2\\x82'); sys.stdout.buffer.flush(); time.sleep(0.1)\n"
        "sys.stdout.buffer.write(b'\\xac\\n')"
    )
    assert list(link.lines(python(code), 30)) == ["€"]


def test_lines_end_in_an_error_where_the_program_failed(link: Link) -> None:
    lines = link.lines(python("import sys; print('partial', flush=True); sys.exit('disk is full')"), 30)
    assert next(lines) == "partial"
    with pytest.raises(LinkError, match="status 1: disk is full"):
        next(lines)


def test_time_up_ends_the_program_and_what_it_started(link: Link) -> None:
    lines = link.lines(python(FAMILY, "stay"), 1.5)
    grandchild = int(next(lines))
    assert not Path(f"/proc/{grandchild}/stat").read_text(encoding="ascii").endswith("Z")
    with pytest.raises(LinkError, match=r"took longer than 1\.5 s"):
        next(lines)
    assert gone(grandchild)


def test_time_up_ends_what_outlived_the_program(link: Link) -> None:
    # The program itself ends at once; its child keeps the output open.
    lines = link.lines(python(FAMILY), 1.5)
    grandchild = int(next(lines))
    with pytest.raises(LinkError, match=r"took longer than 1\.5 s"):
        next(lines)
    assert gone(grandchild)


def test_time_up_tells_what_was_said_until_then(link: Link) -> None:
    code = "import sys, time; print('waiting for the sensor', file=sys.stderr, flush=True); time.sleep(60)"
    with pytest.raises(LinkError, match="waiting for the sensor"):
        link.run(python(code), 1.5)


def test_a_program_that_ignores_the_request_to_end_is_ended(link: Link) -> None:
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    lines = link.lines(python(code), 30)
    pid = int(next(lines))
    lines.close()
    assert gone(pid)


def test_leaving_the_loop_early_ends_the_program(link: Link) -> None:
    with contextlib.closing(link.lines(python(FAMILY, "stay"), 30)) as lines:
        grandchild = int(next(lines))
    assert gone(grandchild)


def test_ctrl_c_ends_the_program() -> None:
    code = f"""
import sys
from ferrule_targets.links import open_link
lines = open_link("local:").lines([sys.executable, "-c", {FAMILY!r}, "stay"], 30)
print(next(lines), flush=True)
next(lines)
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as us:
        assert us.stdout is not None
        grandchild = int(us.stdout.readline())
        os.kill(us.pid, signal.SIGINT)
        assert us.wait(30) in (1, 130, -signal.SIGINT)
    assert gone(grandchild)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_nothing_may_wait_for_ever(link: Link, timeout: float) -> None:
    with pytest.raises(UsageError, match="a timeout of"):
        link.run(python("pass"), timeout)


def test_the_link_starts_ferrule_without_an_activated_environment(link: Link) -> None:
    done = link.run([*link.ferrule, "--version"], 60)
    assert isinstance(done, Completed)
    assert done.check().stdout.startswith("ferrule ")


def test_push_copies_a_file_over_an_older_one(link: Link, tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_bytes(b"new" * 1000)
    old.write_bytes(b"old")
    link.push(new, str(old))
    assert old.read_bytes() == new.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_push_copies_a_folder_but_not_over_another(link: Link, tmp_path: Path) -> None:
    source = tmp_path / "bundle"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "part").write_bytes(b"x")
    there = tmp_path / "there"
    link.push(source, str(there))
    assert (there / "deep" / "part").read_bytes() == b"x"
    with pytest.raises(LinkError, match="exists already"):
        link.push(source, str(there))


def test_a_push_that_fails_leaves_nothing_behind(link: Link, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="could not be copied"):
        link.push(tmp_path / "gone", str(tmp_path / "there"))
    source = tmp_path / "bundle"
    source.mkdir()
    (source / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LinkError, match="could not be copied"):
        link.push(source, str(tmp_path / "there"))
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("url", "says", "hint"),
    [
        ("lokal:", "unknown kind of link `lokal`", "did you mean `local`?"),
        ("local", "`local` is not the URL of a board", "known kinds: local:"),
        ("local:/somewhere", "nothing follows `local:`", "write `local:`"),
    ],
)
def test_a_link_that_is_none_is_refused(url: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        open_link(url)
    assert hint in caught.value.hint
