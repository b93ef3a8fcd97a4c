"""How far a bundle is from the float model: KL divergence, top-1 agreement, perplexity, over a text that we own."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.errors import BundleError

from .abreast import abreast
from .graph import Graph
from .interpret import head_logits

__all__ = ["Fidelity", "compare", "digest", "fidelity_windows", "wilson"]

Array = NDArray[np.float32]
# Gives logits [n, ids] of hidden states [n, hidden].
LogitsOf = Callable[[Array], Array]

# Positions whose two best logits of the float model lie closer than this (nats) are near ties: either answer is fair.
NEAR_TIE = 0.1
# Every text is read in windows of this many tokens, each from an empty state.
WINDOW = 512
# Positions whose logits of one range are worked on at once: few enough for the caches.
_AT_ONCE = 128
# Products of a pass through the float model at conversion: 3 s of two cores with AVX-512.
_WORK = 420_000_000_000
# Positions that a comparison has at least.
_FEWEST = 512
# Of a 95 % interval.
_Z = 1.959964


@dataclass(frozen=True)
class Fidelity:
    """Distance of a quantised model to its float original.

    Attributes:
      positions: Positions compared.
      kl: Mean KL(float ‖ quantised) in nats.
      kl_low: Lower end of its 95 % interval, positions taken as independent.
      kl_high: Upper end.
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
    kl_low: float
    kl_high: float
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
    z = _Z
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def fidelity_windows(encode: Callable[[str], list[int]], context: int, parameters: int | None) -> list[list[int]]:
    """Return the owned text in conversations that each start from an empty state.

    A conversion of a large model takes some windows only, from all over the text: what they cost grows with the model.
    The choice is by size alone, so every recipe of one model is compared over the same positions.

    Args:
      encode: Turns a text into token ids.
      context: Positions of the bundle; no window is longer.
      parameters: Of the model, which is being converted; None takes the whole text.

    Returns:
      Token ids by window.
    """
    text = (resources.files("ferrule_convert.texts") / "fidelity.txt").read_text(encoding="utf-8")
    tokens = encode(text)
    size = min(WINDOW, context)
    every = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    if parameters is None or (kept := max(-(-_FEWEST // size), _WORK // (parameters * size))) >= len(every):
        return every
    return [every[index * len(every) // kept] for index in range(kept)]


def digest(text: Sequence[Sequence[int]]) -> str:
    """Return the identity of a text: the SHA-256 of its tokens and how they are cut."""
    return hashlib.sha256(json.dumps([list(window) for window in text]).encode()).hexdigest()


class _Logits:
    """What must be known of one model's logits, gathered as the vocabulary comes by.

    Attributes:
      best: Ids of the largest logit so far, [positions].
      top: That logit.
      second: The next one.
      sum: Of exp(logit - top), float64.
      following: The logit of the token that follows.
    """

    def __init__(self, positions: int) -> None:
        self.best = np.zeros(positions, dtype=np.int64)
        self.top, self.second = (np.full(positions, -np.inf, dtype=np.float32) for _ in range(2))
        self.sum = np.zeros(positions)
        self.following = np.full(positions, np.nan, dtype=np.float32)

    def add(self, of: slice, first: int, logits: Array, following: NDArray[np.int64]) -> tuple[Array, Array]:
        """Take logits of ids from `first` on; return exp(logit - top) and what earlier sums must be multiplied by."""
        places = np.arange(len(logits))
        best = logits.argmax(axis=1)
        top = logits[places, best]
        logits[places, best] = -np.inf
        second = logits.max(axis=1)
        logits[places, best] = top
        known = self.top[of]
        # Of an earlier range and this one, the two best.
        self.second[of] = np.maximum(np.minimum(known, top), np.maximum(self.second[of], second))
        self.best[of] = np.where(top > known, first + best, self.best[of])
        now = np.maximum(known, top)
        scale = np.exp(known - now)
        self.top[of] = now
        weights = np.exp(logits - now[:, None])
        self.sum[of] = self.sum[of] * scale + weights.sum(axis=1, dtype=np.float64)
        inside = (following >= first) & (following < first + logits.shape[1])
        self.following[of][inside] = logits[places[inside], following[inside] - first]
        return weights, scale

    @property
    def log_sum(self) -> NDArray[np.float64]:
        """The logarithm of the sum of exponentials, [positions]."""
        return self.top.astype(np.float64) + np.log(self.sum)


def compare(
    text: Sequence[Sequence[int]],
    reference: Array,
    hidden: Array,
    graph: Graph,
    parts: Iterable[tuple[int, int, LogitsOf]],
) -> Fidelity:
    """Compare a model with the float model over a text, a range of the vocabulary at a time.

    Args:
      text: Tokens by window.
      reference: The float model's hidden states, [tokens, hidden].
      hidden: The other model's, [tokens, hidden].
      graph: Without schemes; its head turns the reference into logits.
      parts: The other model's head: first id, id behind the last, and what gives the logits of those ids; in order.

    Raises:
      BundleError: Logits that are not finite.
    """
    count = sum(map(len, text))
    following = np.concatenate([[*window[1:], -1] for window in text])
    theirs, ours, moved = _Logits(count), _Logits(count), np.zeros(count)

    def fold(part: tuple[slice, int, Array, Array]) -> None:
        of, first, a, b = part
        weights, scale = theirs.add(of, first, a, following[of])
        ours.add(of, first, b, following[of])
        weights *= a - b
        moved[of] = moved[of] * scale + weights.sum(axis=1, dtype=np.float64)

    for first, stop, logits_of in parts:
        a, b = head_logits(graph, reference, first, stop), logits_of(hidden)
        cuts = [slice(at, at + _AT_ONCE) for at in range(0, count, _AT_ONCE)]
        for _ in abreast(fold, [(of, first, a[of], b[of]) for of in cuts]):
            pass
    # KL = Σ p (log p - log q), with both logarithms as logits less the logarithm of their sum.
    kl = moved / theirs.sum - theirs.log_sum + ours.log_sum
    if bad := int((~np.isfinite(kl)).sum()):
        raise BundleError(f"at {bad} of {len(kl)} positions the logits are not finite", hint="use more bits")
    same, near = theirs.best == ours.best, theirs.top - theirs.second < NEAR_TIE
    known = following >= 0
    spread = _Z * float(kl.std(ddof=1)) / math.sqrt(count)
    low, high = wilson(int(same.sum()), len(same))
    return Fidelity(
        positions=count,
        # Never negative but for rounding.
        kl=max(0.0, float(kl.mean())),
        kl_low=max(0.0, float(kl.mean() - spread)),
        kl_high=max(0.0, float(kl.mean() + spread)),
        kl_p99=float(np.percentile(kl, 99)),
        top1=float(same.mean()),
        top1_low=low,
        top1_high=high,
        near_ties=int(near.sum()),
        top1_clear=float(same[~near].mean()) if (~near).any() else 1.0,
        perplexity=math.exp(float((ours.log_sum - ours.following)[known].mean())),
        perplexity_float=math.exp(float((theirs.log_sum - theirs.following)[known].mean())),
        text=digest(text),
    )
