"""The commands that a board has. Arguments only; the work is imported when a command is carried out."""

from __future__ import annotations

import argparse

from .commandline import Command, add_json, byte_size, positive

__all__ = ["DOCTOR", "FIT", "INSPECT", "MEASURE", "RUN", "SELFTEST"]


def _budget_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=_amount, metavar="SIZE", help="most memory the run may take, such as 700MiB")
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens to hold (2048, or what the bundle reaches)"
    )
    parser.add_argument(
        "--min-context", type=positive, metavar="N", help="let the context shrink to this to fit --memory"
    )
    parser.add_argument(
        "--chunk", type=positive, metavar="N", help="tokens of one prefill step; may shrink if left out"
    )


def _amount(text: str) -> int:
    return byte_size(text)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verify", action="store_true", help="hash every part again, even if nothing seems changed")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help="a bundle's folder; not needed with --model")
    parser.add_argument("request", metavar="REQUEST", help="what to do, in words")
    parser.add_argument("--tools", metavar="MODULE", help="Python module with the tools")
    parser.add_argument(
        "--model", metavar="KIND:ARGUMENT", help="reply by another model than a bundle: a policy file (simulated)"
    )
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="most replies of the model (12)")
    parser.add_argument("--call", action="store_true", help="make the first reply a tool call (constrained)")
    parser.add_argument("--trace", metavar="FILE", help="write every step as a JSON line")
    _budget_arguments(parser)
    _verify(parser)
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    from .run_command import run

    return run(options)


def _measure_arguments(parser: argparse.ArgumentParser) -> None:
    from .measure_options import add_measure_arguments

    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder")
    add_measure_arguments(parser)


def _measure(options: argparse.Namespace) -> int:
    from .measure import measure_run

    return measure_run(options)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor_run

    return doctor_run(options)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="CHECKPOINT|BUNDLE", help="a published model, or a bundle's folder")
    parser.add_argument("--target", default="host", metavar="T", help="the kind of board to estimate for (host)")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens to hold (2048)")
    _verify(parser)
    add_json(parser)


def _inspect(options: argparse.Namespace) -> int:
    from .describe import inspect

    return inspect(options)


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="CHECKPOINT|BUNDLE", help="a published model, or a bundle's folder")
    parser.add_argument("--target", default="host", metavar="T", help="the kind of board to estimate for (host)")
    parser.add_argument("--recipe", metavar="R", help="of a checkpoint, only this recipe")
    _budget_arguments(parser)
    add_json(parser)


def _fit(options: argparse.Namespace) -> int:
    from .describe import fit

    return fit(options)


def _selftest_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder")
    add_json(parser)


def _selftest(options: argparse.Namespace) -> int:
    from .describe import selftest

    return selftest(options)


RUN = Command(
    "carry out a request with a bundle and tools, under a memory budget",
    _run_arguments,
    _run,
    'examples:\n  ferrule run my-bundle "turn the Wi-Fi on" --tools my_tools --memory 300MiB\n'
    '  ferrule run "turn the Wi-Fi on" --model scripted:policy.toml --tools my_tools',
)
MEASURE = Command("print raw timings of a bundle on this machine, one JSON line an event", _measure_arguments, _measure)
DOCTOR = Command("say what this machine is, and what stands in the way", add_json, _doctor)
INSPECT = Command("say what a checkpoint or bundle is, and what it would need", _inspect_arguments, _inspect)
FIT = Command(
    "say whether it will fit, part by part, before anything is loaded",
    _fit_arguments,
    _fit,
    "examples:\n  ferrule fit my-bundle --memory 300MiB --context 1024\n"
    "  ferrule fit model.gguf --recipe w4g32 --target rpi4 --memory 1GiB",
)
SELFTEST = Command("play a bundle's golden calls on this machine", _selftest_arguments, _selftest)
