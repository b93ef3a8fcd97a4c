"""FunctionGemma's calls: texts between `<escape>` tokens, constrained, and read back."""

import pytest
from hypothesis import given, settings
from talking import GEMMA, GEMMA_TAGS, GEMMA_TEMPLATE, accepted, exact, make_talk, tool, tools_and_calls, walk

from ferrule_runtime.dialects import load_dialect
from ferrule_runtime.errors import BundleError, ConstraintError, ModelError
from ferrule_runtime.messages import Call, Message
from ferrule_runtime.round_trip import check_round_trip
from ferrule_runtime.talk import Talk
from ferrule_runtime.tools import check_arguments

GEMMA_RULES = load_dialect("functiongemma")
E = "<escape>"


def call_text(arguments: str, name: str = "t") -> str:
    return f"<start_function_call>call:{name}{{{arguments}}}<end_function_call>"


ARGUMENTS = [
    ("", {}),
    (f"s:{E}plain{E}", {"s": "plain"}),
    (f"s:{E}{E}", {"s": ""}),
    (f"s:{E}7{E}", {"s": "7"}),
    (f"s:{E}true{E}", {"s": "true"}),
    (f's:{E}a,b:{{c}} [d] "e" \\ <f>{E}', {"s": 'a,b:{c} [d] "e" \\ <f>'}),
    (f"s:{E}two\nlines{E}", {"s": "two\nlines"}),
    (f"s:{E} kept {E}", {"s": " kept "}),
    (f"s:{E}<end_function_call>{E}", {"s": "<end_function_call>"}),
    (f"s:{E}ß 日本{E}", {"s": "ß 日本"}),
    ("i:7", {"i": 7}),
    ("i:-7", {"i": -7}),
    ("n:1.5", {"n": 1.5}),
    ("n:1e-07", {"n": 1e-7}),
    ("b:true", {"b": True}),
    ("b:false", {"b": False}),
    ("b:True", {"b": True}),
    ("z:None", {"z": None}),
    ("z:null", {"z": None}),
    ("a:[]", {"a": []}),
    ("a:[1,2]", {"a": [1, 2]}),
    (f"a:[{E}x{E},{E}y,z{E}]", {"a": ["x", "y,z"]}),
    ("a:[[1],[2]]", {"a": [[1], [2]]}),
    ("o:{}", {"o": {}}),
    (f"o:{{k:{E}v{E},n:1}}", {"o": {"k": "v", "n": 1}}),
    (f"o:{{{E}a key{E}:1}}", {"o": {"a key": 1}}),
    ("o:{p:{q:true}}", {"o": {"p": {"q": True}}}),
    (f"b:true,i:7,s:{E}x{E}", {"b": True, "i": 7, "s": "x"}),
    (f"i: 7, s: {E}x{E} ", {"i": 7, "s": "x"}),
    ("snake_case-2:1", {"snake_case-2": 1}),
]


@pytest.mark.parametrize(("arguments", "value"), ARGUMENTS)
def test_arguments_are_read(arguments: str, value: dict) -> None:
    text, (call,) = GEMMA_RULES.parse(call_text(arguments), ())
    assert text == ""
    assert exact(call) == exact(Call("t", value))


A = Call("t", {"i": 1})
READ = [
    (call_text("i:1"), "", (A,)),
    (call_text("i:1") * 2, "", (A, A)),
    (f"{call_text('i:1')}\n{call_text('i:1')}", "", (A, A)),
    (f"Yes. {call_text('i:1')}", "Yes.", (A,)),
    (f"{call_text('i:1')} Done.", "Done.", (A,)),
    (call_text("i:1").removesuffix("<end_function_call>"), "", (A,)),
    ("<start_function_call> call:t {i:1} <end_function_call>", "", (A,)),
    (call_text("i:1", "a.b-c"), "", (Call("a.b-c", {"i": 1}),)),
    ("It is <think> warm.", "It is <think> warm.", ()),
    ("call:t{i:1}", "call:t{i:1}", ()),
    ("", "", ()),
]


