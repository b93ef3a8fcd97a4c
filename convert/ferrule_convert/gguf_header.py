"""The header of a GGUF file, checked to the byte before anything of it is made: metadata, and where each tensor lies.

The format (ggml's docs/gguf.md), little-endian: magic, version, counts of tensors and of keys; each key with its type
and value; each tensor's name, dimensions, type and offset; then, aligned, the bytes of the tensors. Counts and lengths
are never believed: what they claim has to lie in the file.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from .values import printable

__all__ = ["GgufHeader", "GgufTensor", "read"]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# ggml's GGML_MAX_DIMS, and GGUF_DEFAULT_ALIGNMENT.
_MOST_AXES, _ALIGNMENT = 4, 32
# Far more than any model has; a count beyond is damage, even in a file that could hold so many.
_MOST_ENTRIES = 1 << 16
_STRING, _ARRAY = 8, 9
# struct's letter of each type of value (gguf's GGUFValueType).
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FETCH = "the file is damaged; fetch it again"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as the file keeps it.

    Attributes:
      name: llama.cpp's.
      tensor_type: How its values are stored.
      shape: Its dimensions in GGUF's order: the one that lies closest together comes first.
      offset: Of its bytes in the file.
      path: The file.
    """

    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    path: Path

    @property
    def data(self) -> NDArray[np.uint8]:
        """Its stored bytes, [rows, bytes of a row]; a vector's rows are its values, or itself where blocks hold them.

        They are mapped anew each time, so that pages of the file go when the array does.

        Raises:
          CheckpointError: The file is not as it was.
        """
        rows = self.shape[-1] if len(self.shape) > 1 or GGML_QUANT_SIZES[self.tensor_type][0] == 1 else 1
        try:
            return np.memmap(
                self.path, np.uint8, "r", self.offset, (rows, _bytes(self.tensor_type, self.shape) // rows)
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: `{self.name}` cannot be read: {error}",
                hint="was the file changed or removed since it was opened?",
            ) from None


@dataclass(frozen=True)
class _Place:
    """Where a value lies.

    Attributes:
      kind: Its type; an array's is that of its elements.
      count: Of an array's elements; None is no array.
      start: First byte.
      stop: The byte behind it.
    """

    kind: int
    count: int | None
    start: int
    stop: int


class _Metadata(Mapping[str, Any]):
    """Values by key, each read from the file when it is asked for: what nobody asks for costs nothing."""

    def __init__(self, places: Mapping[str, _Place], path: Path) -> None:
        self._places, self._path = places, path

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: str) -> Any:
        place = self._places[key]
        with self._path.open("rb") as file:
            file.seek(place.start)
            raw = file.read(place.stop - place.start)
        try:
            return _value(raw, place)
        except (ValueError, struct.error) as error:
            raise CheckpointError(f"{self._path}: `{printable(key)}`: {printable(error)}", hint=_FETCH) from None


