"""Round to nearest: each group's scale from its largest weight, each weight to the nearest step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import Packed, Scheme, pack

__all__ = ["quantise"]


def quantise(rows: NDArray[np.float32], scheme: Scheme) -> Packed:
    """Quantise rows [n, columns].

    Symmetric: the weight of largest magnitude lands exactly on the lowest integer (-2^(bits-1)), which uses the one
    step that a two's-complement range has on one side only; the same choice as GGUF's Q4_0. With zero points: the
    group's range, widened to hold 0, is spread over all steps, and the zero point is rounded to an integer.

    Returns:
      Integers, scales and, if asked for, zero points.
    """
    groups = rows.reshape(rows.shape[0], -1, scheme.group)
    top = (1 << scheme.bits) - 1
    if scheme.zero:
        low = np.minimum(groups.min(axis=2), 0)
        scales = ((np.maximum(groups.max(axis=2), 0) - low) / top).astype(np.float32)
        safe = np.where(scales > 0, scales, 1)
        zeros = np.clip(np.rint(-low / safe), 0, top)
        packed_zeros = pack(zeros.astype(np.uint8), scheme.bits)
    else:
        peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
        half = 1 << (scheme.bits - 1)
        scales = (peak / -half).astype(np.float32)
        safe = np.where(scales != 0, scales, 1)
        zeros = np.full_like(scales, half)
        packed_zeros = None
    # In place, which takes half the time of five arrays.
    steps = groups / safe[:, :, None]
    steps += zeros[:, :, None]
    np.rint(steps, out=steps)
    np.clip(steps, 0, top, out=steps)
    return Packed(pack(steps.astype(np.uint8), scheme.bits), scales, packed_zeros)
