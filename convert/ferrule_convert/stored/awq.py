"""AWQ (Lin et al. 2024), as AutoAWQ stores it in version `gemm`.

A matrix [out, in] has `qweight`, int32 [in, out / 8], packed along `out` in the order 0, 2, 4, 6, 1, 3, 5, 7 from the
lowest bits of a word; `qzeros`, int32 [groups, out / 8], packed alike; and `scales` [groups, out]. A weight is
(value - zero) · scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.head import unpack

from ..graph import Integers, Weight
from ..safetensors_file import Mapped
from ..schemes import Packed, Scheme, pack
from ._parts import bad_setting, group_size, needed, scales, unlike, words

__all__ = ["PARTS", "Settings", "matrix", "settings"]

PARTS = {"qweight": "I32", "qzeros": "I32", "scales": "float"}

_BITS, _PER = 4, 8
# Where each of a word's columns lies in it, counted from its lowest bits.
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


@dataclass(frozen=True)
class Settings:
    """What the configuration says.

    Attributes:
      group: Columns that share a scale; None for whole rows.
    """

    group: int | None


def settings(raw: Mapping[str, Any], folder: Path) -> Settings:
    """Read the configuration.

    Raises:
      CheckpointError: Something is missing or of a kind that is not read.
    """
    if raw.get("bits") != _BITS:
        raise bad_setting("bits", raw.get("bits"), folder, f"{_BITS} are read")
    key = "version" if raw.get("version") is not None else "format"
    if str(raw.get(key)).lower() != "gemm":
        raise bad_setting(key, raw.get(key), folder, "gemm is read")
    if raw.get("zero_point") is not True:
        raise bad_setting("zero_point", raw.get("zero_point"), folder, "true is read")
    return Settings(group_size(raw, folder))


def _columns(part: Mapped, start: int, stop: int) -> NDArray[np.uint8]:
    """Read columns [start, stop) of a packed matrix as they are named outside: [stop - start, rows]."""
    found, mine = words(part, start, stop, _PER)
    apart = unpack(found.view(np.uint8), _BITS, found.shape[1] * _PER).reshape(*found.shape, _PER)
    return np.ascontiguousarray(apart[..., _PLACES].reshape(len(found), -1)[:, mine].T)


def matrix(name: str, parts: Mapping[str, Mapped], found: Settings, folder: Path) -> Weight:
    """Return a matrix of the parts that stand for it; none is read yet.

    Raises:
      CheckpointError: A part is missing, or their shapes are not those that the configuration implies.
    """
    qweight, qzeros, factors = needed(name, parts, ("qweight", "qzeros", "scales"), folder)
    columns, rows = qweight.shape[0], qweight.shape[1] * _PER
    size = found.group or columns
    groups = columns // size
    fit = columns % size == 0 and size % 2 == 0
    if not fit or qzeros.shape != (groups, rows // _PER) or factors.shape != (groups, rows):
        raise unlike(name, parts, f"{_BITS} bits by groups of {size}", folder)

    def packed(start: int, stop: int) -> Packed:
        values = pack(_columns(qweight, start, stop), _BITS).reshape(stop - start, groups, -1)
        return Packed(values, scales(factors, start, stop), pack(_columns(qzeros, start, stop), _BITS))

    return Weight(name, (rows, columns), Integers(Scheme(_BITS, size, True, "awq"), packed), f"AWQ int{_BITS}")
