"""The numpy reference against transformers' own Llama over the same weights."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import Sizes, Tiny, oracle, write_tiny

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.graph import Graph
from ferrule_convert.interpret import Memory, head_logits, interpret

TOKENS = np.random.default_rng(5).integers(3, 250, 64).tolist()


def graph_of(tiny: Tiny) -> Graph:
    return build(open_checkpoint(tiny.path))


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(tied=False), Sizes(layers=3, heads=8, kv_heads=1)])
def test_logits_equal_those_of_transformers(tmp_path: Path, sizes: Sizes) -> None:
    torch = pytest.importorskip("torch")
    tiny = write_tiny(tmp_path / "m.gguf", sizes, seed=1)
    model = oracle(tiny.tensors, vocabulary=len(tiny.tokens), sizes=sizes, theta=10000.0, epsilon=1e-5)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    graph = graph_of(tiny)
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)


def test_token_by_token_equals_all_at_once(tiny: Tiny) -> None:
    graph, memory = graph_of(tiny), Memory()
    parts = [interpret(graph, TOKENS[:7], memory), *(interpret(graph, [token], memory) for token in TOKENS[7:])]
    np.testing.assert_allclose(np.concatenate(parts), interpret(graph, TOKENS), atol=1e-5)
    assert memory.position == len(TOKENS)
