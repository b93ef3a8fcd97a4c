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
    Weight,
)
from .schemes import dequantise, quantise

__all__ = ["Memory", "embed", "head_logits", "interpret", "rotate", "run_nodes", "weight_rows"]

Array = NDArray[np.float32]


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
    """Read rows of a weight as its scheme leaves them: quantised and back, or as they are."""
    rows = weight.rows(start, stop)
    return rows if weight.scheme is None else dequantise(quantise(rows, weight.scheme), weight.scheme)


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
    y = np.empty((len(x), node.weight.shape[0]), dtype=np.float32)
    for start, block in node.weight.blocks():
        rows = block if node.weight.scheme is None else weight_rows(node.weight, start, start + len(block))
        y[:, start : start + len(rows)] = x @ rows.T
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
def _(node: CausalConv, values: dict[str, Array], memory: Memory) -> Array:
    kernel = node.weight.all()[:, 0]
    before = memory.inputs.get(node.name, np.zeros((kernel.shape[1] - 1, kernel.shape[0]), dtype=np.float32))
    x = np.concatenate([before, values[node.x]])
    memory.inputs[node.name] = x[-len(before) :]
    y = sum(x[j : j + len(values[node.x])] * kernel[:, j] for j in range(kernel.shape[1]))
    return np.asarray(y / (1 + np.exp(-np.asarray(y))), dtype=np.float32)


@_run.register
def _(node: Sigmoid, values: dict[str, Array], memory: Memory) -> Array:
    return np.asarray(1 / (1 + np.exp(-values[node.x])), dtype=np.float32)


@_run.register
def _(node: Decay, values: dict[str, Array], memory: Memory) -> Array:
    return np.asarray(node.rate.all() * np.logaddexp(0, values[node.x] + node.bias.all()), dtype=np.float32)


@_run.register
def _(node: DeltaNet, values: dict[str, Array], memory: Memory) -> Array:
    count = len(values[node.q])
    q, k = (values[name].reshape(count, node.heads, node.key_size) for name in (node.q, node.k))
    v = values[node.v].reshape(count, node.heads, node.value_size)
    keep, beta = np.exp(values[node.decay]), values[node.beta]
    empty = np.zeros((node.heads, node.key_size, node.value_size), dtype=np.float32)
    state = memory.states.get(node.name, empty)
    out = np.empty_like(v)
    for t in range(count):
        state = state * keep[t][:, None, None]
        known = np.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * ((v[t] - known) * beta[t][:, None])[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    memory.states[node.name] = state
    return (out * np.float32(node.key_size**-0.5)).reshape(count, -1)


def embed(graph: Graph, tokens: list[int]) -> Array:
    """Return the embedded tokens, [tokens, hidden]."""
    return np.concatenate([weight_rows(graph.embedding, token, token + 1) for token in tokens])


def head_logits(graph: Graph, hidden: Array) -> Array:
    """Return logits [tokens, vocabulary] of hidden states [tokens, hidden]."""
    logits = np.empty((len(hidden), graph.head.shape[0]), dtype=np.float32)
    for start, block in graph.head.blocks():
        rows = block if graph.head.scheme is None else weight_rows(graph.head, start, start + len(block))
        logits[:, start : start + len(rows)] = hidden @ rows.T
    return logits


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
            # exp of a large negative gate overflows to inf, and 1 / inf is the right 0.
            with np.errstate(over="ignore"):
                results = [_run(node, known, memory) for known, memory in zip(values, memories, strict=True)]
        for known, result in zip(values, results, strict=True):
            known[node.name] = result
            for name in [n for n in node.inputs if last_use[n] == index]:
                known.pop(name, None)
    for one, memory in zip(rows, memories, strict=True):
        memory.position += len(one)
    return [known[nodes[-1].name] for known in values]
