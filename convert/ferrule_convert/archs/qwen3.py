"""Qwen3 (Yang et al. 2025): Llama's layers with each head's query and key normed before they are turned."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..gguf_names import LAYER, GgufNames
from ..graph import Graph
from ._blocks import Builder

__all__ = ["GGUF", "build"]

_NORMS = {f"attn_{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"}
GGUF = GgufNames(architecture="qwen3", model_type="qwen3", layer=LAYER | _NORMS)


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a Qwen3 checkpoint.

    Raises:
      CheckpointError: A tensor is missing or of another shape.
    """
    blocks = Builder(checkpoint)
    return blocks.decoder(lambda at, x, layer: blocks.attention(at, x, head_norms=True))
