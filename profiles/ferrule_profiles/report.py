"""One page that says what was measured and what to ship: it carries its script and data, and asks nothing of a network.

Everything that comes from records is escaped: by the template in text, here in plot labels and embedded JSON. The
page's own policy (`Content-Security-Policy`) forbids outside requests as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ferrule_runtime import __version__
from ferrule_runtime.commandline import human
from ferrule_runtime.errors import RecordError

from .plots import plots
from .request import QUANTITIES, Candidate, candidates, common_request, fidelity_value
from .run import Figure, Missing, Power, Run, Value, unlike, warnings
from .words import amount, interval

__all__ = ["embedded_json", "read_pick", "render", "write"]


@dataclass(frozen=True)
class _Cell:
    """One figure in the table: its value, and under it the interval, or why there is none."""

    text: str
    below: str
    missing: bool = False


@dataclass(frozen=True)
class _Section:
    """Runs that may be compared: one target, one machine, one checkpoint."""

    title: str
    machine: str
    rows: tuple[tuple[Candidate, bool, tuple[_Cell, ...]], ...]
    request: Any
    energy: str
    conditions: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    unlike: tuple[str, ...]
    plots: tuple[dict[str, Any], ...]


def embedded_json(value: Any) -> str:
    """Return JSON that can stand inside a script element whatever its strings hold."""
    text = json.dumps(value, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _newest(runs: Sequence[Run]) -> list[Run]:
    newest = {
        (r.target, r.board, r.bundle.checkpoint_sha256, r.bundle.recipe_key, r.bundle.form, r.bundle.engine): r
        for r in runs
    }
    return sorted(newest.values(), key=lambda run: (run.target, run.bundle.checkpoint, run.bundle.bytes))


def _alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs so that only those are side by side that may be compared."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if run.bundle.checkpoint_sha256 == group[0].bundle.checkpoint_sha256 and not unlike(run, group[0]):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _cell(value: Value, unit: str = "") -> _Cell:
    """Write a figure; `unit` is left out of it, since the column's head has it."""
    if isinstance(value, Missing):
        return _Cell("null", value.reason, missing=True)
    exact = value.count == 0 and value.low == value.high
    return _Cell(amount(value.median, value.unit).removesuffix(unit), "" if exact else interval(value).strip("[]"))


def _top1(run: Run) -> _Cell:
    value, low, high = (fidelity_value(run, name) for name in ("top1", "top1_low", "top1_high"))
    if isinstance(value, Missing):
        return _cell(value)
    below = ""
    if isinstance(low, Figure) and isinstance(high, Figure):
        below = f"{100 * low.median:.1f} to {100 * high.median:.1f}"
    return _Cell(f"{100 * value.median:.1f} %", below)


def _cells(candidate: Candidate, prompt: int) -> tuple[_Cell, ...]:
    run, facts = candidate.run, candidate.run.bundle
    return (
        _Cell(human(facts.bytes), f"{facts.bytes:,} B"),
        _Cell(f"{facts.bits_per_weight:.2f}", ""),
        _cell(candidate.values["fidelity"], " nats"),
        _top1(run),
        _cell(run.figure(f"prefill@{prompt}"), " tok/s"),
        _cell(run.figure(f"first_token@{prompt}")),
        _cell(run.figure(f"decode@{prompt}"), " tok/s"),
        *(_cell(run.figure(name)) for name in ("load", "peak_rss", "unevictable", f"energy_per_token@{prompt}")),
    )


def _machine(run: Run) -> str:
    facts = run.machine
    parts = [facts.get("board"), facts.get("cpu")]
    if facts.get("cores"):
        parts.append(f"{facts['cores']} cores")
    if facts.get("memory"):
        parts.append(f"{human(facts['memory'])} RAM")
    parts.append(facts.get("system"))
    return ", ".join(str(part) for part in parts if part)


def _conditions(run: Run) -> tuple[tuple[str, str], ...]:
    facts, missing = run.machine, run.machine.get("missing", {})
    settings = run.settings
    engine = f"{run.bundle.engine} {run.bundle.engine_version or '(version not known)'}, form {run.bundle.form}"

    def fact(name: str) -> str:
        value = facts.get(name)
        return str(value) if value is not None else f"null: {missing.get(name, 'not recorded')}"

    def now(name: str) -> str:
        before = run.before[0] if run.before else {}
        value = before.get(name)
        return str(value) if value is not None else f"null: {before.get('missing', {}).get(name, 'not recorded')}"

    clocks = run.before[0].get("clocks") if run.before else None
    governors = ", ".join(sorted({clock["governor"] or "not said" for clock in clocks})) if clocks else now("clocks")
    return (
        ("Engine", engine),
        ("Threads, context, chunk", " / ".join(str(settings.get(name)) for name in ("threads", "context", "chunk"))),
        ("Launches, repeats in each", f"{settings.get('launches')} / {settings.get('repeat')}"),
        ("Decoded tokens per repeat", str(settings.get("decode"))),
        ("Governor", governors),
        ("Temperatures before", now("celsius")),
        ("Throttling before", now("throttled")),
        ("Memory limit of the control group", fact("memory_limit")),
        ("Kernel", fact("kernel")),
        ("Python", fact("python")),
        ("Board", run.board),
    )