@pytest.mark.parametrize(("text", "said", "calls"), READ)
def test_a_reply_is_read(text: str, said: str, calls: tuple[Call, ...]) -> None:
    assert GEMMA_RULES.parse(text, ()) == (said, calls)


MALFORMED = [
    ("<start_function_call>", "names no function"),
    ("<start_function_call>t{}", "names no function"),
    ("<start_function_call>call:{}", "names no function"),
    ("<start_function_call>call:t", "names no function"),
    (call_text("i:seven"), "not JSON"),
    (call_text("i:"), "lacks a value"),
    (call_text("i"), "lacks a name"),
    (call_text(":1"), "lacks a name"),
    (call_text("i:1,"), "lacks a name"),
    (call_text("i:1,i:2"), "`i` twice"),
    (call_text("i:1 2"), "does not go on"),
    (call_text("i:NaN"), "not a finite number"),
    (call_text(f"i:{E}x"), "cut off in a text"),
    (call_text("a:[1"), "does not go on"),
    (call_text("a:[1 2]"), "list that does not go on"),
    ("<start_function_call>call:t{i:1", "does not go on"),
    ("<start_function_call>call:t{", "lacks a name"),
    (f"{call_text('i:1').removesuffix('<end_function_call>')} then", "followed by something else"),
    (call_text("a:" + "[" * 50_000), "nested deeper than 32"),
    (call_text('s:"x"'), "neither a number"),
]


@pytest.mark.parametrize(("text", "why"), MALFORMED)
def test_a_malformed_call_is_an_error_and_never_text(text: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        GEMMA_RULES.parse(text, ())


@pytest.fixture(scope="module", params=["flagged", "spelled"])
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """The marks as special tokens, as FunctionGemma has them, and not in the vocabulary."""
    special = (*GEMMA, *GEMMA_TAGS) if request.param == "flagged" else GEMMA
    return make_talk(tmp_path_factory.mktemp("gemma"), "functiongemma", special)


def test_what_a_model_would_say_is_what_the_template_writes(talk: Talk) -> None:
    calls = (Call("t", {"s": "x", "b": True}), Call("t", {}))
    written = talk.written(talk.answer([Message("user", "go")], calls, [tool("t", {})]))
    assert written == call_text(f"b:true,s:{E}x{E}") + call_text("")


def test_the_developer_turn_activates_function_calling_and_results_come_back_as_mappings() -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "go"),
        Message("assistant", "", calls=(A, A)),
        Message("tool", '{"result": 1}', name="t"),
        Message("tool", "plain", name="u"),
    ]
    developer, user, assistant, results = GEMMA_RULES.turns(messages)
    sentence = "You are a model that can do function calling with the following functions"
    assert developer == {"role": "developer", "content": f"Be brief.\n{sentence}"}
    assert user == {"role": "user", "content": "go"}
    assert [call["function"] for call in assistant["tool_calls"]] == [{"name": "t", "arguments": {"i": 1}}] * 2
    assert results["content"] == [
        {"name": "t", "response": {"result": 1}},
        {"name": "u", "response": {"result": "plain"}},
    ]
    assert GEMMA_RULES.turns([Message("user", "go")])[0]["content"] == sentence


def test_the_gate_passes(talk: Talk) -> None:
    check_round_trip(talk)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("{%- for tool in tools or [] %}", "{%- for tool in [] %}", "drops 3 of 3 tools"),
        ("'<escape>' + value + '<escape>'", "value", "do not survive"),
        ("{{- '<start_function_response>' }}", "", "no stop token"),
        ("{{- write(item.response) }}", "", "drops the results"),
    ],
)
def test_a_template_that_does_not_carry_calls_fails_the_gate(talk: Talk, old: str, new: str, why: str) -> None:
    assert old in GEMMA_TEMPLATE
    with pytest.raises(BundleError, match=why):
        check_round_trip(Talk(talk.dialect, GEMMA_TEMPLATE.replace(old, new), talk.tokenizer, talk.stops))


