"""Golden calls: what a bundle answered where it was made, so that a board can tell whether it answers the same.

Another CPU rounds otherwise, so equality is not the test: a call may differ from the recorded one first where the two
best tokens were closer than the noise of the form, and nowhere else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bundle import Bundle
from .constrain import Constraint, Vocabulary
from .decode import generate
from .engines import Engine, load
from .errors import BundleError
from .messages import Call, Message
from .round_trip import check_round_trip
from .talk import Talk
from .tools import Tool

__all__ = [
    "GOLDEN_FILE",
    "Golden",
    "Player",
    "Verdict",
    "golden_prompts",
    "read_golden",
    "record",
    "replay",
    "whole_request",
]

GOLDEN_FILE = "golden.json"
# Most tokens of a golden call.
_LIMIT = 48
_CONTEXT = 1024


def _nothing(**_: Any) -> str:
    return ""


def _tool(name: str, description: str, properties: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Tool(name, description, schema, _nothing)


_TOOLS = (
    _tool("set_alarm", "Set an alarm.", {"hour": {"type": "integer"}, "label": {"type": "string"}}),
    _tool("set_light", "Switch a light.", {"room": {"enum": ["hall", "kitchen"]}, "on": {"type": "boolean"}}),
    _tool("read_sensor", "Read a sensor.", {"sensor": {"type": "string", "enum": ["door", "water", "smoke"]}}),
)
_REQUESTS = (
    ("You are the assistant of this device.", "Wake me at seven, call the alarm early train."),
    ("", "Switch the light in the kitchen off."),
    ("You are the assistant of this device.", "Is there water in the cellar?"),
)
# What answers the first request, in every dialect: what is timed must be the same work.
_ANSWER = Call("set_alarm", {"hour": 7, "label": "early train"})


def _conversation(index: int) -> list[Message]:
    system, request = _REQUESTS[index]
    return [*([Message("system", system)] if system else []), Message("user", request)]


def golden_prompts(bundle: Bundle) -> list[list[int]]:
    """Render the golden conversations with their tools, as token ids.

    Raises:
      BundleError: The template fails or drops tools or results, or calls do not survive the dialect.
    """
    talk = Talk.of(bundle)
    prompts = [talk.prompt(_conversation(index), _TOOLS) for index in range(len(_REQUESTS))]
    check_round_trip(talk)
    return prompts


def whole_request(bundle: Bundle) -> tuple[list[int], list[int]]:
    """Return the first golden prompt, and a call that answers it, as token ids: for timing."""
    talk, messages = Talk.of(bundle), _conversation(0)
    return talk.prompt(messages, _TOOLS), talk.answer(messages, (_ANSWER,), _TOOLS)


class Player:
    """An engine, a tokenizer and a constraint: all that a whole request takes."""

    def __init__(self, bundle: Bundle, engine: Engine | None = None) -> None:
        """Load what is not there yet.

        Args:
          bundle: Opened and verified.
          engine: One that is loaded already; None loads the bundle's own.
        """
        manifest = bundle.manifest
        self.stops = frozenset(manifest.stop_tokens)
        self.engine = engine or load(bundle, threads=0, context=min(_CONTEXT, manifest.context), chunk=64)
        talk = Talk.of(bundle)
        self.vocabulary = Vocabulary(talk.tokenizer, manifest.tables["head"].rows, min(self.stops))
        grammar = talk.grammar(_TOOLS, "call")
        if grammar is None:
            raise BundleError(f"dialect `{manifest.dialect}` cannot be made to call a tool")
        self.grammar = grammar

    def call(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of the constrained call that answers a prompt."""
        self.engine.reset()
        constraint = Constraint(self.vocabulary, self.grammar)
        return list(generate(self.engine, prompt, stops=self.stops, limit=_LIMIT, constraint=constraint).tokens)

    def play(self, prompt: Sequence[int], call: Sequence[int]) -> float:
        """Do all the work of answering a prompt with a call, but take the call's tokens whatever the model prefers.

        What is timed must be the same work for every recipe, and a model's own call is longer or shorter.

        Returns:
          Seconds until the first token was chosen.
        """
        started = time.perf_counter()
        first = 0.0
        self.engine.reset()
        constraint = Constraint(self.vocabulary, self.grammar)
        hidden = self.engine.feed(prompt)
        for index, token in enumerate(call):
            ids = constraint.allowed()
            self.engine.logits(hidden)[0][ids].argmax()
            first = first or time.perf_counter() - started
            constraint.accept([token])
            if index + 1 < len(call):
                hidden = self.engine.feed([token])
        return first

    def margins(self, prompt: Sequence[int], call: Sequence[int]) -> list[float]:
        """Return, for each token of a call, how far its logit lies above the next allowed one's; inf if forced."""
        self.engine.reset()
        hidden = self.engine.feed([*prompt, *call[:-1]], every=True)[len(prompt) - 1 :]
        logits = self.engine.logits(hidden)
        constraint = Constraint(self.vocabulary, self.grammar)
        result = []
        for row, token in zip(logits, call, strict=True):
            others = constraint.allowed()
            others = others[others != token]
            result.append(float(row[token] - row[others].max()) if others.size else float("inf"))
            constraint.accept([token])
        return result


