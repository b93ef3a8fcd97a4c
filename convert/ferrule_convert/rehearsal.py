"""How a checkpoint talks, tried out before a weight is written: its format, golden calls, and the text for fidelity.

All that needs the tokenizer is done at once, since a vocabulary of 248,000 entries takes a second to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ferrule_runtime.constrain import Vocabulary
from ferrule_runtime.dialects import load_dialect
from ferrule_runtime.errors import BundleError
from ferrule_runtime.golden import Case, golden_cases
from ferrule_runtime.talk import Talk
from ferrule_runtime.tokenizer import Tokenizer

from .chat_format import ChatFormat, chat_format
from .checkpoint import Checkpoint
from .fidelity import fidelity_windows

__all__ = ["Rehearsal", "rehearse"]


@dataclass(frozen=True)
class Rehearsal:
    """What the gate needs that a tokenizer makes.

    Attributes:
      chat: Template, dialect and stop tokens.
      cases: The golden calls, as token ids.
      text: Token ids of the owned text, by window.
    """

    chat: ChatFormat
    cases: tuple[Case, ...]
    text: tuple[tuple[int, ...], ...]


def rehearse(
    checkpoint: Checkpoint, dialect: str | None, tokenizer: Path, rows: int, context: int, parameters: int
) -> Rehearsal:
    """Decide how a checkpoint talks, and let it say the golden calls.

    Args:
      checkpoint: Its template and stop tokens are the starting point.
      dialect: The catalogue's or the user's choice; None detects it.
      tokenizer: The bundle's file.
      rows: Of the output head.
      context: Positions of the bundle.
      parameters: Of the model, which decide how much of the text is worth its time.

    Raises:
      CheckpointError: No dialect fits, or nothing would end a reply.
      BundleError: Unknown dialect; the template fails or drops tools or results; calls do not survive the dialect; or
        the context does not hold them.
      ConstraintError: A golden tool's grammar does not compile, or forbids the call that answers.
    """
    chat = chat_format(checkpoint, dialect)
    talk = Talk(load_dialect(chat.dialect), chat.template, Tokenizer(tokenizer), frozenset(chat.stop_tokens))
    cases = golden_cases(talk, Vocabulary(talk.tokenizer, rows, min(chat.stop_tokens)))
    if (needed := max(len(case.prompt) + len(case.call) for case in cases)) > context:
        raise BundleError(
            f"a context of {context} tokens does not hold the golden calls, which take {needed}",
            hint=f"--context {needed} or more",
        )
    text = fidelity_windows(talk.tokenizer.encode, context, parameters)
    return Rehearsal(chat, tuple(cases), tuple(map(tuple, text)))
