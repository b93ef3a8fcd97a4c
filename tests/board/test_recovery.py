"""What failures forbid, whom they ask for help, and what stands in the way in the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.errors import ToolError
from ferrule_runtime.messages import Call
from ferrule_runtime.recovery import Recovery
from ferrule_runtime.tools import Tool


def make(name: str, effect: str = "write", requires: tuple[str, ...] = (), provides: tuple[str, ...] = ()) -> Tool:
    properties = {"n": {"type": "integer", "default": 1}}
    schema = {"type": "object", "properties": properties, "required": []}
    return Tool(name, name, schema, lambda: None, effect, requires, provides)  # type: ignore[arg-type] # any text


TOOLS = [
    make("send", "egress", requires=("network",)),
    make("wifi", requires=("radio",), provides=("network",)),
    make("cable", provides=("network",)),
    make("airplane", provides=("radio",)),
    make("look", "read"),
    make("note"),
]
NO_NETWORK = ToolError("no network", cause="network_off", missing="network")
NO_RADIO = ToolError("no radio", cause="airplane_mode_on", missing="radio")


def test_a_failure_names_the_cause_what_is_missing_who_provides_it_and_the_call_in_canonical_form():
    failure = Recovery(TOOLS).failed(Call("send", {"n": 1.0}), NO_NETWORK)
    assert failure.call == '{"arguments":{"n":1},"name":"send"}'
    assert (failure.tool, failure.cause, failure.missing) == ("send", "network_off", "network")
    assert failure.providers == ("wifi", "cable")
    assert failure.line() == "send: network_off: no network (missing: network; wifi or cable can provide it)"
    assert failure.told() == {
        "error": "network_off",
        "message": "no network",
        "missing": "network",
        "provided_by": ["wifi", "cable"],
    }


def test_a_failure_that_does_not_say_what_is_missing_names_no_providers():
    failure = Recovery(TOOLS).failed(Call("send", {}), ToolError("broken"))
    assert (failure.cause, failure.missing, failure.providers) == ("failed", None, ())
    assert failure.line() == "send: failed: broken"


def test_a_condition_that_nothing_provides_is_said_so():
    failure = Recovery(TOOLS).failed(Call("send", {}), ToolError("flat", cause="battery_low", missing="charge"))
    assert failure.line().endswith("(missing: charge; no tool provides it)")


def test_long_words_of_a_tool_become_one_short_line():
    failure = Recovery(TOOLS).failed(Call("send", {}), ToolError("send: line\n" * 500))
    assert len(failure.message) == 200
    assert "\n" not in failure.message


def test_defaults_written_out_are_the_same_call():
    recovery = Recovery(TOOLS)
    recovery.failed(Call("send", {}), NO_NETWORK)
    assert recovery.refusal(Call("send", {"n": 1}))
    assert recovery.refusal(Call("send", {"n": 2})) is None


@pytest.mark.parametrize("cause", ["bad_arguments", "not_permitted", "unknown_tool"])
def test_what_no_change_cures_stays_refused(cause):
    recovery = Recovery(TOOLS)
    recovery.failed(Call("send", {}), ToolError("no", cause=cause))
    recovery.succeeded(Call("note", {}), "ok")
    assert recovery.refusal(Call("send", {}))


def test_helpers_are_the_providers_and_their_own_providers_when_they_failed():
    recovery = Recovery(TOOLS)
    failure = recovery.failed(Call("send", {}), NO_NETWORK)
    assert [t.name for t in recovery.helpers(failure)] == ["wifi", "cable"]
    recovery.failed(Call("wifi", {}), NO_RADIO)
    assert [t.name for t in recovery.helpers(failure)] == ["wifi", "cable", "airplane"]
    unknown = recovery.failed(Call("note", {}), ToolError("broken"))
    assert recovery.helpers(unknown) == []


def test_a_chain_of_repairs_leaves_the_deed_in_the_way_until_it_is_done():
    recovery = Recovery(TOOLS)
    recovery.failed(Call("send", {}), NO_NETWORK)
    recovery.failed(Call("wifi", {}), NO_RADIO)
    assert [f.tool for f in recovery.in_the_way] == ["send", "wifi"]
    recovery.succeeded(Call("airplane", {}), "off")
    recovery.succeeded(Call("wifi", {}), "on")
    assert [f.tool for f in recovery.in_the_way] == ["send"]
    recovery.succeeded(Call("send", {}), "sent")
    assert recovery.in_the_way == ()
    assert recovery.report() == "changed or sent: airplane(), wifi(), send()"


def test_another_way_round_counts_but_looking_does_not():
    recovery = Recovery(TOOLS)
    recovery.failed(Call("send", {}), NO_NETWORK)
    recovery.succeeded(Call("look", {}), "fine")
    assert [f.tool for f in recovery.in_the_way] == ["send"]
    recovery.succeeded(Call("note", {}), "noted")
    assert recovery.in_the_way == ()


def test_a_failed_look_is_not_an_action_in_the_way():
    recovery = Recovery(TOOLS)
    recovery.failed(Call("look", {}), ToolError("dark"))
    assert recovery.in_the_way == ()
    assert "look: failed: dark" in recovery.report()


def test_cycles_of_two_and_three_are_seen_once_they_went_round_with_the_same_outcomes():
    recovery = Recovery(TOOLS)
    for _ in range(2):
        assert recovery.cycle() == ()
        recovery.failed(Call("send", {}), NO_NETWORK)
        recovery.succeeded(Call("note", {}), "noted")
    assert recovery.cycle() == ('{"arguments":{"n":1},"name":"send"}', '{"arguments":{"n":1},"name":"note"}')
    recovery = Recovery(TOOLS)
    for _ in range(2):
        recovery.failed(Call("send", {}), NO_NETWORK)
        recovery.succeeded(Call("note", {}), "noted")
        recovery.succeeded(Call("look", {}), "fine")
    assert len(recovery.cycle()) == 3


def test_progress_is_no_cycle():
    recovery = Recovery(TOOLS)
    for left in (2, 1):
        recovery.failed(Call("send", {}), NO_NETWORK)
        recovery.succeeded(Call("note", {}), f"{left} to go")
    assert recovery.cycle() == ()
    recovery = Recovery(TOOLS)
    for _ in range(2):
        recovery.succeeded(Call("note", {}), "step")
        recovery.succeeded(Call("look", {}), "fine")
    assert recovery.cycle() == ()


EVENTS = st.tuples(st.sampled_from([t.name for t in TOOLS]), st.integers(1, 2), st.sampled_from(["ok", "off", "no"]))


@given(st.lists(EVENTS, max_size=15))
def test_a_call_is_refused_exactly_while_it_failed_and_nothing_changed(events):
    recovery = Recovery(TOOLS)
    for name, n, how in events:
        call = Call(name, {"n": n})
        if how == "ok":
            recovery.succeeded(call, "ok")
        else:
            recovery.failed(call, ToolError("x", cause="not_permitted" if how == "no" else "off"))
    for name in (t.name for t in TOOLS):
        for n in (1, 2):
            assert bool(recovery.refusal(Call(name, {"n": n}))) is _forbidden(events, name, n)


def _forbidden(events: list[tuple[str, int, Any]], name: str, n: int) -> bool:
    """Read the rule off the log, backwards: the last word on the call itself, and changes after it."""
    changed = False
    for other, m, how in reversed(events):
        if how == "ok":
            changed = changed or other != "look"
        elif (other, m) == (name, n) and (how == "no" or not changed):
            return True
        # Otherwise this one was freed; an older one that no change cures would still hold.
    return False
