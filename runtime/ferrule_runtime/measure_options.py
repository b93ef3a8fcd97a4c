"""What `ferrule measure` and `ferrule profile` time: the options, and their arguments on the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from .commandline import positive

__all__ = ["Options", "add_measure_arguments", "lengths"]

_DEFAULT_CHUNK = 64


@dataclass(frozen=True)
class Options:
    """What to time.

    Attributes:
      prompts: Prompt lengths in tokens; each is prefilled and decoded behind.
      decode: Tokens decoded behind each prompt.
      repeat: Times that all of it is done, the warm-up apart.
      threads: Threads of the engine; the cores this process may use if None.
      context: Tokens to hold; what the longest prompt and its decoding need if None.
      chunk: Tokens of one prefill step.
    """

    prompts: tuple[int, ...] = (128,)
    decode: int = 32
    repeat: int = 3
    threads: int | None = None
    context: int | None = None
    chunk: int = _DEFAULT_CHUNK


def lengths(text: str) -> tuple[int, ...]:
    """Read prompt lengths such as `128,512`, for argparse; sorted, each once."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to time to a command's parser; `ferrule profile` has the same arguments."""
    default = Options()
    parser.add_argument(
        "--prompt", type=lengths, default=default.prompts, metavar="N[,N]", help="prompt lengths in tokens (128)"
    )
    parser.add_argument(
        "--decode", type=positive, default=default.decode, metavar="N", help="tokens decoded behind each prompt (32)"
    )
    parser.add_argument(
        "--repeat", type=positive, default=default.repeat, metavar="N", help="repeats in one process (3)"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads; the usable cores if left out")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens to hold; what is needed if left out")
    parser.add_argument(
        "--chunk", type=positive, default=default.chunk, metavar="N", help="tokens of one prefill step (64)"
    )
