"""Schemas from hints, arguments against schemas, toolboxes, and calls in canonical form."""

from __future__ import annotations

import enum
import json
import unicodedata
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.errors import ToolError, UsageError
from ferrule_runtime.messages import Call
from ferrule_runtime.schemas import schema_of
from ferrule_runtime.tools import Tool, Toolbox, check_arguments, load_toolbox, tool, with_defaults


class Colour(enum.Enum):
    """Colours of a lamp."""

    RED = "red"
    BLUE = "blue"


class Size(enum.Enum):
    """Not texts."""

    SMALL = 1


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list[list[Colour]], {"type": "array", "items": schema_of(list[Colour], "")}),
        (int | None, {"type": "integer"}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (
            Annotated[list[str] | None, "a", 3, "b"],
            {"type": "array", "items": {"type": "string"}, "description": "a b"},
        ),
    ],
)
def test_a_hint_has_its_schema(hint, schema):
    assert schema_of(hint, "here") == schema


@pytest.mark.parametrize("hint", [dict, list, bytes, Any, int | str, Literal["a", 1], tuple[int, str], Size, None, "x"])
def test_a_hint_without_a_schema_is_refused_in_words(hint):
    with pytest.raises(UsageError, match=r"tool `t`, argument `x`: type `.*` has no JSON schema"):
        schema_of(hint, "tool `t`, argument `x`")


