"""The tokenizer inside a GGUF file, rebuilt in the `tokenizers` library's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ferrule_runtime.errors import CheckpointError

__all__ = ["tokenizer_json"]

# gguf-py's TokenType.
_CONTROL, _USER_DEFINED = 3, 4

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


def tokenizer_json(meta: Mapping[str, Any], path: Path) -> str:
    """Rebuild a byte-level BPE tokenizer from GGUF metadata.

    Args:
      meta: The file's metadata.
      path: For messages.

    Raises:
      CheckpointError: No tokenizer, a kind that is not byte-level BPE, or an unknown way of cutting text.
    """
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    tokens, merges = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.merges")
    if not tokens or not kind:
        raise CheckpointError(f"{path}: no tokenizer in its metadata", hint="use a file that carries its tokenizer")
    if kind != "gpt2" or merges is None:
        raise CheckpointError(f"{path}: tokenizer of kind `{kind}` is not read", hint="byte-level BPE (`gpt2`) is")
    if pre not in _PRE:
        raise CheckpointError(
            f"{path}: text-cutting rule `{pre}` of its tokenizer is not known",
            hint=f"known: {', '.join(sorted(_PRE))}; guessing would give other tokens",
        )
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: its tokenizer lists a token twice", hint="fetch the file again")
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # the library raises bare Exceptions for merges outside the vocabulary
        raise CheckpointError(f"{path}: its tokenizer's merges do not fit its tokens: {error}") from None
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [(t, k) for t, k in zip(tokens, types, strict=True) if k in (_CONTROL, _USER_DEFINED)]
    for token, token_type in added:
        entry = AddedToken(token, special=token_type == _CONTROL, normalized=False)
        (tokenizer.add_special_tokens if token_type == _CONTROL else tokenizer.add_tokens)([entry])
    return str(tokenizer.to_str())
