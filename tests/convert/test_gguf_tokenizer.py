"""Tokenizers rebuilt from GGUF against transformers' own reading of the same file."""

import json
import os
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Tiny
from folders import GEMMA3, gemma3_tensors
from gguf_files import write_gemma3, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from ferrule_convert.archs import build
from ferrule_convert.chat_format import chat_format
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.gguf_tokenizer import tokenizer_json
from ferrule_runtime.errors import CheckpointError

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


# What SentencePiece's models keep whole, and what never is text; GGUF has spaces where pieces have `▁`.
DEFINED, CONTROLS = ["  ", "    ", "\n", "\n\n", "<table>"], ["<pad>", "<eos>", "<bos>", "<unused0>"]
NORMAL, UNKNOWN, CONTROL_TYPE, DEFINED_TYPE, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@pytest.fixture(scope="session")
def pieces() -> dict[str, Any]:
    """Metadata of a small SentencePiece model, learned from the mixed strings."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=["▁"])
    learner.train_from_iterator([text for piece in PIECES for text in [piece, f"the {piece} in"] * 3], trainer)
    learned = json.loads(learner.to_str())["model"]
    whole = ["".join(pair) for pair in learned["merges"]]
    kept = [piece.replace(" ", "▁") for piece in DEFINED]
    alphabet = [piece for piece in sorted(learned["vocab"]) if len(piece) == 1]
    normal = [piece for piece in dict.fromkeys([*whole, *alphabet]) if piece not in kept]
    groups: list[tuple[list[str], int]] = [
        (CONTROLS, CONTROL_TYPE), (["<unk>"], UNKNOWN), (DEFINED, DEFINED_TYPE),
        ([f"<0x{byte:02X}>" for byte in range(256)], BYTE), (normal, NORMAL), (["the▁quick"], UNUSED),
    ]  # fmt: skip
    tokens = [(token, kind) for group, kind in groups for token in group]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.scores": [-float(i) if kind == NORMAL else -1000.0 for i, (_, kind) in enumerate(tokens)],
        "tokenizer.ggml.bos_token_id": CONTROLS.index("<bos>"),
        "tokenizer.ggml.eos_token_id": CONTROLS.index("<eos>"),
        "tokenizer.ggml.add_space_prefix": False,
    }


def encode(meta: dict[str, Any], text: str, prefix: bool) -> list[int]:
    """Encode as SentencePiece does: of neighbours that are a piece together, those of the best score first."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = {token: meta["tokenizer.ggml.scores"][i] for token, i in ids.items() if types[i] == NORMAL}
    whole = sorted((t for t, i in ids.items() if types[i] in (CONTROL_TYPE, DEFINED_TYPE)), key=len, reverse=True)
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, whole)) + ")", text):
        if part in whole:
            found.append(ids[part])
            continue
        symbols = list(("▁" if prefix and part else "") + part.replace(" ", "▁"))
        while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
            at = -max(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            found += [ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [False, True])
def test_pieces_are_those_of_sentencepiece(pieces: dict[str, Any], prefix: bool) -> None:
    # A prefix is what files that do not speak of it have.
    meta = {key: value for key, value in pieces.items() if not (prefix and key.endswith("space_prefix"))}
    ours = Tokenizer.from_str(tokenizer_json(meta, Path("m")))
    for text in [*mixed_strings(300, seed=2), " ", "a  b", " " * 7, "▁x", "<bos><table>\n\n\n the", "the quick"]:
        found = ours.encode(text)
        assert found.ids == encode(meta, text, prefix), (text, found.tokens)
        # Prefixes behind tokens that stand in the text cannot be told from spaces, in SentencePiece's models either.
        if not prefix or not any(whole in text for whole in DEFINED + CONTROLS):
            assert ours.decode(found.ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_gemmas_pieces_are_those_of_transformers(pieces: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf", "gemma3", pieces, {})
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    ours = Tokenizer.from_str(tokenizer_json(pieces, Path("m")))
    # transformers builds whole runs of spaces by merging, which gives other runs for long ones.
    for text in [text for text in mixed_strings(300, seed=3) if " " * 5 not in text]:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scores": None}, "not one finite score for each"),
        ({"scores": [0.0]}, "not one finite score for each"),
        ({"token_type": [1]}, "1 types of"),
        ({"token_type": None}, "256 bytes, the first 0x00, have no token"),
        ({"scores": ["0"]}, "not one finite score for each"),
        ({"model": "bert"}, "of kind `bert` is not read"),
    ],
)
def test_pieces_that_are_not_complete_are_refused(pieces: dict[str, Any], change: dict, says: str) -> None:
    meta = pieces | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=says):
        tokenizer_json(meta, Path("m"))