class Lamp:
    """A lamp whose tools note what they were given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    @property
    def broken(self) -> str:
        raise AssertionError("collecting tools must not look at properties")

    @tool(effect="write", requires=["power"], provides=["light"])
    def shine(
        self,
        colour: Colour,
        level: Annotated[float, "from 0 to 1"] = 1,
        steps: int = 3,
        other: list[Colour] | None = None,
    ) -> list[Any]:
        """Shine in
        a colour.

        Not for the model.
        """
        self.given += [colour, level, steps, other]
        return [colour.value, level]

    @tool(effect="read")
    def strange(self, kind: Literal["object", "nan", "circle", "tuple", "none"]) -> Any:
        """Return something strange."""
        circle: list[Any] = []
        circle.append(circle)
        return {"object": object(), "nan": float("nan"), "circle": circle, "tuple": (1, "a"), "none": None}[kind]

    def not_a_tool(self) -> None:
        """Do nothing."""


def test_a_marked_method_is_a_tool_with_a_schema_from_its_hints_and_docstring():
    box = Toolbox.of(Lamp())
    assert [item.name for item in box] == ["shine", "strange"]
    shine = box["shine"]
    assert (shine.effect, shine.requires, shine.provides) == ("write", ("power",), ("light",))
    assert shine.schema() == {
        "type": "function",
        "function": {
            "name": "shine",
            "description": "Shine in a colour.",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"type": "string", "enum": ["red", "blue"]},
                    "level": {"type": "number", "description": "from 0 to 1", "default": 1},
                    "steps": {"type": "integer", "default": 3},
                    "other": {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}},
                },
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
    json.dumps(shine.schema())


def test_arguments_reach_the_function_as_its_hints_say():
    lamp = Lamp()
    result = Toolbox.of(lamp).invoke(Call("shine", {"colour": "blue", "level": 1, "steps": 2.0, "other": ["red"]}))
    assert result == ["blue", 1.0]
    assert lamp.given == [Colour.BLUE, 1.0, 2, [Colour.RED]]
    assert [type(value) for value in lamp.given[1:3]] == [float, int]


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("object", "(a result that is not JSON: object)"),
        ("nan", "(a result that is not JSON: float)"),
        ("circle", "(a result that is not JSON: list)"),
        ("tuple", [1, "a"]),
        ("none", None),
    ],
)
def test_a_result_is_json_or_is_named(kind, result):
    assert Toolbox.of(Lamp()).invoke(Call("strange", {"kind": kind})) == result


@pytest.mark.parametrize(
    ("call", "cause", "says"),
    [
        (Call("shin", {}), "unknown_tool", "unknown tool `shin`"),
        (Call("shine", {}), "bad_arguments", "argument `colour` is missing"),
        (Call("shine", {"colour": "green"}), "bad_arguments", r"`colour` is 'green', expected \['red', 'blue'\]"),
        (Call("shine", {"colour": "red", "steps": True}), "bad_arguments", "`steps` is True, expected integer"),
        (Call("shine", {"colour": "red", "steps": 1.5}), "bad_arguments", "`steps` is 1.5, expected integer"),
        (Call("shine", {"colour": "red", "other": ["green"]}), "bad_arguments", "`other`"),
        (Call("shine", {"colour": "red", "size": 1}), "bad_arguments", "there is no argument `size`"),
    ],
)
def test_a_call_that_does_not_fit_is_a_typed_failure_and_nothing_runs(call, cause, says):
    lamp = Lamp()
    with pytest.raises(ToolError, match=says) as caught:
        Toolbox.of(lamp).invoke(call)
    assert caught.value.cause == cause
    assert lamp.given == []


def test_what_a_tool_raises_is_a_failure_that_names_it():
    def run() -> None:
        raise KeyError("lost")

    with pytest.raises(ToolError, match="KeyError: 'lost'") as caught:
        Toolbox([Tool("t", "t", {"type": "object"}, run)]).invoke(Call("t", {}))
    assert caught.value.cause == "crashed"


def test_two_tools_of_one_name_are_refused():
    same = Tool("t", "t", {"type": "object"}, lambda: None)
    with pytest.raises(UsageError, match="two tools are called `t`"):
        Toolbox([same, same])


def undocumented(x: int) -> None: ...


def unhinted(x) -> None:  # type: ignore[no-untyped-def] # it is what is tested
    """Do."""


def starred(*x: int) -> None:
    """Do."""


def lost(x: Nowhere) -> None:  # type: ignore[name-defined] # noqa: F821 - it is what is tested
    """Do."""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (undocumented, "`undocumented` has no docstring"),
        (unhinted, "argument `x`: no type hint"),
        (starred, "argument `x`: cannot be given by name"),
        (lost, "a type hint cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_words(function, says):
    with pytest.raises(UsageError, match=says):
        tool()(function)


GOOD = """
from ferrule_runtime.tools import tool
@tool(effect="read")
def look() -> str:
    \"\"\"Look.\"\"\"
    return "dark"
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be imported"),
        ("import nowhere_at_all", "cannot be imported"),
        ("1 +", "fails when loaded: SyntaxError"),
        ("1 / 0", "fails when loaded: ZeroDivisionError"),
        ("def toolbox():\n    return [][0]", "fails when loaded: IndexError"),
        ("def toolbox():\n    return 3", "has no tools"),
        ("x = 1", "has no tools"),
    ],
)
def test_a_module_without_tools_is_refused_in_words(tmp_path, monkeypatch, text, says):
    name = f"tools_of_test_{abs(hash(text))}"
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=f"tools module `{name}` {says}"):
        load_toolbox(name)


def test_a_module_gives_its_marked_functions(tmp_path, monkeypatch):
    (tmp_path / "tools_of_test_good.py").write_text(GOOD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    box = load_toolbox("tools_of_test_good")
    assert [item.name for item in box] == ["look"]
    assert box.invoke(Call("look", {})) == "dark"
    assert "look" in box
    assert (box.note, box.state) == ("", None)


@pytest.mark.parametrize("name", ["", ".x"])
def test_a_name_that_is_no_module_is_refused_in_words(name):
    with pytest.raises(UsageError, match="tools module"):
        load_toolbox(name)


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(),
    "integer": st.integers() | st.integers(-9, 9).map(float),
    "number": st.integers() | st.floats(allow_nan=False),
    "boolean": st.booleans(),
    "array": st.lists(st.none() | st.integers()),
    "object": st.dictionaries(st.text(), st.integers()),
    "null": st.none(),
}
# Which kinds of JSON value a schema's type takes, as JSON Schema has it: the numbers without a fraction are integers.
TAKES = {kind: {kind} for kind in KINDS} | {"number": {"number", "integer"}}


