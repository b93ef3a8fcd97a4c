"""What the agent loop yields: immutable steps, and the outcome they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from .errors import UsageError
from .messages import Call, Usage
from .recovery import Failure

__all__ = ["Ending", "Outcome", "Step", "StepKind"]

Ending = Literal["done", "gave_up", "limit"]
_ENDINGS: tuple[Ending, ...] = ("done", "gave_up", "limit")

# act: a call was run, or tried. refused: a call was not run, or a reply could not be used. doubted: a closing text
# was sent back. The rest end the run.
StepKind = Literal["act", "refused", "doubted", "done", "gave_up", "limit"]


@dataclass(frozen=True)
class Step:
    """One turn of the loop.

    Attributes:
      index: Place in the run, from 1.
      kind: What happened.
      call: The call of an `act` or `refused` step, as the model wrote it; None when the reply held none.
      result: What the tool returned, when it did: text or JSON data.
      failure: Why the call failed, or which earlier failure forbids it.
      text: The model's words, or the loop's report for `gave_up` and `limit`.
      usage: What the reply cost; None when the step needed none of its own, or it could not be measured.
      tool_s: Wall time of the tool, in seconds; None when no tool ran.
      note: What the loop has to say of the step.
    """

    index: int
    kind: StepKind
    call: Call | None = None
    result: Any = None
    failure: Failure | None = None
    text: str = ""
    usage: Usage | None = None
    tool_s: float | None = None
    note: str = ""

    @property
    def ends(self) -> bool:
        """Whether the run ended here."""
        return self.kind in _ENDINGS


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      kind: `done`, `gave_up`, or `limit`.
      text: The answer, or the report of what stands in the way.
      steps: Everything that happened.
    """

    kind: Ending
    text: str
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Outcome:
        """Return the outcome of a whole run's steps.

        Raises:
          UsageError: The last step does not end a run.
        """
        kept = tuple(steps)
        if not kept or not kept[-1].ends:
            raise UsageError(f"{len(kept)} steps without an end are no outcome", hint="take every step of events()")
        return cls(cast(Ending, kept[-1].kind), kept[-1].text, kept)
