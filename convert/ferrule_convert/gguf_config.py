"""What the metadata of a GGUF file says about a model, under the keys of Hugging Face's configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrule_runtime.errors import CheckpointError

from .safetensors_file import printable

__all__ = ["rope"]

# gguf-py's constants.py, behind the architecture's name.
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# What else can scale a rotary embedding; reading past it would give another model.
_REFUSED = ("alpha", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")


def rope(
    meta: Mapping[str, Any], architecture: str, head_dim: int, factors: tuple[float, ...] | None, path: Path
) -> dict[str, Any]:
    """Return `partial_rotary_factor` and `rope_scaling`.

    Args:
      meta: The file's metadata.
      architecture: `general.architecture`.
      head_dim: Features of a head.
      factors: Of `rope_freqs.weight`, by which each pair's frequency is divided; None where there are none.
      path: For messages.

    Raises:
      CheckpointError: Scaled in a way that has no equal among Hugging Face's.
    """
    turned = meta.get(f"{architecture}.rope.dimension_count", head_dim)
    if not isinstance(turned, int) or not 0 < turned <= head_dim:
        raise CheckpointError(
            f"{path}: `{architecture}.rope.dimension_count` is {printable(turned)}, a head has {head_dim} features",
            hint="fetch the file again",
        )
    at = f"{architecture}.rope.scaling"
    if refused := [key for key in _REFUSED if meta.get(f"{at}.{key}") is not None]:
        raise CheckpointError(f"{path}: `{at}.{refused[0]}` is not supported", hint="use another file")
    # Without a kind it is linear, and without a factor nothing is scaled (llama.cpp's llama-model.cpp).
    kind = meta.get(f"{at}.type", "linear")
    factor = meta.get(f"{at}.factor", meta.get(f"{architecture}.rope.scale_linear"))
    scaling: dict[str, Any] | None = None
    if kind not in ("none", "linear") or (kind == "linear" and factor):
        values = {ours: meta.get(f"{at}.{theirs}") for theirs, ours in _YARN.items()} if kind == "yarn" else {}
        scaling = {"rope_type": kind, "factor": factor, **values}
    if factors is not None:
        if scaling is not None:
            raise CheckpointError(
                f"{path}: its rotary embedding is scaled twice, by `rope_freqs.weight` and by `{at}.type` {kind}",
                hint="use another file",
            )
        scaling = {"rope_type": "divided", "factors": factors}
    # Half a feature more, so that cutting the product off gives the whole number again.
    partial = 1.0 if turned == head_dim else (turned + 0.5) / head_dim
    return {"partial_rotary_factor": partial, "rope_scaling": scaling}
