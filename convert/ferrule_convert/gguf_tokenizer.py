"""The tokenizer inside a GGUF file, rebuilt in the `tokenizers` library's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ferrule_runtime.errors import CheckpointError

from .values import printable

__all__ = ["tokenizer_json"]

# gguf-py's TokenType.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_FETCH = "fetch the file again"

# How text is cut before merging, by `tokenizer.ggml.pre` (llama.cpp's src/llama-vocab.cpp; each model's own release).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _WORDS + r"\p{N}" + _REST
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
    tokens, merges, types = (meta.get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges", "token_type"))
    for key, value, what in (("tokens", tokens, str), ("merges", merges, str), ("token_type", types, int)):
        if value is not None and not (isinstance(value, list) and all(isinstance(one, what) for one in value)):
            raise CheckpointError(f"{path}: `tokenizer.ggml.{key}` is {printable(value)}", hint=_FETCH)
    if not tokens or not kind:
        raise CheckpointError(f"{path}: no tokenizer in its metadata", hint="use a file that carries its tokenizer")
    if kind != "gpt2" or merges is None:
        raise CheckpointError(
            f"{path}: tokenizer of kind `{printable(kind)}` is not read", hint="byte-level BPE (`gpt2`) is"
        )
    if not isinstance(pre, str) or pre not in _PRE:
        raise CheckpointError(
            f"{path}: text-cutting rule `{printable(pre)}` of its tokenizer is not known",
            hint=f"known: {', '.join(sorted(_PRE))}; guessing would give other tokens",
        )
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: its tokenizer lists a token twice", hint=_FETCH)
    types = types or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: its tokenizer has {len(tokens)} tokens and {len(types)} types", hint=_FETCH)
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
