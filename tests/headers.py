"""GGUF headers written by hand, as no writer would write them."""

import struct
from pathlib import Path

# gguf's GGUFValueType.
U8, U32, I32, F32, BOOL, STRING, ARRAY = 0, 4, 5, 6, 7, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, axes: int | None = None) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if axes is None else axes)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def write_header(
    path: Path,
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = bytes(64),
    *,
    counts: tuple[int, int] | None = None,
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(keys)))) + b"".join(keys + tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path
