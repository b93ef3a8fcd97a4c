import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime import __main__ as command
from ferrule_runtime.commandline import Command, byte_size, emit, human
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
    "text", ["12", "", "MiB", "0MiB", "-1GiB", "nanMiB", "infGiB", "1e400MiB", "1.2.3MiB", "5TiB", "5 0MiB"]
)
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        byte_size(text)
    assert "700MiB" in caught.value.hint


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
