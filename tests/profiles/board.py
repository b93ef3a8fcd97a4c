"""A board for tests: `board.py MODE measure BUNDLE ...` measures a bundle with an engine that only adds up."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.bundle import Bundle, open_bundle
from ferrule_runtime.engines import Engine, Snapshot
from ferrule_runtime.measure import measure
from ferrule_runtime.measure_options import Options, add_measure_arguments

VOCABULARY = 101


class Sums:
    """An engine whose hidden state is the sum of its tokens; every call takes 2 ms, to be timed."""

    position = 0

    def __init__(self, context: int) -> None:
        self.context = context
        self._sum = 0

    def feed(self, tokens: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        time.sleep(0.002)
        sums = self._sum + np.cumsum(tokens)
        self._sum = int(sums[-1])
        hidden = sums[:, None].astype(np.float32)
        return hidden if every else hidden[-1:]

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.eye(VOCABULARY, dtype=np.float32)[hidden[:, 0].astype(np.int64) % VOCABULARY]

    def snapshot(self) -> Snapshot:
        return Snapshot("", 0, {"sum": np.array([self._sum])})

    def restore(self, snapshot: Snapshot) -> None:
        self._sum = int(snapshot.arrays["sum"][0])

    def reset(self) -> None:
        self._sum = 0


def load(bundle: Bundle, *, threads: int, context: int, chunk: int) -> Engine:
    return Sums(context)


def bend(event: dict[str, Any], mode: str) -> dict[str, Any]:
    """Return the event as a misbehaving board would print it."""
    if mode == "foreign-clock" and event["event"] == "marks":
        return {**event, "boot": "another boot"}
    if mode == "other-bundle" and event["event"] == "plan":
        return {**event, "bundle_sha256": "e" * 64}
    if mode == "newer" and event["event"] == "plan":
        return {**event, "schema_version": 99}
    return event


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("command")
    parser.add_argument("bundle", type=Path)
    add_measure_arguments(parser)
    o = parser.parse_args()
    if o.mode == "fails":
        print("error: 300 tokens do not fit\nhint: give a shorter --prompt", file=sys.stderr)
        return 2
    print(json.dumps({"event": "open", "schema_version": 1, "seconds": 0.25}))
    options = Options(o.prompt, o.decode, o.repeat, o.threads, o.context, o.chunk)
    for event in measure(open_bundle(o.bundle), options, load=load):
        if o.mode == "stops" and event["event"] == "marks":
            return 0
        if o.mode == "chatters" and event["event"] == "plan":
            print("loading...")
        print(json.dumps(bend(event, o.mode)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
