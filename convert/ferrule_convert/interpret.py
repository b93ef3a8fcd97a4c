"""The graph, executed in plain numpy: the reference for every format.

One node at a time, one weight at a time: memory holds one layer's activations and one weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .abreast import abreast
from .graph import (
    GLU,
    INPUT,
    Activation,
    Add,
    Attention,
    CausalConv,
    Decay,
    DeltaNet,
    Graph,
    Linear,
    Node,
    RMSNorm,
    Rope,
    Scale,
    Sigmoid,
    Slice,
    Take,
    Weight,
)
from .kept import packed_rows
from .schemes import dequantise

__all__ = ["Memory", "embed", "head_logits", "interpret", "rotate", "run_nodes", "weight_rows"]

Array = NDArray[np.float32]

# Tokens that the delta rule and the convolution take at once: the fastest of 8 to 128 for the first (measured).
_CHUNK = 32


@dataclass
class Memory:
    """What a conversation leaves behind.

    Attributes:
      position: Tokens so far.
      keys: By attention, [tokens, kv_heads, head_size].
      values: The same of values.
      inputs: By convolution, the last kernel - 1 inputs, [kernel - 1, features].
      states: By delta rule, [heads, key_size, value_size].
    """

    position: int = 0
    keys: dict[str, Array] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)


def weight_rows(weight: Weight, start: int, stop: int) -> Array:
    """Read rows of a weight as its scheme leaves them: what its integers stand for, or as they are."""
    if weight.scheme is None:
        return weight.rows(start, stop)
    return dequantise(packed_rows(weight, weight.scheme, start, stop), weight.scheme)


def _times(x: Array, weight: Weight, first: int, last: int) -> Array:
    """Return x · rowsᵀ for rows [first, last) of a weight as its scheme leaves it."""
    y = np.empty((len(x), last - first), dtype=np.float32)

    def multiply(span: tuple[int, int]) -> None:
        y[:, span[0] - first : span[1] - first] = x @ weight_rows(weight, *span).T

    for _ in abreast(multiply, weight.spans(first, last)):
        pass
    return y


def _apply(work: tuple[Node, dict[str, Array], Memory]) -> Array:
    # exp of a large negative gate overflows to inf, and 1 / inf is the right 0.
    with np.errstate(over="ignore"):
        return _run(*work)


@singledispatch
def _run(node: Node, values: dict[str, Array], memory: Memory) -> Array:
    raise NotImplementedError(f"{type(node).__name__} has no numpy form")


@_run.register
def _(node: RMSNorm, values: dict[str, Array], memory: Memory) -> Array:
    x = values[node.x].reshape(len(values[node.x]), node.heads, -1)
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    normed = x / np.sqrt(mean + np.float32(node.epsilon)) * node.weight.all()
    return np.asarray(normed, dtype=np.float32).reshape(values[node.x].shape)


def _linear(node: Linear, x: Array) -> Array:
    y = _times(x, node.weight, 0, node.weight.shape[0])
    return y if node.bias is None else y + node.bias.all()


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (i, i + pairs) of each head: x [tokens, heads, size], cos and sin [tokens, pairs]."""
    pairs = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


@_run.register
def _(node: Rope, values: dict[str, Array], memory: Memory) -> Array:
    x = values[node.x]
    cos, sin = node.table.cos_sin(memory.position, memory.position + len(x))
    return rotate(x.reshape(len(x), node.heads, -1), cos, sin).reshape(x.shape)


@_run.register
def _(node: Attention, values: dict[str, Array], memory: Memory) -> Array:
    shape = (-1, node.kv_heads, node.head_size)
    new_k, new_v = values[node.k].reshape(shape), values[node.v].reshape(shape)
    k = memory.keys[node.name] = np.concatenate([memory.keys.get(node.name, new_k[:0]), new_k])
    v = memory.values[node.name] = np.concatenate([memory.values.get(node.name, new_v[:0]), new_v])
    q = values[node.q].reshape(-1, node.heads, node.head_size)
    past = len(k) - len(q)
    age = past + np.arange(len(q))[:, None] - np.arange(len(k))[None, :]
    hidden = (age < 0) | (age >= (node.window or np.inf))
    out = np.empty_like(q)
    for head in range(node.heads):
        of = head // (node.heads // node.kv_heads)
        scores = q[:, head] @ k[:, of].T * np.float32(node.scale)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, of]
    return out.reshape(len(q), -1)


_ACTIVATIONS: dict[Activation, Callable[[Array], NDArray[Any]]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3))),
}


@_run.register
def _(node: GLU, values: dict[str, Array], memory: Memory) -> Array:
    return np.asarray(_ACTIVATIONS[node.activation](values[node.gate]) * values[node.up], dtype=np.float32)


@_run.register
def _(node: Add, values: dict[str, Array], memory: Memory) -> Array:
    return values[node.a] + values[node.b]


@_run.register
def _(node: Scale, values: dict[str, Array], memory: Memory) -> Array:
    return values[node.x] * np.float32(node.factor)


@_run.register
def _(node: Slice, values: dict[str, Array], memory: Memory) -> Array:
    return values[node.x][:, node.start : node.stop]


@_run.register
def _(node: Take, values: dict[str, Array], memory: Memory) -> Array:
    return values[node.x][:, node.index]


