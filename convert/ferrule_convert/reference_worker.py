"""The float model over a text, in numpy; run as a process of its own by `fidelity.reference_hidden`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ferrule_runtime.commandline import note
from ferrule_runtime.errors import FerruleError

from .archs import build
from .checkpoint import open_checkpoint
from .fidelity import windows
from .graph import INPUT
from .interpret import Memory, embed, run_nodes

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run `TOKENS.npy OUT.npy CHECKPOINT [LORA]`."""
    given, taken, path, *lora = map(Path, arguments)
    try:
        graph = build(open_checkpoint(path, lora[0] if lora else None))
        parts = windows(np.load(given).tolist())
        rows, memories = [embed(graph, part) for part in parts], [Memory() for _ in parts]
        hidden = np.concatenate(run_nodes(graph.nodes, INPUT, rows, memories))
    except FerruleError as error:
        note(f"error: {error}")
        return error.exit_code
    np.save(taken, hidden)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
