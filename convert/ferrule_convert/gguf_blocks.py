"""GGUF's block types: whose integers the kernel can use as they stand, and why the others' not (ggml-common.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .schemes import Packed, Scheme, pack

__all__ = ["INTEGERS", "lost"]

# Floats, of which nothing is lost.
_FLOATS = {"F64", "F32", "F16", "BF16"}
# MatMulNBits takes 2, 4 and 8 bits, and measured 110 times slower with zero points that are no integers.
_OFFSETS = "float zero points are 110 times slower in the kernel"
_BITS = "the kernel has no {} bits"
_LOST = {
    "Q4_1": _OFFSETS,
    "Q2_K": _OFFSETS,
    "Q4_K": _OFFSETS,
    "Q3_K": _BITS.format(3),
    "Q5_0": _BITS.format(5),
    "Q5_1": _BITS.format(5),
    "Q5_K": _BITS.format(5),
    "Q6_K": _BITS.format(6),
    "IQ4_NL": "the kernel has no uneven steps",
    "IQ4_XS": "the kernel has no uneven steps",
}


def _q4_0(blocks: NDArray[np.uint8]) -> Packed:
    """Read blocks of 32 weights, (q - 8) · scale: a float16 scale, then 16 bytes.

    The low halves of the bytes are the first 16 weights, the high halves the last 16.
    """
    groups, scales = _scaled(blocks, 18)
    halves = np.concatenate([groups & 0x0F, groups >> 4], axis=2)
    return Packed(pack(halves, 4), scales, None)


def _q8_0(blocks: NDArray[np.uint8]) -> Packed:
    """Read blocks of 32 weights, q · scale: a float16 scale, then 32 signed bytes."""
    groups, scales = _scaled(blocks, 34)
    # q + 128, without the sign.
    return Packed(groups ^ np.uint8(0x80), scales, None)


def _scaled(blocks: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    split = blocks.reshape(len(blocks), -1, size)
    scales = np.ascontiguousarray(split[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)
    return split[:, :, 2:], scales


# By the type's name: the integers' scheme, and what reads rows of blocks, uint8 [rows, bytes].
INTEGERS: dict[str, tuple[Scheme, Callable[[NDArray[np.uint8]], Packed]]] = {
    "Q4_0": (Scheme(4, 32, method="q4_0"), _q4_0),
    "Q8_0": (Scheme(8, 32, method="q8_0"), _q8_0),
}


def lost(kind: str) -> str | None:
    """Return why a type's integers are of no use to the kernel, or None where it has none or they are."""
    if kind in _FLOATS or kind in INTEGERS:
        return None
    return _LOST.get(kind, "the kernel has no such blocks")
