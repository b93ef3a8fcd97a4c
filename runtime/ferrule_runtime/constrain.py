"""Token constraints: which tokens may come next, so that a reply cannot but fit its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from .bundle import Bundle
from .errors import ConstraintError
from .tokenizer import Tokenizer

__all__ = ["Constraint", "Vocabulary"]

# Characters of a message of the library that are shown; it quotes whole schemas.
_LONGEST = 240


def _line(problem: str) -> str:
    """Return the library's message in one line: what it could not do comes first, why it could not after it."""
    words = " ".join(problem.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


class Vocabulary:
    """The tokenizer as the constraint sees it; made once per bundle.

    Args:
      tokenizer: The bundle's own.
      rows: Rows of the output head; may exceed the tokenizer's ids, whose rest is never allowed.
      stop: The token that ends a reply.

    Raises:
      ConstraintError: The tokenizer has more ids than rows, or the stop token is none of the rows.
    """

    @classmethod
    def of(cls, bundle: Bundle, tokenizer: Tokenizer) -> Vocabulary:
        """Make the vocabulary of a bundle, whose tokenizer is loaded already."""
        return cls(tokenizer, bundle.manifest.tables["head"].rows, min(bundle.manifest.stop_tokens))

    def __init__(self, tokenizer: Tokenizer, rows: int, stop: int) -> None:
        self.rows = rows
        if not 0 <= stop < rows:
            raise ConstraintError(f"the stop token {stop} is outside the {rows} rows of the output head")
        try:
            # No slices: they speed masks of free text, at tens of megabytes.
            self.inner: Any = LLTokenizer(tokenizer.json, n_vocab=rows, eos_token=stop, slices=[])
        except Exception as error:  # the bindings raise bare ValueErrors for every cause
            raise ConstraintError(f"the tokenizer cannot be constrained: {error}") from None


class Constraint:
    """One reply's grammar, advanced token by token."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        problem = LLMatcher.validate_grammar(grammar, vocabulary.inner)
        if problem:
            raise ConstraintError(
                f"the tools' schemas cannot be turned into a constraint: {_line(problem)}",
                hint="simplify the schema; an ignored constraint would be worse than none",
            )
        # Errors are raised below; its own warnings would be printed beside them.
        self._matcher: Any = LLMatcher(vocabulary.inner, grammar, log_level=0)
        self._bits = np.zeros((vocabulary.rows + 31) // 32, dtype=np.uint32)
        self._rows = vocabulary.rows
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the constraint failed: {_line(self._matcher.get_error())}")

    @property
    def done(self) -> bool:
        """Whether the reply is complete: nothing more may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.int64]:
        """Return the ids that may come next.

        Raises:
          ConstraintError: The grammar failed, or nothing may follow although the reply is not complete.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        mask = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._rows]
        ids = np.flatnonzero(mask)
        if not ids.size and not self.done:
            raise ConstraintError("the constraint allows no token here", hint="this is a fault in the grammar")
        return ids

    def accept(self, tokens: Sequence[int]) -> None:
        """Take the tokens that were said.

        Raises:
          ConstraintError: One of them was not allowed.
        """
        if any(not 0 <= token < self._rows for token in tokens):
            raise ConstraintError(f"tokens {list(tokens)} are not all among the {self._rows} rows of the output head")
        if not self._matcher.consume_tokens(list(tokens)):
            self._check()
            raise ConstraintError(f"tokens {list(tokens)} are not allowed here")
