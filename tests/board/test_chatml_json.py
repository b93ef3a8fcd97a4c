"""ChatML with JSON calls, our own template: what it writes is what it reads."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from talking import QWEN, accepted, make_talk, tool

from ferrule_runtime.chat import render
from ferrule_runtime.dialects import chatml_json
from ferrule_runtime.errors import ConstraintError, ModelError
from ferrule_runtime.messages import Call, Message
from ferrule_runtime.talk import Talk

USER = Message("user", "go")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
calls = st.builds(Call, st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.dictionaries(texts, values, max_size=4))
# Plain words: what could itself begin a call, such as a brace at the start of a line, is no text around one.
words = st.from_regex(r"[A-Za-z.,]{1,8}( [A-Za-z.,]{1,8}){0,3}", fullmatch=True)
START, END = "<|im_start|>assistant\n", "<|im_end|>\n"


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    return make_talk(tmp_path_factory.mktemp("chatml"), "chatml-json", QWEN)


def written(*said: Call, text: str = "") -> str:
    """What the template makes of an assistant's turn, without what opens and ends it."""
    turns = chatml_json.turns([USER, Message("assistant", text, calls=said)])
    whole = render(chatml_json.TEMPLATE, turns, [], reply=False)
    before, opening, turn = whole.rpartition(START)
    assert before.endswith(f"go{END}")
    assert opening
    assert turn.endswith(END)
    return turn.removesuffix(END)


def same(read: tuple[Call, ...], meant: tuple[Call, ...]) -> bool:
    """Equal in every bit: 1 is not 1.0 nor True, and the order of keys is kept."""
    plain = [[json.dumps([call.name, dict(call.arguments)]) for call in them] for them in (read, meant)]
    return plain[0] == plain[1]


@given(st.lists(calls, min_size=1, max_size=3).map(tuple))
def test_any_calls_are_read_as_they_were_written(said: tuple[Call, ...]) -> None:
    text, read = chatml_json.parse(written(*said), ())
    assert text == ""
    assert same(read, said)


@given(calls, words, words)
def test_text_around_a_call_is_kept_apart(call: Call, before: str, after: str) -> None:
    text, read = chatml_json.parse(f"{written(call, text=before)}\n{after}", ())
    assert text.split() == [*before.split(), *after.split()]
    assert same(read, (call,))


@given(calls)
def test_the_end_tag_may_be_missing_at_the_very_end(call: Call) -> None:
    whole = written(call)
    for cut in (whole.removesuffix("</tool_call>"), whole.removesuffix("\n</tool_call>")):
        assert same(chatml_json.parse(cut, ())[1], (call,))
    with pytest.raises(ModelError, match="followed by something else"):
        chatml_json.parse(whole.removesuffix("</tool_call>") + "and so on", ())


@given(calls, st.data())
def test_a_call_that_is_cut_off_anywhere_is_an_error_never_another_call(call: Call, data: st.DataObject) -> None:
    whole = written(call)
    body = len("<tool_call>")
    cut = whole[: data.draw(st.integers(body, whole.rindex("}")))]
    with pytest.raises(ModelError):
        chatml_json.parse(cut, ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>\n{'name': 'a'}\n</tool_call>", "not JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": Infinity}}</tool_call>', "not a finite number"),
        ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "a", "arguments": {"\\udfff": 1}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "a\\ud800", "arguments": {}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1"}</tool_call>', "not JSON"),
        ('<tool_call>{"name": ["a"], "arguments": {}}</tool_call>', "has no name"),
        ('<tool_call>{"name": "a", "arguments": {}}<tool_call>', "followed by something else"),
    ],
)
def test_a_malformed_call_is_an_error(text: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        chatml_json.parse(text, ())


def test_a_whole_pair_of_surrogates_is_a_character() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": "\\ud83d\\ude00"}}</tool_call>'
    assert chatml_json.parse(text, ())[1] == (Call("a", {"x": "\U0001f600"}),)


def test_the_whole_conversation_is_written_as_chatml() -> None:
    light = tool("set_light", {"on": {"type": "boolean"}})
    call = Call("set_light", {"on": True})
    talked = [
        Message("system", "Be brief."),
        Message("user", "Light!"),
        Message("assistant", "Yes.", calls=(call,)),
        Message("tool", '{"result": "ok"}', name="set_light"),
    ]
    function = (
        '{"name": "set_light", "description": "Does set_light.", "parameters": {"type": "object", "properties": '
        '{"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": false}}'
    )
    assert render(chatml_json.TEMPLATE, chatml_json.turns(talked), [light.schema()]) == (
        "<|im_start|>system\nBe brief.\n\nYou can call these tools:\n<tools>\n" + function + "\n</tools>\n"
        "To call one, answer with nothing but:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nLight!<|im_end|>\n"
        '<|im_start|>assistant\nYes.\n<tool_call>\n{"name": "set_light", "arguments": {"on": true}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"result": "ok"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_without_a_system_text_there_is_one_all_the_same() -> None:
    text = render(chatml_json.TEMPLATE, chatml_json.turns([USER]), [])
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_grammar_takes_what_the_template_writes_and_nothing_near_it(talk: Talk) -> None:
    light = tool("set_light", {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}})
    good = written(Call("set_light", {"on": True, "room": "attic"}))
    assert accepted(talk, [light], good)
    for bad in (
        good.replace("true", '"true"'),
        good.replace("attic", "cellar"),
        good.replace("set_light", "set_lamp"),
        good.replace('"on": true, ', ""),
        good.replace(": ", ":"),
        good.replace("\n", ""),
        f"Sure. {good}",
        good + good,
        good.removesuffix("</tool_call>"),
    ):
        assert bad != good
        assert not accepted(talk, [light], bad)


def test_only_a_wanted_call_is_constrained(talk: Talk) -> None:
    light = tool("set_light", {"on": {"type": "boolean"}})
    assert talk.grammar([light], "either") is None
    assert talk.grammar([light], "text") is None
    with pytest.raises(ConstraintError, match="there are no tools"):
        talk.grammar([], "call")
