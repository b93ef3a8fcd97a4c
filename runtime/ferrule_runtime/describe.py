"""`ferrule inspect`, `fit` and `selftest`: what something is, whether it fits, whether it answers as before."""

from __future__ import annotations

import argparse
import dataclasses
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .budget import CHUNK, CONTEXT, MemoryPlan, baseline, make_plan, plan_within
from .bundle import Manifest, MemoryFacts, is_bundle, open_bundle
from .commandline import emit, human, say
from .errors import BundleError, ContextError, OverBudget, UsageError

__all__ = ["fit", "inspect", "selftest"]


def _describe_checkpoint(name: str, target: str, recipe: str | None) -> Any:
    """Let the host toolkit read a checkpoint; a board does not have it."""
    points = list(entry_points(group="ferrule.checkpoints"))
    if not points:
        raise UsageError(f"{name}: is not a bundle", hint="checkpoints are read on the host: pip install ferrule")
    return points[0].load()(name, target, recipe)


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    return {**dataclasses.asdict(plan), "total": plan.total}


def _context(asked: int | None, most: int) -> int:
    if asked and asked > most:
        raise ContextError(f"a context of {asked} tokens, it reaches {most}", hint=f"--context {most} or less")
    return asked or min(CONTEXT, most)


def _manifest_lines(manifest: Manifest) -> list[str]:
    facts, recipe, found = manifest.architecture, manifest.recipe, manifest.fidelity
    sizes = f"{facts['layers']} layers, hidden {facts['hidden']}, {facts['vocabulary']} tokens"
    checkpoint = manifest.checkpoint
    if "kl" not in found:
        distance = f"not measured ({found['skipped']})"
    else:
        distance = f"KL {found['kl']:.4f}, top-1 {100 * found['top1']:.1f} % over {found['positions']} positions"
    bits = f"{recipe['bits_per_weight']} bits per weight"
    if kept := recipe.get("matrices", {}).get("kept"):
        bits += f", {kept} matrices with the checkpoint's own integers"
    return [
        f"bundle      {manifest.name}, {human(manifest.bytes)}",
        f"checkpoint  {checkpoint['name']}, {checkpoint['parameters'] / 1e6:.1f} M weights, {checkpoint['licence']}",
        f"model       {facts['family']}, {sizes}",
        f"recipe      {recipe['key']}, {bits}",
        f"made for    {manifest.target}, {manifest.form} on {manifest.engine}",
        f"talks       {manifest.dialect}, stops at {list(manifest.stop_tokens)}, context {manifest.context}",
        f"fidelity    {distance}",
    ]


def _facts_lines(found: Any) -> list[str]:
    facts = found.facts
    return [
        f"checkpoint  {facts['name']} ({facts['file']}), stored as {facts['stored']}",
        f"licence     {facts['licence'] or 'not stated'}",
        f"model       {facts['family']}, {facts['parameters'] / 1e6:.1f} M weights, {facts['layers']} layers, "
        f"hidden {facts['hidden']}, {facts['vocabulary']} tokens, context {found.context}",
        f"remembers   {_remembers(found)}",
        *(f"note        {one}" for one in facts["notes"]),
    ]


def _remembers(found: Any) -> str:
    """Say what grows with the context and what does not: the same in every recipe."""
    facts, memory = found.facts, next(iter(found.memory.values()))
    growing = f"{facts['attention_layers']} of {facts['layers']} layers keep keys and values"
    growing += f", {human(memory.kv_per_token)} a token"
    constant = facts["recurrent_layers"]
    return f"{growing}; {constant} a constant state, {human(memory.state)}" if constant else growing


