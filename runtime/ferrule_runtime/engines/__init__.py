"""Token-level engines, one file each: tokens in, the last hidden states out.

Each module defines `load(bundle, *, threads, context, chunk) -> Engine`; the file's name is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..errors import EngineError
from ..registry import load_module

__all__ = ["Engine", "Snapshot", "load"]


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything an engine remembers, at one position.

    It goes into any engine over the same bundle whose context holds it.

    Attributes:
      bundle: Hash of the bundle that the state is of.
      position: Tokens fed so far.
      arrays: State by name, in the engine's own layout; not to be written to.
    """

    bundle: str
    position: int
    arrays: dict[str, NDArray[Any]]


class Engine(Protocol):
    """Executes a graph. Holds the state of one conversation."""

    @property
    def position(self) -> int:
        """Tokens fed since the last reset."""
        ...

    @property
    def context(self) -> int:
        """Most tokens that can be held."""
        ...

    def feed(self, tokens: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        """Run tokens through the model, in chunks, behind those already fed.

        Args:
          tokens: Token ids, at least one.
          every: Return the hidden state of every token instead of the last one's.

        Returns:
          Hidden states after the final norm, float32 [1 or len(tokens), hidden].

        Raises:
          ContextError: Fewer places are left than tokens given; nothing was fed.
          EngineError: The graph could not be executed.
        """
        ...

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn hidden states [n, hidden] into logits over the whole vocabulary, float32 [n, vocabulary]."""
        ...

    def snapshot(self) -> Snapshot:
        """Copy the state."""
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a state that was copied before, bit for bit.

        Raises:
          EngineError: It is of another bundle, or of other shapes; the engine's own state stays as it was.
          ContextError: It holds more tokens than the context.
        """
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


def load(bundle: Bundle, *, threads: int, context: int, chunk: int) -> Engine:
    """Load a bundle into the engine that its manifest names.

    Args:
      bundle: Opened and verified.
      threads: Of the engine; 0 takes the cores that this process may use.
      context: Most tokens to hold.
      chunk: Most tokens to run through the graph at once.

    Raises:
      EngineError: The engine is unknown, not installed, or cannot load the graph.
      ContextError: The context is longer than the bundle reaches.
    """
    module = load_module("engine", __name__, bundle.manifest.engine, EngineError)
    return cast(Engine, module.load(bundle, threads=threads, context=context, chunk=chunk))