def record(bundle: Bundle, prompts: Sequence[Sequence[int]], noise: float) -> dict[str, Any]:
    """Play golden prompts and keep what was answered.

    Args:
      bundle: Where it was made.
      prompts: From `golden_prompts`.
      noise: The largest difference of a logit between this engine and the graph it was made from.

    Returns:
      The contents of `golden.json`; a margin is null where the token was forced.
    """
    player = Player(bundle)
    cases = []
    for prompt in prompts:
        call = player.call(prompt)
        margins = [margin if np.isfinite(margin) else None for margin in player.margins(prompt, call)]
        cases.append({"prompt": list(prompt), "call": call, "margins": margins})
    return {"schema_version": 1, "noise": noise, "cases": cases}


@dataclass(frozen=True)
class Verdict:
    """How one golden call went.

    Attributes:
      passed: Equal, or different only where two tokens were too close to tell.
      detail: What happened, with numbers.
    """

    passed: bool
    detail: str


def _judge(case: dict[str, Any], found: list[int], noise: float) -> Verdict:
    expected, margins = case["call"], case["margins"]
    if found == expected:
        return Verdict(True, f"{len(found)} tokens, all equal")
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    margin = margins[at] if at < len(margins) else None
    if margin is not None and margin <= noise:
        return Verdict(
            True, f"differs at token {at}, where the margin was {margin:.3f}, within the noise of {noise:.3f}"
        )
    shown = "none: the token was forced" if margin is None else f"{margin:.3f}"
    return Verdict(False, f"differs at token {at} of {len(expected)}; the margin was {shown}, the noise is {noise:.3f}")


@dataclass(frozen=True)
class Golden:
    """A bundle's golden calls.

    Attributes:
      noise: Margins up to this cannot be told from rounding.
      cases: `prompt` and `call` as token ids, and the `margins` of the call's tokens.
    """

    noise: float
    cases: tuple[dict[str, Any], ...]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, int) for item in value)


def read_golden(bundle: Bundle) -> Golden:
    """Read a bundle's golden calls.

    Raises:
      BundleError: The file is malformed.
    """
    path = bundle.file(GOLDEN_FILE)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        noise, cases = float(raw["noise"]), tuple(raw["cases"])
        sound = all(_ids(c["prompt"]) and _ids(c["call"]) and len(c["margins"]) == len(c["call"]) for c in cases)
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path}: malformed: {error!r}", hint="convert the checkpoint again") from None
    if not sound or not cases:
        raise BundleError(f"{path}: malformed: not prompts and calls", hint="convert the checkpoint again")
    return Golden(noise, cases)


def replay(bundle: Bundle) -> list[Verdict]:
    """Play a bundle's golden calls on this machine.

    Raises:
      BundleError: The golden file is malformed.
    """
    golden, player = read_golden(bundle), Player(bundle)
    return [_judge(case, player.call(case["prompt"]), golden.noise) for case in golden.cases]
