"""Qwen3.5's XML calls: raw values typed by the tool's schema, constrained, and read back."""

import pytest
from hypothesis import given, settings
from talking import QWEN, QWEN_TAGS, XML_TEMPLATE, accepted, exact, make_talk, tool, tools_and_calls, walk

from ferrule_runtime.dialects import load_dialect
from ferrule_runtime.errors import BundleError, ConstraintError, ModelError
from ferrule_runtime.messages import Call, Message
from ferrule_runtime.round_trip import check_round_trip
from ferrule_runtime.talk import Talk
from ferrule_runtime.tools import Tool, check_arguments

XML = load_dialect("qwen-xml")

TYPES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "z": {"type": "null"},
    "a": {"type": "array", "items": {"type": "integer"}},
    "o": {"type": "object", "properties": {"k": {"type": "string"}}},
    "e": {"type": "string", "enum": ["on", "off", "7"]},
    "ei": {"enum": [1, 2.5, True, None, "x"]},
    "c": {"const": 3},
    "si": {"type": ["string", "null"]},
    "in": {"type": ["integer", "null"]},
    "any": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "free": {},
    "ref": {"$ref": "#/$defs/count"},
    "implied": {"properties": {}},
}
TOOL = tool("t", TYPES, [], **{"$defs": {"count": {"type": "integer"}}})

# Argument, its raw text, the value that the schema makes of it.
VALUES = [
    ("s", "plain", "plain"),
    ("s", "7", "7"),
    ("s", "True", "True"),
    ("s", "null", "null"),
    ("s", '{"k": 1}', '{"k": 1}'),
    ("s", "two\nlines", "two\nlines"),
    ("s", "\nkept\n", "\nkept\n"),
    ("s", "  kept  ", "  kept  "),
    ("s", "", ""),
    ("s", 'a < b && "c" </function> </tool_call> <tool_call>', 'a < b && "c" </function> </tool_call> <tool_call>'),
    ("s", "<think>no thought</think>", "<think>no thought</think>"),
    ("s", "ß 日本 🙂", "ß 日本 🙂"),
    ("i", "7", 7),
    ("i", "-12", -12),
    ("i", " 7 ", 7),
    ("i", "7.0", 7.0),
    ("i", "seven", "seven"),
    ("i", "7 8", "7 8"),
    ("i", "True", "True"),
    ("n", "1.5", 1.5),
    ("n", "2", 2),
    ("n", "1e-07", 1e-7),
    ("n", "NaN", "NaN"),
    ("n", "Infinity", "Infinity"),
    ("b", "True", True),
    ("b", "False", False),
    ("b", "true", True),
    ("b", "false", False),
    ("b", "yes", "yes"),
    ("b", "1", "1"),
    ("z", "None", None),
    ("z", "null", None),
    ("a", "[1, 2]", [1, 2]),
    ("a", "[]", []),
    ("o", '{"k": "v"}', {"k": "v"}),
    ("o", '{\n  "k": "v"\n}', {"k": "v"}),
    ("e", "on", "on"),
    ("e", "7", "7"),
    ("e", "maybe", "maybe"),
    ("ei", "1", 1),
    ("ei", "2.5", 2.5),
    ("ei", "True", True),
    ("ei", "None", None),
    ("ei", "x", "x"),
    ("c", "3", 3),
    ("si", "None", None),
    ("si", "7", "7"),
    ("in", "null", None),
    ("in", "7", 7),
    ("any", "7", 7),
    ("any", "True", True),
    ("free", "7", 7),
    ("free", "text", "text"),
    ("free", "[1]", [1]),
    ("ref", "7", 7),
    ("implied", '{"x": 1}', {"x": 1}),
    ("unknown", "7", "7"),
]


def call_text(arguments: str, name: str = "t") -> str:
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


def parameter(name: str, raw: str) -> str:
    return f"<parameter={name}>\n{raw}\n</parameter>\n"


@pytest.mark.parametrize(("name", "raw", "value"), VALUES)
def test_a_raw_value_becomes_what_the_schema_says(name: str, raw: str, value: object) -> None:
    text, (call,) = XML.parse(call_text(parameter(name, raw)), [TOOL])
    assert text == ""
    assert exact(call) == exact(Call("t", {name: value}))


