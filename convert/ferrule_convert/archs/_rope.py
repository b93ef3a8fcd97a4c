"""Frequencies of the rotary embedding, and how releases stretch them over contexts longer than those of training.

The formulas are those of transformers' `modeling_rope_utils.py`; values keep the names of its `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from ..graph import RopeTable
from ..values import MOST_NUMBER, number, printable

__all__ = ["rope_table"]

Array = NDArray[np.float64]

# More features of a head are damage, not a model.
_MOST_TURNED = 1 << 16


class _Scaling:
    """The values of one `rope_scaling`, checked as they are read."""

    def __init__(self, values: Mapping[str, Any], where: Path) -> None:
        self.values = values
        self.where = f"{where}: `rope_scaling`"

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}", hint="fetch the file again")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; a default stands for one that is not there."""
        if default is not None and self.values.get(key) is None:
            return default
        return number(self.values, key, self.where)


def _linear(plain: Array, theta: float, scaling: _Scaling) -> tuple[Array, float]:
    return plain / scaling.number("factor"), 1.0


def _llama3(plain: Array, theta: float, scaling: _Scaling) -> tuple[Array, float]:
    """Divide slow frequencies, keep fast ones, and pass smoothly from one to the other (Llama 3.1)."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error(f"`low_freq_factor` is {low:g}, `high_freq_factor` {high:g}: no range between them")
    turns = scaling.number("original_max_position_embeddings") * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / scaling.number("factor") + kept * plain, 1.0


def _yarn(plain: Array, theta: float, scaling: _Scaling) -> tuple[Array, float]:
    """Divide slow frequencies and keep fast ones, by their turns in the original context (Peng et al. 2023)."""
    for key in ("mscale", "mscale_all_dim"):
        if scaling.values.get(key):
            raise scaling.error(f"`{key}` of YaRN is not supported")
    size, factor = 2 * len(plain), scaling.number("factor")
    original = scaling.number("original_max_position_embeddings")

    def place(turns: float) -> float:
        """Return the pair that makes so many turns in the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.number("beta_fast", 32.0)), place(scaling.number("beta_slow", 1.0))
    if scaling.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    divided = np.clip((np.arange(len(plain)) - low) / (high - low or 0.001), 0, 1)
    stretched = plain / factor * divided + plain * (1 - divided)
    return stretched, scaling.number("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)


def _divided(plain: Array, theta: float, scaling: _Scaling) -> tuple[Array, float]:
    """Divide each by a factor of its own: what llama.cpp makes of Llama 3's values, as `rope_freqs.weight`."""
    factors = scaling.values.get("factors")
    # A tuple comes from the reader of GGUF files alone; no release writes this kind in JSON.
    if (
        not isinstance(factors, tuple)
        or len(factors) != len(plain)
        or not all(0 < one <= MOST_NUMBER for one in factors)
    ):
        raise scaling.error(f"`factors` are {printable(factors)}, not {len(plain)} positive ones")
    return plain / np.array(factors), 1.0


_KINDS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "divided": _divided}


def rope_table(theta: float, size: int, turned: int, scaling: Mapping[str, Any] | None, where: Path) -> RopeTable:
    """Return the angles of a rotary embedding.

    Args:
      theta: Its base: pair i of n turns by theta^(-i/n) radians a position before any scaling.
      size: Features of a head.
      turned: How many of them are turned, the first ones.
      scaling: `rope_scaling` with its `rope_type`; None where it is not scaled.
      where: For messages.

    Raises:
      CheckpointError: Scaled in a way that is not known, by values that cannot be, or a head that cannot be turned so.
    """
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 1 < theta <= MOST_NUMBER:
        raise CheckpointError(f"{where}: a base of {printable(theta)} turns its heads", hint="fetch the file again")
    if turned % 2 or not 2 <= turned <= min(size, _MOST_TURNED):
        raise CheckpointError(f"{where}: {turned} of a head's {size} features are turned", hint="fetch the file again")
    pairs = turned // 2
    plain = float(theta) ** (-np.arange(pairs, dtype=np.float64) / pairs)
    if scaling is None:
        return RopeTable(tuple(plain.tolist()))
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(
            f"{where}: its rotary embedding is scaled by `{printable(kind)}`, which is not supported",
            hint=f"supported: {', '.join(_KINDS)}",
        )
    values = _Scaling(scaling, where)
    try:
        with np.errstate(all="ignore"):
            frequencies, magnitude = _KINDS[kind](plain, float(theta), values)
    except (OverflowError, ValueError) as error:
        raise values.error(f"no angles follow from it: {error}") from None
    if not np.isfinite(frequencies).all() or not math.isfinite(magnitude):
        raise values.error("its angles are not finite")
    return RopeTable(tuple(frequencies.tolist()), magnitude)
