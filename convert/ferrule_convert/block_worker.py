"""One block of layers in onnxruntime; run in a process of its own by `blocks.stream`, so it imports little."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.engines.onnx import Layers

__all__ = ["run_block"]

_CHUNK = 128


def run_block(model: Path, conversations: Sequence[NDArray[np.float32]], threads: int) -> list[NDArray[np.float32]]:
    """Run rows through a block.

    Args:
      model: The block; its weights lie beside it.
      conversations: Rows of each, [tokens, features]; each starts from an empty state.
      threads: Of the kernels; 0 takes the cores there are.

    Raises:
      EngineError: It cannot be loaded or executed.
    """
    context = max(map(len, conversations))
    layers = Layers(model, threads=threads or len(os.sched_getaffinity(0)), context=context)
    taken = []
    for rows in conversations:
        layers.reset()
        taken.append(np.concatenate([layers.run(rows[at : at + _CHUNK]) for at in range(0, len(rows), _CHUNK)]))
    return taken
