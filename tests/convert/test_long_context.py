"""4,096 tokens: nothing drifts, whether they are fed at once or in chunks, in numpy, in the engine, in transformers."""

from pathlib import Path

import numpy as np
import pytest
from families import export_bundle, logits_of, write_family

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.interpret import Memory, head_logits, interpret
from ferrule_runtime.engines import load

COUNT = 4096
TOKENS = np.random.default_rng(12).integers(3, 260, COUNT).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_long_contexts_agree_everywhere(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torch")
    expected = logits_of(write_family(tmp_path / "m", kind), TOKENS)

    graph, memory = build(open_checkpoint(tmp_path / "m")), Memory()
    once = head_logits(graph, interpret(graph, TOKENS))
    np.testing.assert_allclose(once, expected, rtol=0, atol=1e-3)
    parts = [interpret(graph, TOKENS[at : at + 512], memory) for at in range(0, COUNT, 512)]
    np.testing.assert_allclose(head_logits(graph, np.concatenate(parts)), once, rtol=0, atol=1e-3)

    bundle = export_bundle(tmp_path / "m", tmp_path / "b", "fp32", context=COUNT)
    for chunk in (64, 1000, COUNT):
        engine = load(bundle, threads=1, context=COUNT, chunk=chunk)
        found = engine.logits(engine.feed(TOKENS, every=True))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3, err_msg=f"chunks of {chunk}")
