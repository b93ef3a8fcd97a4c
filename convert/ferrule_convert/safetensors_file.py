"""Safetensors files: the header checked to the byte, tensor rows read from a mapping when they are asked for.

The format (safetensors' own documentation): eight bytes of little-endian header length, that many bytes of JSON from
names to `dtype`, `shape` and `data_offsets`, then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from .checkpoint import finite
from .graph import Weight

__all__ = ["read"]

_LENGTH = 8
# Safetensors' own limit: a longer header is an attack or an accident.
_MOST_HEADER = 100_000_000
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice}` stands in it twice")
    return dict(pairs)


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header, and where the tensors begin."""

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: damaged or truncated safetensors: {reason}", hint="fetch the file again")

    with path.open("rb") as file:
        start = file.read(_LENGTH)
        if len(start) < _LENGTH:
            raise fail(f"{size} bytes are no header")
        (length,) = struct.unpack("<Q", start)
        if length > min(_MOST_HEADER, size - _LENGTH):
            raise fail(f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_pairs)
        except (ValueError, RecursionError) as error:
            raise fail(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise fail("its header is no object")
    header.pop("__metadata__", None)
    return header, _LENGTH + length


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(name: str, entry: Any, room: int, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    """Return one tensor's type, shape and byte range, if they fit each other and the file."""

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor `{name}` {reason}", hint="the file is damaged; fetch it again")

    if not isinstance(entry, dict):
        raise fail("is not described by an object")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in _BYTES:
        raise fail(f"is stored as `{kind}`, which is not known")
    if not isinstance(shape, list) or not all(map(_natural, shape)):
        raise fail(f"has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise fail(f"lies at {offsets!r}")
    begin, end = offsets
    if not begin <= end <= room:
        raise fail(f"lies at bytes {begin} to {end} of {room}")
    if math.prod(shape) * _BYTES[kind] != end - begin:
        raise fail(f"is {shape} of {kind} in {end - begin} bytes")
    return kind, tuple(shape), begin, end


def _rows(stored: NDArray[Any], kind: str, start: int, stop: int) -> NDArray[np.float32]:
    block = stored[start:stop]
    if kind == "BF16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    return np.array(block, dtype=np.float32)


def _weight(name: str, kind: str, shape: tuple[int, ...], offset: int, path: Path) -> Weight:
    def rows(start: int, stop: int) -> NDArray[np.float32]:
        # Mapped for the block alone, so that its pages are gone when it is.
        width = math.prod(shape[1:]) * _BYTES[kind]
        stored = np.memmap(path, _FLOATS[kind], "r", offset + start * width, (stop - start, *shape[1:]))
        return finite(_rows(stored, kind, 0, stop - start), name, start, path)

    return Weight(name, shape, rows, kind)


def read(path: Path) -> dict[str, Weight]:
    """Read the header of a safetensors file; tensors that are not floats are refused.

    Raises:
      CheckpointError: Malformed in any way, or a tensor is of a type that is not read.
    """
    size = path.stat().st_size
    header, begins = _header(path, size)
    weights: dict[str, Weight] = {}
    ranges = []
    for name, entry in header.items():
        kind, shape, begin, end = _check(name, entry, size - begins, path)
        if kind not in _FLOATS:
            raise CheckpointError(
                f"{path}: `{name}` is stored as {kind}, which cannot be read", hint="F32, F16 and BF16 are read"
            )
        if end > begin and shape:
            ranges.append((begin, end, name))
            weights[name] = _weight(name, kind, shape, begins + begin, path)
    ranges.sort()
    for (_, end, one), (begin, _, two) in itertools.pairwise(ranges):
        if begin < end:
            raise CheckpointError(f"{path}: tensors `{one}` and `{two}` overlap", hint="the file is damaged")
    return weights
