"""The whole way, on a real model: `make demo`. Every step is a command that a user would type, shown as it runs."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ferrule_runtime.commandline import human, note, say
from ferrule_runtime.errors import FerruleError

from .world import policy

__all__ = ["main"]

_MODEL = "smollm2-135m"
_RECIPES = ("fp32", "w8", "w4g32")
_OUT = Path("demo-out")
_REQUEST = "send a message to Ana saying I am on my way"
_LIMITS = ("--max-memory", "500MiB", "--max-kl", "0.05")
# Longest that one command may take; the whole demo takes under four minutes on two cores.
_TIMEOUT_S = 600


def _title(text: str) -> None:
    say(f"\n== {text}")


def _ferrule(*arguments: str, may_fail: bool = False) -> None:
    """Run one command in front of the user.

    Raises:
      FerruleError: It failed, and may not.
    """
    say(f"$ ferrule {shlex.join(arguments)}")
    sys.stdout.flush()
    command = [sys.executable, "-m", "ferrule_runtime", *arguments]
    code = subprocess.run(command, timeout=_TIMEOUT_S, check=False).returncode
    if code and not may_fail:
        raise FerruleError(f"`ferrule {arguments[0]}` failed with exit status {code}")


def _demo() -> None:
    bundles = [str(_OUT / f"smollm2-{recipe}") for recipe in _RECIPES]
    tools = ("--tools", "ferrule_benchmarks.world")
    runs = str(_OUT / "runs.jsonl")
    _title("a published model, hash-checked")
    _ferrule("fetch", _MODEL)
    _ferrule("inspect", _MODEL)
    _title("three quantisation levels, each compared with the float model before it is written")
    for recipe, bundle in zip(_RECIPES, bundles, strict=True):
        _ferrule("convert", _MODEL, "--target", "host", "--recipe", recipe, "-o", bundle)
    _title("a budget that refuses, with numbers")
    _ferrule("fit", bundles[1], "--memory", "200MiB", may_fail=True)
    _title("the agent loop on a simulated device: Wi-Fi off, inbox full; the model is scripted (simulated)")
    _ferrule("run", _REQUEST, "--model", f"scripted:{policy('recovers')}", *tools)
    _title("the same request by the real model: one constrained tool call; a 135M chat model, so no wonders")
    _ferrule("run", bundles[1], _REQUEST, *tools, "--call", "--steps", "1", "--memory", "500MiB", may_fail=True)
    _title("latency, memory and power on this machine")
    _ferrule("profile", *bundles, "--prompt", "128", "-o", runs)
    _title("which one to ship")
    _ferrule("report", runs, "--target", "host", *_LIMITS, "-o", str(_OUT / "report.html"))
    _ferrule("pick", runs, "--target", "host", *_LIMITS)


def _costs(started: float) -> dict[str, float]:
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"seconds": round(time.monotonic() - started, 1), "peak_rss_of_the_largest_process": peak}


def main() -> int:
    """Run the demo in a fresh `demo-out`; print what it took."""
    started = time.monotonic()
    os.environ.setdefault("FERRULE_STATE", str((_OUT / "state").absolute()))
    shutil.rmtree(_OUT, ignore_errors=True)
    _OUT.mkdir()
    try:
        _demo()
    except FerruleError as error:
        note(f"error: {error}")
        return error.exit_code
    costs = _costs(started)
    (_OUT / "costs.json").write_text(json.dumps(costs), encoding="utf-8")
    memory = human(costs["peak_rss_of_the_largest_process"])
    say(f"report: {(_OUT / 'report.html').absolute()}")
    say(f"took {costs['seconds']:.0f} s; the largest process peaked at {memory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
