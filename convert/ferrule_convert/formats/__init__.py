"""Output forms, one file each: the graph as an executor runs it. Only these know an executor's names.

Each module defines `export(graph, folder, context, accuracy_level) -> Exported` and `memory_facts(graph, context,
tokenizer_bytes) -> MemoryFacts`; the file's name is the form's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ferrule_runtime.bundle import MemoryFacts, Table
from ferrule_runtime.errors import TargetError
from ferrule_runtime.registry import load_module

from ..graph import Graph

__all__ = ["Exported", "export", "memory_facts"]


@dataclass(frozen=True)
class Exported:
    """What a form has written.

    Attributes:
      engine: What executes it: a file in the runtime's `engines/`.
      files: Paths relative to the folder.
      tables: Where embedding and head lie.
    """

    engine: str
    files: tuple[str, ...]
    tables: Mapping[str, Table]


def export(form: str, graph: Graph, folder: Path, context: int, accuracy_level: int) -> Exported:
    """Write a graph in one form, reading and quantising its weights block by block.

    Args:
      form: A file in this folder.
      graph: With schemes.
      folder: Where to write; it exists.
      context: Positions that the rotary tables must reach.
      accuracy_level: MatMulNBits' own: 4 computes with int8 activations, 0 with the kernel's default.

    Raises:
      TargetError: Unknown form.
    """
    return cast(
        Exported, load_module("form", __name__, form, TargetError).export(graph, folder, context, accuracy_level)
    )


def memory_facts(form: str, graph: Graph, context: int, tokenizer_bytes: int) -> MemoryFacts:
    """Return what the budget needs to know of a graph in one form; nothing is read or written.

    Raises:
      TargetError: Unknown form.
    """
    return cast(
        MemoryFacts, load_module("form", __name__, form, TargetError).memory_facts(graph, context, tokenizer_bytes)
    )
