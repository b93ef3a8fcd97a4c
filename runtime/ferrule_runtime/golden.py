"""Golden calls: what a bundle preferred where it was made, so that a board can tell whether it prefers the same.

A golden case is a prompt and a call that answers it. At each token of the call, given all before it, one of the allowed
tokens is the best; a board must find the same one. Another CPU rounds otherwise, so it may differ where the two best
were closer than the noise of the form, and nowhere else.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle
from .constrain import Constraint, Vocabulary
from .engines import Engine, load
from .errors import BundleError, EngineError
from .messages import Call, Message
from .round_trip import check_round_trip
from .talk import Talk
from .tools import Tool

__all__ = [
    "GOLDEN_FILE",
    "Case",
    "Golden",
    "Player",
    "Verdict",
    "golden_cases",
    "preferences",
    "read_golden",
    "record",
    "replay",
    "whole_request",
]

GOLDEN_FILE = "golden.json"
_SCHEMA_VERSION = 1
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
# What answers each request, in every dialect.
_ANSWERS = (
    Call("set_alarm", {"hour": 7, "label": "early train"}),
    Call("set_light", {"room": "kitchen", "on": False}),
    Call("read_sensor", {"sensor": "water"}),
)


def _conversation(index: int) -> list[Message]:
    system, request = _REQUESTS[index]
    return [*([Message("system", system)] if system else []), Message("user", request)]


@dataclass(frozen=True)
class Case:
    """One golden case as token ids.

    Attributes:
      prompt: The conversation with its tools, up to the reply.
      call: The call that answers it.
      allowed: For each token of the call, the ids that the constraint allows there.
    """

    prompt: tuple[int, ...]
    call: tuple[int, ...]
    allowed: tuple[NDArray[np.int64], ...]


def _allowed(vocabulary: Vocabulary, grammar: str, call: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    constraint = Constraint(vocabulary, grammar)
    result = []
    for token in call:
        result.append(constraint.allowed())
        constraint.accept([token])
    return tuple(result)


def _grammar(talk: Talk) -> str:
    grammar = talk.grammar(_TOOLS, "call")
    if grammar is None:
        raise BundleError("the dialect cannot be made to call a tool", hint="choose another with --dialect")
    return grammar


def golden_cases(talk: Talk, vocabulary: Vocabulary) -> list[Case]:
    """Render the golden conversations, with their tools and answers.

    Args:
      talk: How the bundle talks.
      vocabulary: Of the same tokenizer.

    Raises:
      BundleError: The template fails or drops tools or results, or calls do not survive the dialect.
      ConstraintError: A golden tool's grammar does not compile, or forbids the call that answers.
    """
    check_round_trip(talk)
    grammar = _grammar(talk)
    cases = []
    for index, answer in enumerate(_ANSWERS):
        messages = _conversation(index)
        prompt, call = talk.prompt(messages, _TOOLS), talk.answer(messages, (answer,), _TOOLS)
        cases.append(Case(tuple(prompt), tuple(call), _allowed(vocabulary, grammar, call)))
    return cases


def whole_request(bundle: Bundle) -> tuple[list[int], list[int]]:
    """Return the first golden prompt, and the call that answers it, as token ids: for timing."""
    talk, messages = Talk.of(bundle), _conversation(0)
    return talk.prompt(messages, _TOOLS), talk.answer(messages, _ANSWERS[:1], _TOOLS)


class Player:
    """An engine, a tokenizer and a constraint: all that a whole request takes."""

    def __init__(self, bundle: Bundle, engine: Engine | None = None) -> None:
        """Load what is not there yet.

        Args:
          bundle: Opened and verified.
          engine: One that is loaded already; None loads the bundle's own.
        """
        context = min(_CONTEXT, bundle.manifest.context)
        self.engine = engine or load(bundle, threads=0, context=context, chunk=64)
        talk = Talk.of(bundle)
        self.vocabulary, self.grammar = Vocabulary.of(bundle, talk.tokenizer), _grammar(talk)

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

    def preferences(self, prompt: Sequence[int], call: Sequence[int]) -> tuple[list[int], list[float | None]]:
        """Return what the model prefers at each token of a call; see `preferences`."""
        self.engine.reset()
        hidden = self.engine.feed([*prompt, *call[:-1]], every=True)[len(prompt) - 1 :]
        return preferences(self.engine.logits(hidden), _allowed(self.vocabulary, self.grammar, call))


def preferences(
    logits: NDArray[np.float32], allowed: Sequence[NDArray[np.int64]]
) -> tuple[list[int], list[float | None]]:
    """Return the best allowed token at each step, and how far its logit lies above the next; None where it is forced.

    Args:
      logits: [steps, vocabulary].
      allowed: Ids by step.

    Raises:
      EngineError: A logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise EngineError("a logit of a golden call is not finite", hint="`ferrule check` the bundle on this machine")
    best, margins = [], list[float | None]()
    for row, ids in zip(logits, allowed, strict=True):
        order = np.argsort(row[ids])
        best.append(int(ids[order[-1]]))
        margins.append(float(row[ids[order[-1]]] - row[ids[order[-2]]]) if len(ids) > 1 else None)
    return best, margins


