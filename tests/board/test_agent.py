"""The loop, on a small device of its own: what it runs, what it refuses, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.agent import SYSTEM, Agent, AgentLimits, Outcome
from ferrule_runtime.errors import ModelError, ToolError, UsageError
from ferrule_runtime.messages import Call, Message, Reply, Usage, Want
from ferrule_runtime.tools import Tool, Toolbox, tool


class Kettle:
    """A kettle that needs power and water; keeps a log of what was really run, and how it went."""

    def __init__(self) -> None:
        self.power = False
        self.log: list[tuple[str, dict[str, Any], bool]] = []

    def _ran(self, name: str, ok: bool, **arguments: Any) -> None:
        self.log.append((name, arguments, ok))

    @tool(requires=["power"])
    def boil(self, cups: int = 1) -> str:
        """Boil water."""
        self._ran("boil", self.power, cups=cups)
        if not self.power:
            raise ToolError("there is no power", cause="power_off", missing="power")
        return f"{cups} cups are hot"

    @tool(provides=["power"])
    def plug_in(self) -> str:
        """Plug the kettle in."""
        self._ran("plug_in", True)
        self.power = True
        return "plugged in"

    @tool(provides=["power"])
    def crank(self) -> str:
        """Make power by hand, for a moment."""
        self._ran("crank", True)
        return "cranked"

    @tool(effect="read")
    def look(self) -> dict[str, bool]:
        """Look at the kettle."""
        self._ran("look", True)
        return {"power": self.power}

    @tool(effect="irreversible")
    def scrap(self, why: str = "old") -> str:
        """Throw the kettle away."""
        self._ran("scrap", True, why=why)
        return "gone"

    @tool(effect="read")
    def manual(self) -> str:
        """Read the manual."""
        self._ran("manual", True)
        return "x" * 10_000

    @tool()
    def crash(self) -> str:
        """Fail in a way nobody foresaw."""
        self._ran("crash", False)
        raise ZeroDivisionError("no cups")


class Plays:
    """A model that says what the test wrote, and keeps what it was asked."""

    label = "test (simulated)"

    def __init__(self, *replies: str | Call | tuple[Call, ...] | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[tuple[Message, ...], list[str], Want]] = []

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], want: Want) -> Reply:
        self.asked.append((tuple(messages), [t.name for t in tools], want))
        said = self.replies.pop(0)
        usage = Usage(prompt_tokens=10, new_tokens=2, seconds=0.5)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, str):
            return Reply(said, usage=usage)
        return Reply("", (said,) if isinstance(said, Call) else said, usage=usage)


BOIL, PLUG, LOOK, CRANK, SCRAP = (Call(name, {}) for name in ("boil", "plug_in", "look", "crank", "scrap"))


def work(*replies: Any, **options: Any) -> tuple[Kettle, Plays, Outcome]:
    kettle, model = Kettle(), Plays(*replies)
    return kettle, model, Agent(model, Toolbox.of(kettle), **options).run("make tea")


def kinds(outcome: Outcome) -> list[str]:
    return [step.kind for step in outcome.steps]


def test_a_failure_is_read_its_cause_removed_and_the_call_made_again():
    kettle, model, outcome = work(BOIL, PLUG, BOIL, "The water is hot.")
    assert (outcome.kind, outcome.text) == ("done", "The water is hot.")
    assert [(name, ok) for name, _, ok in kettle.log] == [("boil", False), ("plug_in", True), ("boil", True)]
    assert kinds(outcome) == ["act", "act", "act", "done"]
    assert [step.index for step in outcome.steps] == [1, 2, 3, 4]
    failure = outcome.steps[0].failure
    assert (failure.cause, failure.missing, failure.providers) == ("power_off", "power", ("plug_in", "crank"))
    assert outcome.steps[2].result == "1 cups are hot"
    assert outcome.steps[3].usage == Usage(prompt_tokens=10, new_tokens=2, seconds=0.5)
    told = model.asked[1][0][-1]
    assert (told.role, told.name) == ("tool", "boil")
    assert '"error": "power_off"' in told.content
    assert '"provided_by": ["plug_in", "crank"]' in told.content


def test_a_failed_call_is_not_run_again_unchanged_and_the_helpers_are_offered():
    kettle, model, outcome = work(BOIL, Call("boil", {"cups": 1}), PLUG, BOIL, "Hot.")
    assert outcome.kind == "done"
    # `cups=1` is the default: the same call.
    assert [name for name, *_ in kettle.log] == ["boil", "plug_in", "boil"]
    assert kinds(outcome) == ["act", "refused", "act", "act", "done"]
    assert "boil" in model.asked[1][1]
    assert model.asked[2][1] == ["plug_in", "crank"]
    assert '"refused"' in model.asked[2][0][-1].content
    assert "boil" in model.asked[3][1]


def test_a_call_with_other_arguments_is_another_call():
    kettle, _, outcome = work(BOIL, Call("boil", {"cups": 2}), PLUG, BOIL, "Hot.")
    assert outcome.kind == "done"
    assert [(name, arguments) for name, arguments, _ in kettle.log][:2] == [
        ("boil", {"cups": 1}),
        ("boil", {"cups": 2}),
    ]


@pytest.mark.parametrize("repairs", [0, 1, 2])
def test_repeating_ends_after_the_repairs_with_a_report_of_what_stands_in_the_way(repairs):
    kettle, _, outcome = work(*[BOIL] * 9, limits=AgentLimits(repairs=repairs))
    assert [name for name, *_ in kettle.log] == ["boil"]
    assert kinds(outcome) == ["act", *["refused"] * (repairs + 1), "gave_up"]
    for fact in ("power_off", "there is no power", "plug_in or crank", "changed or sent: nothing"):
        assert fact in outcome.text


def test_reading_in_between_does_not_free_a_failed_call():
    kettle, _, outcome = work(BOIL, LOOK, BOIL, LOOK, BOIL, LOOK, BOIL)
    assert outcome.kind == "gave_up"
    assert [name for name, *_ in kettle.log].count("boil") == 1


def test_going_round_in_a_circle_ends_honestly():
    kettle, _, outcome = work(*[BOIL, CRANK] * 9)
    assert [name for name, *_ in kettle.log] == ["boil", "crank", "boil", "crank"]
    assert outcome.kind == "gave_up"
    assert "boil and crank went round in a circle" in outcome.text
    assert "power_off" in outcome.text


def test_a_claim_after_a_failed_action_is_sent_back_once_then_given_up():
    _, model, outcome = work(BOIL, "The water is hot!", "It really is hot.")
    assert kinds(outcome) == ["act", "doubted", "gave_up"]
    assert model.asked[2][0][-1].role == "user"
    assert "power_off" in model.asked[2][0][-1].content
    assert outcome.text.startswith("not done")
    assert "hot" not in outcome.text
    assert "It really is hot." in outcome.steps[-1].note


def test_a_claim_that_was_sent_back_can_still_be_made_good():
    _, _, outcome = work(BOIL, "Hot!", PLUG, BOIL, "Now it is hot.")
    assert kinds(outcome) == ["act", "doubted", "act", "act", "done"]


def test_removing_the_obstacle_is_not_the_deed():
    _, _, outcome = work(BOIL, PLUG, "The water is hot.", "The water is hot.")
    assert kinds(outcome) == ["act", "act", "doubted", "gave_up"]
    assert "changed or sent: plug_in()" in outcome.text


def test_a_request_that_needs_no_tool_is_answered_and_says_that_none_was_called():
    kettle, _, outcome = work("Tea is a drink.")
    assert (outcome.kind, outcome.text, kettle.log) == ("done", "Tea is a drink.", [])
    assert outcome.steps[0].note == "no tool was called"


@pytest.mark.parametrize(
    ("confirm", "ran"),
    [(None, False), (lambda c, t: False, False), (lambda c, t: "yes", False), (lambda c, t: True, True)],
)
def test_what_cannot_be_taken_back_runs_only_after_a_yes(confirm, ran):
    kettle, _, outcome = work(SCRAP, "Thrown away.", "Thrown away.", confirm=confirm)
    assert bool(kettle.log) is ran
    assert outcome.kind == ("done" if ran else "gave_up")
    if not ran:
        assert outcome.steps[0].failure.cause == "not_permitted"
        assert outcome.steps[0].tool_s is None


def test_the_person_is_asked_about_the_whole_call_and_never_about_one_that_cannot_run():
    asked = []
    work(
        Call("scrap", {"why": 3}),
        SCRAP,
        "Gone.",
        confirm=lambda call, item: asked.append((call, item.effect)) is None,
    )
    assert asked == [(Call("scrap", {"why": "old"}), "irreversible")]


def test_a_no_holds_for_the_whole_run():
    asked = []
    kettle, _, _ = work(SCRAP, PLUG, SCRAP, "No.", "No.", confirm=lambda call, item: bool(asked.append(call)))
    assert len(asked) == 1
    assert [name for name, *_ in kettle.log] == ["plug_in"]


@pytest.mark.parametrize("request_text", ["", "   ", "\n\t"])
def test_an_empty_request_is_refused_before_anything_runs(request_text):
    model = Plays("never said")
    with pytest.raises(UsageError, match="empty"):
        Agent(model, Toolbox.of(Kettle())).events(request_text)
    assert model.asked == []


def test_one_forced_call_and_a_limit_of_one_step_end_honestly():
    kettle, model, outcome = work(LOOK, first="call", limits=AgentLimits(steps=1))
    assert [want for *_, want in model.asked] == ["call"]
    assert [name for name, *_ in kettle.log] == ["look"]
    assert kinds(outcome) == ["act", "limit"]
    assert outcome.kind == "limit"
    assert "1 reply" in outcome.text
    assert "changed or sent: nothing" in outcome.text


def test_only_the_first_reply_is_forced():
    _, model, _ = work(PLUG, "Plugged in.", first="call")
    assert [want for *_, want in model.asked] == ["call", "either"]


def test_the_limit_of_time_is_looked_at_before_each_reply_and_each_call():
    now = iter([0.0, 1.0, 99.0, 99.0])
    kettle, _, outcome = work(PLUG, limits=AgentLimits(seconds=10), clock=lambda: next(now))
    assert kettle.log == []
    assert kinds(outcome) == ["limit"]
    assert "10 s" in outcome.text


@pytest.mark.parametrize("limits", [{"steps": 0}, {"seconds": 0}, {"seconds": float("nan")}, {"repairs": -1}])
def test_limits_that_cannot_be_kept_are_refused(limits):
    with pytest.raises(UsageError, match="cannot be kept"):
        AgentLimits(**limits)


def test_replies_that_cannot_be_used_are_asked_for_again_then_given_up():
    _, model, outcome = work(ModelError("half a call"), "", PLUG, "Plugged in.", first="call")
    assert kinds(outcome) == ["refused", "refused", "act", "done"]
    assert [want for *_, want in model.asked] == ["call", "call", "call", "either"]
    _, _, outcome = work(*[ModelError("half a call")] * 5)
    assert kinds(outcome) == ["refused"] * 3 + ["gave_up"]
    assert "half a call" in outcome.text


def test_an_unknown_tool_and_a_crash_are_failures_that_the_model_is_told_of():
    _, model, outcome = work(Call("boill", {}), Call("crash", {}), "Sorry.", "Sorry.")
    assert [step.failure.cause for step in outcome.steps[:2]] == ["unknown_tool", "crashed"]
    assert "did you mean `boil`" in model.asked[1][0][-1].content
    assert "ZeroDivisionError: no cups" in model.asked[2][0][-1].content
    assert "Traceback" not in model.asked[2][0][-1].content
    assert outcome.kind == "gave_up"


def test_several_calls_run_in_order_up_to_the_first_that_fails():
    kettle, model, outcome = work((LOOK, BOIL, PLUG), PLUG, BOIL, "Hot.")
    assert [name for name, *_ in kettle.log] == ["look", "boil", "plug_in", "boil"]
    assert kinds(outcome) == ["act", "act", "refused", "act", "act", "done"]
    assert [m.name for m in model.asked[1][0] if m.role == "tool"] == ["look", "boil", "plug_in"]
    assert [step.usage is None for step in outcome.steps[:3]] == [False, True, True]


def test_a_long_result_is_cut_openly_for_the_model_and_kept_whole_in_the_step():
    _, model, outcome = work(Call("manual", {}), "Read.")
    assert len(outcome.steps[0].result) == 10_000
    assert len(model.asked[1][0][-1].content) < 5000
    assert "cut: 10002 characters in all" in model.asked[1][0][-1].content


def test_the_callers_system_text_comes_after_the_loops():
    _, model, _ = work("Hello.", system="Be kind.")
    assert model.asked[0][0] == (Message("system", f"{SYSTEM}\n\nBe kind."), Message("user", "make tea"))


def test_steps_come_as_they_happen():
    kettle = Kettle()
    events = Agent(Plays(BOIL, PLUG, "…", "…"), Toolbox.of(kettle)).events("make tea")
    next(events)
    assert [name for name, *_ in kettle.log] == ["boil"]
    next(events)
    assert [name for name, *_ in kettle.log] == ["boil", "plug_in"]


def test_steps_without_an_end_are_no_outcome():
    events = Agent(Plays(BOIL), Toolbox.of(Kettle())).events("make tea")
    with pytest.raises(UsageError, match="1 steps without an end"):
        Outcome.of([next(events)])


REPLIES = st.sampled_from(
    ["It is done.", "", BOIL, Call("boil", {"cups": 2}), PLUG, LOOK, CRANK, SCRAP, Call("crash", {}), Call("no", {}),
     Call("boil", {"cups": "x"}), (BOIL, PLUG), (PLUG, BOIL), ModelError("half a call")]
)  # fmt: skip


@given(st.lists(REPLIES, min_size=12, max_size=12), st.booleans())
def test_whatever_a_model_says_the_rules_hold(replies, permitted):
    kettle, model, outcome = work(*replies, confirm=lambda call, item: permitted)
    assert [step.index for step in outcome.steps] == list(range(1, len(outcome.steps) + 1))
    assert [step.ends for step in outcome.steps].index(True) == len(outcome.steps) - 1
    assert len(model.asked) <= 12
    assert permitted or all(name != "scrap" for name, *_ in kettle.log)
    failed: list[Any] = []
    for name, arguments, ok in kettle.log:
        assert (name, arguments) not in failed
        if not ok:
            failed.append((name, arguments))
        elif name != "look":
            failed.clear()
    acts = [(name, ok) for name, _, ok in kettle.log if name != "look"]
    if outcome.kind == "done" and acts:
        assert acts[-1][1]