def test_a_byte_without_a_token_is_named(pieces: dict[str, Any]) -> None:
    tokens = ["<0x4g>" if token == "<0x41>" else token for token in pieces["tokenizer.ggml.tokens"]]
    with pytest.raises(CheckpointError, match="1 bytes, the first 0x41, have no token"):
        tokenizer_json(pieces | {"tokenizer.ggml.tokens": tokens}, Path("m"))


@pytest.mark.parametrize("which", ["tokens", "scores"])
def test_pieces_that_are_not_numbers_or_unique_are_refused(pieces: dict[str, Any], which: str) -> None:
    key = f"tokenizer.ggml.{which}"
    broken = [*pieces[key][:-1], {"tokens": pieces[key][0], "scores": float("nan")}[which]]
    with pytest.raises(CheckpointError, match={"tokens": "lists a token twice", "scores": "finite score"}[which]):
        tokenizer_json(pieces | {key: broken}, Path("m"))


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("qwen3.5", "qwen35")])
def test_qwens_release_and_what_gguf_keeps_of_it_give_the_same_ids(name: str, pre: str) -> None:
    folder = os.environ.get("FERRULE_TOKENIZERS")
    if not folder:
        pytest.skip(f"FERRULE_TOKENIZERS does not name a folder with {name}/tokenizer.json")
    text = (Path(folder) / name / "tokenizer.json").read_text(encoding="utf-8")
    raw, release = json.loads(text), Tokenizer.from_str(text)
    added = {one["id"]: one for one in raw["added_tokens"]}
    tokens = {index: token for token, index in raw["model"]["vocab"].items()}
    tokens |= {index: one["content"] for index, one in added.items()}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in raw["model"]["merges"]]
    types = [
        (CONTROL_TYPE if added[i]["special"] else DEFINED_TYPE) if i in added else NORMAL for i in range(len(tokens))
    ]
    meta = {"model": "gpt2", "pre": pre, "tokens": [tokens[i] for i in range(len(tokens))], "merges": merges}
    meta |= {"token_type": types}
    ours = Tokenizer.from_str(tokenizer_json({f"tokenizer.ggml.{k}": v for k, v in meta.items()}, Path("m")))
    for text in [*mixed_strings(500, seed=4), "<tool_call>x</tool_call>", "e\u0301", "<think>"]:
        assert ours.encode(text).ids == release.encode(text, add_special_tokens=False).ids, text


def test_tokens_that_begin_and_end_are_told_to_templates(pieces: dict[str, Any], tmp_path: Path) -> None:
    c = GEMMA3 | {"vocab_size": len(pieces["tokenizer.ggml.tokens"]), "query_pre_attn_scalar": 16}
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for name, more in {"writes": template, "not": "{{ messages[0]['content'] }}"}.items():
        write_gemma3(
            tmp_path / f"{name}.gguf", c, gemma3_tensors(c),
            whole=pieces | {"tokenizer.chat_template": more, "tokenizer.ggml.add_bos_token": True},
        )  # fmt: skip
    checkpoint = open_checkpoint(tmp_path / "writes.gguf")
    assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (2, 1)
    assert checkpoint.stop_tokens == (1,)
    assert checkpoint.notes == ()
    assert open_checkpoint(tmp_path / "not.gguf").notes == (
        "its tokenizer would begin a text with `<bos>`; its chat template does not",
    )
    assert build(checkpoint).facts["vocabulary"] == c["vocab_size"]
    made = chat_format(replace(checkpoint, tensors={}), "functiongemma")
    assert made.template.startswith('{%- set bos_token = "<bos>" %}')
