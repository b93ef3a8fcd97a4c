"""ONNX for onnxruntime's CPU kernels: MatMulNBits, GroupQueryAttention over a shared buffer, external weights.

The graph takes embedded tokens and ends at the last hidden state. Keys and values live in buffers of the whole context
that enter as `past.*` and leave, being the same memory, as `present.*`; recurrent states leave in other memory than
they entered. Embedding and head lie in a file of their own, once where they are tied; `head.onnx` is the
whole-vocabulary head over the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ferrule_runtime.bundle import Table
from ferrule_runtime.errors import TargetError

from ..graph import (
    GLU,
    INPUT,
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
    RopeTable,
    Scale,
    Sigmoid,
    Slice,
    Take,
    Weight,
)
from . import Exported
from ._binary import BinaryFile
from ._onnx_memory import facts as memory_facts

__all__ = ["export", "memory_facts"]

_FLOAT, _UINT8, _INT32 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT32
# RMSNormalization entered the standard at opset 23; onnxruntime 1.31 and newer have its CPU kernel.
_OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
_IR_VERSION = 11
# What GroupQueryAttention asks of a rotary table (its own message).
_PAIRS = 8
# Behind the last of however many: what Slice takes for "to the end".
_END = np.iinfo(np.int64).max
_MODEL, _HEAD, _WEIGHTS, _TABLE = "model.onnx", "head.onnx", "weights.bin", "embedding.bin"


class _Builder:
    """Collects the nodes and initializers of one ONNX graph, streaming weights into a file."""

    def __init__(self, binary: BinaryFile, accuracy_level: int) -> None:
        self.binary = binary
        self.accuracy_level = accuracy_level
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._known: set[str] = set()

    def op(
        self, kind: str, inputs: list[str], outputs: list[str], name: str, domain: str = "", **attributes: Any
    ) -> None:
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name, domain=domain, **attributes))

    def microsoft(self, kind: str, inputs: list[str], outputs: list[str], name: str, **attributes: Any) -> None:
        self.op(kind, inputs, outputs, name, "com.microsoft", **attributes)

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """Keep a small array inside the graph file; the same name is kept once."""
        if name not in self._known:
            self._known.add(name)
            self.initializers.append(onnx.numpy_helper.from_array(values, name))
        return name

    def external(self, name: str, shape: tuple[int, ...], kind: int, offset: int, length: int) -> str:
        """Refer to bytes of the binary file."""
        tensor = TensorProto(name=name, dims=shape, data_type=kind, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self.binary.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def matrix(self, weight: Weight, x: str, y: str) -> None:
        """Write a weight and the node that multiplies by it."""
        rows, columns = weight.shape
        scheme = weight.scheme
        if scheme is None:
            # MatMul wants [in, out]; one float matrix at a time is transposed in memory.
            offset, length = self.binary.write(np.ascontiguousarray(weight.all().T))
            stored = self.external(f"{weight.name}.weight", (columns, rows), _FLOAT, offset, length)
            self.op("MatMul", [x, stored], [y], weight.name)
            return
        table = self.binary.write_table(weight)
        inputs = [x, *self.quantised(weight, table)]
        self.microsoft(
            "MatMulNBits", inputs, [y], weight.name, K=columns, N=rows, bits=scheme.bits, block_size=scheme.group,
            accuracy_level=self.accuracy_level,
        )  # fmt: skip

    def quantised(self, weight: Weight, table: Table) -> list[str]:
        """Refer to the parts of a quantised matrix that is already in the binary file."""
        groups = table.columns // table.group
        size = table.group * table.bits // 8
        values = (table.rows, groups, size)
        names = [
            self.external(f"{weight.name}.weight", values, _UINT8, table.values, int(np.prod(values))),
            self.external(f"{weight.name}.scales", (table.rows, groups), _FLOAT, table.scales, table.rows * groups * 4),
        ]
        if table.zeros:
            width = (groups * table.bits + 7) // 8
            names.append(
                self.external(f"{weight.name}.zeros", (table.rows, width), _UINT8, table.zeros, table.rows * width)
            )
        return names


class _Graph:
    """Writes the nodes of the intermediate form as ONNX."""

    def __init__(self, graph: Graph, builder: _Builder, context: int) -> None:
        self.builder = builder
        self.context = context
        self.ropes = {node.name: node for node in graph.nodes if isinstance(node, Rope)}
        self.tables: dict[RopeTable, int] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        for node in graph.nodes:
            self.write(node)

    def _source(self, name: str) -> str:
        """Return the value that an attention reads, behind the rotation that it does itself."""
        return self.ropes[name].x if name in self.ropes else name

    @singledispatchmethod
    def write(self, node: Node) -> None:
        raise NotImplementedError(f"{type(node).__name__} has no onnx_cpu form")

    @write.register
    def _(self, node: RMSNorm) -> None:
        scale = self.builder.constant(f"{node.weight.name}.weight", node.weight.all())
        if node.heads == 1:
            self.builder.op("RMSNormalization", [node.x, scale], [node.name], node.name, axis=-1, epsilon=node.epsilon)
            return
        split, normed = f"{node.name}.heads", f"{node.name}.normed"
        by_head = self.builder.constant(f"shape.{node.heads}", np.array([0, 0, node.heads, -1]))
        self.builder.op("Reshape", [node.x, by_head], [split], split)
        self.builder.op("RMSNormalization", [split, scale], [normed], normed, axis=-1, epsilon=node.epsilon)
        flat = self.builder.constant("shape.flat", np.array([0, 0, -1]))
        self.builder.op("Reshape", [normed, flat], [node.name], node.name)

    @write.register
    def _(self, node: Linear) -> None:
        if node.bias is None:
            self.builder.matrix(node.weight, node.x, node.name)
            return
        self.builder.matrix(node.weight, node.x, f"{node.name}.product")
        bias = self.builder.constant(f"{node.name}.bias", node.bias.all())
        self.builder.op("Add", [f"{node.name}.product", bias], [node.name], f"{node.name}.add")

    @write.register
    def _(self, node: Rope) -> None:
        """Nothing: GroupQueryAttention turns queries and keys itself."""

    @write.register
    def _(self, node: Attention) -> None:
        shape = (1, node.kv_heads, "context", node.head_size)
        (past_k, now_k), (past_v, now_v) = (self._state(node.name, kind, shape) for kind in ("key", "value"))
        inputs = [self._source(node.q), self._source(node.k), node.v, past_k, past_v]
        inputs += ["seqlens_k", "total_sequence_length", *self._angles(self.ropes[node.q].table)]
        outputs = [node.name, now_k, now_v]
        # The window bounds what is attended to; the buffer still has every position.
        window = {} if node.window is None else {"local_window_size": node.window}
        self.builder.microsoft(
            "GroupQueryAttention", inputs, outputs, node.name, num_heads=node.heads, kv_num_heads=node.kv_heads,
            scale=node.scale, do_rotary=1, rotary_interleaved=0, **window,
        )  # fmt: skip

    def _angles(self, table: RopeTable) -> list[str]:
        if len(table.frequencies) % _PAIRS:
            raise TargetError(
                f"heads turn {len(table.frequencies)} pairs of features, GroupQueryAttention multiples of {_PAIRS}",
                hint="this form cannot carry the model",
            )
        # Layers that turn alike share one pair of tables.
        number = self.tables.setdefault(table, len(self.tables))
        waves = zip(("cos", "sin"), table.cos_sin(0, self.context), strict=True)
        return [self.builder.constant(f"rotary.{number}.{name}", values) for name, values in waves]

    @write.register
    def _(self, node: GLU) -> None:
        opened = f"{node.name}.{node.activation}"
        match node.activation:
            case "silu":
                self.builder.microsoft("QuickGelu", [node.gate], [opened], opened, alpha=1.0)
            case "sigmoid":
                self.builder.op("Sigmoid", [node.gate], [opened], opened)
            case "gelu_tanh":
                # The standard's; com.microsoft.FastGelu gives the same bits at the same 0.4 ns an element (measured).
                self.builder.op("Gelu", [node.gate], [opened], opened, approximate="tanh")
        self.builder.op("Mul", [opened, node.up], [node.name], node.name)

    @write.register
    def _(self, node: Scale) -> None:
        factor = self.builder.constant(f"{node.name}.factor", np.array(node.factor, dtype=np.float32))
        self.builder.op("Mul", [node.x, factor], [node.name], node.name)

    @write.register
    def _(self, node: Slice) -> None:
        bounds = [self.builder.constant(f"at.{place}", np.array([place])) for place in (node.start, node.stop)]
        last = self.builder.constant("axis.last", np.array([-1]))
        self.builder.op("Slice", [node.x, *bounds, last], [node.name], node.name)

    @write.register
    def _(self, node: Take) -> None:
        index = self.builder.constant(f"{node.name}.index", node.index)
        self.builder.op("Gather", [node.x, index], [node.name], node.name, axis=2)

    @write.register
    def _(self, node: CausalConv) -> None:
        """Write a sum of shifted inputs: CausalConvWithState takes up to nine times as long over 128 tokens."""
        channels, _, kernel = node.weight.shape
        past, present = self._state(node.name, "conv", (1, kernel - 1, channels))
        taps, seen = node.weight.all()[:, 0], f"{node.name}.seen"
        self.builder.op("Concat", [past, node.x], [seen], seen, axis=1)
        # The first shift and the state that is left are the two parts of what was seen. One node makes both: a node for
        # the state alone would be run after all others, and what it is made of kept until then.
        count, parts, total = f"{node.name}.count", f"{node.name}.parts", ""
        self.builder.op("Shape", [node.x], [count], count, start=1, end=2)
        left = self.builder.constant(f"at.{kernel - 1}", np.array([kernel - 1]))
        self.builder.op("Concat", [count, left], [parts], parts, axis=0)
        self.builder.op("Split", [seen, parts], [f"{node.name}.shifted.0", present], f"{node.name}.split", axis=1)
        for tap in range(kernel):
            weight = self.builder.constant(f"{node.name}.tap.{tap}", np.ascontiguousarray(taps[:, tap]))
            shifted = f"{node.name}.shifted.{tap}"
            if tap:
                # All but the last kernel - 1 - tap inputs, from the tap's own on.
                self._rows(seen, shifted, tap, tap - kernel + 1 or _END)
            product = f"{node.name}.product.{tap}"
            self.builder.op("Mul", [shifted, weight], [product], product)
            before, total = total, f"{node.name}.sum.{tap}" if tap else product
            if tap:
                self.builder.op("Add", [before, product], [total], total)
        self.builder.microsoft("QuickGelu", [total], [node.name], node.name, alpha=1.0)

    def _rows(self, x: str, y: str, start: int, stop: int) -> None:
        """Slice tokens [start, stop) of a value [1, tokens, features]; negative ones count from the end."""
        bounds = [self.builder.constant(f"at.{place}", np.array([place])) for place in (start, stop)]
        self.builder.op("Slice", [x, *bounds, self.builder.constant("axis.tokens", np.array([1]))], [y], y)

    @write.register
    def _(self, node: Sigmoid) -> None:
        self.builder.op("Sigmoid", [node.x], [node.name], node.name)

    @write.register
    def _(self, node: Decay) -> None:
        bias = self.builder.constant(f"{node.name}.bias", node.bias.all())
        rate = self.builder.constant(f"{node.name}.rate", node.rate.all())
        self.builder.microsoft("LinearAttentionGate", [node.x, bias, rate], [node.name], node.name)

    @write.register
    def _(self, node: DeltaNet) -> None:
        past, present = self._state(node.name, "delta", (1, node.heads, node.key_size, node.value_size))
        self.builder.microsoft(
            "LinearAttention", [node.q, node.k, node.v, past, node.decay, node.beta], [node.name, present], node.name,
            q_num_heads=node.heads, kv_num_heads=node.heads, scale=node.key_size**-0.5, update_rule="gated_delta",
        )  # fmt: skip

    def _state(self, name: str, kind: str, shape: tuple[int | str, ...]) -> tuple[str, str]:
        """Declare a state that enters as `past.NAME.KIND` and leaves as `present.NAME.KIND`."""
        names = f"past.{name}.{kind}", f"present.{name}.{kind}"
        for one, kept in zip(names, (self.inputs, self.outputs), strict=True):
            kept.append(_value(one, _FLOAT, shape))
        return names

    @write.register
    def _(self, node: Add) -> None:
        self.builder.op("Add", [node.a, node.b], [node.name], node.name)


def _value(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _save(builder: _Builder, inputs: list[Any], outputs: list[Any], path: Path) -> None:
    graph = helper.make_graph(builder.nodes, path.stem, inputs, outputs, builder.initializers)
    model = helper.make_model(graph, opset_imports=_OPSETS, ir_version=_IR_VERSION, producer_name="ferrule")
    path.write_bytes(model.SerializeToString())


def _write_head(graph: Graph, binary: BinaryFile, table: Table, accuracy_level: int, path: Path) -> None:
    builder = _Builder(binary, accuracy_level)
    if table.bits == 32:
        weight = builder.external(
            "head.weight", (table.rows, table.columns), _FLOAT, table.values, 4 * graph.head.count
        )
        builder.op("Gemm", ["hidden", weight], ["logits"], "head", transB=1)
    else:
        parts = builder.quantised(graph.head, table)
        builder.microsoft(
            "MatMulNBits", ["hidden", *parts], ["logits"], "head", K=table.columns, N=table.rows, bits=table.bits,
            block_size=table.group, accuracy_level=accuracy_level,
        )  # fmt: skip
    hidden = _value("hidden", _FLOAT, ["tokens", table.columns])
    _save(builder, [hidden], [_value("logits", _FLOAT, ["tokens", table.rows])], path)


def export(graph: Graph, folder: Path, context: int, accuracy_level: int) -> Exported:
    """Write `model.onnx`, `head.onnx` and their weights.

    Args:
      graph: With schemes.
      folder: Where to write; it exists.
      context: Positions that the rotary tables must reach.
      accuracy_level: MatMulNBits' own: 4 computes with int8 activations, 0 with the kernel's default.
    """
    with BinaryFile(folder / _WEIGHTS) as weights:
        builder = _Builder(weights, accuracy_level)
        written = _Graph(graph, builder, context)
        inputs = [_value(INPUT, _FLOAT, [1, "tokens", graph.hidden])]
        inputs += [_value("seqlens_k", _INT32, [1]), _value("total_sequence_length", _INT32, [])]
        outputs = [_value("hidden", _FLOAT, [1, "tokens", graph.hidden])]
        builder.op("Identity", [graph.nodes[-1].name], ["hidden"], "hidden")
        _save(builder, [*inputs, *written.inputs], [*outputs, *written.outputs], folder / _MODEL)
    with BinaryFile(folder / _TABLE) as binary:
        embedding = binary.write_table(graph.embedding)
        head = embedding if graph.tied else binary.write_table(graph.head)
        _write_head(graph, binary, head, accuracy_level, folder / _HEAD)
    return Exported("onnx", (_MODEL, _HEAD, _WEIGHTS, _TABLE), {"embedding": embedding, "head": head})
