"""The float model over a text, in numpy; run as a process of its own by `fidelity.reference_hidden`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ferrule_runtime.commandline import note
from ferrule_runtime.errors import FerruleError

from .archs import build
from .blocks import plan_blocks
from .checkpoint import open_checkpoint
from .interpret import Memory, embed, run_nodes

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run `TOKENS.npy OUT.npy CHECKPOINT LORA LENGTH...`: each length is the tokens of one window."""
    given, taken, path = map(Path, arguments[:3])
    ends = np.cumsum([int(length) for length in arguments[4:]])[:-1]
    try:
        graph = build(open_checkpoint(path, Path(arguments[3]) if arguments[3] else None))
        rows = [embed(graph, window.tolist()) for window in np.split(np.load(given), ends)]
        for block in plan_blocks(graph):
            # No token follows, so what a block remembers can go with it.
            rows = run_nodes(block.nodes, block.start, rows, [Memory() for _ in rows])
    except FerruleError as error:
        note(f"error: {error}")
        return error.exit_code
    np.save(taken, np.concatenate(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
