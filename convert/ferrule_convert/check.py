"""The gate: a bundle is compared with its graph and with the float model, in the target's engine, before it leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load
from ferrule_runtime.engines.onnx import Head
from ferrule_runtime.errors import BundleError, CheckpointError
from ferrule_runtime.golden import GOLDEN_FILE, Case, golden_cases, record

from .apart import apart
from .blocks import plan_blocks, stream
from .checkpoint import Checkpoint
from .fidelity import WINDOW, compare, fidelity_tokens, reference_hidden
from .graph import Graph
from .interpret import Memory, embed, head_logits, run_nodes

__all__ = ["Agreement", "Checked", "gate", "measure_fidelity", "run_blocks"]

Array = NDArray[np.float32]
Progress = Callable[[str], None]

# What a block adds to the residual stream may differ from what the graph, executed in numpy with the same integers,
# adds, by this share (median over tokens). Float kernels agree to rounding, 1e-6; int8 activations add about 1 %.
_FLOAT_SHARE, _INT8_SHARE = 1e-4, 0.1
# Tokens over which engine and graph are compared; the whole text is only run by the engine.
_COMPARED = 128


@dataclass(frozen=True)
class Agreement:
    """How the engine compares with the graph that it was made from.

    Attributes:
      worst_block: The largest median share by which a block differs, each block from the same input.
      noise: The largest difference of a logit, all blocks behind one another.
      tokens: Tokens compared.
    """

    worst_block: float
    noise: float
    tokens: int


@dataclass(frozen=True)
class Checked:
    """What the gate found, and the files that it adds to the bundle."""

    fidelity: dict[str, Any]
    files: tuple[str, ...]


def _share(ours: Array, theirs: Array, given: Array) -> float:
    """Return the median over tokens of |difference| / |what the block added|."""
    added = np.linalg.norm(ours - given, axis=1)
    return float(np.median(np.linalg.norm(theirs - ours, axis=1) / np.maximum(added, 1e-12)))


def run_blocks(bundle: Bundle, graph: Graph, tokens: list[int], head: Head) -> tuple[Array, Agreement]:
    """Run tokens through a bundle's layers block by block, comparing the first of them with the graph.

    Args:
      bundle: Written; its files need no manifest yet.
      graph: With schemes.
      tokens: Run in windows, each from an empty state.
      head: The bundle's.

    Returns:
      The engine's hidden states, [tokens, hidden], and how they compare.

    Raises:
      BundleError: A block differs from its graph by more than the kernels' own rounding.
      EngineError: A block cannot be run here.
    """
    blocks = plan_blocks(graph)
    limit = _INT8_SHARE if any(weight.scheme for weight in graph.weights()) else _FLOAT_SHARE
    compared = min(_COMPARED, len(tokens))
    rows = embed(graph, tokens)
    chain, worst = rows[:compared], 0.0
    for block, given, found in stream(bundle.file("model.onnx"), blocks, rows, window=WINDOW):
        expected, chain = run_nodes(block.nodes, block.start, [given[:compared], chain], [Memory(), Memory()])
        share = _share(expected, found[:compared], given[:compared])
        if not share <= limit:
            raise BundleError(
                f"the engine's layers up to `{block.stop}` differ from the graph by {share:.2g} of what they add, "
                f"more than {limit:g}",
                hint="this is a fault of the form or of the engine on this machine; the bundle was not written",
            )
        rows, worst = found, max(worst, share)
    some = slice(max(0, compared - 16), compared)
    ours, theirs = head_logits(graph, chain[some]), head.logits(rows[some])
    return rows, Agreement(worst, float(np.abs(ours - theirs).max()), compared)


def _head(bundle: Bundle) -> Head:
    return Head(bundle.file("head.onnx"), threads=len(os.sched_getaffinity(0)))


def measure_fidelity(bundle: Bundle, checkpoint: Checkpoint, plain: Graph, progress: Progress) -> dict[str, Any]:
    """Compare a whole bundle, in its engine, with the float model over the owned text.

    Raises:
      CheckpointError: It has another vocabulary than the bundle.
    """
    rows, theirs = bundle.manifest.tables["head"].rows, plain.head.shape[0]
    if theirs != rows:
        raise CheckpointError(
            f"{checkpoint.path}: a vocabulary of {theirs}, the bundle's is of {rows}",
            hint="compare with the checkpoint that the bundle was made of",
        )
    tokens = fidelity_tokens(checkpoint.tokenizer_json)
    progress(f"comparing with the float model over {len(tokens)} tokens")
    engine = load(bundle, threads=0, context=min(WINDOW, bundle.manifest.context), chunk=128)
    parts = []
    for start in range(0, len(tokens), WINDOW):
        engine.reset()
        parts.append(engine.feed(tokens[start : start + WINDOW], every=True))
    reference = reference_hidden(checkpoint.sha256(), plain, tokens)
    return compare(tokens, reference, np.concatenate(parts), plain, engine.logits).to_json()


def gate(
    bundle: Bundle, checkpoint: Checkpoint, plain: Graph, graph: Graph, fidelity: bool, progress: Progress
) -> Checked:
    """Check a bundle before it is given its name.

    Args:
      bundle: Written, but not yet under its name.
      checkpoint: Where it came from.
      plain: The graph without schemes: the float model.
      graph: The graph as quantised.
      fidelity: Whether to compare with the float model.
      progress: Told what is being done.

    Raises:
      BundleError: Values that are not finite, template, grammar or round trip failed, or engine and graph differ.
    """
    progress("checking template and tool calls")
    cases = apart(golden_cases, bundle)
    tokens = apart(fidelity_tokens, checkpoint.tokenizer_json, None if fidelity else _COMPARED)
    progress(f"running {len(tokens)} tokens through the engine, compared with the graph")
    head = _head(bundle)
    hidden, agreement = run_blocks(bundle, graph, tokens, head)
    found: dict[str, Any] = {"skipped": "--no-fidelity"}
    if fidelity:
        progress("comparing with the float model")
        reference = reference_hidden(bundle.manifest.checkpoint["sha256"], plain, tokens)
        found = compare(tokens, reference, hidden, plain, head.logits).to_json()
    progress("recording golden calls")
    golden = record(cases, [head.logits(rows) for rows in _call_rows(bundle, graph, cases)], noise=agreement.noise)
    (bundle.path / GOLDEN_FILE).write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    return Checked(found | {"engine": vars(agreement)}, (GOLDEN_FILE,))


def _call_rows(bundle: Bundle, graph: Graph, cases: Sequence[Case]) -> list[Array]:
    """Return the hidden states before each token of each golden call, block by block, all cases at once."""
    texts = [[*case.prompt, *case.call[:-1]] for case in cases]
    window = max(map(len, texts))
    # A row never sees what stands behind it, so short cases are filled up.
    filled = [token for text in texts for token in [*text, *[text[-1]] * (window - len(text))]]
    rows = embed(graph, filled)
    *_, (_, _, rows) = stream(bundle.file("model.onnx"), plan_blocks(graph), rows, window=window)
    starts = [index * window + len(case.prompt) - 1 for index, case in enumerate(cases)]
    return [rows[start : start + len(case.call)] for start, case in zip(starts, cases, strict=True)]