A = Call("t", {"i": 1})
A_TEXT = call_text(parameter("i", "1"))
BODY = "<function=t>\n<parameter=i>\n1\n</parameter>\n</function>"
READ = [
    (A_TEXT, "", (A,)),
    (f"{A_TEXT}\n{A_TEXT}", "", (A, A)),
    (f"I look.\n\n{A_TEXT}", "I look.", (A,)),
    (f"{A_TEXT}\nDone.", "Done.", (A,)),
    (call_text(""), "", (Call("t", {}),)),
    (call_text(parameter("s", "x") + parameter("i", "2")), "", (Call("t", {"s": "x", "i": 2}),)),
    ("<tool_call><function=t><parameter=i>1</parameter></function></tool_call>", "", (A,)),
    (f"<tool_call>\n{BODY}", "", (A,)),
    (f"<tool_call>\n{BODY.removesuffix('</function>')}", "", (A,)),
    (BODY, "", (A,)),
    (f"{BODY}\n</tool_call>", "", (A,)),
    (f"{BODY}\nDone.", "Done.", (A,)),
    (f"{BODY}\n{BODY}", "", (A, A)),
    ('<tool_call>\n{"name": "t", "arguments": {"i": 1}}\n</tool_call>', "", (A,)),
    ('<tool_call>\n<function=t>\n{"i": 1}\n</function>\n</tool_call>', "", (A,)),
    ('<function=t>{"i": 1}</function>', "", (A,)),
    (call_text(parameter("i", "1"), "other"), "", (Call("other", {"i": "1"}),)),
    (f"<think>\n{A_TEXT}\n</think>\n\nNo.", "No.", ()),
    (f"<think>\nhm\n</think>\n\n{A_TEXT}", "", (A,)),
    (f"{A_TEXT} hm\n</think>\n\nNo.", "No.", ()),
    ("Just text with <parameter=x> in it.", "Just text with <parameter=x> in it.", ()),
    ("", "", ()),
]


@pytest.mark.parametrize(("text", "said", "calls"), READ)
def test_a_reply_is_read(text: str, said: str, calls: tuple[Call, ...]) -> None:
    assert XML.parse(text, [TOOL]) == (said, calls)


MALFORMED = [
    ("<tool_call>", "names no function"),
    ("<tool_call>\n</tool_call>", "names no function"),
    ("<tool_call>\nturn it on\n</tool_call>", "names no function"),
    ("<tool_call>\n<function=>\n</function>", "names no function"),
    ("<tool_call>\n<function=t", "names no function"),
    ("<tool_call>\n<function=t>\n<parameter=s>\ncut o", "cut off"),
    ("<tool_call>\n<function=t>\n<parameter=s>\nx\n</function>\n</tool_call>", "cut off"),
    ("<tool_call>\n<function=t>\nx\n</function>\n</tool_call>", "no argument"),
    (call_text(parameter("s", "x") + "and so on"), "no argument"),
    (call_text(parameter("s", "x") + parameter("s", "y")), "written twice"),
    (call_text(parameter("s", "a </parameter> b")), "no argument"),
    (call_text(parameter("a", "1, 2")), "no JSON array"),
    (call_text(parameter("a", '{"k": 1}')), "no JSON array"),
    (call_text(parameter("o", "{'k': 1}")), "no JSON object"),
    ("<tool_call>\n<function=t>\n[1]\n</function>\n</tool_call>", "not an object"),
    ("<tool_call>\n<function=t>\n{x}\n</function>\n</tool_call>", "not JSON"),
    ('<tool_call>\n{"arguments": {}}\n</tool_call>', "no name"),
    (f"<tool_call>\n{BODY} and then\n</tool_call>", "followed by something else"),
    (f"<think>\n{A_TEXT}", "ends inside a thought"),
]


@pytest.mark.parametrize(("text", "why"), MALFORMED)
def test_a_malformed_call_is_an_error_and_never_text(text: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        XML.parse(text, [TOOL])


@pytest.fixture(scope="module", params=["added", "spelled"])
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """The tags as added tokens, as Qwen has them, and not in the vocabulary."""
    plain = QWEN_TAGS if request.param == "added" else ()
    return make_talk(tmp_path_factory.mktemp("xml"), "qwen-xml", QWEN, plain)


def test_what_a_model_would_say_is_what_the_template_writes(talk: Talk) -> None:
    call = Call("t", {"s": "a\nb", "b": False, "a": [1, 2]})
    tokens = talk.answer([Message("system", "Be brief."), Message("user", "go")], (call, Call("t", {})), [TOOL])
    assert talk.written(tokens) == (
        "<tool_call>\n<function=t>\n<parameter=s>\na\nb\n</parameter>\n<parameter=b>\nFalse\n</parameter>\n"
        "<parameter=a>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=t>\n</function>\n</tool_call>"
    )


def test_a_prompt_ends_behind_an_empty_thought(talk: Talk) -> None:
    text = talk.text([Message("user", "go")], [TOOL])
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    always = XML_TEMPLATE.replace("if enable_thinking else", "if true else")
    assert Talk(talk.dialect, always, talk.tokenizer, talk.stops).text([Message("user", "go")], [TOOL]) == text


def test_results_of_one_turn_share_one_turn(talk: Talk) -> None:
    calls = Message("assistant", "", calls=(Call("t", {}), Call("t", {})))
    results = [Message("tool", '{"result": 1}', name="t"), Message("tool", '{"result": 2}', name="t")]
    text = talk.text([Message("user", "go"), calls, *results], [TOOL])
    assert (
        '<|im_start|>user\n<tool_response>\n{"result": 1}\n</tool_response>\n<tool_response>\n{"result": 2}\n'
        "</tool_response><|im_end|>\n" in text
    )


def test_the_gate_passes(talk: Talk) -> None:
    check_round_trip(talk)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{% endfor %}", "", "drops 3 of 3 tools"),
        ("'\\n</parameter>\\n'", "'\\n'", "do not survive"),
        ("value | tojson", "value | string", "do not survive"),
    ],
)
def test_a_template_that_does_not_carry_calls_fails_the_gate(talk: Talk, old: str, new: str, why: str) -> None:
    assert old in XML_TEMPLATE
    with pytest.raises(BundleError, match=why):
        check_round_trip(Talk(talk.dialect, XML_TEMPLATE.replace(old, new), talk.tokenizer, talk.stops))


