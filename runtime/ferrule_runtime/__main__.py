"""`ferrule COMMAND`: dispatch over the commands that the installed packages bring."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import NoReturn

from . import __version__
from .commandline import Command, note
from .errors import FerruleError, UsageError
from .registry import unknown

__all__ = ["main"]

# Commands of the host toolkit, so that a board can say where they are instead of "unknown".
_HOST = ("check", "convert", "fetch", "pick", "profile", "recipes", "report", "targets")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like every other error of ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.replace("'", "`"), hint=f"{self.prog} --help")


def _commands() -> dict[str, Command]:
    return {point.name: point.load() for point in sorted(entry_points(group="ferrule.commands"), key=lambda p: p.name)}


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    width = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="ferrule", description="Make an agent model fit a board: convert, measure, pick, run.")
    parser.add_argument("--version", action="version", version=f"ferrule {__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in commands.items():
        sub = chosen.add_parser(
            name, help=command.help, description=command.help, epilog=command.epilog or None, formatter_class=width
        )
        command.configure(sub)
    return parser


def _refuse_unknown(arguments: Sequence[str], commands: dict[str, Command]) -> None:
    word = next((a for a in arguments if not a.startswith("-")), None)
    if word is None or word in commands:
        return
    if word in _HOST:
        raise UsageError(
            f"no command `{word}` on this machine", hint="it belongs to the host toolkit: pip install ferrule"
        )
    raise unknown("command", word, commands, UsageError)


def _carry_out(arguments: Sequence[str]) -> int:
    try:
        commands = _commands()
        _refuse_unknown(arguments, commands)
        parser = _parser(commands)
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            return 2
        return commands[options.command].run(options)
    except FerruleError as error:
        note(f"error: {error}")
        if error.hint:
            note(f"hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        note("error: interrupted")
        note("hint: nothing half-done was kept; the same command starts again")
        return 1


def _ended(code: int) -> int:
    """Write what is still to be printed, since at the interpreter's end a failure would be a traceback.

    Returns:
      The exit status: `code`, or 1 if it was 0 and the result could not be written.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if not code and not isinstance(error, BrokenPipeError):
            note(f"error: the result cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Every error of ours is printed here, once."""
    try:
        code = _carry_out(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:  # argparse has printed the help or the version
        if end.code:
            raise
        code = 0
    except BrokenPipeError:  # whoever reads the result has seen enough
        code = 1
    return _ended(code)


if __name__ == "__main__":
    sys.exit(main())
