import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_runtime.chat import render
from ferrule_runtime.dialects import chatml_json
from ferrule_runtime.errors import BundleError

TOOL = {"type": "function", "function": {"name": "set_light", "description": "<b> & 'x'", "parameters": {}}}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "template",
    [
        "{{ ().__class__.__bases__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for x in messages %}{{ x.update({}) }}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no user') }}",
        "{{ nothing }}",
        "{% if %}",
        "{{ 1 / 0 if false else messages | bogus }}",
        "{{ messages[0]['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ lipsum.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ dict.__base__ }}",
        "{% set pop = messages.pop %}{{ pop() }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{% debug %}",
        "{{ nothing.content }}",
        "{{ 'a' + nothing }}",
        "{{ 'a' ~ nothing }}",
        "{{ nothing | tojson }}",
        "{{ messages[5].content }}",
        "{{ none.content }}",
        "{{ none + 1 }}",
        "{{ 1 / 0 }}",
        "{{ 10.0 ** 400 }}",
        "{{ range(10 ** 7) | list }}",
        "{{ 'a' * 10 ** 18 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_a_template_that_reaches_out_or_fails_is_refused(template: str) -> None:
    with pytest.raises(BundleError, match="the chat template"):
        render(template, [USER], [])


def test_a_template_that_drops_the_tools_is_refused() -> None:
    with pytest.raises(BundleError, match="drops 1 of 1 tools, `set_light` first"):
        render("{{ messages[0].content }}", [USER], [TOOL])


def test_tools_are_written_as_plain_json() -> None:
    text = render("{{ tools[0].function | tojson }}", [USER], [TOOL])
    assert text == '{"name": "set_light", "description": "<b> & \'x\'", "parameters": {}}'


def test_our_own_template_writes_every_turn() -> None:
    turns = [{"role": "system", "content": "S"}, USER, {"role": "tool", "content": "R"}]
    text = render(chatml_json.TEMPLATE or "", turns, [TOOL])
    assert text.startswith("<|im_start|>system\nS\n")
    assert "<|im_start|>user\nhi<|im_end|>\n" in text
    assert "<tool_response>\nR\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert not render(chatml_json.TEMPLATE or "", turns, [TOOL], reply=False).endswith("assistant\n")


def test_what_a_template_reaches_is_never_in_the_prompt() -> None:
    # Undefined instead of an error, inside a list: nothing of Python leaks all the same.
    assert render("{{ messages | map(attribute='__class__') | list }}", [USER], []) == "[Undefined]"


def test_a_template_says_why_it_refuses() -> None:
    with pytest.raises(BundleError, match="the chat template fails: no user here") as caught:
        render("{{ raise_exception('no user here') }}", [USER], [])
    assert caught.value.hint


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'a' }}",
        "{{ [1] * 2 ** 40 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ lipsum(10 ** 7) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ no.such.thing }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('\x1b[2J') }}",
    ],
)
def test_whatever_a_template_tries_is_an_error_of_one_printable_line(template: str) -> None:
    with pytest.raises(BundleError, match=r"the chat template fails: .") as caught:
        render(template, [USER], [])
    assert str(caught.value).isprintable()


def test_what_prompts_need_of_repetition_and_powers_is_there() -> None:
    assert (
        render("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ 2.5 ** 2 }}{{ [0] * 2 }}", [USER], [])
        == "ababab1024126.25[0, 0]"
    )


PARTS = [
    *("{{ ", " }}", "{% ", " %}", "for x in ", "endfor", "if ", "endif", "set a = ", "messages", "a", "x", "7", " * "),
    *(" ** ", "'t'", "(", ")", "[", "]", "|", "tojson", "list", "join", ".", "role", "range", " + ", " ~ ", "-", "{"),
]


@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
def test_any_template_renders_or_is_an_error(template: str) -> None:
    said = ""
    try:
        render(template, [USER], [])
    except BundleError as error:
        said = str(error)
    assert said.isprintable()


def test_a_template_may_ask_whether_something_is_there() -> None:
    text = render("{% if documents is defined %}A{% endif %}{% if not date %}B{% endif %}{{ date or 'C' }}", [USER], [])
    assert text == "BC"
    assert render("{% for x in nothing %}{{ x }}{% endfor %}.", [USER], []) == "."


def test_a_template_is_told_not_to_think_and_whether_to_open_the_reply() -> None:
    template = "{{ enable_thinking }} {{ add_generation_prompt }} {{ tools is none }}"
    assert render(template, [USER], []) == "False True True"
    assert render(template + "{{ tools | tojson }}", [USER], [TOOL], reply=False).startswith("False False False")


def test_blocks_leave_no_white_space_as_in_the_templates_of_models() -> None:
    assert render("  {% if true %}\n  a\n  {% endif %}\nb\n", [USER], []) == "  a\nb"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", [USER], []) == "1"


def test_messages_are_not_changed_by_rendering() -> None:
    turns = [dict(USER)]
    render(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", turns, []
    )
    assert turns == [USER]


def test_a_tool_that_is_dropped_among_others_is_named() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{letter}"}} for letter in "abc"]
    with pytest.raises(BundleError, match="drops 2 of 3 tools, `tool_b` first"):
        render("{{ tools[0] | tojson }}", [USER], tools)


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(trees, st.sampled_from([None, 0, 2]))
def test_json_in_a_template_is_that_of_the_library(tree: object, indent: int | None) -> None:
    text = render(f"{{{{ messages[0].content | tojson(indent={str(indent).lower()}) }}}}", [{"content": tree}], [])
    assert text == json.dumps(tree, ensure_ascii=False, indent=indent)
    assert json.loads(text) == tree
