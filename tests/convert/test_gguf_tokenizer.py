"""Tokenizers rebuilt from GGUF against transformers' own reading of the same file."""

import random
from pathlib import Path

import pytest
from checkpoints import Tiny
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from ferrule_convert.checkpoint import open_checkpoint

PIECES = [
    "The quick brown fox", " jumps", "don't", "I'LL", "naïve café", "日本語のテキスト", "Ελληνικά", "🙂🙃👩‍👩‍👧‍👦",
    "\t\t", "    ", "\n\n\n",
    "12345", " 3.14e-10", "0x1F", "½²", "def f(x):\n    return x ** 2\n", '{"name": "a", "v": [1, 2]}', "<b>&amp;</b>",
    "https://example.org/a?b=c#d", "…—“”", "a" * 70, "\u200b\u00a0\u3000", "e\u0301",
    "ﬁ", "\r\n", "<|im_start|>", "<|im_end|>",
    "SELECT * FROM t;", "±°µ", "नमस्ते", "مرحبا", "\x00\x07", "_snake_case_", "CamelCase", "--flag=1", "$HOME/x",
]  # fmt: skip


def mixed_strings(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12))) for _ in range(count)]


@pytest.mark.real
def test_a_thousand_mixed_strings_get_the_ids_of_transformers(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.from_str(open_checkpoint(smollm2).tokenizer_json)
    theirs = transformers.AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    # transformers drops `tokenizer.ggml.pre`; the model's own release cuts single digits out first.
    release = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(release)
    for text in mixed_strings(1000):
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids, text


@pytest.mark.real
def test_what_is_encoded_decodes_to_itself(smollm2: Path) -> None:
    ours = Tokenizer.from_str(open_checkpoint(smollm2).tokenizer_json)
    for text in mixed_strings(300, seed=1):
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


@given(st.text())
def test_any_text_survives_a_byte_level_tokenizer(tiny: Tiny, text: str) -> None:
    ours = _tokenizer(tiny.path)
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


_kept: dict[Path, Tokenizer] = {}


def _tokenizer(path: Path) -> Tokenizer:
    if path not in _kept:
        _kept[path] = Tokenizer.from_str(open_checkpoint(path).tokenizer_json)
    return _kept[path]


def test_control_tokens_are_one_id_and_digits_stand_alone(tiny: Tiny) -> None:
    ours = _tokenizer(tiny.path)
    assert ours.encode("<|im_start|>").ids == [1]
    assert len(ours.encode("2024").ids) == 4
    assert ours.encode(" the").tokens == ["Ġthe"]
