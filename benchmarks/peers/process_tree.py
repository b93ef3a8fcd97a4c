"""What a command costs, with every process that it starts: wall time, and memory as the sum of PSS."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ferrule_runtime.procfs import Absent, kib, read_text

__all__ = ["Cost", "run"]

# Between readings. Each walks the page tables of every process, 5 ms for a gigabyte, so oftener would cost time.
_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
      command: As it was run.
      wall_s: Seconds from start to end.
      peak_pss: Largest sum of PSS over the process tree that was seen, in bytes; a shared page counts once.
      readings: How often it was looked at.
    """

    command: tuple[str, ...]
    wall_s: float
    peak_pss: int
    readings: int


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = read_text(task).split()
        except Absent:  # it has just ended
            continue
        for child in children:
            yield from _tree(int(child))


def _pss(pid: int) -> int:
    try:
        return kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
    except Absent:  # it has just ended
        return 0


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end, watching its memory.

    Args:
      command: Program and arguments.
      log: File for what it says.
      environment: Variables besides this process's own.

    Raises:
      RuntimeError: It failed, with the end of its log; or its memory could not be read.
    """
    peak = readings = 0
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        while process.poll() is None:
            total = sum(map(_pss, _tree(process.pid)))
            peak, readings = max(peak, total), readings + bool(total)
            time.sleep(_INTERVAL_S)
    wall = time.monotonic() - started
    if process.returncode:
        end = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}:\n{end}")
    if not readings:
        raise RuntimeError(f"{command[0]} ended within {wall:.2f} s, its memory was never seen")
    return Cost(tuple(command), wall, peak, readings)
