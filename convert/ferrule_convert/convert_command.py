"""`ferrule fetch`, `convert`, `check` and `recipes`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from ferrule_runtime.bundle import open_bundle
from ferrule_runtime.commandline import emit, human, note, say
from ferrule_runtime.errors import RecipeError
from ferrule_runtime.golden import replay
from ferrule_targets.target import Target, load_target

from .archs import build
from .fetch import catalogue, entry, fetch, open_model
from .recipe import Recipe, describe, load_recipe, recipe_names

__all__ = ["check_command", "convert_command", "fetch_command", "recipes_command"]


def fetch_command(options: argparse.Namespace) -> int:
    """Fetch one model, or list those that are known."""
    if options.name is None:
        entries = {name: entry(name) for name in catalogue()}
        if options.json:
            emit("catalogue", {"models": {name: model.model_dump() for name, model in entries.items()}})
            return 0
        for name, model in entries.items():
            where = "" if model.source else "  (not to be fetched: looked for in FERRULE_MODELS)"
            say(f"{name:20}  {human(model.size):>10}  {model.licence:12}  {model.title}{where}")
        return 0
    path = fetch(options.name, Path(options.to) if options.to else None, note)
    if options.json:
        emit("fetch", {"name": options.name, "path": str(path), "sha256": entry(options.name).sha256})
    else:
        say(str(path))
    return 0


def convert_command(options: argparse.Namespace) -> int:
    """Convert a checkpoint; everything that can be refused is refused before anything is written."""
    from .pack import Options, convert

    started = time.monotonic()
    target, recipe = load_target(options.target), load_recipe(options.recipe)
    checkpoint, dialect = open_model(options.checkpoint)
    if options.lora:
        from .lora import merge

        checkpoint = merge(checkpoint, Path(options.lora))
    chosen = Options(options.context, options.dialect or dialect, not options.no_fidelity, options.max_kl)

    def progress(text: str) -> None:
        note(f"{time.monotonic() - started:6.1f} s  {text}")

    for one in checkpoint.notes:
        note(f"note: {one}")
    bundle = convert(checkpoint, target, recipe, Path(options.out), chosen, progress)
    manifest = bundle.manifest
    if options.json:
        emit("convert", {"bundle": str(bundle.path), "hash": bundle.hash, "manifest": dataclasses.asdict(manifest)})
        return 0
    bits = manifest.recipe["bits_per_weight"]
    say(f"{bundle.path}: {human(manifest.bytes)}, {bits} bits per weight, {_distance(dict(manifest.fidelity))}")
    return 0


def _distance(found: dict[str, Any]) -> str:
    if "kl" not in found:
        return f"not compared with the float model ({found['skipped']})"
    return (
        f"KL {found['kl']:.4f} ({found['kl_low']:.4f} to {found['kl_high']:.4f}), top-1 {100 * found['top1']:.1f} % "
        f"({100 * found['top1_low']:.1f} to {100 * found['top1_high']:.1f}), "
        f"perplexity {found['perplexity']:.2f} (float {found['perplexity_float']:.2f}), {found['positions']} positions"
    )


def check_command(options: argparse.Namespace) -> int:
    """Check a bundle where it stands; the exit status is 1 when something fails."""
    bundle = open_bundle(Path(options.bundle), verify=True)
    note(f"{len(bundle.manifest.files)} files hashed, all as the manifest says")
    verdicts = replay(bundle)
    result: dict[str, Any] = {"bundle": bundle.hash, "golden": [dataclasses.asdict(verdict) for verdict in verdicts]}
    found = dict(bundle.manifest.fidelity)
    if options.against:
        from .check import measure_fidelity

        checkpoint, _ = open_model(options.against)
        if options.lora:
            from .lora import merge

            checkpoint = merge(checkpoint, Path(options.lora))
        found = measure_fidelity(bundle, checkpoint, build(checkpoint), note)
    result["fidelity"] = found
    if options.json:
        emit("check", result)
    else:
        for index, verdict in enumerate(verdicts, 1):
            say(f"golden call {index}: {'pass' if verdict.passed else 'FAIL'}: {verdict.detail}")
        say(_distance(found))
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _takes(target: Target, recipe: Recipe) -> bool:
    schemes = [rule.scheme for rule in recipe.rules if rule.scheme]
    return all(scheme.bits in target.bits and scheme.group in target.groups for scheme in schemes)


def recipes_command(options: argparse.Namespace) -> int:
    """List the shipped recipes, or show one."""
    if options.name:
        recipe = load_recipe(options.name)
        if options.json:
            emit("recipe", {**describe(recipe), "description": recipe.description})
            return 0
        say(f"{recipe.key}: {recipe.description}")
        for rule in recipe.rules:
            scheme = rule.scheme
            how = f"{scheme.bits} bits, group {scheme.group}, {scheme.method}" if scheme else "float32"
            say(f"  {rule.pattern:12}  {how}{', zero points' if scheme and scheme.zero else ''}")
        return 0
    recipes = [load_recipe(name) for name in recipe_names()]
    if options.target:
        target = load_target(options.target)
        recipes = [recipe for recipe in recipes if _takes(target, recipe)]
        if not recipes:
            raise RecipeError(f"no shipped recipe suits target `{target.name}`")
    if options.json:
        emit("recipes", {"recipes": [{**describe(one), "description": one.description} for one in recipes]})
        return 0
    for recipe in recipes:
        say(f"{recipe.name:10}  {recipe.description}")
    return 0
