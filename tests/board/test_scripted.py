"""Policies: what a rule waits for, what a malformed file says, and that a script never passes for a model."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.errors import ModelError, UsageError
from ferrule_runtime.messages import Call, Message
from ferrule_runtime.models.scripted import ScriptedModel, load, parse

START = (Message("system", "s"), Message("user", "go"))
ASKED_AGAIN = (*START, Message("assistant", "done"), Message("user", "this is not done"))


def after(tool: str, **body: object) -> tuple[Message, ...]:
    return (*START, Message("assistant", "", (Call(tool, {}),)), Message("tool", json.dumps(body), name=tool))


FAILED = after("send", error="network_off", message="no network")
SUCCEEDED = after("send", result={"error": "not one: it is inside a result", "refused": "nor this"})
REFUSED = after("send", refused="it failed before", before={"error": "network_off"})


def play(when: str, messages: tuple[Message, ...]) -> bool:
    """Tell whether a rule with this `when` fires on a conversation."""
    try:
        reply = parse(f'[[rule]]\nwhen = {when}\nsay = "yes"', "p").reply(messages, [], "either")
    except ModelError:
        return False
    assert reply.text == "yes"
    return True


@pytest.mark.parametrize(
    ("when", "messages"),
    [
        ('"start"', START),
        ('"asked_again"', ASKED_AGAIN),
        ('"failed"', FAILED),
        ('{ failed = "network_off" }', FAILED),
        ('{ failed = "network_off", tool = "send" }', FAILED),
        ('"succeeded"', SUCCEEDED),
        ('{ succeeded = "send" }', SUCCEEDED),
        ('"refused"', REFUSED),
        ('{ refused = "send" }', REFUSED),
    ],
)
def test_a_rule_fires_on_its_event_and_on_no_other(when, messages):
    others = [m for m in (START, ASKED_AGAIN, FAILED, SUCCEEDED, REFUSED) if m is not messages]
    assert play(when, messages)
    assert not any(play(when, other) for other in others)


@pytest.mark.parametrize(
    ("when", "messages"),
    [
        ('{ failed = "inbox_full" }', FAILED),
        ('{ failed = "network_off", tool = "call" }', FAILED),
        ('{ succeeded = "call" }', SUCCEEDED),
        ('{ refused = "call" }', REFUSED),
    ],
)
def test_a_rule_for_another_cause_or_tool_does_not_fire(when, messages):
    assert not play(when, messages)


def test_rules_are_used_once_in_order_unless_they_repeat():
    model = parse(
        """
        [[rule]]
        when = "failed"
        call = { name = "wifi", arguments = { on = true, tries = 2 } }
        [[rule]]
        when = "failed"
        repeat = true
        say = "no"
        """,
        "p",
    )
    first, *rest = (model.reply(FAILED, [], "either") for _ in range(3))
    assert first.calls == (Call("wifi", {"on": True, "tries": 2}),)
    assert [reply.text for reply in rest] == ["no", "no"]


def test_a_new_conversation_starts_the_policy_anew():
    model = parse('[[rule]]\nwhen = "start"\nsay = "hello"', "p")
    assert [model.reply(START, [], "either").text for _ in range(2)] == ["hello", "hello"]


def test_every_reply_says_that_no_model_ran():
    model = parse('[[rule]]\nwhen = "start"\nsay = "hello"', "p")
    usage = model.reply(START, [], "text").usage
    assert model.label == "scripted (simulated)"
    assert (usage.simulated, usage.new_tokens, usage.first_token_s) == (True, 0, None)


def test_what_no_rule_waits_for_is_an_error_that_says_what_was_seen():
    model = parse('[[rule]]\nwhen = "start"\nsay = "hello"', "mine.toml")
    with pytest.raises(ModelError, match=r"mine\.toml: no unused rule for `failed` of `send`: network_off"):
        model.reply(FAILED, [], "either")


@pytest.mark.parametrize(("then", "want"), [('say = "hi"', "call"), ('call = { name = "wifi" }', "text")])
def test_an_answer_of_a_kind_that_is_not_wanted_is_an_error(then, want):
    with pytest.raises(ModelError, match=f"where a {want} is wanted"):
        parse(f'[[rule]]\nwhen = "start"\n{then}', "p").reply(START, [], want)


@pytest.mark.parametrize(
    "messages",
    [(), START[:1], (*START, Message("assistant", "x")), (*START, Message("tool", "x", name="t")), after("t", other=1)],
)
def test_a_conversation_with_nothing_to_reply_to_is_an_error(messages):
    with pytest.raises(ModelError):
        parse('[[rule]]\nwhen = "start"\nsay = "hello"', "p").reply(messages, [], "either")


RULE = '[[rule]]\nwhen = "start"\nsay = "x"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rule = [", "end of document"),
        ("rule = 1 1", "line 1"),
        ('[[rule]]\nwhen = "start"\nsay = "x\n', "line 3"),
        ("", "`rule` must be"),
        ("rule = []", "`rule` must be"),
        ("rule = [1]", "`rule` must be"),
        ("about = 1\n" + RULE, "`about` must be"),
        ("rules = 1\n" + RULE, "unknown key `rules`"),
        (RULE + RULE + "whn = 1", r"rule\[2\]: unknown key `whn`"),
        ('[[rule]]\nsay = "x"', r"`rule\[1\].when` must be"),
        ('[[rule]]\nwhen = "strat"\nsay = "x"', r"rule\[1\].when: unknown event `strat`"),
        ('[[rule]]\nwhen = { fail = "a" }\nsay = "x"', r"`rule\[1\].when` must be"),
        ('[[rule]]\nwhen = { succeeded = "a", tool = "b" }\nsay = "x"', r"`rule\[1\].when` must be"),
        ('[[rule]]\nwhen = { failed = 1 }\nsay = "x"', r"`rule\[1\].when` must be"),
        ('[[rule]]\nwhen = "start"', "exactly one of `call` and `say`"),
        (RULE + 'call = { name = "a" }', "exactly one of `call` and `say`"),
        ('[[rule]]\nwhen = "start"\nsay = " "', r"`rule\[1\].say` must be"),
        (RULE + "repeat = 1", r"`rule\[1\].repeat` must be"),
        ('[[rule]]\nwhen = "start"\ncall = "a"', r"`rule\[1\].call` must be"),
        ('[[rule]]\nwhen = "start"\ncall = { arguments = {} }', r"`rule\[1\].call` must be"),
        ('[[rule]]\nwhen = "start"\ncall = { name = "a", args = {} }', "unknown key `args`"),
        ('[[rule]]\nwhen = "start"\ncall = { name = "a", arguments = 1 }', r"`rule\[1\].call.arguments` must be"),
        ('[[rule]]\nwhen = "start"\ncall = { name = "a", arguments = { x = nan } }', r"call.arguments` must be"),
        ('[[rule]]\nwhen = "start"\ncall = { name = "a", arguments = { x = 2026-01-01 } }', "call.arguments` must be"),
    ],
)
def test_a_malformed_policy_says_its_line_or_key(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse(text, "mine.toml")
    assert "mine.toml" in str(caught.value)
    assert caught.value.hint


def test_the_nearest_event_is_offered():
    with pytest.raises(UsageError) as caught:
        parse('[[rule]]\nwhen = "strat"\nsay = "x"', "p")
    assert "did you mean `start`" in caught.value.hint


def test_a_policy_is_loaded_from_a_file(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(RULE, encoding="utf-8")
    assert isinstance(load(path), ScriptedModel)
    assert load(str(path)).reply(START, [], "either").text == "x"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "p.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"p\.toml cannot be read"):
        load(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["start", "failed", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "arguments", "failed", "tool", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def _toml(value: object) -> str:
    if value is None:
        return "1.5"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


@given(st.dictionaries(st.sampled_from(["when", "call", "say", "repeat", "x"]), VALUES))
def test_any_rule_is_either_read_or_refused_in_words(rule):
    text = "[[rule]]\n" + "\n".join(f"{key} = {_toml(value)}" for key, value in rule.items())
    said = ""
    try:
        parse(text, "p")
    except UsageError as error:
        said = str(error)
    sound = set(rule) <= {"when", "call", "say", "repeat"} and rule.get("when") and ("call" in rule) != ("say" in rule)
    assert said.startswith("policy p") or (sound and not said)
