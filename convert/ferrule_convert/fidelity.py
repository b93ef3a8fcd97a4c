"""How far a bundle is from the float model: KL divergence, top-1 agreement, perplexity, over a text that we own."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import cache_folder
from .graph import Graph
from .interpret import head_logits, interpret
from .tokenizer import encode, load

__all__ = ["Fidelity", "compare", "fidelity_tokens", "reference_hidden", "wilson"]

Array = NDArray[np.float32]

# Positions whose two best logits of the float model lie closer than this (nats) are near ties: either answer is fair.
NEAR_TIE = 0.1
# Every text is read in windows of this many tokens, each from an empty state.
WINDOW = 512
# Logits held at once; three arrays of this many floats.
_LOGITS = 1 << 24
_VERSION = "1"


@dataclass(frozen=True)
class Fidelity:
    """Distance of a quantised model to its float original.

    Attributes:
      positions: Positions compared.
      kl: Mean KL(float ‖ quantised) in nats.
      kl_p99: Its 99th percentile.
      top1: Share of positions with the same best token.
      top1_low: Lower end of its 95 % Wilson interval.
      top1_high: Upper end.
      near_ties: Positions where the float model's two best are less than 0.1 nat apart.
      top1_clear: Agreement where they are not.
      perplexity: Of the quantised model on the text.
      perplexity_float: Of the float model.
      text: SHA-256 of the text's tokens.
    """

    positions: int
    kl: float
    kl_p99: float
    top1: float
    top1_low: float
    top1_high: float
    near_ties: int
    top1_clear: float
    perplexity: float
    perplexity_float: float
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the figures as manifests keep them."""
        return asdict(self)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927)."""
    z = 1.959964
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def fidelity_tokens(tokenizer_json: str, limit: int | None = None) -> list[int]:
    """Return the tokens of the owned text."""
    text = (resources.files("ferrule_convert.texts") / "fidelity.txt").read_text(encoding="utf-8")
    ids = encode(load(tokenizer_json, "checkpoint"), text, "checkpoint")
    return ids[:limit] if limit else ids


def _windows(tokens: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(tokens), WINDOW):
        yield tokens[start : start + WINDOW]


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).hexdigest()


def reference_hidden(identity: str, graph: Graph, tokens: list[int]) -> Array:
    """Return the float model's hidden states over the text, [tokens, hidden]; computed once, then cached.

    Args:
      identity: Of the checkpoint: its `sha256()`, which names the cached file.
      graph: Without schemes.
      tokens: Of the text.
    """
    key = hashlib.sha256(f"{_VERSION} {identity} {_digest(tokens)}".encode()).hexdigest()
    path = cache_folder() / "reference" / f"{key}.npy"
    try:
        known: Array = np.load(path)
        if known.shape == (len(tokens), graph.hidden) and known.dtype == np.float32 and np.isfinite(known).all():
            return known
    except (OSError, ValueError, EOFError):
        pass  # not there, or damaged: compute it
    hidden = np.concatenate([interpret(graph, window) for window in _windows(tokens)])
    beside = path.with_suffix(f".{os.getpid()}.npy")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(beside, hidden)
        beside.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return hidden


def _shift(logits: Array) -> tuple[Array, Array, Array]:
    """Return logits less their maximum (in place), their exponentials, and the logarithm of those's sum, [n, 1]."""
    logits -= logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    return logits, exponentials, np.log(exponentials.sum(axis=1, keepdims=True))


@dataclass
class _Sums:
    kl: list[Array]
    same: list[NDArray[np.bool_]]
    near: list[NDArray[np.bool_]]
    surprise: float = 0.0
    surprise_float: float = 0.0


def compare(
    tokens: list[int],
    reference: Array,
    hidden: Array,
    graph: Graph,
    logits_of: Callable[[Array], Array],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Fidelity:
    """Compare a model with the float model over a text.

    Args:
      tokens: Of the text.
      reference: The float model's hidden states, [tokens, hidden].
      hidden: The other model's, [tokens, hidden].
      graph: Without schemes; its head turns the reference into logits.
      logits_of: The other model's head.
      progress: Told how many positions are done.
    """
    sums = _Sums([], [], [])
    block, done = max(16, _LOGITS // graph.head.shape[0]), 0
    for window in _windows(tokens):
        for start in range(0, len(window), block):
            stop = min(start + block, len(window))
            theirs, weights, their_sum = _shift(head_logits(graph, reference[done + start : done + stop]))
            ours, _, our_sum = _shift(logits_of(hidden[done + start : done + stop]))
            sums.same.append(theirs.argmax(axis=1) == ours.argmax(axis=1))
            best = np.partition(theirs, -2, axis=1)[:, -2:]
            sums.near.append(best[:, 1] - best[:, 0] < NEAR_TIE)
            following = np.array(window[start + 1 : stop + 1])
            places = np.arange(len(following))
            sums.surprise_float -= float((theirs[places, following] - their_sum[places, 0]).sum())
            sums.surprise -= float((ours[places, following] - our_sum[places, 0]).sum())
            # KL = Σ p (log p - log q), with both logarithms as shifted logits less the logarithm of their sum.
            theirs -= ours
            weights *= theirs
            sums.kl.append((weights.sum(axis=1, keepdims=True) / np.exp(their_sum) - their_sum + our_sum)[:, 0])
        done += len(window)
        progress(done, len(tokens))
    kl = np.concatenate(sums.kl).astype(np.float64)
    same, near = np.concatenate(sums.same), np.concatenate(sums.near)
    predicted = len(tokens) - len(list(_windows(tokens)))
    low, high = wilson(int(same.sum()), len(same))
    return Fidelity(
        positions=len(tokens),
        # Never negative but for rounding.
        kl=max(0.0, float(kl.mean())),
        kl_p99=float(np.percentile(kl, 99)),
        top1=float(same.mean()),
        top1_low=low,
        top1_high=high,
        near_ties=int(near.sum()),
        top1_clear=float(same[~near].mean()) if (~near).any() else 1.0,
        perplexity=math.exp(sums.surprise / predicted),
        perplexity_float=math.exp(sums.surprise_float / predicted),
        text=_digest(tokens),
    )
