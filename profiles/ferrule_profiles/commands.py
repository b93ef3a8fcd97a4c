"""`ferrule profile`, `ferrule pick` and `ferrule report`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrule_runtime.commandline import Command, add_json, byte_size, emit, note, positive, say
from ferrule_runtime.errors import UsageError
from ferrule_runtime.measure_options import Options, add_measure_arguments

if TYPE_CHECKING:
    from .limits import Limits
    from .meters import Meter
    from .run import Missing, Run

__all__ = ["PICK", "PROFILE", "REPORT"]

# Of the links that exist, the kind of board behind them.
_LOCAL, _LOCAL_TARGET = "local:", "host"


def _number(unit: str) -> Callable[[str], float]:
    """Return a reader of a finite number of at least 0, with or without its unit."""

    def read(text: str) -> float:
        try:
            value = float(text.removesuffix(unit).strip())
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            example = f"1.5{unit}"
            raise UsageError(f"`{text}` is not an amount in {unit or 'nats'}", hint=f"write a number such as {example}")
        return value

    return read


def _configure_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE", help="what to measure; bundles take turns")
    parser.add_argument("--board", default=_LOCAL, metavar="URL", help="where; this machine if left out (local:)")
    parser.add_argument("--launches", type=positive, default=3, metavar="N", help="fresh processes per bundle (3)")
    add_measure_arguments(parser)
    parser.add_argument("--meter", metavar="URL", help="what measures power; the board's own sensor if left out")
    parser.add_argument("-o", "--output", type=Path, metavar="RUNS", help="append the runs to this file")
    add_json(parser)


def _meter(url: str | None, board: str) -> Meter | Missing:
    from .meters import open_meter
    from .power import SensorMeter
    from .run import Missing
    from .sensors import NoSensor, find_sensor

    if url is not None:
        return open_meter(url)
    if board != _LOCAL:
        return Missing("no --meter was given, and the sensors of a board are read on this machine only")
    try:
        return SensorMeter(find_sensor())
    except NoSensor as reason:
        return Missing(str(reason))


def _profile(bundles: Sequence[Path], options: argparse.Namespace) -> list[Run]:
    from ferrule_targets.links import open_link

    from .launches import Plan, profile

    if options.board != _LOCAL:
        raise UsageError(f"board `{options.board}` cannot be profiled yet", hint="profile this machine: --board local:")
    wanted = Options(options.prompt, options.decode, options.repeat, options.threads, options.context, options.chunk)
    plan = Plan(wanted, options.launches, _LOCAL_TARGET)
    link, meter = open_link(options.board), _meter(options.meter, options.board)
    with _progress(len(bundles) * options.launches) as tell:
        return profile(bundles, link, plan, meter, tell)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give what tells people how far it is: a bar on a terminal, otherwise a line per launch."""
    begun = itertools.count(1)
    if not sys.stderr.isatty():
        yield lambda text: note(f"[{next(begun)}/{total}] {text}")
        return
    from rich.console import Console
    from rich.progress import Progress

    # Redrawn rarely: it shares the cores with what is being measured.
    with Progress(console=Console(stderr=True), refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, completed=next(begun) - 1, description=text)


def _run_profile(options: argparse.Namespace) -> int:
    from . import store
    from .words import describe

    if options.output is not None:
        store.check_writable(options.output)
    runs = _profile(options.bundles, options)
    if options.output is not None:
        store.append(options.output, runs)
    if options.json:
        emit("runs", {"runs": [run.to_dict() for run in runs]})
        return 0
    for number, run in enumerate(runs):
        if number:
            say()
        for line in describe(run):
            say(line)
    return 0


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits", "checked at the unfavourable end of the interval")
    group.add_argument("--max-memory", type=byte_size, metavar="M", help="peak RSS, such as 700MiB")
    group.add_argument("--max-first-token", type=_number("s"), metavar="S", help="seconds to the first token")
    group.add_argument("--min-decode", type=_number("tok/s"), metavar="TOK/S", help="tokens decoded per second")
    group.add_argument("--max-size", type=byte_size, metavar="M", help="size of the bundle, such as 150MiB")
    group.add_argument("--max-kl", type=_number(""), metavar="X", help="KL to the float model, nats per token")
    group.add_argument("--max-energy-per-task", type=_number("J"), metavar="J", help="joules of one request")
    group.add_argument("--max-accuracy-loss", type=_number("pt"), metavar="PT", help="points of a suite's score")
    choice = parser.add_argument_group("choice")
    choice.add_argument(
        "--prefer",
        choices=("latency", "memory", "size", "fidelity"),
        default="latency",
        help="what decides among those that meet the limits (latency)",
    )
    choice.add_argument(
        "--prompt", type=positive, metavar="N", help="prompt length that latency is of; the longest one measured"
    )


