"""Traces on disk and steps on a terminal."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime import __version__
from ferrule_runtime.errors import FerruleError, UsageError
from ferrule_runtime.messages import Call, Usage
from ferrule_runtime.recovery import Failure
from ferrule_runtime.steps import Step
from ferrule_runtime.trace import Trace, to_record, view

CALL = Call("send", {"to": "Ana", "n": 2})
FAILURE = Failure("send", CALL.canonical(), "network_off", "no network", "network", ("wifi",))
REAL = Usage(prompt_tokens=412, new_tokens=31, seconds=1.25, first_token_s=0.5)


def open_trace(path: Path) -> Trace:
    return Trace(path, request="say hello", model="scripted (simulated)", tools=["send", "wifi"])


def test_a_trace_is_a_head_and_a_line_for_each_step_with_everything_in_it(tmp_path):
    path = tmp_path / "t.jsonl"
    with open_trace(path) as trace:
        trace.write(Step(1, "act", call=CALL, failure=FAILURE, usage=REAL, tool_s=0.25))
        trace.write(Step(2, "done", text="schön", note="n"))
    head, first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert head == {
        "schema_version": 1,
        "kind": "run",
        "request": "say hello",
        "model": "scripted (simulated)",
        "tools": ["send", "wifi"],
        "made": f"ferrule-runtime {__version__}",
    }
    assert first == {
        "schema_version": 1,
        "kind": "step",
        "index": 1,
        "step": "act",
        "call": {"name": "send", "arguments": {"to": "Ana", "n": 2}},
        "result": None,
        "failure": {
            "tool": "send",
            "call": '{"arguments":{"n":2,"to":"Ana"},"name":"send"}',
            "cause": "network_off",
            "message": "no network",
            "missing": "network",
            "providers": ["wifi"],
        },
        "text": "",
        "usage": {
            "prompt_tokens": 412,
            "new_tokens": 31,
            "seconds": 1.25,
            "first_token_s": 0.5,
            "simulated": False,
        },
        "tool_s": 0.25,
        "note": "",
    }
    assert (second["text"], second["usage"], second["call"], second["tool_s"]) == ("schön", None, None, None)


def test_each_step_is_in_the_file_before_the_next_begins(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = open_trace(path)
    for index in range(1, 4):
        trace.write(Step(index, "refused"))
        assert len(path.read_bytes().splitlines()) == index + 1
    trace.close()


def test_a_trace_replaces_an_older_one_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "t.jsonl"
    for _ in range(2):
        open_trace(path).close()
    assert len(path.read_bytes().splitlines()) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        open_trace(tmp_path / "no" / "t.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_an_error_in_words():
    with pytest.raises(FerruleError, match="No space left") as caught:
        open_trace(Path("/dev/full"))
    assert caught.value.exit_code == 1


TEXT = st.text(st.characters(), max_size=300)
STEPS = st.builds(
    Step,
    index=st.integers(1, 99),
    kind=st.sampled_from(["act", "refused", "doubted", "done", "gave_up", "limit"]),
    call=st.none() | st.builds(Call, TEXT, st.dictionaries(TEXT, TEXT | st.integers(), max_size=3)),
    result=st.none() | TEXT | st.dictionaries(TEXT, TEXT, max_size=3),
    failure=st.none() | st.builds(Failure, TEXT, TEXT, TEXT, TEXT, st.none() | TEXT, st.just(("wifi",))),
    text=TEXT,
    usage=st.none() | st.just(REAL) | st.just(Usage(simulated=True)),
    note=TEXT,
)


@given(STEPS)
def test_any_step_is_shown_in_short_lines_that_cannot_drive_the_terminal(step):
    lines = view(step).split("\n")
    assert lines[0].strip()
    assert all(len(line) <= 100 and line.isprintable() for line in lines)


@given(STEPS)
def test_any_step_is_one_line_of_json_in_utf8(tmp_path_factory, step):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with open_trace(path) as trace:
        trace.write(step)
    lines = path.read_bytes().decode("utf-8").rstrip("\n").split("\n")
    assert len(lines) == 2
    assert json.loads(lines[1]) == json.loads(json.dumps(to_record(step)))


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (
            Step(1, "act", call=CALL, result="sent", usage=REAL),
            ' 1 call     send(to="Ana", n=2) [412+31 tokens, 1.2 s]\n   result   sent',
        ),
        (
            Step(2, "act", call=CALL, failure=FAILURE, usage=Usage(simulated=True)),
            ' 2 call     send(to="Ana", n=2) [simulated]\n'
            "   failed   send: network_off: no network (missing: network; wifi can provide it)",
        ),
        (
            Step(3, "refused", call=CALL, failure=FAILURE, note="it failed before"),
            ' 3 refused  send(to="Ana", n=2)\n   note     it failed before',
        ),
        (Step(4, "refused", note="half a call"), " 4 refused  (nothing that could be used)\n   note     half a call"),
        (Step(5, "doubted", text="Sent!", note="no"), " 5 said     Sent!\n   note     no"),
        (Step(6, "gave_up", text="not done"), " 6 gave up  not done"),
        (Step(12, "done", text="Sent."), "12 done     Sent."),
        (
            Step(7, "act", call=CALL, result={"on": True}, text="hm"),
            '   says     hm\n 7 call     send(to="Ana", n=2)\n   result   {"on": true}',
        ),
    ],
)
def test_steps_read_like_this(step, shown):
    assert view(step) == shown


def test_a_long_result_is_cut_on_the_terminal():
    lines = view(Step(1, "act", call=CALL, result="word " * 400)).splitlines()
    assert len(lines) == 5
    assert lines[-1].endswith("…")
