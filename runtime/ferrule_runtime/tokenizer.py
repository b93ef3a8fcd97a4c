"""Text to token ids and back, from the bundle's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from .errors import BundleError

__all__ = ["Tokenizer"]


class Tokenizer:
    """The tokenizer of one bundle."""

    def __init__(self, path: Path) -> None:
        self.json = path.read_text(encoding="utf-8")
        try:
            self._inner = _Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises bare Exceptions
            raise BundleError(f"{path}: not a tokenizer: {error}", hint="convert the checkpoint again") from None
        self._inner.no_padding()
        self._inner.no_truncation()

    @property
    def size(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Return ids; control tokens written out in the text become themselves, none is added."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def id_of(self, token: str) -> int | None:
        """Return the id of one token, or None where the vocabulary lacks it."""
        found = self._inner.token_to_id(token)
        return None if found is None else int(found)
