"""Hermes JSON calls, and ChatML's of ours, which reads the same: written, constrained and read back."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from talking import HERMES_TEMPLATE, QWEN, QWEN_TAGS, accepted, exact, make_talk, tool, tools_and_calls, walk

from ferrule_runtime.constrain import Constraint, Vocabulary
from ferrule_runtime.dialects import Dialect, load_dialect
from ferrule_runtime.errors import BundleError, ConstraintError, ModelError
from ferrule_runtime.messages import Call, Message
from ferrule_runtime.round_trip import check_round_trip
from ferrule_runtime.talk import Talk
from ferrule_runtime.tokenizer import Tokenizer
from ferrule_runtime.tools import check_arguments

HERMES, CHATML = load_dialect("hermes-json"), load_dialect("chatml-json")
A = Call("a", {"x": 1})
B = Call("b", {})
A_TEXT = '{"name": "a", "arguments": {"x": 1}}'
END, NEST = '"</tool_call>"', '[1, {"y": null}]'
B_TEXT = '{"name": "b", "arguments": {}}'

READ = [
    (f"<tool_call>\n{A_TEXT}\n</tool_call>", "", (A,)),
    (f"<tool_call>{A_TEXT}</tool_call>", "", (A,)),
    (f"<tool_call>\n{A_TEXT}\n</tool_call>\n<tool_call>\n{B_TEXT}\n</tool_call>", "", (A, B)),
    (f"<tool_call>\n[{A_TEXT}, {B_TEXT}]\n</tool_call>", "", (A, B)),
    (f"I look.\n<tool_call>\n{A_TEXT}\n</tool_call>", "I look.", (A,)),
    (f"<tool_call>\n{A_TEXT}\n</tool_call>\nDone.", "Done.", (A,)),
    (f"<tool_call>\n{A_TEXT}", "", (A,)),
    (f"<tool_call>\n{A_TEXT}\n", "", (A,)),
    ('<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>', "", (A,)),
    ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "", (A,)),
    ('<tool_call>{"name": "b"}</tool_call>', "", (B,)),
    ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", (A,)),
    (f"<tool_call>{A_TEXT.replace('1', END)}</tool_call>", "", (Call("a", {"x": "</tool_call>"}),)),
    ('<tool_call>{"name": "a", "arguments": {"x": "<think>"}}</tool_call>', "", (Call("a", {"x": "<think>"}),)),
    (f"<tool_call>{A_TEXT.replace('1', NEST)}</tool_call>", "", (Call("a", {"x": [1, {"y": None}]}),)),
    ('<tool_call>{"name": "a", "arguments": {"x": "é\\u00e9"}}</tool_call>', "", (Call("a", {"x": "éé"}),)),
    (A_TEXT, "", (A,)),
    (f"  {A_TEXT}\n", "", (A,)),
    (f"{A_TEXT}\n{B_TEXT}", "", (A, B)),
    (f"{A_TEXT}{B_TEXT}", "", (A, B)),
    (f"{A_TEXT};\n{B_TEXT}", "", (A, B)),
    (f"[{A_TEXT}, {B_TEXT}]", "", (A, B)),
    (f"{A_TEXT}\nThat is all.", "That is all.", (A,)),
    (f"Here it is:\n{A_TEXT}", "Here it is:", (A,)),
    (json.dumps(json.loads(A_TEXT), indent=2), "", (A,)),
    (f"```json\n{A_TEXT}\n```", "", (A,)),
    (f"```\n{A_TEXT}\n```", "", (A,)),
    (f"```json\n{A_TEXT}", "", (A,)),
    (f"Calling:\n```json\n{A_TEXT}\n```\nok", "Calling:\n\nok", (A,)),
    (f"```json\n{A_TEXT}\n```\n```json\n{B_TEXT}\n```", "", (A, B)),
    (f"```json\n{A_TEXT}\n{B_TEXT}\n```", "", (A, B)),
    (f"<think>\n{A_TEXT}\n</think>\n\nNo call.", "No call.", ()),
    (f"<think>\n<tool_call>{A_TEXT}</tool_call>\n</think>\n\n<tool_call>{B_TEXT}</tool_call>", "", (B,)),
    (f"<tool_call>{A_TEXT}</tool_call> hm </think>\nNo.", "No.", ()),
    ("<think>\n\n</think>\n\nHello.", "Hello.", ()),
    ("Plain text.", "Plain text.", ()),
    ("", "", ()),
    ('{"temperature": 20}', '{"temperature": 20}', ()),
    ('{"name": "Ana", "age": 3}', '{"name": "Ana", "age": 3}', ()),
    ("```json\n[1, 2]\n```", "```json\n[1, 2]\n```", ()),
    ("{not json", "{not json", ()),
]  # fmt: skip

MALFORMED = [
    ("<tool_call>", "not JSON"),
    ("<tool_call></tool_call>", "not JSON"),
    ("<tool_call>\nturn it on\n</tool_call>", "not JSON"),
    ('<tool_call>{"name": "a", "arguments": {"x": 1}', "not JSON"),
    ('<tool_call>{"name": "a", "arguments": {"x": "cut o', "not JSON"),
    ('<tool_call>{"arguments": {}}</tool_call>', "has no name"),
    ('<tool_call>{"name": ""}</tool_call>', "has no name"),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "has no name"),
    ("<tool_call>[]</tool_call>", "has no name"),
    ('<tool_call>"a"</tool_call>', "has no name"),
    ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "not an object"),
    ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "not an object"),
    ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "not JSON"),
    ('<tool_call>{"name": "a", "arguments": {}, "id": 1}</tool_call>', "unknown key `id`"),
    ('<tool_call>{"name": "a", "arguments": {"x": 1, "x": 2}}</tool_call>', "written twice"),
    ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "not JSON"),
    ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "not a finite number"),
    ('<tool_call>{"name": "a", "arguments": {}} and then</tool_call>', "followed by something else"),
    ('{"name": "a", "arguments": {"x": 1', "not JSON"),
    ('```json\n{"name": "a", "arguments": {x: 1}}\n```', "not JSON"),
    ("<tool_call>" + "[" * 100_000, "not JSON"),
    ("<think> and on and on", "ends inside a thought"),
]


@pytest.mark.parametrize("dialect", [HERMES, CHATML], ids=["hermes", "chatml"])
@pytest.mark.parametrize(("text", "said", "calls"), READ)
def test_a_reply_is_read(dialect: Dialect, text: str, said: str, calls: tuple[Call, ...]) -> None:
    assert dialect.parse(text, ()) == (said, calls)


@pytest.mark.parametrize(("text", "why"), MALFORMED)
def test_a_malformed_call_is_an_error_and_never_text(text: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        HERMES.parse(text, ())


@pytest.fixture(scope="module", params=["flagged", "added", "spelled"])
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """The tags as special tokens, as added tokens without the flag (Qwen's way), and not in the vocabulary."""
    ways = {"flagged": ((*QWEN, *QWEN_TAGS), ()), "added": (QWEN, QWEN_TAGS), "spelled": (QWEN, ())}
    return make_talk(tmp_path_factory.mktemp("hermes"), "hermes-json", *ways[request.param])


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    return make_talk(tmp_path_factory.mktemp("chatml"), "chatml-json", QWEN)


ALARM = tool("set_alarm", {"hour": {"type": "integer"}, "label": {"type": "string", "maxLength": 5}})
LIGHT = tool("set_light", {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}}, required=["on"])


