"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..gguf_names import LAYER, GgufNames
from ..graph import Graph
from ._blocks import Builder

__all__ = ["GGUF", "build"]

_BIASES = {f"attn_{one}.bias": f"self_attn.{one}_proj.bias" for one in "qkv"}
GGUF = GgufNames(architecture="qwen2", model_type="qwen2", layer=LAYER | _BIASES)


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a Qwen2 checkpoint.

    Raises:
      CheckpointError: A tensor is missing or of another shape.
    """
    blocks = Builder(checkpoint)
    return blocks.decoder(lambda at, x, layer: blocks.attention(at, x, bias=True))
