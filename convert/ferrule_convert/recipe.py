"""Recipes: which weight is quantised how. A name such as `w4g32_head8` decodes itself."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ferrule_runtime.errors import RecipeError
from ferrule_runtime.registry import data_names, module_names, read_data, unknown

from .graph import Graph, Weight
from .kept import ordered
from .schemes import GROUPS, Scheme

__all__ = ["Recipe", "Rule", "apply", "load_recipe", "recipe_names"]

_PACKAGE = "ferrule_convert.recipes"
_NAME = re.compile(r"^w(?P<bits>\d+)(?:g(?P<group>\d+))?(?P<zero>z)?(?:_head(?P<head>\d+))?(?:_(?P<method>[a-z]+))?$")
_BITS = (2, 4, 8)
_TABLE_GROUP = 32


@dataclass(frozen=True)
class Rule:
    """The first rule whose pattern matches a weight's name decides it.

    Attributes:
      pattern: A shell pattern over weight names, such as `layers.*.mlp.*`.
      scheme: How to quantise; None keeps float32.
    """

    pattern: str
    scheme: Scheme | None


@dataclass(frozen=True)
class Recipe:
    """How to quantise a model.

    Attributes:
      name: Decodes itself, or is the name of a TOML file.
      description: One line for people.
      rules: In order; a matrix that no rule matches is an error; norms, biases and filters stay float32.
    """

    name: str
    description: str
    rules: tuple[Rule, ...]

    @property
    def key(self) -> str:
        """The name in records: `name@hash8`, the hash over the rules."""
        rules = json.dumps([asdict(rule) for rule in self.rules], sort_keys=True)
        return f"{self.name}@{hashlib.sha256(rules.encode()).hexdigest()[:8]}"

    def scheme_for(self, weight: Weight) -> Scheme | None:
        """Return how a weight is quantised.

        Raises:
          RecipeError: No rule matches, or the group does not divide the weight's rows.
        """
        if len(weight.shape) != 2:
            return None
        for rule in self.rules:
            if fnmatch.fnmatchcase(weight.name, rule.pattern):
                if rule.scheme and weight.shape[1] % rule.scheme.group:
                    fit = [g for g in GROUPS if weight.shape[1] % g == 0]
                    raise RecipeError(
                        f"recipe `{self.name}`: group {rule.scheme.group} does not divide `{weight.name}`, "
                        f"whose rows have {weight.shape[1]} weights",
                        hint=f"groups that divide: {', '.join(map(str, fit)) or 'none'}",
                    )
                return rule.scheme
        raise RecipeError(f"recipe `{self.name}`: no rule matches `{weight.name}`", hint='end with a rule for "*"')


class _RuleText(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    pattern: str
    bits: int | None = None
    group: int = _TABLE_GROUP
    zero: bool = False
    method: str = "rtn"


class _RecipeText(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    rule: list[_RuleText]


def _legal(scheme: Scheme, where: str) -> Scheme:
    if scheme.bits not in _BITS:
        raise RecipeError(f"{where}: {scheme.bits} bits", hint=f"the kernels execute {', '.join(map(str, _BITS))} bits")
    if scheme.group not in GROUPS:
        raise RecipeError(f"{where}: group {scheme.group}", hint=f"groups are {', '.join(map(str, GROUPS))}")
    known = module_names("ferrule_convert.schemes")
    if scheme.method not in known:
        raise unknown("scheme", scheme.method, known, RecipeError)
    return scheme


def _decode(name: str) -> tuple[Rule, ...] | None:
    """Return the rules that a self-decoding name stands for, or None when it is no such name."""
    if name == "fp32":
        return (Rule("*", None),)
    if not (match := _NAME.match(name)):
        return None
    bits = int(match["bits"])
    scheme = Scheme(bits, int(match["group"] or _TABLE_GROUP), bool(match["zero"]), match["method"] or "rtn")
    head = Scheme(int(match["head"] or 8), _TABLE_GROUP)
    # The delta rule's gates are a few rows, which decide what a state keeps: they stay float32.
    gates = Rule("layers.*.delta.[ab]", None)
    return (Rule("embedding", _legal(head, name)), Rule("head", head), gates, Rule("*", _legal(scheme, name)))


def _parse(text: str, name: str, where: str) -> Recipe:
    try:
        raw = _RecipeText.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where}: not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise RecipeError(f"{where}: `{'.'.join(map(str, first['loc']))}`: {first['msg'].lower()}") from None
    rules = tuple(
        Rule(r.pattern, None if r.bits is None else _legal(Scheme(r.bits, r.group, r.zero, r.method), where))
        for r in raw.rule
    )
    return Recipe(name, raw.description, rules)


def recipe_names() -> list[str]:
    """List the recipes that are shipped; any other name that decodes is legal too."""
    return data_names(_PACKAGE)


def load_recipe(name: str) -> Recipe:
    """Load a recipe by its name, or from a TOML file.

    Raises:
      RecipeError: Unknown, malformed, or asking for what the kernels do not execute.
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            return _parse(path.read_text(encoding="utf-8"), path.stem, name)
        except OSError as error:
            raise RecipeError(f"{name}: cannot be read: {error.strerror}") from None
    if name in recipe_names():
        return _parse(read_data("recipe", _PACKAGE, name, RecipeError), name, f"recipe `{name}`")
    if rules := _decode(name):
        return Recipe(name, "decoded from its name", rules)
    raise unknown("recipe", name, recipe_names(), RecipeError)


def apply(graph: Graph, recipe: Recipe) -> Graph:
    """Return the graph with each weight marked by how the recipe quantises it; no weight is read yet.

    Where the integers of a source are kept, what multiplies by them gets its features in their order.

    Raises:
      RecipeError: A weight that the recipe does not fit.
      CheckpointError: The order of a source's columns is damaged.
    """
    return ordered(graph.map_weights(lambda weight: replace(weight, scheme=recipe.scheme_for(weight))))


def describe(recipe: Recipe) -> Mapping[str, Any]:
    """Return a recipe in full, as manifests keep it."""
    return {"name": recipe.name, "key": recipe.key, "rules": [asdict(rule) for rule in recipe.rules]}
