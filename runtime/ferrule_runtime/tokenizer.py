"""Text to token ids and back, from the bundle's own tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from .errors import BundleError, FerruleError, UsageError

__all__ = ["Tokenizer", "library_faults"]


@contextlib.contextmanager
def library_faults(kind: type[FerruleError], what: str, hint: str) -> Iterator[None]:
    """Turn what the `tokenizers` library raises into an error of ours: bare Exceptions, and Rust's panics.

    Args:
      kind: Of our error.
      what: Is wrong, before the library's reason.
      hint: What to do.
    """
    try:
        yield
    except FerruleError:
        raise
    except BaseException as error:
        # A panic derives from BaseException, as Ctrl-C does.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise kind(f"{what}: {reason if reason.isprintable() else ascii(reason)}", hint=hint) from None


class Tokenizer:
    """The tokenizer of one bundle.

    Attributes:
      json: As the file has it.
      controls: Added tokens that a constraint must write as control tokens, not spell.
    """

    def __init__(self, path: Path) -> None:
        with library_faults(BundleError, f"{path}: not a tokenizer", "convert the checkpoint again"):
            self.json = path.read_text(encoding="utf-8")
            self._inner = _Tokenizer.from_str(self.json)
        added = self._inner.get_added_tokens_decoder()
        self._special = {int(index): str(entry.content) for index, entry in added.items() if entry.special}
        # llguidance's own rule (toktrie_hf_tokenizers): an added token in angle brackets is a control token, flagged or
        # not, and Qwen's `<tool_call>` is not.
        self.controls = frozenset(
            str(entry.content)
            for entry in added.values()
            if entry.special or (entry.content.startswith("<") and entry.content.endswith(">"))
        )
        self._inner.no_padding()
        self._inner.no_truncation()

    @property
    def size(self) -> int:
        """Number of token ids, added ones included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Return ids; control tokens written out in the text become themselves, none is added.

        Raises:
          UsageError: The text holds half a character, as file names and arguments that are not UTF-8 do.
          BundleError: The tokenizer fails on it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not Unicode: {text[error.start : error.end]!r} at character {error.start}",
                hint="write it in UTF-8",
            ) from None
        with library_faults(BundleError, "the tokenizer fails", "it is the checkpoint's own: convert another"):
            return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], keep: Collection[str] = ()) -> str:
        """Return the text of ids, control tokens left out except those to keep."""
        kept = [index for index in ids if index not in self._special or self._special[index] in keep]
        return str(self._inner.decode(kept, skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        """Return the id of one token, or None where the vocabulary lacks it."""
        found = self._inner.token_to_id(token)
        return None if found is None else int(found)
