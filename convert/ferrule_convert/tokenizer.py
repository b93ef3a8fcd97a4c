"""Tokenizers of checkpoints: loaded, and made to fit their model, whatever their file holds."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.tokenizer import library_faults

from .values import printable

__all__ = ["encode", "encoder", "load"]

_HINT = "the file is damaged, or of another model; fetch it again"


def load(text: str, where: str, vocabulary: int | None = None) -> Tokenizer:
    """Load a tokenizer, without what its file says of padding and cutting.

    Args:
      text: In the `tokenizers` library's JSON form.
      where: For messages: the checkpoint.
      vocabulary: Rows of the model's embedding, below which its ids must lie; None does not ask.

    Raises:
      CheckpointError: It is no tokenizer, or has ids beyond the vocabulary.
    """
    with library_faults(CheckpointError, f"{where}: its tokenizer cannot be read", _HINT):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ids = tokenizer.get_vocab(with_added_tokens=True)
    token, last = max(ids.items(), key=lambda item: item[1], default=("", -1))
    if vocabulary is not None and last >= vocabulary:
        raise CheckpointError(
            f"{where}: its tokenizer gives `{printable(token)}` the id {last}, its configuration has {vocabulary} ids",
            hint="tokenizer and weights are of different models",
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    """Return the ids of a text, control tokens written out in it as themselves.

    Raises:
      CheckpointError: The tokenizer fails on it.
    """
    with library_faults(CheckpointError, f"{where}: its tokenizer fails", _HINT):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)


def encoder(tokenizer_json: str, where: str, vocabulary: int | None = None) -> Callable[[str], list[int]]:
    """Return what turns a text into ids; the arguments and errors are those of `load` and `encode`."""
    tokenizer = load(tokenizer_json, where, vocabulary)
    return lambda text: encode(tokenizer, text, where)
