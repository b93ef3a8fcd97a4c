"""Values that files state, checked before they are used or shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from ferrule_runtime.errors import CheckpointError

__all__ = ["MOST_NUMBER", "is_token", "number", "printable", "size", "unique_pairs"]

# Larger sizes are damage, not models.
_MOST = 2**31 - 1
# Rotary bases are the largest numbers that models have: some 3e9 for contexts of a million tokens.
MOST_NUMBER = 1e12


def printable(value: object) -> str:
    """Return what a file says, short and without anything that a terminal would obey."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 120 else f"{text[:120]}…"


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object out of JSON's pairs, as `object_pairs_hook`.

    Raises:
      ValueError: A name stands in it twice.
    """
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"`{printable(name)}` stands in it twice")
        result[name] = value
    return result


def _stated(
    config: Mapping[str, Any], key: str, where: str, kinds: tuple[type, ...], fits: Callable[[Any], bool]
) -> Any:
    value = config.get(key)
    if value is None:
        raise CheckpointError(f"{where}: no `{key}`", hint="the file is incomplete, or of a release not known here")
    if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
        raise CheckpointError(f"{where}: `{key}` is {printable(value)}", hint="the file is damaged; fetch it again")
    return value


def is_token(value: Any, vocabulary: int) -> TypeGuard[int]:
    """Tell whether a value is a token's id in a vocabulary of so many."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary


def size(config: Mapping[str, Any], key: str, where: str, least: int = 1) -> int:
    """Return a size that a configuration states: a whole number up to 2^31 - 1.

    Args:
      config: Keys and values.
      key: Of the size.
      where: For messages: the file.
      least: A smaller one is refused.

    Raises:
      CheckpointError: It is not there, or is none.
    """
    return int(_stated(config, key, where, (int,), lambda value: least <= value <= _MOST))


def number(config: Mapping[str, Any], key: str, where: str, most: float = MOST_NUMBER) -> float:
    """Return a positive number that a configuration states, at most `most`.

    Args:
      config: Keys and values.
      key: Of the number.
      where: For messages: the file.
      most: A larger one is refused.

    Raises:
      CheckpointError: It is not there, or is none.
    """
    return float(_stated(config, key, where, (int, float), lambda value: 0 < value <= most))
