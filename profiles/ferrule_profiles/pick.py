"""Choose what to ship: hard limits, then the Pareto front, then one choice, with every reason in numbers.

Figures whose intervals overlap cannot be separated; the choice says so instead of trusting their medians.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferrule_runtime.errors import RecordError
from ferrule_runtime.registry import unknown

from .limits import Limits, met, nothing_fits, shortfalls
from .request import QUANTITIES, Candidate, Request, candidates, common_request, describe_latency
from .run import Figure, Missing, Run, Value, unlike
from .words import show

__all__ = ["PREFERENCES", "Choice", "comparable", "pick"]

# What decides, and what breaks a tie, in order. Of each of these less is better.
PREFERENCES: Mapping[str, tuple[str, ...]] = {
    "latency": ("latency", "memory", "size"),
    "memory": ("memory", "latency", "size"),
    "size": ("size", "latency", "memory"),
    "fidelity": ("fidelity", "latency", "memory", "size"),
}

# What the Pareto front is made of; of each of these less is better.
_FRONT = ("latency", "memory", "size", "fidelity")

_NO_LIMITS = Limits()

# Below this many launches an interval says little about how processes differ.
_FEW_LAUNCHES = 3


@dataclass(frozen=True)
class Choice:
    """What to ship, and why.

    Attributes:
      winner: What to ship.
      sentence: Why, in one sentence.
      lost: Name and reason of every other one.
      front: Names on the Pareto front of latency, memory, size and fidelity.
      notes: What weakens the choice.
      request: What latency and energy are of.
      limits: What was required.
      prefer: What decided.
      considered: Everything there was to choose from.
    """

    winner: Candidate
    sentence: str
    lost: tuple[tuple[str, str], ...]
    front: tuple[str, ...]
    notes: tuple[str, ...]
    request: Request
    limits: Limits
    prefer: str
    considered: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as JSON-like data."""
        facts = self.winner.run.bundle
        return {
            "target": self.winner.run.target,
            "recipe": facts.recipe,
            "recipe_key": facts.recipe_key,
            "bundle": facts.name,
            "bundle_sha256": facts.sha256,
            "why": self.sentence,
            "lost": [{"name": name, "why": why} for name, why in self.lost],
            "front": list(self.front),
            "notes": list(self.notes),
            "request": dataclasses.asdict(self.request),
            "limits": dict(self.limits.given()),
            "prefer": self.prefer,
            "considered": {
                candidate.name: {name: value.to_dict() for name, value in candidate.values.items()}
                for candidate in self.considered
            },
        }


def comparable(runs: Sequence[Run], target: str) -> tuple[list[Run], list[str]]:
    """Return the newest run of each recipe on a target, and notes on what was left out.

    Args:
      runs: Every run there is, in the order they were taken.
      target: The kind of board to choose for.

    Raises:
      RecordError: No run on that target; or runs of several checkpoints, or of unlike machines, which must not be
        compared.
    """
    if not runs:
        raise RecordError("there are no runs", hint="make some with `ferrule profile BUNDLE -o runs.jsonl`")
    here = [run for run in runs if run.target == target]
    if not here:
        raise unknown("target among the runs", target, {run.target for run in runs}, RecordError)
    newest = {(r.bundle.checkpoint_sha256, r.bundle.recipe_key, r.bundle.form, r.bundle.engine): r for r in here}
    kept = list(newest.values())
    older = len(here) - len(kept)
    notes = [f"of several runs of one recipe only the newest counts: {older} older left out"] if older else []
    first = kept[0]
    for run in kept[1:]:
        if run.bundle.checkpoint_sha256 != first.bundle.checkpoint_sha256:
            raise RecordError(
                f"runs of different checkpoints: `{first.bundle.checkpoint}` and `{run.bundle.checkpoint}`",
                hint="keep the runs of one checkpoint in one file",
            )
        if differences := unlike(first, run):
            raise RecordError(
                f"the runs of `{first.bundle.name}` and `{run.bundle.name}` are unlike, so they are not compared: "
                + "; ".join(differences),
                hint="profile all recipes again, on one board in one state",
            )
    return kept, notes


