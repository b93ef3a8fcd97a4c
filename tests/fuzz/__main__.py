"""Fuzzes every target for its share of a time: `python tests/fuzz`, `FUZZ_SECONDS` in all (60).

A target is a file `fuzz_*.py` with `seeds(folder)`, which writes good inputs, and `one(data)`, which reads one input
and may raise nothing but a FerruleError. libFuzzer changes inputs towards code that none has reached, and stops at
another exception, at an input that takes ten seconds, and at one that takes memory without end; it leaves that input
in `build/fuzz/`. Each finding becomes a plain test.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOUND = HERE.parents[1] / "build" / "fuzz"


def main() -> int:
    names = sys.argv[1:] or sorted(path.stem for path in HERE.glob("fuzz_*.py"))
    seconds = max(1, int(os.environ.get("FUZZ_SECONDS", "60")) // len(names))
    FOUND.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"{name}: {seconds} s", flush=True)
        done = subprocess.run([sys.executable, str(HERE / "harness.py"), name, str(seconds), f"{FOUND}/{name}-"])
        if done.returncode:
            print(f"{name}: found something, see above; its input is in {FOUND}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