@given(drawn=tools_and_calls())
@settings(max_examples=30)
def test_any_call_survives_template_tokens_and_reading_and_fits_the_grammar(talk: Talk, drawn: tuple) -> None:
    tools, calls = drawn
    written = talk.written(talk.answer([Message("user", "go")], calls, tools))
    text, read = talk.read(written, tools, "call")
    assert text == ""
    assert [exact(call) for call in read] == [exact(call) for call in calls]
    first = talk.written(talk.answer([Message("user", "go")], calls[:1], tools))
    assert accepted(talk, tools, first), first


BOUNDED = tool(
    "set",
    {
        "label": {"type": "string", "maxLength": 6},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "hour": {"type": "integer", "minimum": 0, "maximum": 23},
        "level": {"type": "number"},
        "on": {"type": "boolean"},
        "room": {"type": "string", "enum": ["hall", "hallway"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3},
        "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "at": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}, "y": {"type": "boolean"}}},
    },
    required=["hour", "code"],
)
PLAIN = tool("ping", {})


@pytest.mark.parametrize("seed", range(25))
def test_random_logits_under_the_grammar_give_a_call_that_fits(talk: Talk, seed: int) -> None:
    text, (call,) = talk.read(walk(talk, [BOUNDED, PLAIN], seed), [BOUNDED, PLAIN], "call")
    assert text == ""
    arguments = check_arguments({"set": BOUNDED, "ping": PLAIN}[call.name], call.arguments)
    if call.name == "set":
        assert 0 <= arguments["hour"] <= 23
        assert 2 <= len(arguments["code"]) <= 3
        assert len(arguments.get("days", [])) <= 3
        assert len(arguments.get("pair", [0, 0])) == 2


NEEDED = f"code:{E}ab{E},hour:7"


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        (NEEDED, True),
        (f"at:{{}},{NEEDED}", True),
        (f"at:{{x:1,y:true}},{NEEDED}", True),
        (f"at:{{x:None}},{NEEDED}", True),
        (f"at:{{y:true}},{NEEDED},label:{E}{E},on:true,room:{E}hallway{E}", True),
        (f"code:{E}ab{E},days:[1,2],hour:7,pair:[true,false]", True),
        (f"code:{E}ab{E},days:[],hour:7", True),
        (f"hour:7,code:{E}ab{E}", False),
        (f"code:{E}ab{E}", False),
        ("code:ab,hour:7", False),
        (f"code:{E}a{E},hour:7", False),
        (f"code:{E}ab{E},hour:24", False),
        (f"{NEEDED},on:yes", False),
        (f"{NEEDED},", False),
        (f",{NEEDED}", False),
        (f"{NEEDED},pair:[true]", False),
        (f"code:{E}ab{E},days:[1,2,3,4],hour:7", False),
        (f"{NEEDED},zz:1", False),
    ],
)
def test_the_grammar_takes_what_fits_and_nothing_else(talk: Talk, arguments: str, taken: bool) -> None:
    assert accepted(talk, [BOUNDED, PLAIN], call_text(arguments, "set")) is taken


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "^a"}, "`pattern`"),
        ({"type": "string", "format": "date"}, "`format`"),
        ({"type": "integer", "enum": [1], "minimum": 0}, "`minimum`"),
        ({"type": "array"}, "what the list holds"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "`uniqueItems`"),
        ({"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 2}, "at least 3 and at most 2"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "`minProperties`"),
        ({"type": "object", "properties": {"a:b": {"type": "string"}}}, "`a:b` cannot be written"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "`a` has no schema"),
        ({"enum": ["a<escape>"]}, "cannot be written"),
        ({"enum": []}, "no value at all"),
        ({"$ref": "#/$defs/x"}, "no type"),
        ({}, "no type"),
    ],
)
def test_a_schema_that_the_format_cannot_be_held_to_is_refused(talk: Talk, schema: dict, why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        talk.grammar([tool("a", {"x": schema})], "call")
