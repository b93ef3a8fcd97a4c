"""Constraints: whatever is said under one fits its schema, and what cannot be kept to is refused."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talking import QWEN, accepted, make_talk, tool, walk

from ferrule_runtime.constrain import Constraint, Vocabulary
from ferrule_runtime.errors import BundleError, ConstraintError, UsageError
from ferrule_runtime.messages import Call
from ferrule_runtime.talk import Talk
from ferrule_runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    return make_talk(tmp_path_factory.mktemp("constrain"), "chatml-json", QWEN)


@pytest.fixture(scope="module")
def vocabulary(talk: Talk) -> Vocabulary:
    return Vocabulary(talk.tokenizer, talk.tokenizer.size, min(talk.stops))


def is_kind(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or value == int(value))
    return isinstance(value, {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}[kind])


def same(one: Any, two: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def valid(value: Any, schema: Any) -> bool:
    """JSON Schema 2020-12, validation: the keywords that these tests use, written down one by one."""
    if isinstance(schema, bool):
        return schema
    checks = []
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        checks.append(any(is_kind(value, kind) for kind in kinds))
    if "enum" in schema:
        checks.append(any(same(value, one) for one in schema["enum"]))
    if "const" in schema:
        checks.append(same(value, schema["const"]))
    if is_kind(value, "number"):
        checks += [
            value >= schema.get("minimum", value),
            value <= schema.get("maximum", value),
            value > schema.get("exclusiveMinimum", value - 1),
            value < schema.get("exclusiveMaximum", value + 1),
            value % schema.get("multipleOf", value or 1) == 0,
        ]
    if isinstance(value, str):
        checks += [
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)),
            re.search(schema.get("pattern", ""), value) is not None,
        ]
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        checks += [
            schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)),
            all(valid(item, rule) for item, rule in zip(value, first, strict=False)),
            all(valid(item, schema.get("items", True)) for item in value[len(first) :]),
        ]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        checks += [
            all(name in value for name in schema.get("required", [])),
            all(valid(item, known.get(name, schema.get("additionalProperties", True))) for name, item in value.items()),
            schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)),
        ]
    checks += [all(valid(value, one) for one in schema.get("allOf", []))]
    checks += [any(valid(value, one) for one in schema["anyOf"])] if "anyOf" in schema else []
    checks += [sum(valid(value, one) for one in schema["oneOf"]) == 1] if "oneOf" in schema else []
    return all(checks)


def test_the_validator_of_these_tests_can_say_no() -> None:
    assert valid({"a": 1}, {"type": "object", "required": ["a"]})
    for value, schema in [
        (True, {"type": "integer"}), (1.5, {"type": "integer"}), (1, {"const": True}), (8, {"multipleOf": 7}),
        (3, {"exclusiveMaximum": 3}), ("abc", {"maxLength": 2}), ("b", {"pattern": "^a"}), ([1], {"maxItems": 0}),
        ([1], {"items": {"type": "string"}}), ({}, {"required": ["a"]}), ({"a": 1}, {"additionalProperties": False}),
        (1, {"anyOf": [{"type": "string"}]}), (1, {"oneOf": [{"const": 1}, {"minimum": 0}]}), (1, False),
    ]:  # fmt: skip
        assert not valid(value, schema), (value, schema)


_words = st.from_regex(r"[a-z]{1,5}", fullmatch=True)


def _between(kind: str, keys: tuple[str, str], low: tuple[int, int], more: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(st.integers(*low), st.integers(0, more)).map(
        lambda drawn: {"type": kind, keys[0]: drawn[0], keys[1]: drawn[0] + drawn[1]}
    )


_letters = st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")).map(sorted)
_plain = _words | st.integers(-50, 50) | st.booleans() | st.none()
_scalars = st.one_of(
    _between("integer", ("minimum", "maximum"), (-999, 999), 5000),
    _between("number", ("minimum", "maximum"), (-99, 99), 99),
    _between("string", ("minLength", "maxLength"), (0, 3), 3),
    _letters.map(lambda ends: {"type": "string", "pattern": f"^[{ends[0]}-{ends[1]}]{{1,3}}$"}),
    st.lists(_plain, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _words.map(lambda value: {"const": value}),
    st.just({"type": ["boolean", "null"]}),
    st.just({"type": "boolean"}),
)


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(properties)[optional:]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_schemas = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.builds(lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(_object, st.dictionaries(_words, inner, min_size=1, max_size=3), st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
    ),
    max_leaves=4,
)  # fmt: skip


def said(talk: Talk, schema: Any, seed: int) -> Any:
    """Let random logits fill one argument, and return what it became."""
    item = tool("f", {"x": schema})
    text, (call,) = talk.read(walk(talk, [item], seed), [item], "call")
    assert text == ""
    assert call.name == "f"
    assert call.arguments.keys() == {"x"}
    return call.arguments["x"]


@given(_schemas, st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_whatever_random_logits_say_fits_a_random_schema(talk: Talk, schema: dict[str, Any], seed: int) -> None:
    value = said(talk, schema, seed)
    assert valid(value, schema), value


HONOURED = [
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
    {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7},
    {"type": "string", "pattern": "b", "maxLength": 4},
    {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 3}], "items": False},
    {"type": "object", "required": ["z"], "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {"type": "object", "properties": {"a": {"const": 1}}, "minProperties": 1, "additionalProperties": False},
    {"oneOf": [{"const": 1}, {"const": "a"}]},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 2}]},
    {"type": "string", "enum": ["a", 1]},
    {"enum": [1, "a", None, True, [1], {"k": 2}]},
    {"const": {"a": [1, None]}},
    {"type": ["integer", "string"], "minimum": 3, "maximum": 300, "maxLength": 1},
    {"type": "string", "maxLength": 3, "title": "remarks change nothing", "examples": [5], "deprecated": True},
]
REFUSED = [
    # What the library does not hold a model to.
    {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
    {"type": "array", "contains": {"const": 1}},
    {"type": "array", "unevaluatedItems": False},
    {"type": "object", "propertyNames": {"pattern": "^a$"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"type": "object", "unevaluatedProperties": False},
    {"not": {"type": "string"}},
    {"type": "string", "if": {"const": "a"}, "then": {"const": "a"}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "string", "format": "idn-email"},
    {"type": "string", "format": "klingon"},
    {"type": "string", "pattern": "(?=a)b"},
    {"$dynamicRef": "#x"},
    # No schema, or one that nothing fits.
    {"$ref": "#/$defs/missing"},
    {"type": "strin"},
    {"type": "integer", "minimum": "a"},
    {"type": "string", "maxLength": -1},
    {"type": "string", "pattern": "["},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "integer", "enum": ["a"]},
    {"enum": []},
    {"type": "object", "required": ["z"], "additionalProperties": False},
    False,
    # A wish to be lenient is no part of a schema.
    {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
]


@pytest.mark.parametrize("schema", HONOURED, ids=json.dumps)
def test_a_keyword_is_kept_to(talk: Talk, schema: dict[str, Any]) -> None:
    for seed in range(8):
        value = said(talk, schema, seed)
        assert valid(value, schema), value


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_would_not_be_kept_to_is_refused_with_the_reason(talk: Talk, vocabulary: Vocabulary, schema: Any) -> None:
    grammar = talk.grammar([tool("f", {"x": schema})], "call")
    assert grammar is not None
    with pytest.raises(
        ConstraintError, match=r"cannot be turned into a constraint: .*failed to compile JSON schema: \S"
    ) as caught:
        Constraint(vocabulary, grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 350
    assert "simplify the schema" in caught.value.hint


@pytest.mark.parametrize(
    ("date", "fits"), [("2024-02-29", True), ("2024-13-01", False), ("24-01-01", False), ("tomorrow", False)]
)
def test_a_format_that_is_known_is_kept_to(talk: Talk, date: str, fits: bool) -> None:
    item = tool("f", {"x": {"type": "string", "format": "date"}})
    body = json.dumps({"name": "f", "arguments": {"x": date}})
    assert accepted(talk, [item], f"<tool_call>\n{body}\n</tool_call>") is fits


@pytest.mark.parametrize(
    "grammar", ["", "start: nothing\n", "start: @missing", '{"', 'start: "a', 'start: %json {"type": 3}']
)
def test_a_broken_grammar_is_an_error(vocabulary: Vocabulary, grammar: str) -> None:
    with pytest.raises(ConstraintError, match=r"cannot be turned into a constraint: \S"):
        Constraint(vocabulary, grammar)


def test_the_tokens_that_are_allowed_are_those_that_are_accepted(talk: Talk, vocabulary: Vocabulary) -> None:
    grammar = 'start: /[a-c]/ ("1" | "2")?'
    for before in ("", "b"):
        fed = talk.tokenizer.encode(before)
        constraint = Constraint(vocabulary, grammar)
        constraint.accept(fed)
        taken = set()
        for token in range(vocabulary.rows):
            trial = Constraint(vocabulary, grammar)
            trial.accept(fed)
            try:
                trial.accept([token])
            except ConstraintError:
                continue
            taken.add(token)
        assert set(constraint.allowed().tolist()) == taken
        letters = {"": "abc", "b": "12"}[before]
        assert taken == {*talk.tokenizer.encode(letters), *([min(talk.stops)] if before else [])}


def test_a_reply_that_can_go_on_is_not_done_and_one_that_cannot_is(talk: Talk, vocabulary: Vocabulary) -> None:
    (a,) = talk.tokenizer.encode("a")
    open_ended, closed = Constraint(vocabulary, "start: /a+/"), Constraint(vocabulary, 'start: "aa"')
    for constraint in (open_ended, closed):
        constraint.accept([a])
        assert not constraint.done
        constraint.accept([a])
    assert not open_ended.done
    assert closed.done
    assert closed.allowed().tolist() == [min(talk.stops)]
    open_ended.accept([min(talk.stops)])
    assert open_ended.done


@pytest.mark.parametrize("tokens", [[-1], [1 << 40], [263], [65, -1]])
def test_what_is_no_token_is_refused(vocabulary: Vocabulary, tokens: list[int]) -> None:
    with pytest.raises(ConstraintError, match="not all among the 259 rows"):
        Constraint(vocabulary, "start: /(.|\\n)*/").accept(tokens)


def test_a_token_that_is_not_allowed_is_refused_quietly(
    talk: Talk, vocabulary: Vocabulary, capfd: pytest.CaptureFixture[str]
) -> None:
    constraint = Constraint(vocabulary, 'start: "a"')
    with pytest.raises(ConstraintError, match=r"the constraint failed: \S"):
        constraint.accept(talk.tokenizer.encode("b"))
    # The library would print a warning of its own beside the error that is raised.
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConstraintError):
        constraint.allowed()


def test_rows_without_a_token_are_never_allowed(talk: Talk) -> None:
    size = talk.tokenizer.size
    wide = Vocabulary(talk.tokenizer, size + 61, min(talk.stops))
    ids = Constraint(wide, "start: /(.|\\n)*/").allowed()
    assert ids.max() < size
    # Every byte may come but those that no UTF-8 begins with: continuations, C0, C1, and F5 on; and the stop token.
    assert len(ids) == 128 + (0xF4 - 0xC2 + 1) + 1


@pytest.mark.parametrize(
    ("rows", "stop", "why"), [(0, 259, "outside the 259 rows"), (0, -1, "outside the 259 rows"), (-1, 1, "too small")]
)
def test_a_head_that_does_not_belong_to_the_tokenizer_is_refused(talk: Talk, rows: int, stop: int, why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        Vocabulary(talk.tokenizer, talk.tokenizer.size + rows, stop)


@given(st.lists(st.sampled_from(["hall", "attic", "kitchen"]), max_size=3), st.integers(-5, 5))
@settings(max_examples=40)
def test_every_value_that_fits_can_be_said(talk: Talk, rooms: Sequence[str], level: int) -> None:
    room = {"type": "array", "items": {"enum": ["hall", "attic", "kitchen"]}, "maxItems": 2}
    item = tool("f", {"rooms": room, "level": {"type": "integer", "minimum": -3, "maximum": 3}})
    call = Call("f", {"rooms": list(rooms), "level": level})
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    fits = len(rooms) <= 2 and -3 <= level <= 3
    assert accepted(talk, [item], f"<tool_call>\n{body}\n</tool_call>") is fits


def test_masks_are_of_the_whole_vocabulary_and_each_its_own(talk: Talk, vocabulary: Vocabulary) -> None:
    one, two = Constraint(vocabulary, 'start: "a"'), Constraint(vocabulary, 'start: "b"')
    first, second = one.allowed(), two.allowed()
    assert first.dtype == np.int64
    assert first.tolist() == talk.tokenizer.encode("a")
    assert second.tolist() == talk.tokenizer.encode("b")


def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"{}", b"[" * 100_000, b""):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(BundleError, match="not a tokenizer"):
            Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("text", "at"), [("caf\udce9", 3), ("\ud800", 0)])
def test_half_a_character_has_no_tokens(talk: Talk, text: str, at: int) -> None:
    with pytest.raises(UsageError, match=f"the text is not Unicode: .* at character {at}"):
        talk.tokenizer.encode(text)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives_its_tokens(talk: Talk, text: str) -> None:
    assert talk.tokenizer.decode(talk.tokenizer.encode(text)) == text