def _clearly_less(one: Value, other: Value) -> bool:
    """Tell whether the intervals are apart in favour of `one`; any figure is better than a missing one."""
    if isinstance(one, Missing):
        return False
    return isinstance(other, Missing) or one.high < other.low


def _no_more(one: Value, other: Value) -> bool:
    if isinstance(one, Missing):
        return isinstance(other, Missing)
    return isinstance(other, Missing) or one.median <= other.median


def _dominates(one: Candidate, other: Candidate) -> bool:
    """Tell whether `one` is no worse in any median, and clearly better in something."""
    pairs = [(one.values[name], other.values[name]) for name in _FRONT]
    return all(_no_more(a, b) for a, b in pairs) and any(_clearly_less(a, b) for a, b in pairs)


@dataclass(frozen=True)
class _Step:
    """One quantity that was looked at to decide, and what it left."""

    name: str
    left: tuple[Candidate, ...]


def _decide(pool: Sequence[Candidate], order: Sequence[str]) -> list[_Step]:
    """Narrow the pool, quantity by quantity, to what cannot be separated from the best."""
    steps: list[_Step] = []
    left = list(pool)
    for name in order:
        figures = [(c, value) for c in left if isinstance(value := c.values[name], Figure)]
        if figures:
            best = min((value for _, value in figures), key=lambda value: value.median)
            left = [c for c, value in figures if not _clearly_less(best, value)]
            steps.append(_Step(name, tuple(left)))
        elif not steps:
            reasons = sorted({value.reason for c in left if isinstance(value := c.values[name], Missing)})
            raise RecordError(
                f"nothing to prefer by: {QUANTITIES[name].label} is null everywhere ({'; '.join(reasons)})",
                hint="give another --prefer",
            )
        if len(left) == 1:
            break
    return steps


def _against(name: str, one: Candidate, other: Candidate) -> str:
    """Compare two candidates by one quantity: `latency 4.1 s [4.0 to 4.2] against 1.8 s [1.7 to 1.9]`."""
    return f"{QUANTITIES[name].label} {show(one.values[name])} against {show(other.values[name])}"


def _better_in(one: Candidate, other: Candidate) -> list[str]:
    return [_against(name, one, other) for name in _FRONT if _clearly_less(one.values[name], other.values[name])]


def _dominated(loser: Candidate, by: Candidate) -> str:
    return f"`{by.name}` is at least as good in everything and better in " + ", ".join(
        f"{QUANTITIES[name].label} ({show(by.values[name])} against {show(loser.values[name])})"
        for name in _FRONT
        if _clearly_less(by.values[name], loser.values[name])
    )


def _why_lost(loser: Candidate, winner: Candidate, steps: Sequence[_Step]) -> str:
    """Say at which quantity a candidate of the front fell out, and what it would have been better in."""
    fell = next((step.name for step in steps if loser not in step.left), None)
    parts = []
    if tied := [QUANTITIES[step.name].label for step in steps if loser in step.left]:
        parts.append(f"cannot be separated from `{winner.name}` by {' or '.join(tied)}")
    parts.append(_against(fell, loser, winner) if fell else "the smaller median decided")
    if better := _better_in(loser, winner):
        parts.append(f"better in {', '.join(better)}")
    return "; ".join(parts)


def _among(fitting: int, count: int) -> str:
    """Say what the winner is the best of: only what meets the limits was compared."""
    return f"of {count} recipes" if fitting == count else f"of the {fitting} of {count} recipes within the limits"


