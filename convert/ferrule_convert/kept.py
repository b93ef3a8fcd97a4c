"""Integers that a checkpoint holds already: which of them a recipe keeps, and how they become its own.

They are kept bit for bit where the kernel can use them: equal bits, the recipe's group within the source's, and integer
zero points that the recipe has room for. Scales and zero points are then repeated for the smaller groups, which changes
no value. Everything else is quantised anew from the floats, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ferrule_runtime.head import unpack

from .graph import Graph, Integers, Linear, Node, Take, Weight
from .schemes import GROUPS, Packed, Scheme, pack, quantise

__all__ = ["Tally", "ordered", "packed_rows", "recipe_keeping", "tally"]


@dataclass(frozen=True)
class Tally:
    """What becomes of a graph's matrices.

    Attributes:
      kept: Keep the source's own integers.
      quantised: Are quantised from floats.
      requantised: Held integers that are quantised anew: how many, by source and reason.
      floats: Stay float32.
    """

    kept: int
    quantised: int
    requantised: Mapping[str, int]
    floats: int

    def to_json(self) -> dict[str, Any]:
        """Return the counts as manifests keep them."""
        return {
            "kept": self.kept,
            "quantised": self.quantised,
            "requantised": dict(self.requantised),
            "float32": self.floats,
        }

    def lines(self) -> list[str]:
        """Say in words what became of integers; nothing where the source holds floats."""
        anew = sum(self.requantised.values())
        if not self.kept + anew:
            return []
        total = self.kept + self.quantised + self.floats + anew
        lines = [f"{self.kept} of {total} matrices keep their integers"]
        return [*lines, *(f"{count} requantised from {reason}" for reason, count in self.requantised.items())]


def _misfit(source: Scheme, scheme: Scheme) -> str | None:
    """Return why integers of one scheme cannot stand for another's, or None where they can."""
    if source.bits != scheme.bits:
        return f"{source.bits} bits where the recipe has {scheme.bits}"
    if source.group % scheme.group:
        return f"groups of {source.group} where the recipe has {scheme.group}"
    if source.zero and not scheme.zero:
        return "zero points where the recipe has none (it would with a z)"
    return None


def _obstacle(integers: Integers, scheme: Scheme) -> str | None:
    """Return why integers are not kept by a scheme, or None where they are."""
    in_order = "columns in another order, which no node undoes here" if integers.order else None
    return _misfit(integers.scheme, scheme) or in_order


def _regrouped(packed: Packed, source: Scheme, scheme: Scheme) -> Packed:
    """Lay the same values out for a scheme that they fit."""
    rows, groups = packed.scales.shape
    times = source.group // scheme.group
    zeros = None
    if scheme.zero:
        half = np.full((rows, groups), 1 << (source.bits - 1), dtype=np.uint8)
        known = half if packed.zeros is None else unpack(packed.zeros, source.bits, groups)
        zeros = pack(known.repeat(times, axis=1), source.bits)
    values = packed.values.reshape(rows, groups * times, -1)
    return Packed(values, packed.scales.repeat(times, axis=1), zeros)


def packed_rows(weight: Weight, scheme: Scheme, start: int, stop: int) -> Packed:
    """Return rows [start, stop) of a weight by a scheme: the source's integers where they are kept, or quantised anew.

    Raises:
      RecipeError: Unknown method, or columns that the group does not divide.
      CheckpointError: The rows cannot be read, or are damaged.
    """
    integers = weight.integers
    if integers and _obstacle(integers, scheme) is None:
        return _regrouped(integers.packed(start, stop), integers.scheme, scheme)
    return quantise(weight.rows(start, stop), scheme)


def ordered(graph: Graph) -> Graph:
    """Return the graph with features gathered in the order in which kept integers are stored (act-order).

    One node serves all matrices with the same input and order. Matrices that are quantised anew need none: their
    floats have the columns in their places.

    Args:
      graph: With schemes.

    Raises:
      CheckpointError: An order cannot be read, or is damaged.
    """
    nodes: list[Node] = []
    known: dict[tuple[str, bytes], str] = {}
    for node in graph.nodes:
        if isinstance(node, Linear) and (integers := _out_of_order(node.weight)):
            index, x = integers.index(), node.x
            if index is not None:
                key = node.x, index.tobytes()
                if key not in known:
                    known[key] = f"{node.name}.ordered"
                    nodes.append(Take(known[key], node.x, index))
                x = known[key]
            node = replace(node, x=x, weight=replace(node.weight, rows=integers.as_stored()))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), embedding=_in_place(graph.embedding), head=_in_place(graph.head))


def _out_of_order(weight: Weight) -> Integers | None:
    """Return a weight's integers if all that keeps a recipe from them may be the order of their columns."""
    integers, scheme = weight.integers, weight.scheme
    if integers and integers.order and scheme and _misfit(integers.scheme, scheme) is None:
        return integers
    return None


def _in_place(weight: Weight) -> Weight:
    """Return a table without its columns' order where they stand in their places."""
    integers = _out_of_order(weight)
    if integers and integers.index() is None:
        return replace(weight, rows=integers.as_stored())
    return weight


def tally(graph: Graph) -> Tally:
    """Count what becomes of a graph's matrices.

    Args:
      graph: As `recipe.apply` leaves it.
    """
    kept = quantised = floats = 0
    requantised: Counter[str] = Counter()
    for weight in graph.weights():
        if len(weight.shape) != 2:
            continue
        if weight.scheme is None:
            floats += 1
        elif (why := _obstacle(weight.integers, weight.scheme) if weight.integers else weight.lost) is not None:
            requantised[f"{weight.stored}: {why}"] += 1
        elif weight.integers:
            kept += 1
        else:
            quantised += 1
    return Tally(kept, quantised, dict(requantised.most_common()), floats)


def recipe_keeping(graph: Graph) -> str | None:
    """Return the name of the recipe that keeps most of a checkpoint's integers, or None where it has none to keep."""
    schemes = Counter(weight.integers.scheme for weight in graph.weights() if weight.integers)
    for scheme, _ in schemes.most_common(1):
        group = max((group for group in GROUPS if scheme.group % group == 0), default=None)
        return f"w{scheme.bits}g{group}{'z' if scheme.zero else ''}" if group else None
    return None
