"""`ferrule measure`: raw timings of a bundle on this machine, as JSON lines.

No statistics here: medians, intervals, meters and the store are the host's. A process measures one load, so a host
starts several. Every event has `event` and `schema_version`; times are seconds, sizes bytes.

Events, in order: `open` (only from the command), `machine`, `plan`, `load`, `ready` (tokenizer and constraint),
`memory`, `warmup`, then for every repeat and prompt length `prefill`, `first_token`, `decode`, and for every repeat
`call`: a whole request, from its prompt to a constrained call, the same tokens for every bundle of a model; then
`memory`, `marks`, `machine_after`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bundle import Bundle, open_bundle
from .commandline import say
from .errors import EngineError, UsageError
from .measure_options import Options
from .probe import conditions, machine
from .procfs import Absent, boot_id, kib
from .registry import load_module

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .engines import Engine
    from .golden import Player

__all__ = ["SCHEMA_VERSION", "SEED", "measure", "measure_run", "own_memory", "prompt_tokens"]

SCHEMA_VERSION = 1

# Prompt tokens, and those of the call that answers it.
Request = tuple[Sequence[int], Sequence[int]]

# The prompt is the same in every run of this version; recorded in the plan.
SEED = 20240229

_WARMUP_DECODE = 4


def prompt_tokens(count: int, vocabulary: int, avoid: Sequence[int], seed: int = SEED) -> list[int]:
    """Return a prompt of ordinary token ids that is the same everywhere.

    Control tokens sit at either end of a vocabulary, so ids are drawn from its middle eight tenths.

    Args:
      count: Tokens wanted.
      vocabulary: Entries of the tokenizer.
      avoid: Ids not to use, such as stop tokens.
      seed: Where the sequence starts.
    """
    low, high = vocabulary // 10, vocabulary - vocabulary // 10
    allowed = high - low - len({token for token in avoid if low <= token < high})
    if allowed < 1:
        raise EngineError(f"a vocabulary of {vocabulary} leaves no ordinary tokens to measure with")
    # Only `random()` itself is promised to be the same in every version of Python.
    draw, refused, tokens = random.Random(seed), frozenset(avoid), list[int]()
    while len(tokens) < count:
        token = low + int(draw.random() * (high - low))
        if token not in refused:
            tokens.append(token)
    return tokens


def own_memory(root: Path = Path("/")) -> dict[str, Any]:
    """Return what this process holds, in bytes; absent values are null, with the reason under `missing`.

    `unevictable` is anonymous and shared memory: what the kernel cannot drop and read again from a file.

    Args:
      root: Where /proc is.
    """
    status = root / "proc/self/status"
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    fields = {"peak_rss": ("VmHWM",), "rss": ("VmRSS",), "unevictable": ("RssAnon", "RssShmem"), "file": ("RssFile",)}
    for name, parts in fields.items():
        try:
            values[name] = sum(kib(status, part) for part in parts)
        except Absent as reason:
            values[name], missing[name] = None, str(reason)
    return {**values, "missing": missing}


class _Clock:
    """Times phases and remembers when each was, on the clock that a meter's samples are laid beside."""

    def __init__(self) -> None:
        self.marks: list[dict[str, Any]] = []
        self._start = 0

    def start(self) -> None:
        self._start = time.monotonic_ns()

    def stop(self, phase: str, **where: Any) -> float:
        """Return the seconds since `start`, and keep the mark."""
        end = time.monotonic_ns()
        self.marks.append({"phase": phase, **where, "start_ns": self._start, "end_ns": end})
        return (end - self._start) / 1e9


def _best(engine: Engine, hidden: NDArray[np.float32]) -> tuple[int, NDArray[np.float32]]:
    """Return the most likely next token, and the logits."""
    logits = engine.logits(hidden)
    return int(logits[-1].argmax()), logits


def _check_finite(logits: NDArray[np.float32], phase: str) -> None:
    import numpy as np

    if not np.isfinite(logits).all():
        bad = int(logits.size - np.isfinite(logits).sum())
        raise EngineError(
            f"{bad} of {logits.size} logits are not finite after {phase}", hint="convert the checkpoint again"
        )


