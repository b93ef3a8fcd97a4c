"""Safetensors files: header, and the rows of every tensor."""

from pathlib import Path

import numpy as np
from folders import write_safetensors

from ferrule_convert.safetensors_file import read
from ferrule_runtime.errors import CheckpointError


def seeds(folder: Path) -> None:
    tensors = {"a": np.ones((3, 4)), "model.layers.0.b": np.arange(5.0), "c": np.ones((2, 1, 3))}
    for dtype in ("F32", "F16", "BF16"):
        write_safetensors(folder / dtype, tensors, dtype)


def one(data: bytes) -> None:
    path = Path("input.safetensors")
    path.write_bytes(data)
    for weight in read(path, lambda name: name.startswith("c")).values():
        try:
            size = sum(weight.rows(start, stop).nbytes for start, stop in weight.spans())
        except CheckpointError:
            continue  # one that is damaged tells nothing of the next
        assert size <= 2 * len(data)