def test_what_a_model_would_say_is_what_the_template_writes(talk: Talk) -> None:
    calls = (Call("set_alarm", {"hour": 7, "label": "tea"}), Call("set_light", {"on": True}))
    tokens = talk.answer([Message("user", "wake me")], calls, [ALARM, LIGHT])
    assert talk.written(tokens) == (
        '<tool_call>\n{"name": "set_alarm", "arguments": {"hour": 7, "label": "tea"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "set_light", "arguments": {"on": true}}\n</tool_call>'
    )


def test_the_gate_passes(talk: Talk, chatml: Talk) -> None:
    check_round_trip(talk)
    check_round_trip(chatml)


@given(drawn=tools_and_calls())
@settings(max_examples=25)
def test_any_call_survives_template_tokens_and_reading(talk: Talk, chatml: Talk, drawn: tuple) -> None:
    tools, calls = drawn
    for way in (talk, chatml):
        raw = way.written(way.answer([Message("user", "go")], calls, tools))
        text, read = way.read(raw, tools, "call")
        assert text == ""
        assert [exact(call) for call in read] == [exact(call) for call in calls]


@pytest.mark.parametrize("seed", range(12))
def test_random_logits_under_the_grammar_give_a_call_that_fits(talk: Talk, chatml: Talk, seed: int) -> None:
    for way in (talk, chatml):
        text, (call,) = way.read(walk(way, [ALARM, LIGHT], seed), [ALARM, LIGHT], "call")
        assert text == ""
        check_arguments({"set_alarm": ALARM, "set_light": LIGHT}[call.name], call.arguments)


def test_the_grammar_takes_one_call_as_the_template_writes_it_and_nothing_else(talk: Talk) -> None:
    good = '<tool_call>\n{"name": "set_light", "arguments": {"on": true}}\n</tool_call>'
    assert accepted(talk, [ALARM, LIGHT], good)
    assert not accepted(talk, [ALARM], good)
    assert not accepted(talk, [LIGHT], good.replace("true", "1"))
    assert not accepted(talk, [LIGHT], good + good)
    assert not accepted(talk, [LIGHT], good.replace('"on": true', ""))


def test_only_a_call_that_is_wanted_is_constrained(talk: Talk) -> None:
    assert talk.grammar([ALARM], "either") is None
    assert talk.grammar([ALARM], "text") is None
    with pytest.raises(ConstraintError, match="no tools"):
        talk.grammar([], "call")


