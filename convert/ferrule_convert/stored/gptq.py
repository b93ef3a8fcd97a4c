"""GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel store it.

A matrix [out, in] has `qweight`, int32 [in · bits / 32, out], packed along `in`, the first value in the lowest bits;
`qzeros`, int32 [groups, out · bits / 32], packed along `out`; `scales` [groups, out]; and `g_idx`, int32 [in], each
column's group. A weight is (value - zero) · scale. Format `gptq` stores zero points less one, `gptq_v2` as they are.
Where columns were quantised in the order of their activations (`desc_act`), those of one group stand apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.head import unpack

from ..graph import Integers, Weight
from ..safetensors_file import Mapped
from ..schemes import Packed, Scheme, pack
from ..values import printable
from ._parts import bad_setting, flag, group_size, needed, scales, unlike, words

__all__ = ["PARTS", "Settings", "matrix", "settings"]

PARTS = {"qweight": "I32", "qzeros": "I32", "scales": "float", "g_idx": "I32"}

_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
# What makes it another container, or another model; each is refused when it is set.
_REFUSED = ("is_marlin_format", "rotation", "adapter")


@dataclass(frozen=True)
class Settings:
    """What the configuration says.

    Attributes:
      bits: Of one weight.
      group: Columns that share a scale; None for whole rows.
      symmetric: Whether every zero point is 2^(bits-1).
      act_order: Whether columns of a group may stand apart.
      less_one: Whether zero points are stored less one.
    """

    bits: int
    group: int | None
    symmetric: bool
    act_order: bool
    less_one: bool


def settings(raw: Mapping[str, Any], folder: Path) -> Settings:
    """Read the configuration.

    Raises:
      CheckpointError: Something is missing or of a kind that is not read.
    """
    bits = raw.get("bits")
    if not isinstance(bits, int) or bits not in _BITS:
        raise bad_setting("bits", bits, folder, f"{', '.join(map(str, _BITS))} are read: what the kernel takes")
    # GPTQModel calls it `format` too; the first version had no word for itself.
    for key in ("checkpoint_format", "format"):
        if raw.get(key, "gptq") not in _FORMATS:
            raise bad_setting(key, raw[key], folder, f"{' and '.join(_FORMATS)} are read")
    if raw.get("pack_dtype", "int32") != "int32":
        raise bad_setting("pack_dtype", raw["pack_dtype"], folder, "int32 is read")
    for key in _REFUSED:
        if raw.get(key):
            raise bad_setting(key, raw[key], folder, "not supported")
    # Patterns of matrices quantised otherwise; those that begin so are left as floats, which their tensors show.
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(str(pattern).startswith("-:") for pattern in dynamic):
        raise bad_setting("dynamic", dynamic, folder, "one setting for all matrices is read")
    named = raw.get("checkpoint_format", raw.get("format", "gptq"))
    sym, desc_act = (flag(raw, key, folder) for key in ("sym", "desc_act"))
    return Settings(bits, group_size(raw, folder), sym, desc_act, named == "gptq")


def _order(part: Mapped, groups: int, size: int) -> NDArray[np.int64] | None:
    """Read which columns the groups hold, one group behind the other, or None where they stand so already.

    Raises:
      CheckpointError: A group is out of range, or holds more or fewer columns than the others.
    """
    index = part.stored(0, part.shape[0]).astype(np.int32)
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"{part.path}: `{printable(part.name)}` names groups {low} to {high} of {groups}",
            hint="the file is damaged; fetch it again",
        )
    counts = np.bincount(index, minlength=groups)
    if (counts != size).any():
        wrong = int((counts != size).argmax())
        raise CheckpointError(
            f"{part.path}: `{printable(part.name)}` gives group {wrong} {counts[wrong]} columns of {size}",
            hint="the file is damaged; fetch it again",
        )
    return None if (np.diff(index) >= 0).all() else np.argsort(index, kind="stable")


def matrix(name: str, parts: Mapping[str, Mapped], found: Settings, folder: Path) -> Weight:
    """Return a matrix of the parts that stand for it; none is read yet.

    Raises:
      CheckpointError: A part is missing, or their shapes are not those that the configuration implies.
    """
    wanted = ("qweight", "qzeros", "scales")
    qweight, qzeros, factors = needed(name, parts, wanted, folder)
    bits, per = found.bits, 32 // found.bits
    columns, rows = qweight.shape[0] * per, qweight.shape[1]
    size = found.group or columns
    groups = columns // size
    places = parts.get("g_idx")
    fit = columns % size == 0 and size * bits % 8 == 0 and rows % per == 0
    if places and places.shape != (columns,):
        fit = False
    if not fit or qzeros.shape != (groups, rows // per) or factors.shape != (groups, rows):
        raise unlike(name, parts, f"{bits} bits by groups of {size}", folder)
    if found.act_order and places is None:
        needed(name, parts, ("g_idx",), folder)

    def order() -> NDArray[np.int64] | None:
        index = _order(places, groups, size) if places else None
        if index is not None and not found.act_order:
            raise CheckpointError(
                f"{folder}: config.json says no `desc_act`, `{printable(name)}` has one in its g_idx",
                hint="weights and configuration are of different releases",
            )
        return index

    def packed(start: int, stop: int) -> Packed:
        # Words packed along `in` are, byte for byte, the kernel's own layout.
        values = np.ascontiguousarray(qweight.stored(0, qweight.shape[0], slice(start, stop)).T).view(np.uint8)
        if (index := order()) is not None:
            values = pack(unpack(values, bits, columns)[:, index], bits)
        zeros = _zeros(qzeros, start, stop, found)
        return Packed(values.reshape(stop - start, groups, -1), scales(factors, start, stop), zeros)

    scheme = Scheme(bits, size, not found.symmetric, "gptq")
    reader = Integers(scheme, packed, order if found.act_order else None)
    return Weight(name, (rows, columns), reader, f"GPTQ int{bits}")


def _zeros(part: Mapped, start: int, stop: int, found: Settings) -> NDArray[np.uint8] | None:
    """Read the zero points of rows [start, stop), packed along the groups; None where they are symmetric.

    Raises:
      CheckpointError: They are not symmetric though the configuration says so.
    """
    bits = found.bits
    stored, mine = words(part, start, stop, 32 // bits)
    if found.less_one:
        # Over whole words, carries included: GPTQModel, which takes the one away so, adds it so.
        stored = stored + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))
    zeros = unpack(stored.view(np.uint8), bits, stored.shape[1] * 32 // bits)[:, mine].T
    if not found.symmetric:
        return pack(np.ascontiguousarray(zeros), bits)
    if odd := int((zeros != 1 << (bits - 1)).sum()):
        raise CheckpointError(
            f"{part.path}: `{printable(part.name)}` holds {odd} zero points other than {1 << (bits - 1)} "
            f"for rows {start} to {stop - 1}; config.json says symmetric",
            hint="weights and configuration are of different releases",
        )
    return None
