"""Model families, one file each, called by the configuration's `model_type`. Each reads like its paper.

Each module defines `build(checkpoint) -> Graph`; `DEFAULTS` where its releases leave out what a configuration must
say, and `GGUF` where llama.cpp has the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.registry import load_module

from ..checkpoint import Checkpoint
from ..graph import Graph

__all__ = ["build", "defaults"]


def defaults(model_type: str) -> Mapping[str, Any]:
    """Return what a family's configurations may leave out, by key.

    Raises:
      CheckpointError: Unknown family.
    """
    module = load_module("model family", __name__, model_type, CheckpointError)
    return cast(Mapping[str, Any], getattr(module, "DEFAULTS", {}))


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a checkpoint; no weight is read.

    Raises:
      CheckpointError: Unknown family, or tensors that are missing or of another shape.
    """
    module = load_module("model family", __name__, str(checkpoint.config["model_type"]), CheckpointError)
    return cast(Graph, module.build(checkpoint))
