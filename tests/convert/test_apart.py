"""Work in a process of its own, with what makes such work necessary: templates and memory without end."""

import os
import signal
import time
from pathlib import Path

import pytest

from ferrule_convert.apart import Limits, apart, within
from ferrule_runtime.chat import render
from ferrule_runtime.errors import BundleError, CheckpointError, FerruleError

LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% set a = i %}{% endfor %}{% endfor %}"
WIDE = "{% set all = namespace(a='a') %}{% for i in range(60) %}{% set all.a = all.a ~ all.a %}{% endfor %}"


def refuse() -> None:
    raise CheckpointError("no", hint="do")


def fault() -> None:
    raise KeyError("a fault of ours")


def die() -> None:
    os.write(2, b"last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def chatter() -> int:
    print("not the result")
    os.write(1, b"nor this\n")
    return 7


def unsendable() -> object:
    return lambda: None


def test_it_returns_what_the_function_returns_and_raises_what_it_raises() -> None:
    assert apart(pow, 2, 70) == 2**70
    assert apart(bytes, 1 << 22) == bytes(1 << 22)
    assert apart(chatter) == 7
    with pytest.raises(CheckpointError, match="no") as caught:
        apart(refuse)
    assert caught.value.hint == "do"


@pytest.mark.parametrize(
    ("function", "says"),
    [(die, "was killed: last words"), (unsendable, "failed: .*pickle"), (fault, "failed: KeyError: 'a fault of ours'")],
)
def test_a_process_that_dies_is_an_error_with_its_last_words(function: object, says: str) -> None:
    with pytest.raises(FerruleError, match=f"the process of `{function.__name__}` {says}"):
        apart(function)


def test_a_template_that_never_ends_is_ended(tmp_path: Path) -> None:
    with pytest.raises(FerruleError, match="`render` took longer than 2 s"):
        within(Limits(seconds=2), render, LONG, [], [])


def test_a_template_that_takes_all_memory_is_refused_its_memory() -> None:
    with pytest.raises(BundleError, match="the chat template fails: MemoryError"):
        within(Limits(memory=512 << 20), render, WIDE, [], [])


def test_a_process_that_is_late_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FerruleError, match="took longer than"):
        within(Limits(seconds=3), sleep, str(tmp_path / "pid"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
