"""The gate: a bundle is compared with its graph and with the float model, in the target's engine, before it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load
from ferrule_runtime.errors import BundleError
from ferrule_runtime.golden import GOLDEN_FILE, golden_prompts, record

from .checkpoint import Checkpoint
from .fidelity import WINDOW, compare, fidelity_tokens, reference_hidden
from .graph import Graph
from .interpret import head_logits, interpret

__all__ = ["Checked", "engine_against_graph", "gate", "measure_fidelity"]

Progress = Callable[[str], None]

# Mean KL allowed between the engine and the graph executed in numpy with the same integers. Float kernels agree to
# rounding; int8 activations add noise of their own (about 0.005 on real weights).
_KL_FLOAT, _KL_INT8 = 1e-5, 0.05


@dataclass(frozen=True)
class Checked:
    """What the gate found, and the files that it adds to the bundle."""

    fidelity: dict[str, Any]
    files: tuple[str, ...]


def _kl(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
        y = x.astype(np.float64) - x.max(axis=1, keepdims=True)
        return np.asarray(y - np.log(np.exp(y).sum(axis=1, keepdims=True)))

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def engine_against_graph(bundle: Bundle, graph: Graph, prompt: list[int]) -> dict[str, float]:
    """Compare the engine with the graph executed in numpy, same integers, over one prompt.

    Returns:
      `max_abs`: largest difference of a logit; `kl`: mean KL in nats.

    Raises:
      BundleError: They differ by more than the kernels' own rounding.
    """
    engine = load(bundle, threads=0, context=max(64, len(prompt)), chunk=64)
    ours = head_logits(graph, interpret(graph, prompt))
    theirs = engine.logits(engine.feed(prompt, every=True))
    kl, worst = _kl(ours, theirs), float(np.abs(ours - theirs).max())
    quantised = any(weight.scheme for weight in graph.weights())
    limit = _KL_INT8 if quantised else _KL_FLOAT
    if not kl <= limit:
        raise BundleError(
            f"the engine is {kl:.2g} nats from the graph it was made from, more than {limit:g}",
            hint="this is a fault of the form or of the engine on this machine; the bundle was not written",
        )
    return {"max_abs": worst, "kl": kl}


def measure_fidelity(bundle: Bundle, checkpoint: Checkpoint, plain: Graph, progress: Progress) -> dict[str, Any]:
    """Compare the bundle, in its engine, with the float model over the owned text."""
    tokens = fidelity_tokens(checkpoint.tokenizer_json)
    progress(f"comparing with the float model over {len(tokens)} tokens")
    reference = reference_hidden(checkpoint, plain, tokens)
    engine = load(bundle, threads=0, context=min(WINDOW, bundle.manifest.context), chunk=128)

    def hidden_of(window: list[int]) -> NDArray[np.float32]:
        engine.reset()
        return engine.feed(window, every=True)

    return compare(tokens, reference, plain, hidden_of, engine.logits).to_json()


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
    progress("checking tool calls, template and engine")
    prompts = golden_prompts(bundle)
    agreement = engine_against_graph(bundle, graph, prompts[0])
    golden = record(bundle, prompts, noise=agreement["max_abs"])
    (bundle.path / GOLDEN_FILE).write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    found: dict[str, Any] = {"skipped": "--no-fidelity"}
    if fidelity:
        found = measure_fidelity(bundle, checkpoint, plain, progress)
    return Checked(found | {"engine": agreement}, (GOLDEN_FILE,))
