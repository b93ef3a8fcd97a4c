import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Tiny
from folders import write_llama

from ferrule_convert.checkpoint import Checkpoint, open_checkpoint
from ferrule_runtime.errors import CheckpointError


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    write_llama(tmp_path / "m", tiny)
    return tmp_path / "m"


def opened(folder: Path, **files: Any) -> Checkpoint:
    """Open a folder after writing files, by their stem: a text as jinja, anything else as JSON."""
    for name, content in files.items():
        path = folder / f"{name}.{'jinja' if isinstance(content, str) else 'json'}"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return open_checkpoint(folder)


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("one", "one"), (NAMED, "tools"), (NAMED[:1], "plain"), ({"tool_use": "tools"}, "tools"), (None, None)],
)
def test_a_template_is_a_text_or_named_ones_of_which_that_for_tools_wins(
    folder: Path, value: Any, expected: str | None
) -> None:
    assert opened(folder, tokenizer_config={"chat_template": value}).template == expected


@pytest.mark.parametrize(
    ("value", "says"), [([{"name": "rag", "template": "x"}], "named .'rag'."), (3, "neither"), ([], "are named")]
)
def test_a_template_of_no_known_form_is_refused(folder: Path, value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        opened(folder, tokenizer_config={"chat_template": value})


def test_files_of_their_own_win_and_contradictions_are_told(folder: Path) -> None:
    made = opened(folder, chat_template={"chat_template": "json"}, tokenizer_config={"chat_template": "config"})
    assert made.template == "json"
    assert made.notes == ("chat_template.json is its chat template; tokenizer_config.json says another",)
    made = opened(folder, chat_template="jinja")
    assert made.template == "jinja"
    assert made.notes == (
        "chat_template.jinja is its chat template; chat_template.json, tokenizer_config.json says another",
    )
    (folder / "additional_chat_templates").mkdir()
    before = made.sha256()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    made = open_checkpoint(folder)
    assert made.template == "tools"
    assert made.sha256() != before


def test_the_same_template_twice_is_no_contradiction(folder: Path) -> None:
    made = opened(folder, chat_template="one\n", tokenizer_config={"chat_template": "one"})
    assert made.notes == ()


def test_stop_tokens_come_from_every_file_and_contradictions_are_told(folder: Path) -> None:
    made = opened(folder, generation_config={"eos_token_id": [0, 2]}, tokenizer_config={"eos_token": "<|im_start|>"})
    assert made.stop_tokens == (0, 1, 2)
    assert made.notes == (
        "generation_config.json ends replies at [0, 2], config.json at [2], tokenizer_config.json at [1]: "
        "all of them end replies",
    )


def test_templates_get_the_tokenizers_tokens(folder: Path) -> None:
    made = opened(folder, tokenizer_config={"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"})
    assert (made.config["bos_token_id"], made.config["eos_token_id"]) == (0, 2)


def test_a_stop_token_that_the_tokenizer_does_not_have_is_told(folder: Path) -> None:
    made = opened(folder, tokenizer_config={"eos_token": "</s>"})
    assert made.stop_tokens == (2,)
    assert made.notes == ("tokenizer_config.json: `eos_token` is `</s>`, no added token of its tokenizer",)