def _energy(runs: Sequence[Run]) -> str:
    known = [run.power for run in runs if isinstance(run.power, Power)]
    if known:
        simulated = "Simulated. " if any(power.simulated for power in known) else ""
        return f"{simulated}{known[0].source}: {known[0].boundary}."
    power = runs[0].power
    return f"Not measured: {power.reason}." if isinstance(power, Missing) else ""


def _warnings(pool: Sequence[Candidate]) -> list[str]:
    """Return every warning once, with whose it is unless it is everybody's."""
    whose: dict[str, list[str]] = {}
    for candidate in pool:
        for text in warnings(candidate.run):
            whose.setdefault(text, []).append(candidate.name)
    return [text if len(names) == len(pool) else f"{', '.join(names)}: {text}" for text, names in whose.items()]


def _section(runs: Sequence[Run], head: Run, picked: str | None) -> _Section:
    """Build one section; `head` is the first run shown of the same target, from which these may differ."""
    request = common_request(runs)
    pool = candidates(runs, request)
    return _Section(
        title=f"{runs[0].bundle.checkpoint} on {runs[0].target}",
        machine=_machine(runs[0]),
        rows=tuple((c, c.run.bundle.sha256 == picked, _cells(c, request.prompt)) for c in pool),
        request=request,
        energy=_energy(runs),
        conditions=_conditions(runs[0]),
        warnings=tuple(_warnings(pool)),
        unlike=tuple(unlike(runs[0], head)),
        plots=tuple(plots(pool, request, picked)),
    )


def read_pick(path: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """Read a choice that `ferrule pick --json` printed.

    Args:
      path: The file.
      runs: What is reported; the choice must be among them.

    Raises:
      RecordError: Not such a file, of a newer schema, or what it chose is not among the runs.
    """
    hint = "make it with `ferrule pick RUNS --target T --json > FILE`"
    try:
        choice = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read: {error}", hint=hint) from None
    if not isinstance(choice, dict) or choice.get("kind") != "pick" or choice.get("schema_version") != 1:
        raise RecordError(f"{path}: not a pick of schema 1", hint=hint)
    texts = all(isinstance(choice.get(name), str) for name in ("why", "bundle", "bundle_sha256"))
    lost, notes = choice.get("lost"), choice.get("notes")
    listed = isinstance(lost, list) and all(isinstance(item, dict) and {"name", "why"} <= item.keys() for item in lost)
    if not texts or not listed or not isinstance(notes, list):
        raise RecordError(f"{path}: a pick without `why`, `bundle`, `lost` or `notes`", hint=hint)
    if choice["bundle_sha256"] not in {run.bundle.sha256 for run in runs}:
        raise RecordError(f"{path}: it chose `{choice['bundle']}`, which is not among the runs", hint="pick again")
    return choice


def _code(text: str) -> Any:
    """Turn names between back-ticks into code, for the template; everything else is escaped."""
    from markupsafe import Markup, escape

    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # a back-tick of the text's own
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def _moment(time: str) -> str:
    """Write an ISO time to the minute; `2026-03-01 12:30 UTC`."""
    day, _, clock = time.partition("T")
    zone = " UTC" if time.endswith(("+00:00", "Z")) else ""
    return f"{day} {clock[:5]}{zone}"


def render(runs: Sequence[Run], choice: Mapping[str, Any] | None = None) -> str:
    """Write the page.

    Args:
      runs: In the order they were taken; of several of one recipe the newest is shown.
      choice: What `Choice.to_dict` or `read_pick` returned.

    Raises:
      RecordError: There are no runs.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    if not runs:
        raise RecordError("there are no runs", hint="make some with `ferrule profile BUNDLE -o runs.jsonl`")
    newest = _newest(runs)
    picked = str(choice["bundle_sha256"]) if choice else None
    groups = _alike(newest)
    heads: dict[str, Run] = {}
    sections = [_section(group, heads.setdefault(group[0].target, group[0]), picked) for group in groups]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = _code
    template = environment.from_string((resources.files(__package__) / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        sections=sections,
        choice=choice,
        quantities=QUANTITIES,
        left_out=len(runs) - len(newest),
        taken=_moment(max(run.time for run in newest)),
        version=__version__,
        records=[(run.bundle.name, _moment(run.time), json.dumps(run.to_dict(), indent=1)) for run in newest],
        plot_data=embedded_json([plot for section in sections for plot in section.plots]),
        plotly=get_plotlyjs(),
    )


def write(path: Path, page: str) -> None:
    """Write the page beside its place, then rename it, so that there is never half of one.

    Raises:
      RecordError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RecordError(
            f"{path}: cannot be written: {error.strerror or error}", hint="give another file with -o"
        ) from None
