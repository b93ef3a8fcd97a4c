"""The exported graph, run a few layers at a time in the target's engine, each block in a process of its own.

So a conversion never holds more than one block's packed weights, whatever the model's size, and what the kernels do can
be compared with the graph block by block, before rounding has piled up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from ferrule_runtime.errors import EngineError, FerruleError

from .apart import LONG, within
from .block_worker import run_block
from .graph import INPUT, Add, Graph, Node

__all__ = ["Block", "plan_blocks", "stream"]

Array = NDArray[np.float32]

# Weights of one block: large enough to be few processes, small beside what else a conversion holds.
_BLOCK_BYTES = 96 << 20


@dataclass(frozen=True)
class Block:
    """Consecutive nodes of a graph with one value entering and one leaving.

    Attributes:
      start: The value that enters.
      nodes: What runs.
      stop: The value that leaves.
    """

    start: str
    nodes: tuple[Node, ...]
    stop: str


def _bytes(node: Node) -> int:
    return sum(weight.stored_bytes for weight in node.weights.values() if len(weight.shape) == 2)


def plan_blocks(graph: Graph, most: int = _BLOCK_BYTES) -> list[Block]:
    """Cut a graph where the residual stream alone passes from layer to layer, into blocks of about `most` bytes."""
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    blocks: list[Block] = []
    first, start, size = 0, INPUT, 0
    alive: set[str] = {INPUT}
    for index, node in enumerate(graph.nodes):
        size += _bytes(node)
        alive = {name for name in {*alive, node.name} if last.get(name, -1) > index} | {node.name}
        final = index + 1 == len(graph.nodes)
        if final or (size >= most and isinstance(node, Add) and alive == {node.name}):
            blocks.append(Block(start, graph.nodes[first : index + 1], node.name))
            first, start, size = index + 1, node.name, 0
    return blocks


def _extract(model: onnx.ModelProto, start: str, stop: str) -> onnx.ModelProto:
    """Return the part of a model between two values, with the states of its nodes, over the same external weights."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    declared = {value.name: value for value in [*model.graph.input, *model.graph.output]}
    kept, wanted, seen = [], [stop], {start}
    while wanted:
        name = wanted.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        # What a part reads of a state it also leaves behind.
        if (left := name.replace("past.", "present.", 1)) in made_by:
            wanted.append(left)
        if name in made_by:
            kept.append(made_by[name])
            seen.update(made_by[name].output)
            wanted += made_by[name].input
    order = {id(node): index for index, node in enumerate(model.graph.node)}
    kept.sort(key=lambda node: order[id(node)])
    used = {name for node in kept for name in node.input}
    states = [name for node in kept for name in node.output if name in declared and name != stop]

    hidden = declared[INPUT].type.tensor_type.shape.dim[2].dim_value

    def rows(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, "tokens", hidden])

    inputs = [rows(start), *(value for value in model.graph.input if value.name in used and value.name != start)]
    outputs = [rows(stop), *(declared[name] for name in states)]
    initializers = [tensor for tensor in model.graph.initializer if tensor.name in used]
    graph = helper.make_graph(kept, "block", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def stream(
    model: Path, blocks: Sequence[Block], conversations: Sequence[Array], *, threads: int = 0
) -> Iterator[tuple[Block, list[Array], list[Array]]]:
    """Run conversations through an exported graph block by block.

    Args:
      model: The exported graph; its weights lie beside it.
      blocks: From `plan_blocks` of the graph that was exported.
      conversations: Embedded tokens of each, [tokens, hidden]; each starts from an empty state.
      threads: Of the kernels; 0 takes the cores there are.

    Yields:
      Each block, with what entered it and what left it, by conversation [tokens, hidden].

    Raises:
      EngineError: A block could not be loaded or executed.
    """
    whole = onnx.load(model, load_external_data=False)
    given = list(conversations)
    for number, block in enumerate(blocks):
        # The last node's value is called `hidden` at the end of the exported graph.
        stop = block.stop if number + 1 < len(blocks) else "hidden"
        part = model.with_name(f".block-{number}.onnx")
        try:
            part.write_bytes(_extract(whole, block.start, stop).SerializeToString())
            taken = within(LONG, run_block, part, given, threads)
        except FerruleError as error:
            raise EngineError(
                f"layers up to `{block.stop}` cannot be run here: {error}", hint=error.hint or "use a smaller model"
            ) from None
        finally:
            part.unlink(missing_ok=True)
        yield block, given, taken
        given = taken
