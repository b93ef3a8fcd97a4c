"""`runs.jsonl`: one record a line, only ever appended to. A line that is not understood is refused, not skipped."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ferrule_runtime.errors import RecordError

from .run import KIND, SCHEMA_VERSION, Run

__all__ = ["append", "check_writable", "read"]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except ValueError as error:
        raise RecordError(
            f"{where}: not JSON: {error}", hint="the line is broken or cut short: remove it, or profile again"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("schema_version"), int):
        raise RecordError(f"{where}: no `schema_version`", hint="is this a file of runs?")
    if record["schema_version"] > SCHEMA_VERSION:
        raise RecordError(
            f"{where}: schema {record['schema_version']} is newer than {SCHEMA_VERSION}, the newest known here",
            hint="update ferrule on this machine",
        )
    if record.get("kind") != KIND:
        raise RecordError(
            f"{where}: a record of unknown kind `{record.get('kind')}`", hint="update ferrule on this machine"
        )
    return record


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file", hint="make it with `ferrule profile BUNDLE -o runs.jsonl`") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecordError(f"{path}: cannot be read: {reason}", hint="is this a file of runs?") from None
    if text and not text.endswith("\n"):
        number = text.count("\n") + 1
        raise RecordError(f"{path}:{number}: the last line was cut short", hint="remove it, or profile again")
    return text.split("\n")[:-1]


def read(path: Path) -> list[Run]:
    """Read every run of a file, in the order they were taken.

    Raises:
      RecordError: No such file, or a line is broken, of a newer schema, or of an unknown kind; the text has its number.
    """
    numbered = [(f"{path}:{number}", line) for number, line in enumerate(_lines(path), 1)]
    return [Run.from_dict(_record(line, where), where) for where, line in numbered]


def check_writable(path: Path) -> None:
    """Fail now rather than after an hour of measuring.

    Raises:
      RecordError: The folder is missing, the file may not be written, or it holds something that is not understood.
    """
    if path.exists():
        read(path)
    if not path.parent.is_dir():
        raise RecordError(f"{path}: no folder {path.parent}", hint=f"mkdir -p {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RecordError(f"{path}: cannot be written", hint="give another file with -o")


def _add(file: io.FileIO, data: bytes) -> None:
    """Write all of `data` at the end of an open file, or nothing of it."""
    before = os.fstat(file.fileno()).st_size
    if before and os.pread(file.fileno(), 1, before - 1) != b"\n":
        raise RecordError(f"{file.name}: the last line was cut short", hint="remove it, then profile again")
    try:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # not a regular file; what went wrong before is what matters
            os.ftruncate(file.fileno(), before)
        raise


def append(path: Path, runs: Sequence[Run]) -> None:
    """Add runs to a file; they are on the disk when this returns.

    Writers are kept apart by a lock on the file, so several boards may report to one.

    Raises:
      RecordError: The file cannot be written; what was written of these runs is taken back.
    """
    data = "".join(json.dumps(run.to_dict(), allow_nan=False) + "\n" for run in runs).encode()
    try:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _add(file, data)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror or error}", hint="is the disk full?") from None
