"""Llama (Touvron et al. 2023) and its kin, SmolLM2 among them: RMSNorm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..gguf_names import LAYER, GgufNames, interleaved
from ..graph import Graph
from ._blocks import Builder

__all__ = ["GGUF", "build"]

GGUF = GgufNames(
    architecture="llama",
    model_type="llama",
    layer=LAYER,
    order=interleaved(
        {"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"}
    ),
)


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a Llama checkpoint.

    Raises:
      CheckpointError: A tensor is missing or of another shape.
    """
    blocks = Builder(checkpoint)
    return blocks.decoder(lambda at, x, layer: blocks.attention(at, x))
