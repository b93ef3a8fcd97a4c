"""`ferrule targets`: which kinds of board there are, and what each can do."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ferrule_runtime.commandline import Command, add_json, emit, human, say

if TYPE_CHECKING:
    from .target import Target

__all__ = ["TARGETS"]


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a target, or a TOML file; all of them if left out")
    add_json(parser)


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _rows(target: Target) -> list[tuple[str, str]]:
    from ferrule_runtime.registry import module_names

    here = module_names("ferrule_targets.links")
    links = [link if link in here else f"{link} (not in this version)" for link in target.links]
    return [
        ("name", target.name),
        ("title", target.title),
        ("memory", f"{human(target.memory.ram)}, of which {human(target.memory.free)} are free for the agent"),
        ("", target.memory.source),
        ("cores", str(target.cores)),
        ("features", _list(target.features)),
        ("engine", target.engine),
        ("forms", _list(target.forms)),
        ("weights", f"float32, or {_list(target.bits)} bits in groups of {_list(target.groups)}"),
        ("activations", f"{target.activations} in quantised layers (accuracy level {target.accuracy_level})"),
        ("sensors", _list(target.sensors)),
        ("links", _list(links)),
        ("agent", target.agent),
    ]


def _table(targets: list[Target]) -> list[tuple[str, ...]]:
    head = ("NAME", "MEMORY", "FREE", "CORES", "BITS", "ACTIVATIONS", "TITLE")
    rows: list[tuple[str, ...]] = [
        (
            target.name,
            human(target.memory.ram),
            human(target.memory.free),
            str(target.cores),
            "/".join(map(str, target.bits)),
            target.activations,
            target.title,
        )
        for target in targets
    ]
    return [head, *rows]


def _print_columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _run(options: argparse.Namespace) -> int:
    from .target import load_target, target_names

    if options.name:
        target = load_target(options.name)
        if options.json:
            emit("target", target.model_dump(mode="json"))
        else:
            _print_columns([*_rows(target)])
        return 0
    targets = [load_target(name) for name in target_names()]
    if options.json:
        emit("targets", {"targets": [target.model_dump(mode="json") for target in targets]})
    else:
        _print_columns(_table(targets))
    return 0


TARGETS = Command(
    help="list the kinds of board, or show one in full",
    configure=_configure,
    run=_run,
    epilog="examples:\n  ferrule targets\n  ferrule targets rpi5\n  ferrule targets my-board.toml --json",
)
