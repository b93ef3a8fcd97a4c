"""The intermediate form: a small graph of *semantic* operations, the same for every model family and executor.

A node has one output, called by the node's name. Values are float32, shaped [tokens, features]; the batch is always one
conversation. Weights stay where they are until a format asks for their rows, so a graph costs kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .schemes import Packed, Scheme, dequantise

__all__ = [
    "GLU",
    "INPUT",
    "Activation",
    "Add",
    "Attention",
    "CausalConv",
    "Decay",
    "DeltaNet",
    "Graph",
    "Integers",
    "Linear",
    "Node",
    "RMSNorm",
    "Rope",
    "RopeTable",
    "Rows",
    "Scale",
    "Sigmoid",
    "Slice",
    "Take",
    "Weight",
    "widths",
]

# Reads rows [start, stop) of a matrix (or the elements of a vector) as float32, from wherever they are stored.
Rows = Callable[[int, int], NDArray[np.float32]]

INPUT = "embeddings"
Activation = Literal["silu", "sigmoid", "gelu_tanh"]

# Weights that are read, quantised or multiplied by at once: twice as fast as four times as many (measured).
_BLOCK = 1 << 18


@dataclass(frozen=True, eq=False)
class Integers:
    """Reads a matrix that its checkpoint holds as integers; called as `Rows`, it gives the floats that they stand for.

    As a weight's `rows` it says that these are the weight's values: a reader put around it has no integers to keep.

    Attributes:
      scheme: The source's bits, group and zero points; its method is what the source calls itself.
      packed: Reads rows [start, stop) in MatMulNBits' layout, columns in the order in which they share scales.
      order: Reads which column each stored one is (act-order), or None where they stand in their places; None itself
        where the source has no such order. Lazy, since it lies among the weights.
    """

    scheme: Scheme
    packed: Callable[[int, int], Packed]
    order: Callable[[], NDArray[np.int64] | None] | None = None

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        """Read rows [start, stop) as float32, columns in their places."""
        stored, index = dequantise(self.packed(start, stop), self.scheme), self.index()
        if index is None:
            return stored
        rows = np.empty_like(stored)
        rows[:, index] = stored
        return rows

    def index(self) -> NDArray[np.int64] | None:
        """Read which column each stored one is, or None where they stand in their places."""
        return self.order() if self.order else None

    def take(self, index: NDArray[np.int64]) -> Integers:
        """Return chosen rows, in the order of the index."""

        def packed(start: int, stop: int) -> Packed:
            wanted = index[start:stop]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            block, pick = self.packed(low, high), wanted - low
            zeros = None if block.zeros is None else block.zeros[pick]
            return Packed(block.values[pick], block.scales[pick], zeros)

        return replace(self, packed=packed)

    def as_stored(self) -> Integers:
        """Return the same with the columns as they are stored: for an input whose features were brought in order."""
        return replace(self, order=None)


@dataclass(frozen=True)
class Weight:
    """A tensor of the model, not yet read.

    Attributes:
      name: Where it stands in the model, such as `layers.3.attention.q`.
      shape: [rows, columns] of a matrix, [elements] of a vector, [channels, 1, kernel] of filters.
      rows: Reads a block of it.
      stored: The source's own number format, such as `BF16` or `Q4_1`.
      scheme: How it will be quantised; None keeps float32.
      lost: Why the integers that the source holds are of no use, or None where it holds floats or `integers`.
    """

    name: str
    shape: tuple[int, ...]
    rows: Rows
    stored: str
    scheme: Scheme | None = None
    lost: str | None = None

    @property
    def integers(self) -> Integers | None:
        """The source's own integers, or None where it holds none or the values are others by now."""
        return self.rows if isinstance(self.rows, Integers) else None

    def changed(self, rows: Rows, why: str) -> Weight:
        """Return the weight with other values; integers of the source, if it has any, are lost, and it says why."""
        return replace(self, rows=rows, lost=why if self.integers else self.lost)

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def stored_bytes(self) -> int:
        """Bytes that a bundle will store for it: integers, scales and zero points, or float32."""
        if self.scheme is None:
            return 4 * self.count
        return self.scheme.bytes_for(self.shape[0], self.shape[1])

    def all(self) -> NDArray[np.float32]:
        """Read the whole tensor."""
        return self.rows(0, self.shape[0])

    def spans(self, first: int = 0, last: int | None = None, *, elements: int = _BLOCK) -> Iterator[tuple[int, int]]:
        """Cut rows [first, last), or all, into blocks of about `elements`: (first row, row behind the last)."""
        stop = self.shape[0] if last is None else last
        step = max(1, elements // max(1, self.count // self.shape[0]))
        for start in range(first, stop, step):
            yield start, min(start + step, stop)


@dataclass(frozen=True)
class Node:
    """One operation. Its output has its name."""

    name: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        raise NotImplementedError

    @property
    def weights(self) -> dict[str, Weight]:
        """Its weights, by the field that holds them."""
        return {key: value for key, value in vars(self).items() if isinstance(value, Weight)}


@dataclass(frozen=True)
class RMSNorm(Node):
    """y = x / sqrt(mean(x²) + epsilon) · weight (Zhang & Sennrich 2019).

    With several heads each is normed by itself, all with the same weight of one head's length. An L2 norm,
    x / sqrt(sum(x²) + epsilon), is this with the weight size^-0.5 and epsilon / size.
    """

    x: str
    weight: Weight
    epsilon: float
    heads: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class Linear(Node):
    """y = x · weightᵀ + bias; weight is [out, in]."""

    x: str
    weight: Weight
    bias: Weight | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class RopeTable:
    """Angles of the rotary embedding: position p turns pair i by p · frequencies[i] (Su et al. 2021).

    Attributes:
      frequencies: Radians per position, one per pair of features, after any scaling.
      magnitude: What turned features are multiplied by (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0

    def cos_sin(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return magnitude · cos and magnitude · sin of positions [start, stop): float32 [positions, pairs]."""
        angles = np.outer(np.arange(start, stop, dtype=np.float64), np.array(self.frequencies, dtype=np.float64))
        return (
            (np.cos(angles) * self.magnitude).astype(np.float32),
            (np.sin(angles) * self.magnitude).astype(np.float32),
        )


@dataclass(frozen=True)
class Rope(Node):
    """Turns feature i and i + pairs of each head by the position's angle (the half-split layout)."""

    x: str
    heads: int
    table: RopeTable

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class Attention(Node):
    """Causal grouped-query attention over everything fed so far; remembers keys and values by its name.

    Query head h reads key/value head h // (heads // kv_heads) (Ainslie et al. 2023). Scores are scaled by `scale`.
    With a window only the last `window` tokens are attended to, the query's own included (Beltagy et al. 2020).
    """

    q: str
    k: str
    v: str
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.q, self.k, self.v)


