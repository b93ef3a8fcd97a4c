"""The gate: a bundle is compared with its graph and with the float model, in the target's engine, before it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load
from ferrule_runtime.errors import BundleError, CheckpointError
from ferrule_runtime.golden import GOLDEN_FILE, Case, record

from .apart import LONG, apart, within
from .blocks import Block, plan_blocks, stream
from .checkpoint import Checkpoint
from .distance import distance
from .fidelity import fidelity_windows
from .graph import Graph
from .heads import parted_logits
from .interpret import Memory, embed, head_logits, run_nodes
from .rehearsal import Rehearsal
from .tokenizer import encoder

__all__ = ["Agreement", "Checked", "gate", "measure_fidelity", "run_blocks"]

Array = NDArray[np.float32]
Progress = Callable[[str], None]

# What a block adds to the residual stream may differ from what the graph, executed in numpy with the same integers,
# adds, by this share (median over tokens). Float kernels agree to rounding, 1e-6; int8 activations add about 1 %.
_FLOAT_SHARE, _INT8_SHARE = 1e-4, 0.1
# Tokens over which engine and graph are compared; the whole text is only run by the engine.
_COMPARED = 64
# The last of them, whose logits are compared too, all blocks behind them.
_NOISY = 16


@dataclass(frozen=True)
class Agreement:
    """How the engine compares with the graph that it was made from.

    Attributes:
      worst_block: The largest median share by which a block differs, each block from the same input.
      noise: How far one token's lead over another may move: twice the largest difference of a logit, all blocks behind
        one another.
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


def run_blocks(
    bundle: Bundle, graph: Graph, conversations: Sequence[Sequence[int]]
) -> tuple[list[Array], Array, float]:
    """Run conversations through a bundle's layers block by block, comparing the first tokens with the graph.

    Args:
      bundle: Written; its files need no manifest yet.
      graph: With schemes.
      conversations: Token ids; each starts from an empty state.

    Returns:
      The engine's hidden states by conversation, [tokens, hidden]; the graph's own, of the first tokens of the first;
      and the largest median share by which a block differs, each block from the same input.

    Raises:
      BundleError: A block differs from its graph by more than the kernels' own rounding.
      EngineError: A block cannot be run here.
    """
    limit = _INT8_SHARE if any(weight.scheme for weight in graph.weights()) else _FLOAT_SHARE
    embedded = left = [embed(graph, tokens) for tokens in conversations]
    chain, worst = embedded[0][:_COMPARED], 0.0

    def compare(block: Block, given: Array, found: Array) -> None:
        nonlocal chain, worst
        expected, chain = run_nodes(block.nodes, block.start, [given, chain], [Memory(), Memory()])
        share = _share(expected, found, given)
        if not share <= limit:
            raise BundleError(
                f"the engine's layers up to `{block.stop}` differ from the graph by {share:.2g} of what they add, "
                f"more than {limit:g}",
                hint="this is a fault of the form or of the engine on this machine; the bundle was not written",
            )
        worst = max(worst, share)

    # One thread, so one block after the other: each while the engine loads and runs the next.
    with ThreadPoolExecutor(1) as pool:
        comparing: list[Future[None]] = []
        for block, entered, left in stream(bundle.file("model.onnx"), plan_blocks(graph), embedded):
            for one in comparing:
                one.result()
            comparing = [pool.submit(compare, block, entered[0][:_COMPARED], left[0][:_COMPARED])]
        for one in comparing:
            one.result()
    return left, chain, worst


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
    text = apart(_whole_text, checkpoint.tokenizer_json, rows, bundle.manifest.context)
    progress(f"comparing with the float model over {sum(map(len, text))} tokens")
    engine = load(bundle, threads=0, context=max(map(len, text)), chunk=128)
    parts = []
    for window in text:
        engine.reset()
        parts.append(engine.feed(window, every=True))
    return _distance(bundle, checkpoint.sha256(), checkpoint, text, np.concatenate(parts))


def _whole_text(tokenizer_json: str, rows: int, context: int) -> list[list[int]]:
    return fidelity_windows(encoder(tokenizer_json, "checkpoint", rows), context, None)


def _distance(
    bundle: Bundle, identity: str, checkpoint: Checkpoint, text: Sequence[Sequence[int]], hidden: Array
) -> dict[str, Any]:
    path, lora, head = checkpoint.path.absolute(), checkpoint.lora, bundle.file("head.onnx").absolute()
    lora = lora and lora.absolute()
    return within(LONG, distance, identity, path, lora, head, text, hidden).to_json()


def gate(
    bundle: Bundle, checkpoint: Checkpoint, graph: Graph, rehearsed: Rehearsal, fidelity: bool, progress: Progress
) -> Checked:
    """Check a bundle before it is given its name.

    Args:
      bundle: Written, but not yet under its name.
      checkpoint: Where it came from.
      graph: The graph as quantised.
      rehearsed: Its golden calls, and the text.
      fidelity: Whether to compare with the float model.
      progress: Told what is being done.

    Raises:
      BundleError: Values that are not finite, or engine and graph differ.
      EngineError: The engine cannot be run here.
    """
    cases, text = rehearsed.cases, rehearsed.text if fidelity else (rehearsed.text[0][:_COMPARED],)
    count = sum(map(len, text))
    progress(f"running {count} tokens and {len(cases)} golden calls through the engine, compared with the graph")
    hidden, chain, worst = run_blocks(bundle, graph, [*text, *([*case.prompt, *case.call[:-1]] for case in cases)])
    found: dict[str, Any] = {"skipped": "--no-fidelity"}
    with ThreadPoolExecutor(1) as pool:
        if fidelity:
            progress("comparing with the float model")
            identity, rows = bundle.manifest.checkpoint["sha256"], np.concatenate(hidden[: len(text)])
            measured = pool.submit(_distance, bundle, identity, checkpoint, text, rows)
        noise = _record(bundle, graph, cases, hidden[0][: len(chain)], chain, hidden[len(text) :])
        if fidelity:
            found = measured.result()
    return Checked(found | {"engine": vars(Agreement(worst, noise, len(chain)))}, (GOLDEN_FILE,))


def _record(
    bundle: Bundle, graph: Graph, cases: Sequence[Case], hidden: Array, chain: Array, calls: Sequence[Array]
) -> float:
    """Write the golden calls; return their noise.

    Args:
      bundle: Where to.
      graph: With schemes.
      cases: The calls.
      hidden: The engine's states of the first tokens of the text.
      chain: The graph's own, of the same tokens.
      calls: The engine's states by case, over its prompt and its call.
    """
    last = slice(-_NOISY, None)
    before = [rows[len(case.prompt) - 1 :] for case, rows in zip(cases, calls, strict=True)]
    logits = parted_logits(bundle.file("head.onnx"), np.concatenate([hidden[last], *before]))
    first, *rest = np.split(logits, np.cumsum([len(chain[last]), *map(len, before)])[:-1])
    # Two logits lead by their difference, and each may be that far off.
    noise = 2 * float(np.abs(head_logits(graph, chain[last]) - first).max())
    golden = record(cases, rest, noise=noise)
    (bundle.path / GOLDEN_FILE).write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    return noise