def record(cases: Sequence[Case], logits: Sequence[NDArray[np.float32]], noise: float) -> dict[str, Any]:
    """Keep what was preferred.

    Args:
      cases: From `golden_cases`.
      logits: By case, [tokens of the call, vocabulary].
      noise: How far one token's lead over another may differ between this engine and the graph it was made from.

    Returns:
      The contents of `golden.json`.

    Raises:
      EngineError: A logit, or the noise, is not finite.
    """
    if not math.isfinite(noise):
        # Against such a noise every board would pass.
        raise EngineError(f"the noise of the golden calls is {noise}")
    kept = []
    for case, rows in zip(cases, logits, strict=True):
        best, margins = preferences(rows, case.allowed)
        kept.append({"prompt": list(case.prompt), "call": list(case.call), "best": best, "margins": margins})
    return {"schema_version": _SCHEMA_VERSION, "noise": noise, "cases": kept}


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
    steps = zip(case["best"], found, case["margins"], strict=True)
    differing = [(at, margin) for at, (ours, theirs, margin) in enumerate(steps) if ours != theirs]
    free = sum(margin is not None for margin in case["margins"])
    for at, margin in differing:
        if margin is None or margin > noise:
            shown = "forced" if margin is None else f"preferred by {margin:.3f}"
            return Verdict(False, f"token {at} of {len(found)} differs; it was {shown}, the noise is {noise:.3f}")
    close = f", {len(differing)} within the noise of {noise:.3f}" if differing else ""
    return Verdict(True, f"{len(found)} tokens, {free} of them free: all as recorded{close}")


@dataclass(frozen=True)
class Golden:
    """A bundle's golden calls.

    Attributes:
      noise: Margins up to this cannot be told from rounding.
      cases: `prompt`, `call` and the `best` allowed token at each step as ids, and the `margins` of the best.
    """

    noise: float
    cases: tuple[dict[str, Any], ...]


def _amount(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _ids(value: Any, rows: int) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < rows for item in value)


def _sound(case: Any, rows: int) -> bool:
    if not all(_ids(case[key], rows) for key in ("prompt", "call", "best")) or not isinstance(case["margins"], list):
        return False
    steps = len(case["call"])
    known = all(margin is None or _amount(margin) for margin in case["margins"])
    return known and len(case["best"]) == len(case["margins"]) == steps


def read_golden(bundle: Bundle) -> Golden:
    """Read a bundle's golden calls.

    Raises:
      BundleError: The file is malformed, or of another schema.
    """
    path = bundle.file(GOLDEN_FILE)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version, noise, cases = raw["schema_version"], raw["noise"], tuple(raw["cases"])
        rows = bundle.manifest.tables["head"].rows
        sound = bool(cases) and _amount(noise) and all(_sound(case, rows) for case in cases)
    except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
        raise BundleError(f"{path}: malformed: {error!r}", hint="convert the checkpoint again") from None
    if version != _SCHEMA_VERSION:
        raise BundleError(
            f"{path}: schema {version!r}, known here is {_SCHEMA_VERSION}",
            hint="update ferrule-runtime on this machine",
        )
    if not sound:
        raise BundleError(f"{path}: malformed: not prompts and calls", hint="convert the checkpoint again")
    return Golden(float(noise), cases)


def replay(bundle: Bundle, engine: Engine | None = None) -> list[Verdict]:
    """Play a bundle's golden calls on this machine.

    Args:
      bundle: Opened and verified.
      engine: One that is loaded already; None loads the bundle's own.

    Raises:
      BundleError: The golden file is malformed.
      EngineError: The engine cannot load or execute the graph, or a logit is not finite.
    """
    golden, player = read_golden(bundle), Player(bundle, engine)
    return [_judge(case, player.preferences(case["prompt"], case["call"])[0], golden.noise) for case in golden.cases]
