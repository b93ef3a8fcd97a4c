"""Raw timings, with a small engine that really computes: its next token is a sum of all it was fed."""

from __future__ import annotations

import dataclasses
import json
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ferrule_runtime.bundle import Bundle, File, Manifest, MemoryFacts
from ferrule_runtime.engines import Engine, Snapshot
from ferrule_runtime.errors import EngineError, UsageError
from ferrule_runtime.measure import SEED, measure, own_memory, prompt_tokens
from ferrule_runtime.measure_options import Options, lengths

VOCABULARY = 101


class Sums:
    """An engine whose hidden state is the sum of its tokens, and whose next token is that sum times 7 plus 3."""

    def __init__(self, context: int, *, broken: bool = False) -> None:
        self.context = context
        self.fed: list[list[int]] = []
        self._broken = broken
        self._sum = 0
        self._position = 0

    @property
    def position(self) -> int:
        return self._position

    def feed(self, tokens: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        if self._position + len(tokens) > self.context:
            raise EngineError("over the context")
        sums = self._sum + np.cumsum(tokens)
        self._sum, self._position = int(sums[-1]), self._position + len(tokens)
        self.fed.append(list(tokens))
        hidden = sums[:, None].astype(np.float32)
        return hidden if every else hidden[-1:]

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        scores = np.zeros((len(hidden), VOCABULARY), dtype=np.float32)
        scores[np.arange(len(hidden)), (hidden[:, 0].astype(np.int64) * 7 + 3) % VOCABULARY] = 1
        if self._broken:
            scores[0, 0] = np.nan
        return scores

    def snapshot(self) -> Snapshot:
        return Snapshot("", self._position, {"sum": np.array([self._sum])})

    def restore(self, snapshot: Snapshot) -> None:
        self._sum, self._position = int(snapshot.arrays["sum"][0]), snapshot.position

    def reset(self) -> None:
        self.fed.append([])
        self._sum = self._position = 0


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    memory = MemoryFacts(**{field.name: 0 for field in dataclasses.fields(MemoryFacts)} | {"vocabulary": VOCABULARY})
    manifest = Manifest(
        name="sums", checkpoint={}, architecture={}, recipe={}, target="host", form="onnx-cpu", engine="onnx",
        features=(), context=256, dialect="qwen_xml", stop_tokens=(50, 51), tables={}, memory=memory, fidelity={},
        made={}, files={"a": File(1, "0" * 64)},
    )  # fmt: skip
    return Bundle(tmp_path, manifest, "f" * 64)


def run(bundle: Bundle, options: Options, **kinds: Any) -> tuple[list[dict[str, Any]], Sums]:
    engines: list[Sums] = []

    def load(_: Bundle, *, threads: int, context: int, chunk: int) -> Engine:
        engines.append(Sums(context, **kinds))
        return engines[0]

    return list(measure(bundle, options, load=load)), engines[0]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def test_every_repeat_and_prompt_length_is_timed(bundle: Bundle) -> None:
    events, _ = run(bundle, Options(prompts=(8, 20), decode=5, repeat=3))
    assert [event["event"] for event in events[:5]] == ["machine", "plan", "load", "memory", "warmup"]
    assert [event["event"] for event in events[-3:]] == ["memory", "marks", "machine_after"]
    for name in ("prefill", "first_token", "decode"):
        places = [(event["repeat"], event["prompt"]) for event in named(events, name)]
        assert places == [(0, 8), (0, 20), (1, 8), (1, 20), (2, 8), (2, 20)], name
    assert [event["tokens"] for event in named(events, "prefill")] == [8, 20] * 3
    assert {(event["tokens"], event["depth"]) for event in named(events, "decode")} == {(5, 8), (5, 20)}
    assert all(event["seconds"] > 0 for event in events if "seconds" in event)


def test_first_token_includes_its_prefill(bundle: Bundle) -> None:
    events, _ = run(bundle, Options(prompts=(8,), decode=2))
    for prefill, first in zip(named(events, "prefill"), named(events, "first_token"), strict=True):
        assert first["seconds"] > prefill["seconds"]


def test_events_are_json_with_a_schema(bundle: Bundle) -> None:
    events, _ = run(bundle, Options(prompts=(8,), decode=2))
    assert json.loads(json.dumps(events)) is not None
    assert {event["schema_version"] for event in events} == {1}


def test_decoding_is_greedy_behind_the_same_prompt(bundle: Bundle) -> None:
    events, engine = run(bundle, Options(prompts=(10,), decode=4, repeat=2))
    prompt = prompt_tokens(10, VOCABULARY, (50, 51))
    total, expected = sum(prompt), []
    for _ in range(4):
        expected.append((total * 7 + 3) % VOCABULARY)
        total += expected[-1]
    one_pass = [[], prompt, *([token] for token in expected)]
    assert engine.fed == one_pass * 3, "the warm-up and two repeats"
    assert named(events, "plan")[0]["seed"] == SEED


def test_default_context_is_what_is_needed(bundle: Bundle) -> None:
    events, engine = run(bundle, Options(prompts=(8, 20), decode=5, threads=2))
    plan = named(events, "plan")[0]
    assert (plan["context"], engine.context, plan["threads"]) == (25, 25, 2)


def test_marks_lie_on_the_monotonic_clock_and_agree_with_the_timings(bundle: Bundle) -> None:
    before = time.monotonic_ns()
    events, _ = run(bundle, Options(prompts=(8,), decode=5, repeat=2))
    after = time.monotonic_ns()
    marks = named(events, "marks")[0]["marks"]
    assert [mark["phase"] for mark in marks] == [
        "import", "load", "warmup", *["prefill", "first_token", "decode"] * 2,
    ]  # fmt: skip
    assert all(before <= mark["start_ns"] <= mark["end_ns"] <= after for mark in marks)
    seconds = [(mark["end_ns"] - mark["start_ns"]) / 1e9 for mark in marks if mark["phase"] == "decode"]
    assert seconds == [event["seconds"] for event in named(events, "decode")]


def test_memory_is_read_when_loaded_and_at_the_end(bundle: Bundle) -> None:
    events, _ = run(bundle, Options(prompts=(8,), decode=2))
    memory = named(events, "memory")
    assert [event["when"] for event in memory] == ["loaded", "end"]
    assert memory[0]["peak_rss"] <= memory[1]["peak_rss"]


def test_context_that_is_too_small_is_refused_before_anything_runs(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="do not fit a context of 30"):
        next(measure(bundle, Options(prompts=(30,), decode=1, context=30)))
    with pytest.raises(UsageError, match="do not fit a context of 256"):
        next(measure(bundle, Options(prompts=(256,), decode=1, context=1000)))


def test_logits_that_are_not_finite_are_refused(bundle: Bundle) -> None:
    with pytest.raises(EngineError, match="1 of 101 logits are not finite after prefill"):
        run(bundle, Options(prompts=(8,), decode=2), broken=True)


def test_own_memory_agrees_with_the_kernel_and_sees_what_is_touched() -> None:
    before = own_memory()
    # Mapped, not allocated: an allocator may hand out pages that earlier work has touched.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * len(block))
        after = own_memory()
        assert after["unevictable"] - before["unevictable"] >= len(block) * 0.9
    assert after["peak_rss"] >= after["rss"] * 0.9
    assert after["missing"] == {}


def test_own_memory_without_fields_is_null_with_the_reason(tmp_path: Path) -> None:
    status = tmp_path / "proc/self/status"
    status.parent.mkdir(parents=True)
    # Linux before 4.5 does not split the resident set.
    status.write_text("VmHWM:\t    1684 kB\nVmRSS:\t    1500 kB\n")
    found = own_memory(tmp_path)
    assert (found["peak_rss"], found["rss"]) == (1684 * 1024, 1500 * 1024)
    assert (found["unevictable"], found["file"]) == (None, None)
    assert found["missing"] == {
        "unevictable": "no `RssAnon` in /proc/self/status", "file": "no `RssFile` in /proc/self/status",
    }  # fmt: skip
    assert set(own_memory(tmp_path / "none")["missing"]) == {"peak_rss", "rss", "unevictable", "file"}


@given(st.integers(0, 300), st.integers(20, 50_000), st.lists(st.integers(0, 60_000), max_size=8))
def test_prompt_tokens_are_ordinary_and_always_the_same(count: int, vocabulary: int, avoid: list[int]) -> None:
    tokens = prompt_tokens(count, vocabulary, avoid)
    assert len(tokens) == count
    assert all(vocabulary // 10 <= token < vocabulary - vocabulary // 10 for token in tokens)
    assert not set(tokens) & set(avoid)
    assert tokens == prompt_tokens(count + 5, vocabulary, avoid)[:count]


def test_prompt_tokens_of_a_tiny_vocabulary_are_refused() -> None:
    with pytest.raises(EngineError, match="no ordinary tokens"):
        prompt_tokens(4, 3, [0, 1, 2])


def test_prompt_lengths_are_sorted_and_single() -> None:
    assert lengths("512,128,128") == (128, 512)
    with pytest.raises(ValueError, match="invalid literal"):
        lengths("128,")
