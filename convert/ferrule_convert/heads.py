"""The exported head, a range of the vocabulary at a time.

A kernel keeps a packed copy of its whole weight beside the mapped one; for a head of 248,000 rows that is more than
everything else that a conversion holds. Its rows are independent, so a few thousand at once give the same logits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from ferrule_runtime.engines.onnx import Head

__all__ = ["head_parts", "parted_logits"]

Array = NDArray[np.float32]

# Weights of one part.
_PART = 1 << 22


def _cut(tensor: onnx.TensorProto, start: int, stop: int) -> None:
    """Make an external tensor refer to some of its rows."""
    place = {entry.key: entry for entry in tensor.external_data}
    width = int(place["length"].value) // tensor.dims[0]
    place["offset"].value = str(int(place["offset"].value) + start * width)
    place["length"].value = str((stop - start) * width)
    tensor.dims[0] = stop - start


def _extract(whole: onnx.ModelProto, start: int, stop: int) -> bytes:
    """Return the head of rows [start, stop), over the same external weights."""
    part = onnx.ModelProto()
    part.CopyFrom(whole)
    for tensor in part.graph.initializer:
        _cut(tensor, start, stop)
    for attribute in part.graph.node[0].attribute:
        if attribute.name == "N":
            attribute.i = stop - start
    part.graph.output[0].type.tensor_type.shape.dim[1].dim_value = stop - start
    return bytes(part.SerializeToString())


def head_parts(path: Path) -> Iterator[tuple[int, int, Head]]:
    """Load an exported head part by part.

    Args:
      path: The bundle's `head.onnx`; its weights lie beside it.

    Yields:
      First id, id behind the last, and the head that gives their logits; use it before the next is taken.

    Raises:
      EngineError: A part cannot be loaded.
    """
    whole = onnx.load(path, load_external_data=False)
    rows = int(whole.graph.output[0].type.tensor_type.shape.dim[1].dim_value)
    columns = int(whole.graph.input[0].type.tensor_type.shape.dim[1].dim_value)
    step, threads = max(1, _PART // columns), len(os.sched_getaffinity(0))
    file = path.with_name(f".part-{os.getpid()}.onnx")
    try:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            file.write_bytes(_extract(whole, start, stop))
            yield start, stop, Head(file, threads=threads)
    finally:
        file.unlink(missing_ok=True)


def parted_logits(path: Path, hidden: Array) -> Array:
    """Return logits [n, vocabulary] of hidden states [n, hidden], computed part by part."""
    return np.concatenate([head.logits(hidden) for _, _, head in head_parts(path)], axis=1)
