import statistics
from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import Tiny

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.fidelity import NEAR_TIE, WINDOW, compare, fidelity_windows, wilson
from ferrule_convert.interpret import head_logits, interpret
from ferrule_convert.tokenizer import encoder
from ferrule_runtime.errors import BundleError


def test_the_owned_text_has_enough_positions_for_a_real_vocabulary(tiny: Tiny) -> None:
    windows = fidelity_windows(encoder(open_checkpoint(tiny.path).tokenizer_json, "tiny"), 2048, 100_000)
    assert sum(map(len, windows)) > 2000
    assert {len(window) for window in windows[:-1]} == {WINDOW}


def test_a_large_model_gets_fewer_windows_from_all_over_the_text_and_never_less_than_512_tokens(tiny: Tiny) -> None:
    tokenizer = encoder(open_checkpoint(tiny.path).tokenizer_json, "tiny")
    every = fidelity_windows(tokenizer, 2048, None)
    assert fidelity_windows(tokenizer, 2048, 1) == every
    half = fidelity_windows(tokenizer, 2048, 420_000_000_000 // (WINDOW * (len(every) // 2)))
    assert half == [every[index * len(every) // len(half)] for index in range(len(half))]
    assert len(half) == len(every) // 2
    for context, least in ((2048, 1), (256, 2), (300, 2)):
        few = fidelity_windows(tokenizer, context, 10**13)
        assert len(few) == least
        assert {len(window) for window in few} == {min(context, WINDOW)}


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Newcombe 1998, table II, method 3: Wilson without continuity correction.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_those_of_the_literature(successes: int, count: int, low: float, high: float) -> None:
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)


def test_figures_equal_their_definitions_computed_plainly(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny.path)
    graph = build(checkpoint)
    tokens = np.random.default_rng(1).integers(3, 250, WINDOW + 90).tolist()
    windows = [tokens[:WINDOW], tokens[WINDOW:]]
    hidden = np.concatenate([interpret(graph, window) for window in windows])
    rng = np.random.default_rng(2)
    moved = hidden + rng.standard_normal(hidden.shape).astype(np.float32) * 0.1

    def part(first: int, stop: int) -> tuple[int, int, Callable[[np.ndarray], np.ndarray]]:
        return first, stop, lambda rows: head_logits(graph, rows, first, stop)

    parts = [part(0, 100), part(100, 101), part(101, graph.head.shape[0])]
    found = compare(windows, hidden, moved, graph, parts)

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    p, q = softmax(head_logits(graph, hidden)), softmax(head_logits(graph, moved))
    kl = (p * np.log(p / q)).sum(axis=1)
    assert found.kl == pytest.approx(kl.mean(), rel=1e-3)
    half = statistics.NormalDist().inv_cdf(0.975) * statistics.stdev(kl.tolist()) / len(kl) ** 0.5
    assert (found.kl_low, found.kl_high) == pytest.approx((kl.mean() - half, kl.mean() + half), rel=1e-3)
    best = np.sort(head_logits(graph, hidden), axis=1)[:, -2:]
    assert found.near_ties == (best[:, 1] - best[:, 0] < NEAR_TIE).sum() > 0
    assert found.top1 == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    # The token that follows is known unless the position is the last of its window.
    known = [i for i in range(len(tokens) - 1) if i != WINDOW - 1]
    surprise = -np.mean([np.log(q[i, tokens[i + 1]]) for i in known])
    assert found.perplexity == pytest.approx(np.exp(surprise), rel=1e-3)
    assert 0 < found.top1_low <= found.top1 <= found.top1_high < 1


def test_logits_that_are_not_finite_are_no_distance(tiny: Tiny) -> None:
    graph = build(open_checkpoint(tiny.path))
    hidden = np.zeros((4, 64), dtype=np.float32)
    head = (0, graph.head.shape[0], lambda rows: np.full((len(rows), graph.head.shape[0]), np.nan, dtype=np.float32))
    with pytest.raises(BundleError, match="at 4 of 4 positions the logits are not finite"):
        compare([[5, 6, 7, 8]], hidden, hidden, graph, [head])