@given(st.data(), st.sampled_from([k for k in KINDS if k != "null"]), st.sampled_from(list(KINDS)))
def test_a_value_is_taken_exactly_where_json_schema_takes_it(data, wanted, given_kind):
    value = data.draw(KINDS[given_kind])
    item = Tool("t", "t", {"properties": {"x": {"type": wanted}}, "required": ["x"]}, lambda x: x)
    whole = isinstance(value, float) and value.is_integer()
    if given_kind in TAKES[wanted] or (wanted == "integer" and given_kind == "number" and _is_whole(value, whole)):
        assert check_arguments(item, {"x": value}) == {"x": value}
    else:
        with pytest.raises(ToolError) as caught:
            check_arguments(item, {"x": value})
        assert caught.value.cause == "bad_arguments"


def _is_whole(value: Any, whole: bool) -> bool:
    return whole or isinstance(value, int)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c", "z"]), st.integers() | st.text(max_size=3)),
    st.sets(st.sampled_from(["a", "b", "c"])),
)
def test_arguments_fit_when_all_required_are_there_and_none_is_unknown(arguments, required):
    properties = {name: {"type": "integer"} for name in "abc"}
    item = Tool("t", "t", {"properties": properties, "required": sorted(required)}, lambda **x: x)
    good = set(required) <= set(arguments) <= set("abc") and all(isinstance(v, int) for v in arguments.values())
    if good:
        assert check_arguments(item, arguments) == arguments
    else:
        with pytest.raises(ToolError):
            check_arguments(item, arguments)


def test_a_type_that_is_not_known_takes_nothing():
    item = Tool("t", "t", {"properties": {"x": {"type": "date"}}}, lambda x: x)
    with pytest.raises(ToolError):
        check_arguments(item, {"x": "2026-01-01"})


KEYS = st.text().map(lambda text: unicodedata.normalize("NFC", text))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(KEYS, JSON, max_size=4)


@given(ARGUMENTS)
def test_the_canonical_form_is_its_own_canonical_form(arguments):
    once = Call("t", arguments).canonical()
    assert Call(**json.loads(once)).canonical() == once


@given(ARGUMENTS, st.randoms())
def test_the_order_of_arguments_does_not_matter(arguments, random):
    shuffled = list(arguments.items())
    random.shuffle(shuffled)
    assert Call("t", dict(shuffled)).canonical() == Call("t", arguments).canonical()


@given(st.integers(-(2**53), 2**53), st.text(), st.sampled_from([" ", "\n", "\t ", ""]))
def test_whole_floats_spaces_around_and_unicode_forms_do_not_matter(number, text, space):
    a = Call("t", {"n": number, "s": unicodedata.normalize("NFC", text)})
    b = Call("t", {"s": space + unicodedata.normalize("NFD", text) + space, "n": float(number)})
    assert a.canonical() == b.canonical()


@given(st.integers(), st.integers(), st.booleans())
def test_calls_that_mean_something_else_read_otherwise(first, second, flag):
    assert (Call("t", {"n": first}).canonical() == Call("t", {"n": second}).canonical()) is (first == second)
    assert Call("t", {"n": flag}).canonical() != Call("t", {"n": int(flag)}).canonical()
    assert Call("t", {"n": first}).canonical() != Call("t", {"n": str(first)}).canonical()
    assert Call("t", {"n": first}).canonical() != Call("u", {"n": first}).canonical()


def test_the_canonical_form_is_this():
    call = Call("send", {"to": " Ana ", "n": 2.0, "a": {"z": [1.5, True, None], "b": "e\u0301"}})
    assert call.canonical() == '{"arguments":{"a":{"b":"é","z":[1.5,true,null]},"n":2,"to":"Ana"},"name":"send"}'


def test_a_call_reads_like_this():
    assert Call("send", {"to": "Ana", "n": 2, "é": None}).written() == 'send(to="Ana", n=2, é=null)'


def test_defaults_are_written_out_behind_what_was_given():
    shine = Toolbox.of(Lamp())["shine"]
    whole = with_defaults(shine, Call("shine", {"colour": "red", "steps": 5}))
    assert whole.arguments == {"level": 1, "steps": 5, "colour": "red"}
