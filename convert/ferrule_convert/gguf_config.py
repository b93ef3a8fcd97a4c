"""What the metadata of a GGUF file says about a model, under the keys of Hugging Face's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError

from .values import number, printable, size

__all__ = ["Metadata", "rope"]

# gguf-py's constants.py, behind the architecture's name.
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# What else can scale a rotary embedding; reading past it would give another model.
_REFUSED = ("alpha", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")


class Metadata:
    """One architecture's metadata, by the keys behind its name, checked as it is read."""

    def __init__(self, meta: Mapping[str, Any], architecture: str, path: Path) -> None:
        """Take a file's metadata.

        Args:
          meta: All of it.
          architecture: `general.architecture`.
          path: For messages.
        """
        self.meta = meta
        self.architecture = architecture
        self.path = path

    def name(self, key: str) -> str:
        """Return a key as the file has it."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value unchecked; the default where it is not there."""
        return self.meta.get(self.name(key), default)

    def error(self, key: str) -> CheckpointError:
        """Return the error for a value that is there and cannot be."""
        found = printable(self.get(key))
        return CheckpointError(f"{self.path}: `{self.name(key)}` is {found}", hint="fetch the file again")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number.

        Raises:
          CheckpointError: It is none, or too small; or missing where there is no default.
        """
        if default is not None and self.get(key) is None:
            return default
        return size(self.meta, self.name(key), str(self.path), least)

    def number(self, key: str) -> float:
        """Return a positive number.

        Raises:
          CheckpointError: It is none, or missing.
        """
        return number(self.meta, self.name(key), str(self.path))

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Return one flag for each of so many layers, or None where the file has none.

        Raises:
          CheckpointError: They are not.
        """
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) < count or not all(isinstance(one, bool) for one in values):
            raise self.error(key)
        return values[:count]


def rope(meta: Metadata, head_dim: int, factors: tuple[float, ...] | None) -> dict[str, Any]:
    """Return `partial_rotary_factor` and `rope_scaling`.

    Args:
      meta: The file's metadata.
      head_dim: Features of a head.
      factors: Of `rope_freqs.weight`, by which each pair's frequency is divided; None where there are none.

    Raises:
      CheckpointError: Scaled in a way that has no equal among Hugging Face's.
    """
    at = "rope.scaling"
    turned = meta.whole("rope.dimension_count", head_dim)
    if turned > head_dim:
        raise meta.error("rope.dimension_count")
    if refused := [key for key in _REFUSED if meta.get(f"{at}.{key}") is not None]:
        raise CheckpointError(
            f"{meta.path}: `{meta.name(f'{at}.{refused[0]}')}` is not supported", hint="use another file"
        )
    # Without a kind it is linear, and without a factor nothing is scaled (llama.cpp's llama-model.cpp).
    kind = meta.get(f"{at}.type", "linear")
    factor = meta.get(f"{at}.factor", meta.get("rope.scale_linear"))
    scaling: dict[str, Any] | None = None
    if kind not in ("none", "linear") or (kind == "linear" and factor):
        values = {ours: meta.get(f"{at}.{theirs}") for theirs, ours in _YARN.items()} if kind == "yarn" else {}
        scaling = {"rope_type": kind, "factor": factor, **values}
    if factors is not None:
        if scaling is not None:
            raise CheckpointError(
                f"{meta.path}: its rotary embedding is scaled twice, by `rope_freqs.weight` and as {printable(kind)}",
                hint="use another file",
            )
        scaling = {"rope_type": "divided", "factors": factors}
    # Half a feature more, so that cutting the product off gives the whole number again.
    partial = 1.0 if turned == head_dim else (turned + 0.5) / head_dim
    return {"partial_rotary_factor": partial, "rope_scaling": scaling}