def _value(raw: bytes, place: _Place) -> Any:
    """Return a value from its bytes."""
    if place.kind != _STRING:
        found = struct.unpack(f"<{1 if place.count is None else place.count}{_SCALARS[place.kind]}", raw)
        return found[0] if place.count is None else list(found)
    texts, at = [], 0
    for _ in range(1 if place.count is None else place.count):
        (length,) = struct.unpack_from("<Q", raw, at)
        texts.append(raw[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return texts[0] if place.count is None else texts


def _bytes(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return prod(shape) // block * size


class _Cursor:
    """Reads forward through a file, and never beyond its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: damaged or truncated GGUF at byte {self.at} of {len(self.data)}: {reason}",
            hint="fetch the file again",
        )

    def skip(self, count: int, what: str) -> None:
        if count > len(self.data) - self.at:
            raise self.fail(f"{what} of {count} bytes")
        self.at += count

    def take(self, letters: str, what: str) -> tuple[int, ...]:
        start = self.at
        self.skip(struct.calcsize(f"<{letters}"), what)
        return struct.unpack_from(f"<{letters}", self.data, start)

    def string(self, what: str) -> str:
        (length,) = self.take("Q", what)
        start = self.at
        self.skip(length, what)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error.reason}") from None

    def value(self, kind: int, key: str) -> _Place:
        """Pass over a value; return where it lies."""
        count = None
        if kind == _ARRAY:
            kind, count = self.take("IQ", f"array `{key}`")
        start = self.at
        if kind in _SCALARS:
            self.skip(struct.calcsize(_SCALARS[kind]) * (1 if count is None else count), f"value of `{key}`")
        elif kind == _STRING:
            what = f"a text of `{key}`"
            # Each has a length of eight bytes, so the count ends with the file at the latest.
            for _ in range(1 if count is None else count):
                (length,) = self.take("Q", what)
                self.skip(length, what)
        else:
            raise self.fail(f"`{key}` is of type {kind}{' in an array' if count is not None else ''}")
        return _Place(kind, count, start, self.at)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the number of tensors and of keys."""
    path, head = cursor.path, cursor.data[:8]
    if head[:4] != _MAGIC:
        raise CheckpointError(
            f"{path}: starts with {head[:4]!r}, not {_MAGIC!r}", hint="not a GGUF file, or a broken download"
        )
    _, version = cursor.take("II", "header")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version {version}{', or big-endian' if not version & 0xFFFF else ''}",
            hint=f"versions {' and '.join(map(str, _VERSIONS))} are read, little-endian",
        )
    tensors, keys = cursor.take("QQ", "header")
    for count, what in ((tensors, "tensors"), (keys, "keys")):
        if count > _MOST_ENTRIES:
            raise cursor.fail(f"{count} {what}")
    return tensors, keys


def _places(cursor: _Cursor, count: int) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for _ in range(count):
        key = cursor.string("a key")
        shown = printable(key)
        (kind,) = cursor.take("I", f"type of `{shown}`")
        if key in places:
            raise cursor.fail(f"the key `{shown}` stands in it twice")
        places[key] = cursor.value(kind, shown)
    return places


def _tensor(cursor: _Cursor) -> GgufTensor:
    """Read one tensor's entry; its offset still counts from where tensors begin."""
    name = cursor.string("a tensor's name")
    shown = printable(name)
    (axes,) = cursor.take("I", f"dimensions of `{shown}`")
    if not 1 <= axes <= _MOST_AXES:
        raise cursor.fail(f"tensor `{shown}` has {axes} dimensions")
    shape = cursor.take(f"{axes}Q", f"dimensions of `{shown}`")
    number, offset = cursor.take("IQ", f"type of `{shown}`")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.fail(f"tensor `{shown}` is stored as type {number}, which is not known") from None
    block, _ = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[0] % block:
        raise cursor.fail(
            f"tensor `{shown}` is {'×'.join(map(str, shape))}, stored as {kind.name} in blocks of {block}"
        )
    return GgufTensor(name, kind, shape, offset, cursor.path)


def _placed(tensors: list[GgufTensor], begins: int, alignment: int, cursor: _Cursor) -> list[GgufTensor]:
    """Return tensors at their place in the file, if they fill it one behind the other."""
    name, count = Counter(tensor.name for tensor in tensors).most_common(1)[0] if tensors else ("", 1)
    if count > 1:
        raise cursor.fail(f"tensor `{printable(name)}` stands in it {count} times")
    reached, before = 0, ""
    for tensor in sorted(tensors, key=lambda one: one.offset):
        shown, size = printable(tensor.name), _bytes(tensor.tensor_type, tensor.shape)
        if tensor.offset < reached:
            raise cursor.fail(f"tensors `{before}` and `{shown}` overlap at byte {begins + tensor.offset}")
        # As llama.cpp's reader: nothing but the padding lies between two.
        if tensor.offset != -(-reached // alignment) * alignment:
            raise cursor.fail(f"tensor `{shown}` lies at {tensor.offset}, behind one that ends at {reached}")
        reached, before = tensor.offset + size, shown
        if begins + reached > len(cursor.data):
            raise cursor.fail(f"tensor `{shown}` ends at byte {begins + reached}")
    return [GgufTensor(one.name, one.tensor_type, one.shape, begins + one.offset, one.path) for one in tensors]


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
      metadata: Values by key.
      tensors: In the file's order.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def _alignment(metadata: Mapping[str, Any], cursor: _Cursor) -> int:
    found = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(found, int) or found < 1 or found & (found - 1):
        raise cursor.fail(f"its alignment is {printable(found)}")
    return found


def read(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
      CheckpointError: Another kind of file, another version, or malformed in any way.
    """
    try:
        if not path.is_file() or not path.stat().st_size:
            raise CheckpointError(f"{path}: is an empty file, or none", hint="fetch it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            count, keys = _counts(cursor)
            metadata = _Metadata(_places(cursor, keys), path)
            tensors = [_tensor(cursor) for _ in range(count)]
            alignment = _alignment(metadata, cursor)
            begins = -(-cursor.at // alignment) * alignment
            return GgufHeader(metadata, tuple(_placed(tensors, begins, alignment, cursor)))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
