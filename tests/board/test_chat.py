import pytest

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