def _sentence(
    winner: Candidate, steps: Sequence[_Step], fitting: int, count: int, limits: Limits, request: Request
) -> str:
    first, last = steps[0], steps[-1]
    of = f" for {describe_latency(winner.run, request)}" if first.name == "latency" else ""
    value = f"{show(winner.values[first.name])}{of}"
    quantity = QUANTITIES[first.name]
    if count == 1:
        reason = f"the only recipe measured on `{winner.run.target}`, with {quantity.label} {value}"
    elif fitting == 1:
        reason = f"the only one of {count} recipes on `{winner.run.target}` within the limits, "
        reason += f"with {quantity.label} {value}"
    else:
        reason = f"{_among(fitting, count)} on `{winner.run.target}` "
        if len(first.left) == 1:
            reason += f"it has {quantity.best}, {value}"
        else:
            others = " and ".join(f"`{c.name}`" for c in first.left if c is not winner)
            reason += f"it and {others} cannot be separated by {quantity.label} ({value}), "
            if len(last.left) == 1:
                reason += f"and it has {QUANTITIES[last.name].best}, {show(winner.values[last.name])}"
            else:
                reason += "nor by anything else, so the smaller median decided"
    fits = met(winner, limits)
    return f"ship `{winner.name}`: {reason}" + (f"; it meets every limit: {fits}" if fits else "")


def _notes(runs: Sequence[Run]) -> list[str]:
    fewest = min(len(run.before) for run in runs)
    if fewest < _FEW_LAUNCHES:
        return [f"{fewest} launch(es) of a recipe: intervals leave out how processes differ; profile with more"]
    return []


def pick(
    runs: Sequence[Run],
    target: str,
    limits: Limits = _NO_LIMITS,
    prefer: str = "latency",
    prompt: int | None = None,
) -> Choice:
    """Choose what to ship on a target.

    Args:
      runs: Every run there is, in the order they were taken.
      target: The kind of board to choose for.
      limits: What must be met.
      prefer: What decides among those that meet it; a key of `PREFERENCES`.
      prompt: Prompt length that latency is of; the longest that all runs measured if None.

    Raises:
      RecordError: There are no runs for the target, or they must not be compared, or a limit needs what is not there.
      NothingFits: No recipe meets the limits; says which came nearest, and by how much it failed.
    """
    if prefer not in PREFERENCES:
        raise unknown("preference", prefer, PREFERENCES)
    kept, notes = comparable(runs, target)
    request = common_request(kept, prompt)
    pool = candidates(kept, request)
    if limits.max_accuracy_loss is not None:
        raise RecordError(
            f"no score for {', '.join(f'`{c.name}`' for c in pool)}, so --max-accuracy-loss cannot be checked",
            hint="leave it out, or limit the distance to the float model with --max-kl",
        )
    failures = {c.name: shortfalls(c, limits) for c in pool}
    fitting = [c for c in pool if not failures[c.name]]
    if not fitting:
        raise nothing_fits(failures, target)
    # Medians order the dominated behind their dominators, so the front is never empty.
    front = [c for c in fitting if not any(_dominates(other, c) for other in fitting)]
    steps = _decide(front, PREFERENCES[prefer])
    winner = min(steps[-1].left, key=lambda c: (_median(c.values[steps[0].name]), c.name))
    lost = []
    for candidate in pool:
        if failures[candidate.name]:
            why = "; ".join(shortfall.words for shortfall in failures[candidate.name])
        elif candidate not in front:
            by = [c for c in front if _dominates(c, candidate)] or [c for c in fitting if _dominates(c, candidate)]
            why = _dominated(candidate, winner if winner in by else by[0])
        elif candidate is not winner:
            why = _why_lost(candidate, winner, steps)
        else:
            continue
        lost.append((candidate.name, why))
    return Choice(
        winner=winner,
        sentence=_sentence(winner, steps, len(fitting), len(pool), limits, request),
        lost=tuple(lost),
        front=tuple(c.name for c in front),
        notes=(*notes, *_notes(kept)),
        request=request,
        limits=limits,
        prefer=prefer,
        considered=tuple(pool),
    )


def _median(value: Value) -> float:
    assert isinstance(value, Figure), "who has no figure was not left over"
    return value.median
