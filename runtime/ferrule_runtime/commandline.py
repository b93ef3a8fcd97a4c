"""What a `ferrule` command is, and what all of them share. Imports nothing heavy: `--help` must be instant."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from typing import Any

from .errors import FerruleError, UsageError

__all__ = ["SCHEMA_VERSION", "Command", "add_json", "byte_size", "emit", "human", "note", "positive", "say"]

SCHEMA_VERSION = 1
# More than any address space holds.
_MOST = 1 << 63
# Control characters but for tabs and line ends, and surrogates: names in files and replies of models hold anything.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Command:
    """One word after `ferrule`.

    Attributes:
      help: One line for the list of commands.
      configure: Adds the arguments to the command's parser.
      run: Carries the command out; imports what it needs when called. Returns the exit status.
      epilog: Worked examples, shown under the arguments.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def _shown(text: str) -> str:
    """Return a text without what a terminal would obey, or what is half a character: both as Python writes them."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str = "") -> None:
    """Print a line of a command's result.

    Raises:
      FerruleError: There is no room for it where it goes to.
    """
    try:
        sys.stdout.write(_shown(text) + "\n")
    except BrokenPipeError:  # nobody reads on: for `main`
        raise
    except OSError as error:
        raise FerruleError(
            f"the result cannot be written: {error.strerror}", hint="make room where it goes to"
        ) from None


def note(text: str) -> None:
    """Print a line about the work itself (progress, a warning) beside the result."""
    sys.stderr.write(_shown(text) + "\n")
    sys.stderr.flush()


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which every command that reports has."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def emit(kind: str, values: Mapping[str, Any]) -> None:
    """Print a result as one JSON document that says its schema."""
    say(json.dumps({"schema_version": SCHEMA_VERSION, "kind": kind, **values}, indent=2, sort_keys=False))


def byte_size(text: str) -> int:
    """Read an amount of memory such as `700MiB` or `1.5GB`.

    Raises:
      UsageError: No unit, an unknown unit, or less than a byte.
    """
    stripped = text.strip()
    digits = stripped.rstrip("bBiIkKmMgG")
    unit = stripped[len(digits) :].upper()
    try:
        # Exact, unlike a float: 9,007,199,255 GB is a whole number of bytes too.
        count = Decimal(digits) * _UNITS.get(unit, 1)
    except DecimalException:  # no number, or one beyond what a Decimal multiplies
        raise UsageError(
            f"`{text}` is not an amount of memory", hint="write a number and a unit: 700MiB, 1GiB"
        ) from None
    if unit not in _UNITS or unit == "":
        raise UsageError(f"`{text}` has no unit that is known", hint="write a number and a unit: 700MiB, 1GiB, 512MB")
    if not (count.is_finite() and 1 <= count < _MOST):
        raise UsageError(f"`{text}` is not a positive amount of memory", hint="write a number and a unit: 700MiB, 1GiB")
    return int(count)


def positive(text: str) -> int:
    """Read a whole number of at least one, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is less than 1")
    return value


def human(count: float) -> str:
    """Write bytes for a person: `141.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
