"""What onnxruntime's CPU kernels need for a graph, from its shapes alone."""

from __future__ import annotations

from ferrule_runtime.bundle import MemoryFacts

from ..graph import INPUT, Attention, CausalConv, DeltaNet, Graph, Node, Rope, Take, Weight, widths

__all__ = ["facts"]

_FLOAT = 4
# An operation of the intermediate form costs about this much in the file, initializers apart.
_NODE_BYTES = 700


def _packed(weight: Weight) -> int:
    """Bytes of the anonymous copy that the kernel makes at load.

    MatMulNBits with int8 activations keeps the integers, a float scale and a float block sum per group (measured:
    exact); a float matrix is copied as it is.
    """
    rows, columns = weight.shape
    if weight.scheme is None:
        return weight.count * _FLOAT
    groups = rows * (columns // weight.scheme.group)
    return groups * (weight.scheme.group * weight.scheme.bits // 8 + 2 * _FLOAT)


def _mapped(weight: Weight) -> int:
    """Bytes that stay mapped from the file beside the copy: the scales."""
    return 0 if weight.scheme is None else weight.shape[0] * (weight.shape[1] // weight.scheme.group) * _FLOAT


def _live_activations(graph: Graph) -> int:
    """Return the most bytes per token that are alive at once, by liveness over the nodes."""
    width = widths(graph)
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    alive, most = {INPUT}, 0
    for index, node in enumerate(graph.nodes):
        alive.add(node.name)
        # The convolution is a sum of products: the inputs behind one another, one shifted, its product.
        inside = 3 * width[node.name] if isinstance(node, CausalConv) else 0
        most = max(most, inside + sum(width[name] for name in alive))
        alive -= {name for name in node.inputs if last[name] == index}
    return most * _FLOAT


def _state(node: Node) -> int:
    """Numbers that a recurrent node remembers; kept twice, since a step reads one copy and writes the other."""
    match node:
        case CausalConv():
            return node.weight.shape[0] * (node.weight.shape[2] - 1)
        case DeltaNet():
            return node.heads * node.key_size * node.value_size
        case _:
            return 0


def facts(graph: Graph, context: int, tokenizer_bytes: int) -> MemoryFacts:
    """Return what the budget needs to know.

    Args:
      graph: With schemes.
      context: Positions of the rotary tables.
      tokenizer_bytes: Size of the tokenizer's file.
    """
    inner = [weight for node in graph.nodes for weight in node.weights.values() if len(weight.shape) == 2]
    small = sum(weight.count for node in graph.nodes for weight in node.weights.values() if len(weight.shape) != 2)
    attentions = [node for node in graph.nodes if isinstance(node, Attention)]
    tables = {node.table for node in graph.nodes if isinstance(node, Rope)}
    rotary = 2 * context * sum(len(table.frequencies) for table in tables) * _FLOAT
    orders = sum(node.index.nbytes for node in graph.nodes if isinstance(node, Take))
    return MemoryFacts(
        mapped=sum(map(_mapped, [*inner, graph.head])),
        packed=sum(map(_packed, inner)),
        table=graph.head.stored_bytes,
        head_packed=_packed(graph.head),
        kv_per_token=sum(2 * node.kv_heads * node.head_size * _FLOAT for node in attentions),
        state=2 * _FLOAT * sum(map(_state, graph.nodes)),
        # Activations alive by shape, and as much again for the kernels' own: quantised inputs, arena rounding.
        work_per_token=2 * _live_activations(graph),
        scores_per_pair=max((node.heads for node in attentions), default=0) * _FLOAT,
        graph=len(graph.nodes) * _NODE_BYTES + small * _FLOAT + rotary + orders,
        vocabulary=graph.head.shape[0],
        tokenizer=tokenizer_bytes,
    )