def _pass(
    engine: Engine, prompt: Sequence[int], decode: int, repeat: int, clock: _Clock
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Prefill one prompt and decode behind it, greedily, whatever tokens come."""
    engine.reset()
    place = {"repeat": repeat, "prompt": len(prompt)}
    clock.start()
    hidden = engine.feed(prompt)
    prefill = clock.stop("prefill", **place)
    token, logits = _best(engine, hidden)
    first = clock.stop("first_token", **place)
    _check_finite(logits, "prefill")
    clock.start()
    for _ in range(decode):
        token, logits = _best(engine, engine.feed([token]))
    seconds = clock.stop("decode", tokens=decode, **place)
    _check_finite(logits, "decode")
    yield "prefill", {**place, "tokens": len(prompt), "seconds": prefill}
    yield "first_token", {**place, "prompt_tokens": len(prompt), "seconds": first}
    yield "decode", {**place, "tokens": decode, "depth": len(prompt), "seconds": seconds}


def _plan(bundle: Bundle, options: Options, cores: int | None, request: Request) -> dict[str, Any]:
    whole = len(request[0]) + len(request[1])
    needed = max(max(options.prompts) + options.decode, whole)
    context = options.context if options.context is not None else needed
    limit = bundle.manifest.context
    if needed > min(context, limit):
        raise UsageError(
            f"{max(options.prompts)} prompt and {options.decode} decoded tokens, and a whole request of {whole}, "
            f"do not fit a context of {min(context, limit)}",
            hint="give a shorter --prompt, fewer --decode tokens" + (", or a larger --context" * (context < limit)),
        )
    if options.threads is None and cores is None:
        raise UsageError("the number of usable cores is not known here", hint="give --threads")
    return {
        "prompts": list(options.prompts),
        "decode": options.decode,
        "repeat": options.repeat,
        "threads": options.threads if options.threads is not None else cores,
        "context": context,
        "chunk": options.chunk,
        "seed": SEED,
        "request": {"prompt": len(request[0]), "tokens": len(request[1])},
    }


def measure(
    bundle: Bundle,
    options: Options,
    *,
    load: Callable[..., Engine] | None = None,
    player: Callable[[Bundle, Engine], Player] | None = None,
    request: Request = ((), ()),
) -> Iterator[dict[str, Any]]:
    """Load a bundle and time it, one event at a time; nothing runs between asking for two events but the next phase.

    Args:
      bundle: What to load.
      options: What to time.
      load: What loads the engine, called as `load(bundle, threads=, context=, chunk=)`; the bundle's own engine if
        None.
      player: Makes what plays a whole request: tokenizer and constraint over the loaded engine; None times none.
      request: Prompt tokens of that request, and those of the call that answers it.

    Yields:
      Events, as the module describes them.

    Raises:
      UsageError: The prompt does not fit the context.
      EngineError: The engine failed, or its logits are not finite.
    """

    def event(name: str, **values: Any) -> dict[str, Any]:
        return {"event": name, "schema_version": SCHEMA_VERSION, **values}

    facts = machine()
    plan = _plan(bundle, options, facts.cores, request)
    yield event("machine", machine=facts.to_dict(), conditions=conditions().to_dict())
    yield event("plan", **plan, bundle=bundle.manifest.name, bundle_sha256=bundle.hash)
    clock = _Clock()
    clock.start()
    if load is None:
        from . import engines

        # Its module now, so that importing and loading are timed apart.
        load_module("engine", engines.__name__, bundle.manifest.engine, EngineError)
        load = engines.load
    imported = clock.stop("import")
    clock.start()
    engine = load(bundle, threads=plan["threads"], context=plan["context"], chunk=plan["chunk"])
    loaded = clock.stop("load")
    yield event("load", import_seconds=imported, engine_seconds=loaded, seconds=imported + loaded)
    play = None
    if player is not None:
        clock.start()
        play = player(bundle, engine)
        yield event("ready", seconds=clock.stop("ready"))
    yield event("memory", when="loaded", **own_memory())
    vocabulary, avoid = bundle.manifest.memory.vocabulary, bundle.manifest.stop_tokens
    prompt = prompt_tokens(max(options.prompts), vocabulary, avoid)
    clock.start()
    # The longest prompt, so that no buffer grows later on.
    warm = min(_WARMUP_DECODE, options.decode)
    for _ in _pass(engine, prompt, warm, -1, _Clock()):
        pass
    yield event("warmup", seconds=clock.stop("warmup"), tokens=len(prompt) + warm)
    for repeat in range(options.repeat):
        for count in options.prompts:
            for name, values in _pass(engine, prompt[:count], options.decode, repeat, clock):
                yield event(name, **values)
        if play is not None:
            clock.start()
            first = play.play(*request)
            sizes = {"prompt": len(request[0]), "tokens": len(request[1])}
            yield event("call", repeat=repeat, **sizes, first_seconds=first, seconds=clock.stop("call", repeat=repeat))
    yield event("memory", when="end", **own_memory())
    yield event("marks", clock="monotonic", boot=boot_id(), marks=clock.marks)
    yield event("machine_after", conditions=conditions().to_dict())


def measure_run(options: argparse.Namespace) -> int:
    """Measure `options.bundle` and print every event as one line."""
    start = time.monotonic()
    bundle = open_bundle(Path(options.bundle))
    opened = {"event": "open", "schema_version": SCHEMA_VERSION, "seconds": time.monotonic() - start}
    say(json.dumps(opened))
    wanted = Options(options.prompt, options.decode, options.repeat, options.threads, options.context, options.chunk)
    from .golden import Player, whole_request

    for event in measure(bundle, wanted, player=Player, request=whole_request(bundle)):
        say(json.dumps(event))
    return 0
