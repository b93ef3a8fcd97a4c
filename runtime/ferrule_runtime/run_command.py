"""`ferrule run`: one request, carried out step by step in front of the user."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from .agent import Agent, AgentLimits
from .budget import MemoryPlan, baseline, plan_within
from .bundle import Bundle, open_bundle
from .commandline import emit, human, note, say
from .errors import UsageError
from .messages import Call
from .models import Model, load_model
from .steps import Outcome, Step
from .tools import Tool, Toolbox, load_toolbox
from .trace import Trace, view

__all__ = ["run"]


def _plan(bundle: Bundle, options: argparse.Namespace) -> MemoryPlan:
    plan = plan_within(
        bundle.manifest.memory,
        options.memory,
        interpreter=baseline(),
        most_context=bundle.manifest.context,
        context=options.context,
        min_context=options.min_context,
        chunk=options.chunk,
    )
    allowed = f" of {human(options.memory)} allowed" if options.memory else ""
    note(f"memory: {human(plan.total)} planned{allowed}, context {plan.context}, chunk {plan.chunk}")
    return plan


def _model(options: argparse.Namespace) -> Model:
    if options.model and options.bundle:
        raise UsageError(f"both a bundle, `{options.bundle}`, and --model {options.model}", hint="give one of them")
    if options.model:
        return load_model(options.model)
    if not options.bundle:
        raise UsageError("no bundle to run", hint='ferrule run BUNDLE "request", or --model KIND:ARGUMENT')
    bundle = open_bundle(Path(options.bundle), verify=options.verify)
    plan = _plan(bundle, options)
    from .models.local import LocalModel

    return LocalModel(bundle, plan)


def _confirm(call: Call, tool: Tool) -> bool:
    """Ask a person about what cannot be taken back; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{tool.name} cannot be undone: {call.canonical()}\nrun it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _watched(steps: Iterator[Step], trace: Trace | None, quiet: bool) -> Iterator[Step]:
    for step in steps:
        if trace:
            trace.write(step)
        if not quiet:
            say(view(step))
        yield step


def run(options: argparse.Namespace) -> int:
    """Carry out `options.request`; the exit status is 0 only when it was done."""
    if not options.request.strip():
        raise UsageError("the request is empty", hint='say what to do: ferrule run BUNDLE "turn the Wi-Fi on"')
    toolbox = load_toolbox(options.tools) if options.tools else Toolbox([])
    model = _model(options)
    agent = Agent(
        model,
        toolbox,
        limits=AgentLimits(steps=options.steps),
        confirm=_confirm,
        first="call" if options.call else "either",
    )
    names = [tool.name for tool in toolbox]
    if not options.json:
        say(f"model: {model.label}")
        if toolbox.note:
            say(f"tools: {len(toolbox)}; {toolbox.note}")
    with contextlib.ExitStack() as stack:
        trace = None
        if options.trace:
            trace = stack.enter_context(
                Trace(Path(options.trace), request=options.request, model=model.label, tools=names)
            )
        outcome = Outcome.of(_watched(agent.events(options.request), trace, options.json))
    if options.json:
        steps = [dataclasses.asdict(step) for step in outcome.steps]
        emit(
            "run",
            {"model": model.label, "note": toolbox.note, "ending": outcome.kind, "text": outcome.text, "steps": steps},
        )
    return 0 if outcome.kind == "done" else 1
