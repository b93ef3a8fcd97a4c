"""Quantisers, one file each: float rows in, integers and scales out.

Each module defines `quantise(rows, scheme) -> Packed`; the file's name is the scheme's name in a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import RecipeError
from ferrule_runtime.head import unpack
from ferrule_runtime.registry import load_module

__all__ = ["GROUPS", "Packed", "Scheme", "dequantise", "pack", "quantise"]

# What MatMulNBits' fast paths take.
GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantised.

    Attributes:
      bits: Of one weight: 2, 4 or 8 (what MatMulNBits executes).
      group: Columns that share a scale.
      zero: Whether a group has a zero point of its own, besides its scale.
      method: The quantiser: a file in this folder.
    """

    bits: int
    group: int
    zero: bool = False
    method: str = "rtn"

    def bytes_for(self, rows: int, columns: int) -> int:
        """Return the bytes of integers, scales and zero points of a [rows, columns] matrix as stored."""
        groups = rows * (columns // self.group)
        zeros = rows * ((columns // self.group * self.bits + 7) // 8) if self.zero else 0
        return groups * (self.group * self.bits // 8 + 4) + zeros


@dataclass(frozen=True)
class Packed:
    """Quantised rows, laid out as MatMulNBits reads them.

    Attributes:
      values: uint8 [rows, groups, group · bits / 8], the first of two 4-bit values in the low half.
      scales: float32 [rows, groups].
      zeros: Integer zero points, uint8 [rows, ceil(groups · bits / 8)], packed like values; None means 2^(bits-1).
    """

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None


def pack(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack unsigned integers along the last axis, the first in a byte's lowest bits; `head.unpack` undoes it."""
    per = 8 // bits
    if per == 1:
        return integers
    short = -integers.shape[-1] % per
    padded = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, short)]) if short else integers
    split = padded.reshape(*padded.shape[:-1], -1, per)
    result = split[..., 0].copy()
    for place in range(1, per):
        result |= split[..., place] << (bits * place)
    return result


def quantise(rows: NDArray[np.float32], scheme: Scheme) -> Packed:
    """Quantise rows [n, columns] by the scheme's own method.

    Raises:
      RecipeError: Unknown method, or columns that the group does not divide.
    """
    if rows.shape[-1] % scheme.group:
        raise RecipeError(
            f"group size {scheme.group} does not divide rows of {rows.shape[-1]} weights",
            hint="choose a recipe with a smaller group, such as w4g32",
        )
    module = load_module("scheme", __name__, scheme.method, RecipeError)
    return cast(Packed, module.quantise(rows, scheme))


def dequantise(packed: Packed, scheme: Scheme) -> NDArray[np.float32]:
    """Return the float rows that the integers stand for: (value - zero) · scale, [rows, columns]."""
    rows, groups = packed.scales.shape
    values = unpack(packed.values, scheme.bits, scheme.group).astype(np.float32)
    if packed.zeros is None:
        values -= np.float32(1 << (scheme.bits - 1))
    else:
        values -= unpack(packed.zeros, scheme.bits, groups).astype(np.float32)[:, :, None]
    values *= packed.scales[:, :, None]
    return values.reshape(rows, groups * scheme.group)