@_run.register
def _(node: CausalConv, values: dict[str, Array], memory: Memory) -> Array:
    kernel = np.ascontiguousarray(node.weight.all()[:, 0].T)
    before = memory.inputs.get(node.name, np.zeros((len(kernel) - 1, kernel.shape[1]), dtype=np.float32))
    x = np.concatenate([before, values[node.x]])
    # A copy, or every input would be kept with the last.
    memory.inputs[node.name] = x[-len(before) :].copy()
    out = np.empty_like(values[node.x])
    # A few tokens at once, which stay in the caches.
    for start in range(0, len(out), _CHUNK):
        y = out[start : start + _CHUNK]
        np.multiply(x[start : start + len(y)], kernel[0], out=y)
        for j in range(1, len(kernel)):
            y += x[start + j : start + j + len(y)] * kernel[j]
        y /= 1 + np.exp(-y)
    return out


@_run.register
def _(node: Sigmoid, values: dict[str, Array], memory: Memory) -> Array:
    return np.asarray(1 / (1 + np.exp(-values[node.x])), dtype=np.float32)


@_run.register
def _(node: Decay, values: dict[str, Array], memory: Memory) -> Array:
    return np.asarray(node.rate.all() * np.logaddexp(0, values[node.x] + node.bias.all()), dtype=np.float32)


@_run.register
def _(node: DeltaNet, values: dict[str, Array], memory: Memory) -> Array:
    count = len(values[node.q])
    q, k = (_by_head(values[name], node.heads) for name in (node.q, node.k))
    v, decay, beta = (_by_head(values[name], node.heads) for name in (node.v, node.decay, node.beta))
    empty = np.zeros((node.heads, node.key_size, node.value_size), dtype=np.float32)
    state, out = memory.states.get(node.name, empty), np.empty_like(v)
    for start in range(0, count, _CHUNK):
        of = slice(start, start + _CHUNK)
        out[:, of], state = _delta_chunk(q[:, of], k[:, of], v[:, of], decay[:, of], beta[:, of], state)
    memory.states[node.name] = state
    return (out * np.float32(node.key_size**-0.5)).swapaxes(0, 1).reshape(count, -1)


def _by_head(x: Array, heads: int) -> Array:
    """Return [tokens, heads · size] as [heads, tokens, size]."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def _delta_chunk(q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """Apply the gated delta rule to a few tokens at once, exactly (Yang et al. 2024, section 3.3).

    Token i writes u[i] = beta[i] · (v[i] - what the state holds for k[i]), and the state holds what tokens before it
    wrote: one triangular system for all u of a chunk.

    Args:
      q: [heads, tokens, key_size].
      k: The same.
      v: [heads, tokens, value_size].
      decay: Logarithms, [heads, tokens, 1].
      beta: [heads, tokens, 1].
      state: [heads, key_size, value_size].

    Returns:
      Unscaled outputs, [heads, tokens, value_size], and the next state.
    """
    kept = np.cumsum(decay, axis=1)
    # What is left at token i of what token j wrote; tokens behind i are cut off below.
    left = np.exp(np.minimum(kept - kept.swapaxes(1, 2), 0))
    since = np.exp(kept)
    system = np.tril(k @ k.swapaxes(1, 2) * left * beta, -1) + np.eye(k.shape[1], dtype=np.float32)
    writes = np.linalg.solve(system, beta * (v - (k * since) @ state))
    out = (q * since) @ state + np.tril(q @ k.swapaxes(1, 2) * left) @ writes
    return out, state * since[:, -1:] + (k * np.exp(kept[:, -1:] - kept)).swapaxes(1, 2) @ writes


def embed(graph: Graph, tokens: Sequence[int]) -> Array:
    """Return the embedded tokens, [tokens, hidden]."""
    return np.concatenate([weight_rows(graph.embedding, token, token + 1) for token in tokens])


def head_logits(graph: Graph, hidden: Array, first: int = 0, last: int | None = None) -> Array:
    """Return logits [tokens, ids] of hidden states [tokens, hidden], for ids [first, last) or for all."""
    return _times(hidden, graph.head, first, graph.head.shape[0] if last is None else last)


def interpret(graph: Graph, tokens: list[int], memory: Memory | None = None) -> Array:
    """Run tokens through the graph behind what the memory holds.

    Args:
      graph: With or without schemes; quantised weights are used as their integers stand.
      tokens: Token ids.
      memory: Changed in place; None starts afresh.

    Returns:
      Hidden states after the final norm, float32 [tokens, hidden].
    """
    memory = Memory() if memory is None else memory
    return run_nodes(graph.nodes, INPUT, [embed(graph, tokens)], [memory])[0]


def run_nodes(nodes: Sequence[Node], start: str, rows: Sequence[Array], memories: Sequence[Memory]) -> list[Array]:
    """Run consecutive nodes over several conversations at once; each weight is read once for all.

    Args:
      nodes: In order; the last one's value is the result.
      start: The value that the rows are.
      rows: By conversation, [tokens, features].
      memories: By conversation; changed in place.

    Returns:
      By conversation, [tokens, features].
    """
    values: list[dict[str, Array]] = [{start: one} for one in rows]
    last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
    ends = np.cumsum([len(one) for one in rows])[:-1]
    for index, node in enumerate(nodes):
        if isinstance(node, Linear):
            together = _linear(node, np.concatenate([known[node.x] for known in values]))
            results = np.split(together, ends)
        else:
            work = [(node, known, memory) for known, memory in zip(values, memories, strict=True)]
            results = list(abreast(_apply, work)) if len(work) > 1 else [_apply(work[0])]
        for known, result in zip(values, results, strict=True):
            known[node.name] = result
            for name in [n for n in node.inputs if last_use[n] == index]:
                known.pop(name, None)
    for one, memory in zip(rows, memories, strict=True):
        memory.position += len(one)
    return [known[nodes[-1].name] for known in values]