def test_a_template_that_wants_a_user_turn_says_so_instead_of_dropping_the_tools(talk: Talk) -> None:
    with pytest.raises(BundleError, match="No user query found"):
        talk.text([Message("system", "You are.")], [TOOL])


@given(drawn=tools_and_calls())
@settings(max_examples=30)
def test_any_call_survives_template_tokens_and_reading(talk: Talk, drawn: tuple) -> None:
    tools, calls = drawn
    text, read = talk.read(talk.written(talk.answer([Message("user", "go")], calls, tools)), tools, "call")
    assert text == ""
    assert [exact(call) for call in read] == [exact(call) for call in calls]


@given(drawn=tools_and_calls())
@settings(max_examples=25)
def test_the_grammar_takes_any_call_that_the_template_writes(talk: Talk, drawn: tuple) -> None:
    tools, calls = drawn
    whole = {item.name: list(item.parameters["properties"]) for item in tools}
    assert list(calls[0].arguments) == whole[calls[0].name]
    written = talk.written(talk.answer([Message("user", "go")], calls[:1], tools))
    assert accepted(talk, tools, written), written


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
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
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
        assert len(arguments.get("label", "")) <= 6
        assert set(arguments.get("at", {"x": 0})) == {"x"}


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        (parameter("code", "ab") + parameter("hour", "7"), True),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("on", "True"), True),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("on", "true"), True),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("room", "hall"), True),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("room", "hallway"), True),
        (parameter("label", "") + parameter("code", "ab") + parameter("hour", "7"), True),
        (parameter("label", "\n<b>\n") + parameter("code", "ab") + parameter("hour", "7"), True),
        (parameter("code", "a") + parameter("hour", "7"), False),
        (parameter("code", "ab") + parameter("hour", "24"), False),
        (parameter("code", "ab") + parameter("hour", "seven"), False),
        (parameter("code", "ab") + parameter("hour", '"7"'), False),
        (parameter("code", "ab"), False),
        (parameter("hour", "7") + parameter("code", "ab"), False),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("on", "yes"), False),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("days", "[8]"), False),
        (parameter("code", "ab") + parameter("hour", "7") + parameter("extra", "1"), False),
    ],
)
def test_the_grammar_takes_what_fits_and_nothing_else(talk: Talk, arguments: str, taken: bool) -> None:
    assert accepted(talk, [BOUNDED, PLAIN], call_text(arguments, "set")) is taken


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "^a"}, "`pattern`"),
        ({"type": "string", "format": "date"}, "`format`"),
        ({"type": "string", "not": {}}, "`not`"),
        ({"type": "string", "enum": ["a"], "minLength": 1}, "`minLength`"),
        ({"type": "boolean", "if": {}}, "`if`"),
        ({"type": ["string", "null"], "pattern": "a"}, "`pattern`"),
        ({"allOf": [{"type": "string"}]}, "no type"),
        ({}, "no type"),
        ({"type": "text"}, "no type"),
        ({"enum": []}, "cannot be written"),
        ({"enum": ["a</parameter>"]}, "cannot be written"),
    ],
)
def test_a_schema_that_raw_text_cannot_be_held_to_is_refused(talk: Talk, schema: dict, why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        talk.grammar([tool("a", {"x": schema})], "call")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (tool("a", {}, minProperties=1), "`minProperties`"),
        (tool("a", {}, patternProperties={}), "`patternProperties`"),
        (tool("a", {}, required=["x"]), "`x` has no schema"),
        (tool("a", {"x>": {"type": "string"}}), "name cannot be written"),
        (tool("a>b", {}), "name cannot be written"),
    ],
)
def test_a_tool_whose_arguments_the_grammar_cannot_keep_is_refused(talk: Talk, broken: Tool, why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        talk.grammar([broken], "call")


def test_remarks_in_a_schema_are_no_constraints(talk: Talk) -> None:
    remarked = {"type": "string", "description": "d", "title": "t", "default": "x", "examples": ["x"], "x-note": 1}
    assert accepted(talk, [tool("a", {"x": remarked})], call_text(parameter("x", "v"), "a"))
