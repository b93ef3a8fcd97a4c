"""Model families, one file each, called by the configuration's `model_type`. Each reads like its paper.

Each module defines `build(checkpoint) -> Graph`; `DEFAULTS` where its releases leave out what a configuration must
say, and `GGUF` where llama.cpp has the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ferrule_runtime.errors import CheckpointError
from ferrule_runtime.registry import load_module

from ..checkpoint import Checkpoint
from ..graph import Graph, Weight
from ..values import printable

__all__ = ["build", "defaults"]


def defaults(model_type: str) -> Mapping[str, Any]:
    """Return what a family's configurations may leave out, by key.

    Raises:
      CheckpointError: Unknown family.
    """
    module = load_module("model family", __name__, model_type, CheckpointError)
    return cast(Mapping[str, Any], getattr(module, "DEFAULTS", {}))


class _Watched(dict[str, Weight]):
    """Tensors that remember which of them were asked for."""

    def __init__(self, tensors: Mapping[str, Weight]) -> None:
        super().__init__(tensors)
        self.left = set(tensors)

    def __getitem__(self, name: str) -> Weight:
        self.left.discard(name)
        return super().__getitem__(name)


def build(checkpoint: Checkpoint) -> Graph:
    """Build the graph of a checkpoint; no weight is read.

    Raises:
      CheckpointError: Unknown family, tensors that are missing or of another shape, or ones that the family lacks.
    """
    family = printable(checkpoint.config["model_type"])
    module = load_module("model family", __name__, family, CheckpointError)
    tensors = _Watched(checkpoint.tensors)
    graph = cast(Graph, module.build(replace(checkpoint, tensors=tensors)))
    if left := sorted(tensors.left):
        shown = ", ".join(f"`{printable(name)}`" for name in left[:3])
        raise CheckpointError(
            f"{checkpoint.path}: {len(left)} of {len(tensors)} tensors are not of a {graph.family} model "
            f"as configured: {shown}{', …' if len(left) > 3 else ''}",
            hint="without them it would be another model: is its configuration of this release?",
        )
    return graph
