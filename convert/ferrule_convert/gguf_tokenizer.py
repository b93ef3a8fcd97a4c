"""The tokenizer inside a GGUF file, rebuilt in the `tokenizers` library's form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.tokenizer import library_faults

from .values import printable

__all__ = ["tokenizer_json"]

# gguf-py's TokenType.
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

# Of a SentencePiece token, which is cut at every letter to find what makes it; Gemma's longest have some hundred.
_MOST_LETTERS = 1024

_FETCH = "fetch the file again"

# How text is cut before merging, by `tokenizer.ggml.pre` (llama.cpp's src/llama-vocab.cpp; each model's own release).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _WORDS + r"\p{N}" + _REST
# Marks belong to the letters before them.
_QWEN35 = _QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "qwen2": lambda: _split(_QWEN2),
    "qwen35": lambda: _split(_QWEN35),
    "llama-bpe": lambda: _split(_LLAMA3),
}
# GGUF does not say these: releases of Qwen compose characters first, those of Llama 3 take whole tokens before merging.
_COMPOSED = ("qwen2", "qwen35")
_WHOLE_FIRST = ("llama-bpe",)


def _listed(value: Any, key: str, what: type, path: Path) -> None:
    """Refuse what is there, but is no list of such values."""
    if value is not None and not (isinstance(value, list) and all(isinstance(one, what) for one in value)):
        raise CheckpointError(f"{path}: `tokenizer.ggml.{key}` is {printable(value)}", hint=_FETCH)


def _byte_level(tokens: list[str], meta: Mapping[str, Any], path: Path) -> Tokenizer:
    merges, pre = meta.get("tokenizer.ggml.merges"), meta.get("tokenizer.ggml.pre")
    _listed(merges, "merges", str, path)
    if merges is None:
        raise CheckpointError(f"{path}: no merges of its tokenizer in its metadata", hint=_FETCH)
    if not isinstance(pre, str) or pre not in _PRE:
        raise CheckpointError(
            f"{path}: text-cutting rule `{printable(pre)}` of its tokenizer is not known",
            hint=f"known: {', '.join(sorted(_PRE))}; guessing would give other tokens",
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    with library_faults(CheckpointError, f"{path}: its tokenizer's merges do not fit its tokens", _FETCH):
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_FIRST))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return which two pieces make one, in the order in which SentencePiece would: by the score of what they make.

    Only normal pieces are made of others: what a user defined is cut out of the text before, the rest is never text.
    """
    normal = {token: index for index, token in enumerate(tokens) if types[index] == _NORMAL}
    ranked = [
        (-scores[index], index, token[:cut], token[cut:])
        for token, index in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _sentencepiece(tokens: list[str], types: list[int], meta: Mapping[str, Any], path: Path) -> Tokenizer:
    """SentencePiece's BPE: spaces are `▁`, and what has no piece is spelled in bytes (Kudo & Richardson 2018)."""
    scores = meta.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(one, float) and math.isfinite(one) for one in scores)
    ):
        raise CheckpointError(f"{path}: not one finite score for each of its {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    spelled = {token for token, kind in zip(tokens, types, strict=True) if kind == _BYTE}
    if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in spelled]:
        raise CheckpointError(
            f"{path}: {len(missing)} bytes, the first {missing[0]:#04x}, have no token of its tokenizer",
            hint="text without a piece could not be spelled",
        )
    if (longest := max(map(len, tokens))) > _MOST_LETTERS:
        raise CheckpointError(f"{path}: a token of {longest} letters, the most are {_MOST_LETTERS}")
    merges = _merges(tokens, types, scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    escaped: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    read: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        escaped.insert(0, normalizers.Prepend("▁"))
        read.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(escaped)
    tokenizer.decoder = decoders.Sequence(read)
    return tokenizer


def tokenizer_json(meta: Mapping[str, Any], path: Path) -> str:
    """Rebuild a tokenizer, byte-level BPE or SentencePiece's, from GGUF metadata.

    No token is put before or behind a text: templates write those that belong there.

    Args:
      meta: The file's metadata.
      path: For messages.

    Raises:
      CheckpointError: No tokenizer, one of another kind, incomplete, or with an unknown way of cutting text.
    """
    kind, tokens, types = (meta.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens", "token_type"))
    for key, value, what in (("tokens", tokens, str), ("token_type", types, int)):
        _listed(value, key, what, path)
    if not tokens or not kind:
        raise CheckpointError(f"{path}: no tokenizer in its metadata", hint="use a file that carries its tokenizer")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{path}: tokenizer of kind `{printable(kind)}` is not read",
            hint="byte-level BPE (`gpt2`) and SentencePiece (`llama`) are",
        )
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: its tokenizer lists a token twice", hint=_FETCH)
    types = types or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(types)} types of {len(tokens)} tokens", hint=_FETCH)
    with library_faults(CheckpointError, f"{path}: its tokenizer cannot be built", _FETCH):
        return _built(str(kind), tokens, types, meta, path)


def _built(kind: str, tokens: list[str], types: list[int], meta: Mapping[str, Any], path: Path) -> str:
    tokenizer = _byte_level(tokens, meta, path) if kind == "gpt2" else _sentencepiece(tokens, types, meta, path)
    # Of both kinds, and found in text as they stand: the longest first where several begin at one place.
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, one in zip(tokens, types, strict=True) if one == wanted]
        entries = [AddedToken(token, special=special, normalized=False) for token in added]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(entries)
    return str(tokenizer.to_str())
