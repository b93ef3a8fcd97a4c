"""A bundle on this machine: engine, dialect and constraint behind the message-level protocol."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..budget import MemoryPlan, baseline, plan_within
from ..bundle import Bundle, open_bundle
from ..constrain import Constraint, Vocabulary
from ..decode import generate
from ..engines import load as load_engine
from ..errors import ContextError, ModelError
from ..messages import Message, Reply, Usage, Want
from ..talk import Talk
from ..tools import Tool

__all__ = ["LocalModel", "load"]

# Most tokens of one reply; a call of a small agent takes about 60.
REPLY_LIMIT = 256


class LocalModel:
    """A bundle, loaded."""

    def __init__(self, bundle: Bundle, plan: MemoryPlan, threads: int = 0) -> None:
        manifest = bundle.manifest
        self._talk = Talk.of(bundle)
        self._engine = load_engine(bundle, threads=threads, context=plan.context, chunk=plan.chunk)
        self._vocabulary = Vocabulary.of(bundle, self._talk.tokenizer)
        self.label = f"{manifest.name} ({manifest.engine})"

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        tokens = self._talk.prompt(messages, tools)
        if len(tokens) >= self._engine.context:
            raise ContextError(
                f"the prompt has {len(tokens)} tokens ({len(tools)} tools), the context holds {self._engine.context}",
                hint=f"--context {len(tokens) + REPLY_LIMIT}, a shorter request, or fewer tools",
            )
        return tokens

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool], want: Want) -> Reply:
        """Say what comes next; see `models.Model`."""
        started = time.perf_counter()
        prompt = self._prompt(messages, tools)
        grammar = self._talk.grammar(tools, want) if tools else None
        constraint = Constraint(self._vocabulary, grammar) if grammar else None
        self._engine.reset()
        generated = generate(self._engine, prompt, stops=self._talk.stops, limit=REPLY_LIMIT, constraint=constraint)
        raw = self._talk.written(generated.tokens)
        if not generated.complete and constraint is not None:
            raise ModelError(f"the call was cut off at {len(generated.tokens)} tokens: {raw[-60:]!r}")
        text, calls = self._talk.read(raw, tools, want)
        if calls and not generated.complete:
            # An argument that was left out, or another call, may have been to come.
            raise ModelError(f"the call was cut off at {len(generated.tokens)} tokens: {raw[-60:]!r}")
        seconds = time.perf_counter() - started
        usage = Usage(len(prompt), len(generated.tokens), seconds, generated.first_token_s)
        return Reply(text, calls, raw, usage)


def load(argument: str) -> LocalModel:
    """Load the bundle in a folder, with the default context and no limit on memory."""
    bundle = open_bundle(Path(argument))
    facts, reach = bundle.manifest.memory, bundle.manifest.context
    return LocalModel(bundle, plan_within(facts, None, interpreter=baseline(), most_context=reach))
