"""Every error that a user can meet.

FerruleError
 ├─ UsageError           the command was asked for in a way it cannot be carried out (exit 2)
 ├─ FetchError           a model or package could not be brought, or is not what was asked for
 ├─ CheckpointError      a published checkpoint cannot be read or understood
 ├─ RecipeError          a recipe is unknown, malformed, or does not fit the weights or the target
 ├─ TargetError          a target or board is unknown, or cannot do what was asked
 ├─ LinkError            a board could not be reached, or a command on it failed
 ├─ BundleError          a bundle is malformed, of another schema, damaged, or failed its gate
 ├─ EngineError          the engine could not load or execute a graph
 ├─ OverBudget           the memory that is needed is more than the memory that is allowed
 ├─ ContextError         more tokens than the context holds
 ├─ ConstraintError      a tool schema cannot be turned into a token constraint
 ├─ ToolError            a tool failed; carries a typed cause
 ├─ ModelError           a model replied with something that cannot be used
 └─ RecordError          a run record is malformed, of another schema, or unlike its neighbours
"""

from __future__ import annotations

__all__ = [
    "BundleError",
    "CheckpointError",
    "ConstraintError",
    "ContextError",
    "EngineError",
    "FerruleError",
    "FetchError",
    "LinkError",
    "ModelError",
    "OverBudget",
    "RecipeError",
    "RecordError",
    "TargetError",
    "ToolError",
    "UsageError",
]


class FerruleError(Exception):
    """Something a user can act on: printed once as `error:` and `hint:`, never as a traceback.

    Attributes:
      hint: What to do about it; empty when there is nothing to do.
      exit_code: The process's exit status.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(FerruleError):
    """The command cannot be carried out as it was asked for."""

    exit_code = 2


class FetchError(FerruleError):
    """A model or package could not be brought, or is not what was asked for."""


class CheckpointError(FerruleError):
    """A published checkpoint cannot be read or understood."""


class RecipeError(FerruleError):
    """A recipe is unknown, malformed, or does not fit the weights or the target."""


class TargetError(FerruleError):
    """A target or board is unknown, or cannot do what was asked."""


class LinkError(FerruleError):
    """A board could not be reached, or a command on it failed."""


class BundleError(FerruleError):
    """A bundle is malformed, of another schema, damaged, or failed its gate."""


class EngineError(FerruleError):
    """The engine could not load or execute a graph."""


class OverBudget(FerruleError):  # noqa: N818 - reads as a sentence where it is raised
    """The memory that is needed is more than the memory that is allowed."""


class ContextError(FerruleError):
    """More tokens than the context holds."""


class ConstraintError(FerruleError):
    """A tool schema cannot be turned into a token constraint."""


class ToolError(FerruleError):
    """A tool failed.

    Attributes:
      cause: A short name of what stands in the way, such as `network_off`; what recovery reasons with.
      missing: The condition among the tool's `requires` that does not hold, such as `network`; None when the tool
        does not say.
    """

    def __init__(self, message: str, *, cause: str = "failed", missing: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.cause = cause
        self.missing = missing


class ModelError(FerruleError):
    """A model replied with something that cannot be used."""


class RecordError(FerruleError):
    """A run record is malformed, of another schema, or unlike its neighbours."""
