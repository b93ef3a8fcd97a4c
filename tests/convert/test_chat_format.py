"""Which dialect a checkpoint gets, and why; and that a bundle of each passes the gate, replays and can be timed."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import TEMPLATE, Tiny, write_tiny
from talking import GEMMA, GEMMA_TEMPLATE, HERMES_TEMPLATE, QWEN, XML_TEMPLATE, tokenizer_json

from ferrule_convert.chat_format import chat_format
from ferrule_convert.checkpoint import Checkpoint, open_checkpoint
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_runtime.bundle import Bundle
from ferrule_runtime.chat import render
from ferrule_runtime.errors import BundleError, CheckpointError
from ferrule_runtime.golden import Player, replay, whole_request
from ferrule_targets.target import load_target


@pytest.fixture
def checkpoint(tiny: Tiny) -> Checkpoint:
    return open_checkpoint(tiny.path)


@pytest.mark.parametrize(
    ("template", "dialect", "why"),
    [
        (XML_TEMPLATE, "qwen-xml", "`<function=...>`"),
        (HERMES_TEMPLATE, "hermes-json", "JSON between `<tool_call>`"),
        (GEMMA_TEMPLATE, "functiongemma", "FunctionGemma's control tokens"),
        (TEMPLATE, "chatml-json", "a tool format of ours"),
        (None, "chatml-json", "a tool format of ours"),
    ],
)
def test_the_template_decides_and_the_note_says_why(
    checkpoint: Checkpoint, template: str | None, dialect: str, why: str
) -> None:
    found = chat_format(replace(checkpoint, template=template))
    assert found.dialect == dialect
    assert why in found.note
    assert found.template == (template if dialect != "chatml-json" else found.template)


def test_a_choice_of_the_user_goes_before_the_template(checkpoint: Checkpoint) -> None:
    found = chat_format(replace(checkpoint, template=HERMES_TEMPLATE), "chatml-json")
    assert (found.dialect, found.note) == ("chatml-json", "named by the user")
    assert "You can call these tools" in found.template


def test_stop_tokens_are_the_checkpoints_and_the_dialects(checkpoint: Checkpoint) -> None:
    gemma = replace(checkpoint, template=GEMMA_TEMPLATE, tokenizer_json=tokenizer_json(GEMMA), stop_tokens=(7,))
    # Behind 256 bytes: <eos>, <start_of_turn>, <end_of_turn>, <start_function_response>.
    assert chat_format(gemma).stop_tokens == (7, 256, 258, 259)
    qwen = replace(checkpoint, template=HERMES_TEMPLATE, tokenizer_json=tokenizer_json(QWEN), stop_tokens=())
    assert chat_format(qwen).stop_tokens == (256, 258)
    with pytest.raises(CheckpointError, match="no stop token"):
        chat_format(replace(qwen, tokenizer_json=tokenizer_json(())))


def test_tools_in_a_format_that_no_dialect_reads_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="no dialect here reads") as caught:
        chat_format(replace(checkpoint, template="{% for t in tools %}[TOOL] {{ t }}{% endfor %}"))
    for name in ("chatml-json", "functiongemma", "hermes-json", "qwen-xml"):
        assert name in caught.value.hint


def test_no_template_and_no_chatml_is_refused(checkpoint: Checkpoint) -> None:
    bare = replace(checkpoint, template=None, tokenizer_json=tokenizer_json(("<eos>",)))
    with pytest.raises(CheckpointError, match="no tool-call dialect fits"):
        chat_format(bare)
    with pytest.raises(CheckpointError, match="no chat template"):
        chat_format(bare, "hermes-json")


def test_tokens_that_a_template_names_are_written_into_it(checkpoint: Checkpoint) -> None:
    named = replace(
        checkpoint,
        template="{{- bos_token }}" + GEMMA_TEMPLATE,
        tokenizer_json=tokenizer_json(("<bos>", *GEMMA)),
        config={**checkpoint.config, "bos_token_id": 256},
    )
    text = render(chat_format(named).template, [{"role": "user", "content": "hi"}], [])
    assert text == "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(CheckpointError, match="`bos_token`, which its configuration does not say"):
        chat_format(replace(named, config={"vocab_size": 268}))
    for wrong in (-1, 1 << 40, True, "256", [], [None]):
        with pytest.raises(CheckpointError, match="`bos_token`, which its configuration does not say"):
            chat_format(replace(named, config={"vocab_size": 268, "bos_token_id": wrong}))


def make(folder: Path, template: str) -> Bundle:
    path = write_tiny(folder / "m.gguf", change={"tokenizer.chat_template": template}).path
    options, quiet = Options(fidelity=False), lambda text: None
    return convert(open_checkpoint(path), load_target("host"), load_recipe("w8"), folder / "b", options, quiet)


# A byte-level tokenizer takes a token a letter, so the tools are written shorter.
SHORT = XML_TEMPLATE.replace("tool | tojson", "tool.function | tojson")


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, SHORT], ids=["hermes", "xml"])
def test_a_bundle_of_each_dialect_passes_the_gate_replays_and_can_be_timed(tmp_path: Path, template: str) -> None:
    bundle = make(tmp_path, template)
    assert all(verdict.passed for verdict in replay(bundle))
    prompt, call = whole_request(bundle)
    assert Player(bundle).play(prompt, call) > 0


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{# <tool_call> #}" + TEMPLATE, "drops 3 of 3 tools"),
        (HERMES_TEMPLATE.replace("message.tool_calls", "[]"), "do not survive"),
        ("{{ raise_exception('only for the cloud') }}" + HERMES_TEMPLATE, "only for the cloud"),
        ("{% if %}" + HERMES_TEMPLATE, "the chat template fails"),
        ("{{ ''.__class__.__base__.__subclasses__() }}" + HERMES_TEMPLATE, "the chat template fails"),
    ],
)
def test_a_template_that_does_not_carry_calls_fails_the_conversion_with_the_reason(
    tmp_path: Path, template: str, why: str
) -> None:
    with pytest.raises(BundleError, match=why):
        make(tmp_path, template)
    assert not (tmp_path / "b").exists()