@pytest.mark.parametrize(
    "schema", [{"type": "string", "format": "klingon"}, {"not": {}}, {"type": "array", "uniqueItems": True}]
)
def test_a_schema_that_would_be_ignored_is_refused(talk: Talk, schema: dict) -> None:
    vocabulary = Vocabulary(talk.tokenizer, talk.tokenizer.size, min(talk.stops))
    grammar = talk.grammar([tool("a", {"x": schema})], "call")
    assert grammar is not None
    with pytest.raises(ConstraintError, match="cannot be turned into a constraint"):
        Constraint(vocabulary, grammar)


def test_where_text_is_wanted_there_are_no_calls_and_no_thoughts(talk: Talk) -> None:
    assert talk.read(f"<think>\nso\n</think>\n\nAll done. {A_TEXT}", [], "text") == (f"All done. {A_TEXT}", ())


def _with(talk: Talk, template: str) -> Talk:
    return Talk(talk.dialect, template, talk.tokenizer, talk.stops)


def test_a_prompt_that_opens_a_thought_has_it_closed(talk: Talk) -> None:
    forced = HERMES_TEMPLATE.replace(
        "'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n' }}{% endif"
    )
    assert forced != HERMES_TEMPLATE
    text = _with(talk, forced).text([Message("user", "say <think>")], [])
    assert text.endswith("<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    check_round_trip(_with(talk, forced))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{% endfor %}", "", "drops 3 of 3 tools"),
        ("{%- for call in message.tool_calls %}", "{%- for call in [] %}", "do not survive"),
        ("+ message.content + '\\n</tool_response>", "+ '\\n</tool_response>", "drops the results"),
        ("{{- '<|im_end|>\\n' }}\n{%- endif %}", "{{- '\\n' }}\n{%- endif %}", "no stop token"),
        ("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>bot\\n' }}", "but writes it as"),
        ("<tool_call>\\n{", "<call>\\n{", "do not survive"),
        ("arguments | tojson", "arguments | string", "do not survive"),
        ("{%- set system", "{{ nobody }}{%- set system", "'nobody' is undefined"),
        ("{%- set system", "{{ ''.__class__.__mro__ }}{%- set system", "chat template fails"),
        ("{%- set system", "{{ raise_exception('not so') }}{%- set system", "not so"),
        ("{%- set system", "{% if %}{%- set system", "chat template fails"),
    ],
)
def test_a_template_that_does_not_carry_calls_fails_the_gate_with_the_reason(
    talk: Talk, old: str, new: str, why: str
) -> None:
    assert old in HERMES_TEMPLATE
    with pytest.raises(BundleError, match=why):
        check_round_trip(_with(talk, HERMES_TEMPLATE.replace(old, new)))


def test_control_tokens_outlive_decoding_only_where_they_are_asked_for(tmp_path: Path) -> None:
    flagged = make_talk(tmp_path, "hermes-json", (*QWEN, *QWEN_TAGS)).tokenizer
    ids = flagged.encode("<|im_start|><tool_call>x</tool_call>")
    assert flagged.decode(ids) == "x"
    assert flagged.decode(ids, keep=HERMES.CONTROLS) == "<tool_call>x</tool_call>"
    assert flagged.controls == {*QWEN, *QWEN_TAGS}


@pytest.fixture(scope="module")
def qwen3() -> Talk:
    folder = os.environ.get("FERRULE_TOKENIZERS")
    if not folder:
        pytest.skip("FERRULE_TOKENIZERS does not name a folder with qwen3/tokenizer.json and tokenizer_config.json")
    path = Path(folder) / "qwen3"
    template = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    tokenizer = Tokenizer(path / "tokenizer.json")
    stop = tokenizer.id_of("<|im_end|>")
    assert stop == 151645
    return Talk(HERMES, template, tokenizer, frozenset({stop}))


def test_the_real_qwen3_passes_the_gate_with_thinking_off(qwen3: Talk) -> None:
    check_round_trip(qwen3)
    text = qwen3.text([Message("user", "hi")], [ALARM])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_real_qwen3_tags_are_one_token_each_in_grammar_and_answer(qwen3: Talk) -> None:
    tokens = qwen3.answer([Message("user", "hi")], (Call("set_alarm", {"hour": 7, "label": "tea"}),), [ALARM])
    assert tokens[0] == 151657
    assert tokens[-1] == 151658
    constraint = Constraint(Vocabulary(qwen3.tokenizer, 151936, 151645), qwen3.grammar([ALARM], "call") or "")
    constraint.accept(tokens)
    assert constraint.done


@pytest.mark.parametrize("seed", range(4))
def test_random_logits_under_the_real_qwen3_vocabulary_give_a_call_that_fits(qwen3: Talk, seed: int) -> None:
    _, (call,) = qwen3.read(walk(qwen3, [ALARM, LIGHT], seed), [ALARM, LIGHT], "call")
    check_arguments({"set_alarm": ALARM, "set_light": LIGHT}[call.name], call.arguments)
