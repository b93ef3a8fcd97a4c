"""What a bundle will need, by part, before anything is loaded; and the refusal when that is more than is allowed.

The total is the peak resident memory (VmHWM) of one process that holds the engine, the constraint and one conversation
of the whole context. Parts that follow from the graph are exact formulas; the few constants were measured and belong to
this version of the runtime and to onnxruntime 1.31 to 1.32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .bundle import MemoryFacts, state_folder
from .commandline import human
from .errors import ContextError, EngineError, FerruleError, OverBudget, UsageError

__all__ = ["CHUNK", "CONTEXT", "MemoryPlan", "Part", "baseline", "largest_context", "make_plan", "plan_within"]

# Defaults of a run; 64 tokens reach most of the prefill speed at a fraction of the activations of 512.
CONTEXT, CHUNK = 2048, 64
_CHUNKS = (64, 32, 16)
_MIB = 1 << 20

# Fitted on vocabularies of 49k, 152k and 248k entries (tokenizer.json of 2, 11 and 20 MB): the `tokenizers` library and
# llguidance's trie together, peak of loading included.
_PER_ENTRY, _PER_JSON_BYTE = 1100, 5.5
# onnxruntime's two sessions beyond their weights: kernels, plans, thread pools, pages of its library that running
# touches.
_SESSIONS = 20 * _MIB
# The allocator's own slack: freed activations that are not given back.
_SLACK = 4 * _MIB
_LIBRARIES = ("numpy", "onnxruntime", "llguidance", "tokenizers", "jinja2")


@dataclass(frozen=True)
class Part:
    """One line of a plan: what it is, its bytes, and how they were found."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will need.

    Attributes:
      context: Tokens it can hold.
      chunk: Tokens that go through the graph at once.
      parts: What adds up to the total.
    """

    context: int
    chunk: int
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        """Peak resident memory in bytes."""
        return sum(part.bytes for part in self.parts)

    def table(self) -> list[str]:
        """Return the plan as lines of text."""
        width = max(len(part.name) for part in self.parts)
        lines = [f"{part.name:<{width}}  {human(part.bytes):>10}  {part.how}" for part in self.parts]
        return [*lines, f"{'total':<{width}}  {human(self.total):>10}  context {self.context}, chunk {self.chunk}"]


def baseline() -> int:
    """Return the resident bytes of Python with everything that a run imports, measured once per set of versions.

    Raises:
      EngineError: A library is not installed.
      FerruleError: The measuring process failed.
    """
    try:
        key = " ".join([sys.version.split()[0], *(f"{name} {version(name)}" for name in _LIBRARIES)])
    except PackageNotFoundError as error:
        raise EngineError(f"{error.name} is not installed", hint="pip install 'ferrule-runtime[onnx]'") from None
    path = state_folder() / "baseline.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        found_bytes = known["bytes"]
        if known["key"] == key and isinstance(found_bytes, int) and found_bytes >= _MIB:
            return found_bytes
    except (OSError, ValueError, TypeError, LookupError):
        pass  # not measured yet, or the note is damaged: measure
    code = "import onnxruntime, ferrule_runtime.models.local, ferrule_runtime.agent, ferrule_runtime.commands\n"
    code += "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if found.returncode or not found.stdout.strip().isdigit():
        reason = found.stderr.strip().splitlines()[-1:] or ["no VmHWM in /proc/self/status"]
        raise FerruleError(f"cannot measure the interpreter's own memory: {reason[0]}")
    measured = int(found.stdout) * 1024
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"key": key, "bytes": measured}), encoding="utf-8")
    except OSError:
        pass  # costs half a second at the next start, nothing else
    return measured


def make_plan(facts: MemoryFacts, *, context: int, chunk: int, interpreter: int) -> MemoryPlan:
    """Add up what a run needs.

    Args:
      facts: Of the graph, from the manifest or estimated from a checkpoint.
      context: Tokens to hold.
      chunk: Tokens to run through the graph at once.
      interpreter: What `baseline` measured.
    """
    chunk = min(chunk, context)
    work = chunk * facts.work_per_token + chunk * context * facts.scores_per_pair + 8 * facts.vocabulary
    tokens = int(_PER_ENTRY * facts.vocabulary + _PER_JSON_BYTE * facts.tokenizer)
    parts = [
        Part("interpreter and libraries", interpreter, "measured on this machine"),
        Part("weights", facts.packed + facts.head_packed, "as the kernels pack them, head included"),
        Part("scales", facts.mapped, "mapped from the file"),
        Part("keys and values", facts.kv_per_token * context, f"{human(facts.kv_per_token)} a token"),
        Part("recurrent state", facts.state, "constant in the context"),
        Part("workspace", work, f"{human(facts.work_per_token)} a token of a chunk, attention scores, logits"),
        Part("engine", _SESSIONS + 2 * facts.graph, "sessions and graph"),
        Part("tokenizer and constraint", tokens, f"{facts.vocabulary} entries"),
        Part("allocator slack", _SLACK, "freed memory that is not given back"),
    ]
    # While the head is packed, its table is mapped beside the copy; that is the peak if the rest is small.
    loading = interpreter + facts.table + facts.head_packed + _SESSIONS
    if (extra := loading - sum(part.bytes for part in parts)) > 0:
        parts.append(Part("packing the head", extra, "beyond what running needs"))
    return MemoryPlan(context, chunk, tuple(part for part in parts if part.bytes))


def largest_context(facts: MemoryFacts, budget: int, *, chunk: int, interpreter: int, most: int) -> int:
    """Return the most tokens, a multiple of 64, that a budget holds; 0 when not even 64."""
    low, high = 0, most // 64
    while low < high:
        middle = (low + high + 1) // 2
        fits = make_plan(facts, context=middle * 64, chunk=chunk, interpreter=interpreter).total <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * 64


def plan_within(
    facts: MemoryFacts,
    budget: int | None,
    *,
    interpreter: int,
    most_context: int,
    context: int | None = None,
    min_context: int | None = None,
    chunk: int | None = None,
) -> MemoryPlan:
    """Plan a run within a budget, adapting only what the user left open.

    Args:
      facts: Of the graph.
      budget: Bytes allowed; None plans without a limit.
      interpreter: What `baseline` measured.
      most_context: Tokens that the bundle's tables reach.
      context: Tokens asked for; None takes the default.
      min_context: The context may shrink to this many; None keeps it. The default grows to it.
      chunk: Tokens of a chunk; None lets it shrink from the default.

    Raises:
      UsageError: The context may not shrink to more than itself.
      ContextError: More tokens than the tables reach.
      OverBudget: Nothing that the user allows fits; says every part and what would.
    """
    wanted = context or max(min(CONTEXT, most_context), min_context or 0)
    if wanted > most_context:
        raise ContextError(
            f"a context of {wanted} tokens was asked for, the model's tables reach {most_context}",
            hint=f"{'--context' if context else '--min-context'} {most_context} or less",
        )
    if min_context is not None and min_context > wanted:
        raise UsageError(
            f"a context of {wanted} tokens cannot shrink to {min_context}", hint=f"--min-context {wanted} or less"
        )
    chunks = (chunk,) if chunk else _CHUNKS
    plans = [make_plan(facts, context=wanted, chunk=c, interpreter=interpreter) for c in chunks]
    fitting = [plan for plan in plans if budget is None or plan.total <= budget]
    if fitting or budget is None:
        return fitting[0]
    smallest = plans[-1]
    best = largest_context(facts, budget, chunk=chunks[-1], interpreter=interpreter, most=wanted)
    if min_context is not None:
        # The least that is allowed may fit where no multiple of 64 above it does.
        for shrunk in (best, min_context):
            plan = make_plan(facts, context=shrunk, chunk=chunks[-1], interpreter=interpreter)
            if shrunk >= min_context and plan.total <= budget:
                return plan
    table = "\n  ".join(smallest.table())
    over = human(smallest.total - budget)
    none = f"not even 64 tokens fit; {human(smallest.total)} would hold {wanted} tokens"
    would = f"--context {best} fits" if best else none
    raise OverBudget(
        f"{human(smallest.total)} needed, {human(budget)} allowed: {over} too much\n  {table}",
        hint=f"{would}, --memory {-(-smallest.total // _MIB)}MiB fits, or a recipe with fewer bits",
    )