@dataclass(frozen=True)
class GLU(Node):
    """y = activation(gate) · up (Shazeer 2020).

    `gelu_tanh` is Gelu's approximation x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Hendrycks & Gimpel 2016).
    """

    gate: str
    up: str
    activation: Activation = "silu"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.gate, self.up)


@dataclass(frozen=True)
class Add(Node):
    """y = a + b."""

    a: str
    b: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.a, self.b)


@dataclass(frozen=True)
class Scale(Node):
    """y = factor · x."""

    x: str
    factor: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class Slice(Node):
    """y = features [start, stop) of x."""

    x: str
    start: int
    stop: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True, eq=False)
class Take(Node):
    """y[:, i] = x[:, index[i]]: features in another order."""

    x: str
    index: NDArray[np.int64]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class CausalConv(Node):
    """y = silu of a convolution over time, each feature with its own kernel; remembers the last inputs.

    y[t, c] = silu(Σ_j weight[c, 0, j] · x[t - (kernel - 1) + j, c]), with zeros before the first token.
    """

    x: str
    weight: Weight

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class Sigmoid(Node):
    """y = 1 / (1 + exp(-x))."""

    x: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class Decay(Node):
    """y = rate · softplus(x + bias): the logarithm of how much a state keeps, at most 0 (Gu & Dao 2023)."""

    x: str
    bias: Weight
    rate: Weight

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.x,)


@dataclass(frozen=True)
class DeltaNet(Node):
    """The gated delta rule (Yang et al. 2024); remembers one [key_size, value_size] state S for each head.

    S ← exp(decay) · S, then S ← S + k ⊗ beta · (v - Sᵀ k), then y = Sᵀ q · key_size^-0.5.
    """

    q: str
    k: str
    v: str
    decay: str
    beta: str
    heads: int
    key_size: int
    value_size: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads."""
        return (self.q, self.k, self.v, self.decay, self.beta)


@dataclass(frozen=True)
class Graph:
    """A model: from embedded tokens to the last hidden states; table and head apart.

    Attributes:
      family: The model family, a file in `archs/`.
      nodes: In the order in which they run; the last one's output is the result.
      embedding: [vocabulary, hidden].
      head: [vocabulary, hidden]; the embedding itself where they are tied.
      hidden: Features of the residual stream.
      context: Positions the model was trained for.
      facts: Sizes for people and manifests: layers, heads, kv_heads, head_dim, hidden, vocabulary.
    """

    family: str
    nodes: tuple[Node, ...]
    embedding: Weight
    head: Weight
    hidden: int
    context: int
    facts: dict[str, Any]

    @property
    def tied(self) -> bool:
        """Whether the head reads the embedding's own table."""
        return self.head.name == self.embedding.name

    def weights(self) -> Iterator[Weight]:
        """Yield every weight once, nodes' first, then embedding and head."""
        for node in self.nodes:
            yield from node.weights.values()
        yield self.embedding
        if not self.tied:
            yield self.head

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(weight.count for weight in self.weights())

    def map_weights(self, change: Callable[[Weight], Weight]) -> Graph:
        """Return the graph with every weight changed by a function."""

        def changed(node: Node) -> Node:
            fields: dict[str, Any] = {key: change(weight) for key, weight in node.weights.items()}
            return replace(node, **fields)

        nodes = tuple(changed(node) for node in self.nodes)
        return replace(self, nodes=nodes, embedding=change(self.embedding), head=change(self.head))


def widths(graph: Graph) -> dict[str, int]:
    """Return how many features each value has, the input's included."""
    found: dict[str, int] = {INPUT: graph.hidden}
    for node in graph.nodes:
        match node:
            case Linear():
                found[node.name] = node.weight.shape[0]
            case Attention():
                found[node.name] = node.heads * node.head_size
            case DeltaNet():
                found[node.name] = node.heads * node.value_size
            case Slice():
                found[node.name] = node.stop - node.start
            case Take():
                found[node.name] = len(node.index)
            case _:
                found[node.name] = found[node.inputs[0]]
    return found