def _limits(options: argparse.Namespace) -> Limits:
    from .limits import Limits

    return Limits(
        max_memory=options.max_memory,
        max_first_token=options.max_first_token,
        min_decode=options.min_decode,
        max_size=options.max_size,
        max_kl=options.max_kl,
        max_energy_per_task=options.max_energy_per_task,
        max_accuracy_loss=options.max_accuracy_loss,
    )


def _configure_pick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a file that `ferrule profile -o` made")
    parser.add_argument("--target", required=True, metavar="T", help="the kind of board to choose for")
    _add_limits(parser)
    add_json(parser)


def _run_pick(options: argparse.Namespace) -> int:
    from . import store
    from .pick import pick

    choice = pick(store.read(options.runs), options.target, _limits(options), options.prefer, options.prompt)
    if options.json:
        emit("pick", choice.to_dict())
        return 0
    say(choice.sentence)
    for name, why in choice.lost:
        say(f"  not `{name}`: {why}")
    for text in choice.notes:
        note(f"warning: {text}")
    return 0


def _configure_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a file that `ferrule profile -o` made")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="HTML", help="the page to write")
    parser.add_argument("--pick", type=Path, metavar="FILE", help="a choice that `ferrule pick --json` printed")
    parser.add_argument("--target", metavar="T", help="choose for this kind of board, as `ferrule pick` does")
    _add_limits(parser)
    add_json(parser)


def _choice(options: argparse.Namespace, runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the choice to show as JSON-like data: a stored one, one made now, or none."""
    from .pick import pick
    from .report import read_pick

    limits = _limits(options)
    if options.pick is not None:
        if options.target is not None or any(limits.given()):
            raise UsageError("--pick shows a choice that was made", hint="leave out --target and the limits, or --pick")
        return read_pick(options.pick, runs)
    if options.target is None:
        if any(limits.given()):
            raise UsageError("limits need a --target", hint="the kind of board to choose for, such as --target host")
        return None
    return pick(runs, options.target, limits, options.prefer, options.prompt).to_dict()


def _run_report(options: argparse.Namespace) -> int:
    from . import store
    from .report import render, write

    runs = store.read(options.runs)
    page = render(runs, _choice(options, runs))
    write(options.output, page)
    if options.json:
        emit("report", {"path": str(options.output), "bytes": len(page.encode()), "runs": len(runs)})
    else:
        size = len(page.encode()) / 1e6
        say(f"{options.output}: {len(runs)} run{'s' * (len(runs) != 1)}, {size:.1f} MB, needs no network")
    return 0


PROFILE = Command(
    help="measure bundles on a board: speed, memory, energy",
    configure=_configure_profile,
    run=_run_profile,
    epilog="examples:\n  ferrule profile out/w8 out/w4g32 -o runs.jsonl\n"
    "  ferrule profile out/w4g32 --prompt 128,512 --decode 64 --launches 12",
)
PICK = Command(
    help="choose which measured bundle to ship, and say why",
    configure=_configure_pick,
    run=_run_pick,
    epilog="examples:\n  ferrule pick runs.jsonl --target host\n"
    "  ferrule pick runs.jsonl --target host --max-memory 700MiB --min-decode 20 --max-kl 0.1 --json",
)
REPORT = Command(
    help="write measured runs as one page to read anywhere",
    configure=_configure_report,
    run=_run_report,
    epilog="examples:\n  ferrule report runs.jsonl -o report.html\n"
    "  ferrule report runs.jsonl --target host --max-memory 700MiB -o report.html",
)
