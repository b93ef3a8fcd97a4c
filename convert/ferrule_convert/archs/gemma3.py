"""Gemma 3's text model (Kamath et al. 2025): layers that see the last few tokens, and one in six that sees them all.

Norms store their weight less one, and stand before and behind attention and MLP; each head's query and key is normed
before it is turned, by another base in layers with a window. The embedding is scaled by the root of its size as it
enters, not as the head reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ferrule_runtime.errors import CheckpointError

from ..checkpoint import Checkpoint
from ..gguf_config import Metadata
from ..gguf_names import LAYER, GgufNames
from ..graph import INPUT, Graph, Scale, Weight
from ._blocks import Builder, each

__all__ = ["DEFAULTS", "GGUF", "build"]

# What transformers' Gemma3TextConfig takes where config.json says nothing: Google's own releases leave these out.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}  # fmt: skip
_NAMES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _from_gguf(meta: Metadata, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a file says, or what llama.cpp takes where it says nothing (its src/models/gemma3.cpp)."""
    layers, heads, kinds = config["num_hidden_layers"], config["num_attention_heads"], None
    every, key = DEFAULTS["sliding_window_pattern"], "attention.sliding_window_pattern"
    if isinstance(meta.get(key), list):
        kinds = [_LOCAL if near else _GLOBAL for near in meta.flags(key, layers) or ()]
    else:
        every = meta.whole(key, every)
    window = meta.whole("attention.sliding_window", 0, least=0)
    return {
        # Without a window every layer sees everything.
        "sliding_window": window or config["max_position_embeddings"],
        "sliding_window_pattern": every if window else 1,
        "layer_types": kinds if window else None,
        "rope_local_base_freq": meta.get("rope.freq_base_swa", DEFAULTS["rope_local_base_freq"]),
        # Not in the file; 62 layers are the model of 27 billion, whose scale is another.
        "query_pre_attn_scalar": config["hidden_size"] // heads if layers == 62 else config["head_dim"],
        **{key: meta.get(key) for key in _REFUSED[:2]},
    }


def _restored(name: str, weight: Weight, config: Mapping[str, Any]) -> Weight:
    # llama.cpp's converter adds the one.
    return each(weight, lambda rows: rows - np.float32(1)) if name.endswith("norm.weight") else weight


GGUF = GgufNames(
    architecture="gemma3",
    model_type="gemma3",
    layer=LAYER | _NAMES,
    config=_from_gguf,
    restore=_restored,
)


def _near(b: Builder) -> Callable[[int], bool]:
    """Return whether a layer has a window, by `layer_types` or by the pattern of releases before it."""
    if b.config.get("layer_types") is None:
        every = b.size("sliding_window_pattern")
        return lambda layer: (layer + 1) % every != 0
    kinds = b.layer_kinds((_LOCAL, _GLOBAL))
    return lambda layer: kinds[layer] == _LOCAL


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a Gemma 3 text model.

    Raises:
      CheckpointError: A tensor is missing or of another shape, a layer is of an unknown kind, or scores are capped.
    """
    b = Builder(checkpoint, zero_centred=True, activation="gelu_tanh")
    c = b.config
    if said := [key for key in _REFUSED if c.get(key)]:
        raise CheckpointError(f"{checkpoint.path}: `{said[0]}` is set, which is not supported", hint="not a Gemma 3?")
    near = _near(b)
    local, whole = b.rope(c["rope_local_base_freq"], None), b.rope(c["rope_theta"], c.get("rope_scaling"))
    scale, reach = b.size("query_pre_attn_scalar") ** -0.5, b.size("sliding_window")

    def attention(at: str, x: str, layer: int) -> str:
        table, window = (local, reach) if near(layer) else (whole, None)
        return b.attention(at, x, head_norms=True, table=table, window=window, scale=scale)

    # A node of its own: head and embedding are one table, which only the embedding's side scales. transformers
    # rounds the root to the weights' own format; in float32 it is this.
    x = b.add(Scale("scaled", INPUT, math.sqrt(b.size("hidden_size"))))
    return b.decoder(attention, x=x, post_norms=True)