def inspect(options: argparse.Namespace) -> int:
    """Say what a checkpoint or bundle is and what it would need."""
    path, interpreter = Path(options.path), baseline()
    if is_bundle(path):
        bundle = open_bundle(path, verify=options.verify)
        manifest = bundle.manifest
        context = _context(options.context, manifest.context)
        plan = make_plan(manifest.memory, context=context, chunk=CHUNK, interpreter=interpreter)
        if options.json:
            emit("inspect", {"bundle": dataclasses.asdict(manifest), "hash": bundle.hash, "memory": _plan_json(plan)})
            return 0
        for line in [*_manifest_lines(manifest), "", *plan.table()]:
            say(line)
        return 0
    found = _describe_checkpoint(options.path, options.target, None)
    context = _context(options.context, found.context)
    plans = {
        name: make_plan(facts, context=context, chunk=CHUNK, interpreter=interpreter)
        for name, facts in found.memory.items()
    }
    if options.json:
        recipes = {
            name: {
                "bytes": found.bytes[name],
                "memory": _plan_json(plan),
                "matrices": found.matrices[name].to_json(),
            }
            for name, plan in plans.items()
        }
        emit(
            "inspect",
            {"checkpoint": found.facts, "target": options.target, "recipes": recipes, "refused": found.refused},
        )
        return 0
    for line in _facts_lines(found):
        say(line)
    say()
    say(f"{'recipe':10}  {'on disk':>10}  {'in memory':>10}  at context {context} on {options.target}")
    for name, plan in sorted(plans.items(), key=lambda item: -item[1].total):
        say(f"{name:10}  {human(found.bytes[name]):>10}  {human(plan.total):>10}")
        for line in found.matrices[name].lines():
            say(f"{'':10}  {line}")
    for name, reason in found.refused.items():
        say(f"{name:10}  refused: {reason}")
    return 0


def _facts_for_fit(path: Path, options: argparse.Namespace) -> tuple[dict[str, MemoryFacts], int]:
    if is_bundle(path):
        if options.recipe:
            raise UsageError(f"{path}: a bundle has its recipe already", hint="--recipe is for checkpoints")
        manifest = open_bundle(path).manifest
        return {manifest.recipe["name"]: manifest.memory}, manifest.context
    found = _describe_checkpoint(options.path, options.target, options.recipe)
    return found.memory, found.context


def fit(options: argparse.Namespace) -> int:
    """Say, by part, whether it fits; the exit status is 1 when nothing does."""
    facts, most = _facts_for_fit(Path(options.path), options)
    interpreter = baseline()
    fits: dict[str, MemoryPlan] = {}
    refused: dict[str, OverBudget] = {}
    for name, one in facts.items():
        try:
            fits[name] = plan_within(
                one, options.memory, interpreter=interpreter, most_context=most,
                context=options.context, min_context=options.min_context, chunk=options.chunk,
            )  # fmt: skip
        except OverBudget as error:
            refused[name] = error
    if not fits:
        raise next(iter(refused.values())) if len(refused) == 1 else _none_fits(refused)
    if options.json:
        plans = {name: _plan_json(plan) for name, plan in fits.items()}
        emit("fit", {"memory": options.memory, "fits": plans, "refused": {n: str(e) for n, e in refused.items()}})
        return 0
    for name, plan in fits.items():
        say(f"{name}: fits" if options.memory else name)
        for line in plan.table():
            say(f"  {line}")
    for name, why in refused.items():
        say(f"{name}: {str(why).splitlines()[0]}")
    return 0


def _none_fits(refused: dict[str, OverBudget]) -> OverBudget:
    lines = [f"{name}: {str(error).splitlines()[0]}" for name, error in refused.items()]
    return OverBudget("no recipe fits\n  " + "\n  ".join(lines), hint="a shorter --context, or more --memory")


def selftest(options: argparse.Namespace) -> int:
    """Play golden calls; the exit status is 1 when one fails."""
    from .golden import replay

    bundle = open_bundle(Path(options.bundle), verify=True)
    verdicts = replay(bundle)
    if options.json:
        emit("selftest", {"bundle": bundle.hash, "cases": [dataclasses.asdict(verdict) for verdict in verdicts]})
    else:
        for index, verdict in enumerate(verdicts, 1):
            say(f"golden call {index}: {'pass' if verdict.passed else 'FAIL'}: {verdict.detail}")
    failed = sum(not verdict.passed for verdict in verdicts)
    if failed:
        raise BundleError(
            f"{failed} of {len(verdicts)} golden calls differ from those of the machine that made the bundle",
            hint="do not ship it to this board; convert for this board's own target",
        )
    return 0
