r"""Traces: each step of a run as a line of a file, and as lines for a terminal.

A trace is JSON Lines, UTF-8, one object a line, each with `schema_version` and `kind`:

* the first, `run`: `request`, `model` (its label, which says when it is simulated), `tools` (names), `made` (version).
* then a `step` for each step as it happens: `index`, `step` (act, refused, doubted, done, gave_up, limit), `call`
  (`name`, `arguments`; or null), `result`, `failure` (`tool`, `call` in canonical form, `cause`, `message`, `missing`,
  `providers`; or null), `text`, `usage` (`prompt_tokens`, `new_tokens`, `seconds`, `first_token_s`, `simulated`; null
  when the step had no reply of its own, or it was not measured), `tool_s` (seconds; null when no tool ran), `note`.

Every line is given to the operating system before the next step begins, so a run that is killed leaves a trace up to
its last step. A trace is no journal: it is not synced to the disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from . import __version__
from .errors import FerruleError, UsageError
from .messages import Usage
from .steps import Step

__all__ = ["SCHEMA_VERSION", "Trace", "to_record", "view"]

SCHEMA_VERSION = 1
# Owner only: requests and results can be private.
_MODE = 0o600
_WIDTH = 100
# Lines of a tool's result that a terminal shows; the trace has it whole.
_RESULT_LINES = 4
_WORDS = {
    "act": "call",
    "refused": "refused",
    "doubted": "said",
    "done": "done",
    "gave_up": "gave up",
    "limit": "limit",
}


def to_record(step: Step) -> dict[str, Any]:
    """Return a step as its line of a trace."""
    call = None if step.call is None else {"name": step.call.name, "arguments": dict(step.call.arguments)}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "step",
        "index": step.index,
        "step": step.kind,
        "call": call,
        "result": step.result,
        "failure": None if step.failure is None else dataclasses.asdict(step.failure),
        "text": step.text,
        "usage": None if step.usage is None else dataclasses.asdict(step.usage),
        "tool_s": step.tool_s,
        "note": step.note,
    }


class Trace:
    """A trace that is being written. Overwrites what was there."""

    def __init__(self, path: Path, *, request: str, model: str, tools: Iterable[str]) -> None:
        """Open a trace and write its first line.

        Args:
          path: The file to write.
          request: What was asked for.
          model: The model's label.
          tools: Names of the tools.

        Raises:
          UsageError: The file cannot be opened.
          FerruleError: It cannot be written.
        """
        self._path = path
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
        except OSError as error:
            raise UsageError(
                f"trace {path} cannot be written: {error.strerror}", hint="give a file in a folder that exists"
            ) from None
        self._file = os.fdopen(number, "wb", buffering=0)
        head = {"request": request, "model": model, "tools": list(tools), "made": f"ferrule-runtime {__version__}"}
        self._line({"schema_version": SCHEMA_VERSION, "kind": "run", **head})

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, step: Step) -> None:
        """Write a step through.

        Raises:
          FerruleError: The file cannot be written, such as on a full disk.
        """
        self._line(to_record(step))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, record: dict[str, Any]) -> None:
        # A lone surrogate in a model's text has no UTF-8; it is written as its escape.
        data = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.close()
            raise FerruleError(
                f"trace {self._path} cannot be written: {error.strerror}", hint="is the disk full?"
            ) from None


def _plain(text: str) -> str:
    """Return text in one line without control characters: a tool's output must not drive the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _lines(head: str, text: str, most: int | None = None) -> list[str]:
    indent = " " * 12
    wrapped = textwrap.wrap(
        _plain(text),
        _WIDTH,
        initial_indent=f"{head:<12}",
        subsequent_indent=indent,
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )
    return wrapped or [head.rstrip()]


def _cost(usage: Usage | None) -> str:
    if usage is None:
        return ""
    if usage.simulated:
        return " [simulated]"
    return f" [{usage.prompt_tokens}+{usage.new_tokens} tokens, {usage.seconds:.1f} s]"


def view(step: Step) -> str:
    """Write a step for a terminal: plain text, lines of at most 100 columns, no control characters."""
    head = f"{step.index:>2} {_WORDS[step.kind]}"
    if step.call is not None:
        said = _lines("   says", step.text, _RESULT_LINES) if step.text else []
        lines = said + _lines(head, step.call.written() + _cost(step.usage), _RESULT_LINES)
    else:
        lines = _lines(head, (step.text or "(nothing that could be used)") + _cost(step.usage))
    if step.kind == "act" and step.failure is not None:
        lines += _lines("   failed", step.failure.line())
    elif step.kind == "act":
        result = step.result if isinstance(step.result, str) else json.dumps(step.result, ensure_ascii=False)
        lines += _lines("   result", result, _RESULT_LINES)
    if step.note:
        lines += _lines("   note", step.note)
    return "\n".join(lines)
