"""What a checkpoint is and what it would need, from its headers alone: for `inspect` and `fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ferrule_runtime.bundle import MemoryFacts
from ferrule_runtime.errors import RecipeError
from ferrule_targets.target import load_target

from .archs import build
from .fetch import open_model
from .formats import memory_facts
from .graph import Attention, DeltaNet
from .kept import Tally, recipe_keeping, tally
from .recipe import apply, load_recipe, recipe_names

__all__ = ["describe"]


@dataclass(frozen=True)
class Described:
    """A checkpoint as `inspect` and `fit` see it.

    Attributes:
      facts: For people: name, family, layers, parameters, licence, how it is stored, notes.
      context: Positions that it was trained for.
      memory: By recipe, what a bundle would need; only recipes that fit its shapes.
      bytes: By recipe, what a bundle would weigh.
      refused: By recipe, why it does not fit.
      matrices: By recipe, what becomes of the matrices.
    """

    facts: dict[str, Any]
    context: int
    memory: dict[str, MemoryFacts]
    bytes: dict[str, int]
    refused: dict[str, str]
    matrices: dict[str, Tally]


def describe(name: str, target: str, recipe: str | None = None) -> Described:
    """Read a checkpoint's headers and say what each recipe would make of it.

    The recipe that keeps the integers which a checkpoint holds already is always one of them.

    Args:
      name: A checkpoint, a catalogued model that was fetched, or a release on the hub.
      target: The kind of board.
      recipe: Only this one; None takes all that are shipped.

    Raises:
      CheckpointError: It cannot be read.
      TargetError: Unknown target.
      RecipeError: The one recipe asked for is unknown or does not fit.
    """
    (checkpoint, _), board = open_model(name, weights=False), load_target(target)
    graph = build(checkpoint)
    facts = {
        "name": checkpoint.name,
        "file": checkpoint.path.name,
        "stored": checkpoint.stored,
        "licence": checkpoint.licence,
        "parameters": graph.parameters,
        "family": graph.family,
        **graph.facts,
        "attention_layers": sum(isinstance(node, Attention) for node in graph.nodes),
        "recurrent_layers": sum(isinstance(node, DeltaNet) for node in graph.nodes),
        "notes": list(checkpoint.notes),
    }
    memory, sizes, refused, matrices = {}, {}, {}, {}
    keeping = recipe_keeping(graph)
    levels = dict.fromkeys([*recipe_names(), *([keeping] if keeping else [])])
    for level in [recipe] if recipe else levels:
        try:
            quantised = apply(graph, load_recipe(level))
        except RecipeError as error:
            if recipe:
                raise
            refused[level] = str(error)
            continue
        tokenizer = len(checkpoint.tokenizer_json.encode())
        memory[level] = memory_facts(board.forms[0], quantised, min(graph.context, 8192), tokenizer)
        matrices[level] = tally(quantised)
        sizes[level] = tokenizer + sum(weight.stored_bytes for weight in quantised.weights())
    return Described(facts, graph.context, memory, sizes, refused, matrices)
