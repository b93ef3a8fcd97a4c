"""What containers share: checked settings, the shapes of a matrix's parts, scales by rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import CheckpointError

from ..safetensors_file import Mapped
from ..values import printable

__all__ = ["bad_setting", "flag", "group_size", "needed", "scales", "unlike", "words"]


def bad_setting(key: str, value: object, folder: Path, hint: str) -> CheckpointError:
    """Return the error for a setting that is not there or cannot be read."""
    what = "does not say" if value is None else f"says {printable(value)} for"
    return CheckpointError(f"{folder}/config.json: `quantization_config` {what} `{key}`", hint=hint)


def flag(raw: Mapping[str, Any], key: str, folder: Path) -> bool:
    """Return a setting that is true or false.

    Raises:
      CheckpointError: It is neither.
    """
    value = raw.get(key)
    if not isinstance(value, bool):
        raise bad_setting(key, value, folder, "true or false")
    return value


def group_size(raw: Mapping[str, Any], folder: Path) -> int | None:
    """Return how many columns share a scale, or None where whole rows do.

    Raises:
      CheckpointError: It is neither -1 nor a positive number.
    """
    value = raw.get("group_size")
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
        raise bad_setting("group_size", value, folder, "a positive number, or -1 for whole rows")
    return None if value == -1 else value


def needed(name: str, parts: Mapping[str, Mapped], wanted: tuple[str, ...], folder: Path) -> list[Mapped]:
    """Return parts of a matrix by name.

    Raises:
      CheckpointError: One is missing, or is no matrix.
    """
    stem = name.removesuffix("weight")
    for part in wanted:
        if part not in parts:
            raise CheckpointError(
                f"{folder}: no tensor `{printable(stem)}{part}`, which belongs to `{printable(next(iter(parts)))}`",
                hint="the file is incomplete",
            )
        if len(parts[part].shape) != 2:
            raise unlike(name, parts, "", folder)
    return [parts[part] for part in wanted]


def unlike(name: str, parts: Mapping[str, Mapped], what: str, folder: Path) -> CheckpointError:
    """Return the error for parts whose shapes are not those of one matrix, quantised as the configuration says."""
    shapes = ", ".join(f"{part} {'×'.join(map(str, mapped.shape))}" for part, mapped in sorted(parts.items()))
    return CheckpointError(
        f"{folder}: `{printable(name)}` has {shapes}, which do not fit one another{what and ' in ' + what}",
        hint="weights and configuration are of different releases",
    )


def scales(part: Mapped, start: int, stop: int) -> NDArray[np.float32]:
    """Read the scales of rows [start, stop) from [groups, rows]: float32 [rows, groups].

    No quantiser writes a scale of 0: it would be a hole in the file.

    Raises:
      CheckpointError: Some are 0 or not finite.
    """
    found = np.ascontiguousarray(part.floats(0, part.shape[0], slice(start, stop)).T)
    if bad := int((~np.isfinite(found) | (found == 0)).sum()):
        raise CheckpointError(
            f"{part.path}: `{printable(part.name)}` holds {bad} scales that are zero or not finite "
            f"for rows {start} to {stop - 1}",
            hint="the weights are damaged; fetch the file again",
        )
    return found


def words(part: Mapped, start: int, stop: int, per: int) -> tuple[NDArray[np.uint32], slice]:
    """Read the words that hold columns [start, stop) of a matrix packed along its rows.

    Args:
      part: Words of 32 bits, [rows, columns / per].
      start: First column.
      stop: One behind the last.
      per: Columns in a word.

    Returns:
      Words [rows, some], and which of the columns in them are the ones asked for.
    """
    first = start // per
    found = part.stored(0, part.shape[0], slice(first, -(-stop // per)))
    return found, slice(start - first * per, stop - first * per)
