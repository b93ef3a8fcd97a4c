"""The float model over a text, and how far a bundle is from it: all of it in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .archs import build
from .blocks import plan_blocks
from .cache import cache_folder
from .checkpoint import open_checkpoint
from .fidelity import Fidelity, compare, digest
from .graph import Graph
from .heads import head_parts
from .interpret import Memory, embed, run_nodes

__all__ = ["distance", "reference_hidden"]

Array = NDArray[np.float32]

# Of what is kept in the cache; a change of the interpreter's meaning is a new one.
_VERSION = "3"


def distance(
    identity: str, path: Path, lora: Path | None, head: Path, text: Sequence[Sequence[int]], hidden: Array
) -> Fidelity:
    """Compare a model with the float model over a text: all that the second one takes, for a process of its own.

    Args:
      identity: The checkpoint's `sha256()`.
      path: The checkpoint.
      lora: Its adapter.
      head: The bundle's exported head.
      text: Token ids by window.
      hidden: The bundle's hidden states over it, [tokens, hidden].

    Raises:
      CheckpointError: The checkpoint cannot be read.
      BundleError: Logits that are not finite.
    """
    graph = build(open_checkpoint(path, lora))
    reference = reference_hidden(identity, graph, text)
    parts = ((first, stop, one.logits) for first, stop, one in head_parts(head))
    return compare(text, reference, hidden, graph, parts)


def reference_hidden(identity: str, graph: Graph, text: Sequence[Sequence[int]]) -> Array:
    """Return the float model's hidden states over a text, [tokens, hidden]; computed once, then cached.

    Args:
      identity: The checkpoint's `sha256()`, which names the cached file.
      graph: Without schemes.
      text: Token ids by window.
    """
    key = hashlib.sha256(f"{_VERSION} {identity} {digest(text)}".encode()).hexdigest()
    path = cache_folder() / "reference" / f"{key}.npy"
    try:
        known: Array = np.load(path)
        shape = (sum(map(len, text)), graph.hidden)
        if known.shape == shape and known.dtype == np.float32 and np.isfinite(known).all():
            return known
    except (OSError, ValueError, EOFError):
        pass  # not there, or damaged: compute it
    rows = [embed(graph, window) for window in text]
    for block in plan_blocks(graph):
        # No token follows, so what a block remembers can go with it.
        rows = run_nodes(block.nodes, block.start, rows, [Memory() for _ in rows])
    hidden = np.concatenate(rows)
    beside = path.with_suffix(f".{os.getpid()}.npy")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(beside, hidden)
        beside.replace(path)
    except OSError:
        # A cache that cannot be written costs time, nothing else.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return hidden
