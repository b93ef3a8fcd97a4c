"""One block of layers in onnxruntime, over a file of rows; run as a process of its own by `blocks.stream`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ferrule_runtime.commandline import note
from ferrule_runtime.engines.onnx import Layers
from ferrule_runtime.errors import FerruleError

__all__ = ["main"]

_CHUNK = 128


def main(arguments: Sequence[str]) -> int:
    """Run `IN.npy OUT.npy MODEL THREADS LENGTH...`: each length is the rows of one conversation."""
    given, taken, model = map(Path, arguments[:3])
    threads, *lengths = map(int, arguments[3:])
    rows = np.load(given)
    out = np.empty_like(rows)
    try:
        layers = Layers(model, threads=threads or len(os.sched_getaffinity(0)), context=max(lengths))
        start = 0
        for length in lengths:
            layers.reset()
            for at in range(start, start + length, _CHUNK):
                stop = min(at + _CHUNK, start + length)
                out[at:stop] = layers.run(rows[at:stop])
            start += length
    except FerruleError as error:
        note(f"error: {error}")
        return error.exit_code
    np.save(taken, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
