"""Prompt tokens in, reply tokens out: prefill, then one step a token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .constrain import Constraint
from .engines import Engine
from .errors import ContextError, EngineError

__all__ = ["Generated", "generate"]


@dataclass(frozen=True)
class Generated:
    """Tokens that were generated, and when.

    Attributes:
      tokens: Without the stop token.
      complete: False when the limit cut the reply off.
      first_token_s: Seconds from the start of prefill until the first token was known, or None where there was none.
      seconds: Seconds in all.
    """

    tokens: tuple[int, ...]
    complete: bool
    first_token_s: float | None
    seconds: float


def generate(
    engine: Engine, prompt: Sequence[int], *, stops: frozenset[int], limit: int, constraint: Constraint | None = None
) -> Generated:
    """Continue a prompt greedily.

    Args:
      engine: Its state is continued; the prompt's tokens are fed first.
      prompt: Tokens not yet fed.
      stops: Ids that end the reply.
      limit: Most tokens to generate.
      constraint: Restricts every token; the reply ends when it is complete.

    Raises:
      ContextError: Prompt and one token do not fit; nothing was fed.
      ConstraintError: The grammar failed.
      EngineError: The graph could not be executed, or a logit is not finite.
    """
    room = engine.context - engine.position - len(prompt)
    if room < 1:
        raise ContextError(
            f"a prompt of {len(prompt)} tokens behind {engine.position} leaves no room in {engine.context}",
            hint="a larger --context, a shorter request, or fewer tools",
        )
    started = time.perf_counter()
    hidden = engine.feed(prompt)
    tokens: list[int] = []
    first: float | None = None
    while len(tokens) < min(limit, room):
        logits = engine.logits(hidden[-1:])[0]
        if constraint is None:
            token = int(logits.argmax())
        else:
            ids = constraint.allowed()
            if constraint.done:
                break
            token = int(ids[logits[ids].argmax()])
        # The largest of logits among which one is not a number is that one.
        if not np.isfinite(logits[token]):
            raise EngineError(f"the logit of token {token} at position {engine.position} is {logits[token]}")
        if first is None:
            first = time.perf_counter() - started
        if token in stops:
            return Generated(tuple(tokens), True, first, time.perf_counter() - started)
        tokens.append(token)
        if constraint is not None:
            constraint.accept([token])
            if constraint.done:
                break
        if len(tokens) < min(limit, room):
            hidden = engine.feed([token])
    complete = constraint.done if constraint is not None else False
    return Generated(tuple(tokens), complete, first, time.perf_counter() - started)
