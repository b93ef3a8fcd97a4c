"""The converters' commands. Arguments only; the work is imported when a command is carried out."""

from __future__ import annotations

import argparse

from ferrule_runtime.commandline import Command, add_json, positive

__all__ = ["CHECK", "CONVERT", "FETCH", "RECIPES"]


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a model of the catalogue; left out, lists them")
    parser.add_argument("--to", metavar="DIR", help="where to put it (the cache)")
    add_json(parser)


def _fetch(options: argparse.Namespace) -> int:
    from .convert_command import fetch_command

    return fetch_command(options)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="GGUF file, Hugging Face folder or hub id, or catalogued name"
    )
    parser.add_argument("--target", required=True, metavar="T", help="the kind of board; a name or a TOML file")
    parser.add_argument("--recipe", default="w8", metavar="R", help="how to quantise; a name or a TOML file (w8)")
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="the bundle's folder; must not exist")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens it must reach (the model's, up to 8192)")
    parser.add_argument("--lora", metavar="DIR", help="a LoRA adapter's folder (PEFT), merged into the weights")
    parser.add_argument("--dialect", metavar="D", help="tool-call format; detected if left out")
    parser.add_argument("--no-fidelity", action="store_true", help="do not compare with the float model")
    parser.add_argument(
        "--max-kl", type=float, metavar="X", help="fail if the mean KL to the float model is above this"
    )
    add_json(parser)


def _convert(options: argparse.Namespace) -> int:
    from .convert_command import convert_command

    return convert_command(options)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder")
    parser.add_argument("--against", metavar="CHECKPOINT", help="compare with this float model")
    parser.add_argument("--lora", metavar="DIR", help="with this LoRA adapter merged into it")
    add_json(parser)


def _check(options: argparse.Namespace) -> int:
    from .convert_command import check_command

    return check_command(options)


def _recipes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe; left out, lists them")
    parser.add_argument("--target", metavar="T", help="only those that this kind of board takes")
    add_json(parser)


def _recipes(options: argparse.Namespace) -> int:
    from .convert_command import recipes_command

    return recipes_command(options)


FETCH = Command("bring a catalogued model, hash-checked", _fetch_arguments, _fetch)
CONVERT = Command(
    "quantise a checkpoint and export it as a bundle for a board",
    _convert_arguments,
    _convert,
    "example:\n  ferrule convert smollm2-135m --target rpi5 --recipe w4g32 -o smollm2-w4",
)
CHECK = Command("check a bundle: hashes, golden calls, distance to the float model", _check_arguments, _check)
RECIPES = Command("list recipes, or show one in full", _recipes_arguments, _recipes)
