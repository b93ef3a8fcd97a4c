"""The simulated device: its obstacles, the tools that change it, and whole runs over it."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_benchmarks.world import SCENARIOS, policy, toolbox, world
from ferrule_runtime.agent import Agent, Outcome
from ferrule_runtime.errors import ToolError, UsageError
from ferrule_runtime.messages import Call
from ferrule_runtime.models import scripted
from ferrule_runtime.tools import Toolbox, check_arguments, load_toolbox

SEND = Call("send_message", {"to": "Ana", "text": "I am on my way"})
SENT = [{"to": "Ana", "text": "I am on my way"}]


def box(name: str) -> Toolbox:
    made = world(name)
    return Toolbox.of(made, state=made.state)


def cause(tools: Toolbox, call: Call) -> tuple[str, str | None]:
    with pytest.raises(ToolError) as caught:
        tools.invoke(call)
    return caught.value.cause, caught.value.missing


def run(policy_name: str, scenario: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Outcome, Any]:
    monkeypatch.setenv("FERRULE_WORLD", scenario)
    tools = load_toolbox("ferrule_benchmarks.world")
    assert tools.state is not None
    agent = Agent(scripted.load(policy(policy_name)), tools, **options)
    return agent.run("send a message to Ana saying I am on my way"), tools.state()


def test_the_showcase_fails_twice_before_it_can_succeed():
    tools = toolbox()
    before = tools.state()
    assert cause(tools, SEND) == ("network_off", "network")
    assert tools.state() == before
    assert tools.invoke(Call("set_wifi", {"on": True})) == "Wi-Fi is on and connected"
    assert cause(tools, SEND) == ("inbox_full", "inbox_space")
    assert tools.state()["sent"] == []
    assert tools.invoke(Call("delete_messages", {})) == "8 messages were moved to the trash, 12 are left in the inbox"
    assert tools.invoke(SEND) == "the message was sent to Ana"
    after = tools.state()
    assert after["sent"] == SENT
    assert (len(before["inbox"]), len(after["inbox"]), len(after["trash"])) == (20, 12, 8)
    assert after["storage_used_mb"] == before["storage_used_mb"] + 1


def test_the_device_says_that_it_is_simulated():
    tools = toolbox()
    assert "simulated" in tools.note
    assert tools.invoke(Call("device_status", {}))["device"] == "simulated"
    assert tools.state()["device"] == "simulated"


def test_each_toolbox_has_a_device_of_its_own():
    first, second = toolbox(), toolbox()
    first.invoke(Call("set_wifi", {"on": True}))
    assert (first.state()["wifi"], second.state()["wifi"]) == (True, False)


def test_the_start_state_is_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("FERRULE_WORLD", "ready")
    assert toolbox().invoke(SEND) == "the message was sent to Ana"
    monkeypatch.setenv("FERRULE_WORLD", "airplan")
    with pytest.raises(UsageError, match="unknown start state of the simulated device `airplan`") as caught:
        toolbox()
    assert "did you mean `airplane`" in caught.value.hint


def test_an_unknown_contact_is_refused_with_the_nearest_name():
    tools = box("ready")
    call = Call("send_message", {"to": "Anna", "text": "hi"})
    assert cause(tools, call) == ("unknown_contact", "known_contact")
    with pytest.raises(ToolError) as caught:
        tools.invoke(call)
    assert "did you mean `Ana`" in caught.value.hint
    assert tools.invoke(Call("list_contacts", {})) == ["Ana", "Ben", "Chen", "Dora"]
    assert tools.invoke(Call("send_message", {"to": " ana ", "text": "hi"})) == "the message was sent to Ana"


def test_airplane_mode_keeps_the_radios_off():
    tools = box("airplane")
    for name in ("set_wifi", "set_mobile_data"):
        assert cause(tools, Call(name, {"on": True})) == ("airplane_mode_on", "radio")
    tools.invoke(Call("set_airplane_mode", {"on": False}))
    tools.invoke(Call("set_wifi", {"on": True}))
    assert tools.state()["online"] is True
    tools.invoke(Call("set_airplane_mode", {"on": True}))
    assert (tools.state()["online"], tools.state()["wifi"]) == (False, False)


def test_a_full_storage_is_freed_only_for_good():
    tools = box("full-storage")
    assert cause(tools, SEND) == ("storage_full", "storage")
    assert tools["empty_trash"].effect == "irreversible"
    assert tools.invoke(Call("empty_trash", {})) == "2 messages were deleted for good, 920 MB are free again"
    assert tools.invoke(SEND) == "the message was sent to Ana"
    assert cause(tools, Call("empty_trash", {})) == ("nothing_to_delete", None)


@pytest.mark.parametrize(
    ("scenario", "call", "expected"),
    [
        ("flat-battery", Call("set_wifi", {"on": True}), ("battery_low", "charge")),
        ("ready", Call("set_mobile_data", {"on": True}), ("no_sim", "sim")),
        ("ready", Call("send_message", {"to": "Ana", "text": "  "}), ("bad_arguments", None)),
        ("ready", Call("delete_messages", {"older_than_days": -1}), ("bad_arguments", None)),
        ("ready", Call("delete_messages", {"older_than_days": 400}), ("nothing_to_delete", None)),
    ],
)
def test_other_obstacles_have_their_cause(scenario, call, expected):
    assert cause(box(scenario), call) == expected


def test_every_condition_that_a_tool_misses_is_one_that_it_requires():
    for scenario in SCENARIOS:
        for call in (SEND, Call("set_wifi", {"on": True}), Call("set_mobile_data", {"on": True})):
            tools, missing = box(scenario), None
            try:
                tools.invoke(call)
            except ToolError as error:
                missing = error.missing
            assert missing is None or missing in tools[call.name].requires


def test_the_inbox_shows_the_newest_messages():
    shown = box("showcase").invoke(Call("read_inbox", {}))
    assert (shown["messages"], shown["capacity"], len(shown["newest"])) == (20, 20, 10)
    assert [mail["age_days"] for mail in shown["newest"]] == [1, 2, 3, 5, 6, 8, 9, 11, 14, 17]


ON = st.builds(dict, on=st.booleans())
CALLS = st.one_of(
    st.builds(Call, st.sampled_from(["set_wifi", "set_mobile_data", "set_airplane_mode"]), ON),
    st.builds(Call, st.sampled_from(["device_status", "list_contacts", "read_inbox", "empty_trash"]), st.just({})),
    st.builds(Call, st.just("delete_messages"), st.builds(dict, older_than_days=st.integers(-1, 210))),
    st.just(SEND),
)


@given(st.sampled_from(sorted(SCENARIOS)), st.lists(CALLS, max_size=12))
def test_whatever_is_called_the_device_stays_sound(scenario, calls):
    tools = box(scenario)
    start = tools.state()
    for call in calls:
        before = tools.state()
        try:
            tools.invoke(call)
        except ToolError:
            assert tools.state() == before
        else:
            assert tools[call.name].effect != "read" or tools.state() == before
            if call is SEND:
                assert before["online"]
                assert len(before["inbox"]) < before["inbox_capacity"]
    end = tools.state()
    assert 0 <= end["storage_used_mb"] <= end["storage_total_mb"]
    assert len(end["inbox"]) + len(end["trash"]) <= len(start["inbox"]) + len(start["trash"])
    assert json.loads(json.dumps(end)) == end


def test_the_recovering_policy_does_the_job_and_the_state_shows_it(monkeypatch):
    outcome, state = run("recovers", "showcase", monkeypatch)
    assert outcome.kind == "done"
    assert state["sent"] == SENT
    assert [step.kind for step in outcome.steps] == ["act"] * 5 + ["done"]
    causes = [step.failure.cause if step.failure else None for step in outcome.steps]
    assert causes == ["network_off", None, "inbox_full", None, None, None]
    assert all(step.usage is not None and step.usage.simulated for step in outcome.steps)


def test_the_stubborn_policy_is_stopped_and_reported(monkeypatch):
    outcome, state = run("stubborn", "showcase", monkeypatch)
    assert outcome.kind == "gave_up"
    assert state["sent"] == []
    assert [step.kind for step in outcome.steps] == ["act", "refused", "refused", "refused", "gave_up"]
    for fact in ("network_off", "set_wifi or set_mobile_data", "changed or sent: nothing"):
        assert fact in outcome.text


@pytest.mark.parametrize(
    ("scenario", "confirm", "kind"),
    [
        ("ready", None, "done"),
        ("airplane", None, "done"),
        ("full-storage", lambda call, item: True, "done"),
        ("full-storage", lambda call, item: False, "gave_up"),
        ("full-storage", None, "gave_up"),
        ("flat-battery", None, "gave_up"),
    ],
)
def test_the_recovering_policy_ends_rightly_in_every_other_state(monkeypatch, scenario, confirm, kind):
    outcome, state = run("recovers", scenario, monkeypatch, confirm=confirm)
    assert outcome.kind == kind
    assert state["sent"] == (SENT if kind == "done" else [])


@pytest.mark.parametrize("name", ["recovers", "stubborn"])
def test_the_calls_of_a_policy_fit_the_tools(name):
    tools = toolbox()
    for rule in tomllib.loads(policy(name).read_text(encoding="utf-8"))["rule"]:
        if "call" in rule:
            check_arguments(tools[rule["call"]["name"]], rule["call"].get("arguments", {}))


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError) as caught:
        policy("recover")
    assert "did you mean `recovers`" in caught.value.hint
