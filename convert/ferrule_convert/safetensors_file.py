"""Safetensors files: the header checked to the byte, tensor rows read from a mapping when they are asked for.

The format (safetensors' own documentation): eight bytes of little-endian header length, that many bytes of JSON from
names to `dtype`, `shape` and `data_offsets`, then the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from .checkpoint import finite
from .graph import Weight
from .values import printable, unique_pairs

__all__ = ["Mapped", "read"]

_LENGTH = 8
# Safetensors' own limit: a longer header is an attack or an accident.
_MOST_HEADER = 100_000_000
# numpy's `intp`: beyond it a size is an overflow, and no tensor of a model has this many axes.
_MOST_SIZE, _MOST_AXES = 2**63 - 1, 8
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Packed integers, whose bits matter and not their sign.
_WORDS = {"I32": "<u4"}


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
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise fail(f"its header is not JSON: {printable(error)}") from None
    if not isinstance(header, dict):
        raise fail("its header is no object")
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise fail("its `__metadata__` is no object of texts")
    return header, _LENGTH + length


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_SIZE


def _check(name: str, entry: Any, room: int, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    """Return one tensor's type, shape and byte range, if they fit each other and the file."""

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{path}: tensor `{printable(name)}` {reason}", hint="the file is damaged; fetch it again"
        )

    if not isinstance(entry, dict):
        raise fail("is not described by an object")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in _BYTES:
        raise fail(f"is stored as `{printable(kind)}`, which is not known")
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(map(_natural, shape)):
        raise fail(f"has the shape {printable(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise fail(f"lies at {printable(offsets)}")
    begin, end = offsets
    if not begin <= end <= room:
        raise fail(f"lies at bytes {begin} to {end} of {room}")
    if math.prod(shape) * _BYTES[kind] != end - begin:
        raise fail(f"is {printable(shape)} of {kind} in {end - begin} bytes")
    return kind, tuple(shape), begin, end


def _without_gaps(ranges: list[tuple[int, int, str]], room: int, path: Path) -> None:
    """Refuse tensors that overlap, and bytes that belong to none: they hide something, or the header is not theirs."""

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{path}: {reason}", hint="the file is damaged; fetch it again")

    reached, before = 0, ""
    for begin, end, name in sorted(ranges):
        if begin < reached:
            raise fail(f"tensors `{printable(before)}` and `{printable(name)}` overlap at byte {begin}")
        if begin > reached:
            raise fail(f"bytes {reached} to {begin}, before tensor `{printable(name)}`, belong to none")
        reached, before = end, name
    if reached != room:
        raise fail(f"its tensors end at byte {reached} of {room}")


@dataclass(frozen=True)
class Mapped:
    """A tensor in a file; called as `Rows`, it reads them as float32.

    Attributes:
      name: In the file.
      kind: The file's word for its type, such as `BF16`.
      shape: Of the tensor.
      path: The file.
      offset: Where it begins, in bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Read rows [start, stop), all of them finite."""
        return finite(self.floats(start, stop), self.name, start, self.path)

    def floats(self, start: int, stop: int, columns: slice = slice(None)) -> NDArray[np.float32]:
        """Read rows [start, stop), or some columns of them, as float32, finite or not."""
        if self.kind not in _FLOATS:
            raise _unreadable(self.name, self.kind, self.path)
        stored = self.stored(start, stop, columns)
        # A bf16 is the upper half of a float32.
        half = self.kind == "BF16"
        return (stored.astype(np.uint32) << 16).view(np.float32) if half else stored.astype(np.float32, copy=False)

    def stored(self, start: int, stop: int, columns: slice = slice(None)) -> NDArray[Any]:
        """Read rows [start, stop), or some columns of them, as they are stored; bf16 as uint16, int32 as uint32.

        Raises:
          CheckpointError: The file cannot be read, or the tensor is of a type that is not read.
        """
        kind = (_FLOATS | _WORDS).get(self.kind)
        if kind is None:
            raise _unreadable(self.name, self.kind, self.path)
        width = math.prod(self.shape[1:]) * _BYTES[self.kind]
        try:
            # Mapped for the block alone, so that its pages are gone when it is, and copied, so that no view keeps them.
            mapped: NDArray[Any] = np.memmap(
                self.path, kind, "r", self.offset + start * width, (stop - start, *self.shape[1:])
            )
            return np.array(mapped[..., columns])
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: rows {start} to {stop - 1} of `{self.name}` cannot be read: {error}",
                hint="was the file changed or removed since it was opened?",
            ) from None


def _unreadable(name: str, kind: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: `{printable(name)}` is stored as {kind}, which cannot be read",
        hint=f"{', '.join(_FLOATS)} are read",
    )


def read(path: Path, unread: Callable[[str], bool] = lambda name: False) -> dict[str, Weight]:
    """Read the header of a safetensors file.

    Scalars and empty tensors are checked and left out: no family has them.

    Args:
      path: The file.
      unread: Tells by name what the caller will not read as floats, so that its type does not matter.

    Raises:
      CheckpointError: Malformed in any way, or a tensor is of a type that is not read.
    """
    try:
        size = path.stat().st_size
        header, begins = _header(path, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    weights: dict[str, Weight] = {}
    ranges = []
    for name, entry in header.items():
        kind, shape, begin, end = _check(name, entry, size - begins, path)
        ranges.append((begin, end, name))
        if kind not in _FLOATS and not unread(name):
            raise _unreadable(name, kind, path)
        if end > begin and shape:
            weights[name] = Weight(name, shape, Mapped(name, kind, shape, path, begins + begin), kind)
    _without_gaps(ranges, size - begins, path)
    return weights
