"""Decoding 32 tokens behind a 64-token prompt: bundles beside transformers fp32 eager, same weights and threads.

Only the ratios of one run mean anything; nothing is asserted.
"""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from conftest import THREADS

from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load

_TOKENS = 32
_ROUNDS = 7


def _keep(benchmark: Any, rates: dict[str, dict[int, float]], name: str, threads: int) -> None:
    rate = _TOKENS / statistics.median(benchmark.stats.stats.data)
    benchmark.extra_info.update({"tokens_per_second": rate, "threads": threads})
    rates.setdefault(name, {})[threads] = rate


@pytest.mark.parametrize("threads", THREADS)
def test_transformers(
    benchmark: Any, rates: dict[str, dict[int, float]], transformers_model: Any, prompt: list[int], threads: int
) -> None:
    import torch

    torch.set_num_threads(threads)
    benchmark.group = f"decode, {threads} threads"

    @torch.no_grad()
    def prefill() -> tuple[tuple[Any, Any], dict[str, Any]]:
        out = transformers_model(torch.tensor([prompt]), use_cache=True)
        return (out.past_key_values, out.logits[:, -1:].argmax(-1)), {}

    @torch.no_grad()
    def decode(state: Any, token: Any) -> None:
        for _ in range(_TOKENS):
            out = transformers_model(token, cache=state, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)

    benchmark.pedantic(decode, setup=prefill, rounds=_ROUNDS, warmup_rounds=1)
    _keep(benchmark, rates, "transformers fp32 eager", threads)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("recipe", ["fp32", "w8", "w4g32"])
def test_bundle(
    benchmark: Any,
    rates: dict[str, dict[int, float]],
    bundles: Callable[[str], Bundle],
    prompt: list[int],
    recipe: str,
    threads: int,
) -> None:
    engine = load(bundles(recipe), threads=threads, context=256, chunk=64)
    benchmark.group = f"decode, {threads} threads"

    def prefill() -> tuple[tuple[int], dict[str, Any]]:
        engine.reset()
        return (int(engine.logits(engine.feed(prompt))[0].argmax()),), {}

    def decode(token: int) -> None:
        for _ in range(_TOKENS):
            token = int(engine.logits(engine.feed([token]))[0].argmax())

    benchmark.pedantic(decode, setup=prefill, rounds=_ROUNDS, warmup_rounds=1)
    _keep(benchmark, rates, f"ferrule {recipe}", threads)
