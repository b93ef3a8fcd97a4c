import json
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime import __main__ as command
from ferrule_runtime import __version__
from ferrule_runtime.commandline import Command, byte_size, emit, human, note, positive, say
from ferrule_runtime.errors import FerruleError, UsageError
from ferrule_runtime.registry import load_module, unknown


@given(
    st.integers(1, 1 << 30),
    st.sampled_from([("B", 1), ("KiB", 1024), ("MiB", 1 << 20), ("GiB", 1 << 30), ("MB", 10**6)]),
)
def test_amounts_are_read_with_their_unit(count: int, unit: tuple[str, int]) -> None:
    assert byte_size(f"{count}{unit[0]}") == count * unit[1]
    assert byte_size(f" {count} {unit[0].lower()} ") == count * unit[1]


@pytest.mark.parametrize(
    "text",
    [
        "12",
        "",
        "MiB",
        "0MiB",
        "-1GiB",
        "nanMiB",
        "infGiB",
        "1e400MiB",
        "1.2.3MiB",
        "5TiB",
        "5 0MiB",
        "1e9999999MiB",
        "1e-9MiB",
        "0.4B",
        "sNaNMiB",
        "8589934592GiB",
        "5M",
        "0x10MiB",
        "MiB5",
    ],
)
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        byte_size(text)
    assert "700MiB" in caught.value.hint


@given(st.decimals("0.001", "9999", places=3), st.sampled_from([("GB", 10**9), ("KiB", 1 << 10), ("GiB", 1 << 30)]))
def test_fractions_are_exact_down_to_the_byte(count: Decimal, unit: tuple[str, int]) -> None:
    thousandths = int(count.scaleb(3))
    assert byte_size(f"{count}{unit[0]}") == thousandths * unit[1] // 1000


@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_a_usage_error(text: str) -> None:
    try:
        assert 1 <= byte_size(text) < 1 << 63
    except UsageError:
        assert text.strip()[-1:].lower() != "b" or not text.strip()[:-1].isdecimal() or int(text.strip()[:-1]) == 0


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (5 << 28, "1.25 GiB")]
)
def test_bytes_are_written_in_the_unit_that_a_person_would_take(count: int, text: str) -> None:
    assert human(count) == text


@given(st.integers(0, 1 << 44))
def test_bytes_for_people_are_right_to_the_last_digit(count: int) -> None:
    number, unit = human(count).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    digits = len(number.partition(".")[2])
    assert abs(float(number) - count / scale) <= 0.51 * 10**-digits


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    error = unknown("recipe", "w4g23", ["w4g32", "w8"], UsageError)
    assert str(error) == "unknown recipe `w4g23`"
    assert error.hint == "did you mean `w4g32`? known: w4g32, w8"
    with pytest.raises(UsageError, match="unknown engine `onx`"):
        load_module("engine", "ferrule_runtime.engines", "onx", UsageError)


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for put in (say, note):
        put("a\x1b[2Jb\r\x00\x9b\ud800\tc\nd 日本 👩\u200d👩 é")
    out, err = capsys.readouterr()
    assert out == err == "a\\x1b[2Jb\\r\\x00\\x9b\\ud800\tc\nd 日本 👩\u200d👩 é\n"


def test_json_says_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    emit("thing", {"x": 1})
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "kind": "thing", "x": 1}


def raising(error: BaseException) -> dict[str, Command]:
    def run(options: object) -> int:
        raise error

    return {"go": Command("goes", lambda parser: None, run)}


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (FerruleError("it broke at 7", hint="mend it"), 1, ["error: it broke at 7", "hint: mend it"]),
        (UsageError("no"), 2, ["error: no"]),
        (
            KeyboardInterrupt(),
            1,
            ["error: interrupted", "hint: nothing half-done was kept; the same command starts again"],
        ),
    ],
)
def test_an_error_is_printed_once_with_its_hint(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    lines: list[str],
) -> None:
    monkeypatch.setattr(command, "_commands", lambda: raising(error))
    assert command.main(["go"]) == code
    assert capsys.readouterr().err.splitlines() == lines


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_commands", lambda: raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        command.main(["go"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mesure"], "did you mean `measure`"),
        (["measure"], "error:"),
        (["run", "x", "--memory", "12"], "`12` has no unit"),
    ],
)
def test_usage_errors_end_with_two(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert command.main(words) == 2
    assert says in capsys.readouterr().err


def test_a_command_of_the_host_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_commands", lambda: raising(ZeroDivisionError()))
    assert command.main(["convert"]) == 2
    assert "pip install ferrule" in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: ferrule ")


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ferrule {__version__}\n"
    assert command.main(["run", "--help"]) == 0
    assert "--memory SIZE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["run"], "the following arguments are required: REQUEST", "ferrule run --help"),
        (["fit", "x", "--context", "0"], "`0` is less than 1", "ferrule fit --help"),
        (["fit", "x", "--context", "many"], "invalid positive value: `many`", "ferrule fit --help"),
        (["fit", "x", "--chunk", "9" * 5000], "--chunk", "ferrule fit --help"),
        (["fit", "x", "--memory", "0MiB"], "`0MiB` is not a positive amount", "700MiB"),
        (["inspect", "x", "--nothing"], "unrecognized arguments: --nothing", "ferrule --help"),
        (["--nothing"], "unrecognized arguments: --nothing", "ferrule --help"),
        (["doctr", "--json"], "unknown command `doctr`", "did you mean `doctor`?"),
        (["", "x"], "unknown command ``", "known: "),
    ],
)
def test_what_was_asked_for_wrongly_is_said_with_what_to_do(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str, hint: str
) -> None:
    assert command.main(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    (first, second) = error.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("hint: ")
    assert hint in second


def test_a_number_for_an_option_is_at_least_one() -> None:
    assert positive("7") == 7


PROGRAM = """
import sys, time
from ferrule_runtime import __main__ as command
from ferrule_runtime.commandline import Command, emit, note, say

def loud(options):
    for index in range(100_000):
        say(f"line {index}")
    return 0

def few(options):
    say("one line")
    return 0

def sleep(options):
    note("ready")
    time.sleep(60)

command._commands = lambda: {f.__name__: Command("", lambda parser: None, f) for f in (loud, few, sleep)}
sys.exit(command.main(sys.argv[1:]))
"""


def start(word: str, **kinds: object) -> "subprocess.Popen[str]":
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, word], env=environment, text=True, **kinds)


def test_ctrl_c_ends_a_command_with_one_and_no_traceback() -> None:
    with start("sleep", stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 1
    assert rest.startswith("error: interrupted\nhint: ")
    assert "Traceback" not in rest


@pytest.mark.parametrize("word", ["loud", "few"])
def test_a_reader_that_goes_away_is_no_traceback(word: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(word, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        assert process.stderr.read() == ""
        assert process.wait(30) == 1


@pytest.mark.parametrize("word", ["loud", "few"])
def test_a_result_that_there_is_no_room_for_is_an_error(word: str) -> None:
    with Path("/dev/full").open("w") as full, start(word, stdout=full, stderr=subprocess.PIPE) as process:
        said = process.stderr.read()
        assert process.wait(30) == 1
    assert said.startswith("error: the result cannot be written: No space left on device\n")
    assert "Traceback" not in said
    assert "Exception ignored" not in said
