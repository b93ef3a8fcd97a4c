"""Quantised graphs of every family against transformers over the weights that the integers stand for."""

from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, export_bundle, logits_of, write_family

from ferrule_convert.schemes import Scheme, dequantise, quantise
from ferrule_runtime.engines import load

TOKENS = np.random.default_rng(11).integers(3, 260, 48).tolist()
RECIPES = {
    "w8": Scheme(8, 32),
    "w4g32": Scheme(4, 32),
    "w4g128": Scheme(4, 128),
    "w4g32z": Scheme(4, 32, zero=True),
    "w2g32": Scheme(2, 32),
}
TABLES = Scheme(8, 32)
# The delta rule's gates stay in float32.
FLOAT = ("in_proj_a", "in_proj_b")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_quantised_graph_is_the_model_over_the_dequantised_weights(tmp_path: Path, kind: str, recipe: str) -> None:
    torch = pytest.importorskip("torch")
    net = write_family(tmp_path / "m", kind)
    plain = logits_of(net, TOKENS)
    tables = {net.lm_head.weight.data_ptr(), net.model.embed_tokens.weight.data_ptr()}
    done = set()
    for name, module in net.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or name.endswith(FLOAT):
            continue
        weight = module.weight.data
        if weight.data_ptr() not in done:  # a tied table is one
            done.add(weight.data_ptr())
            scheme = TABLES if weight.data_ptr() in tables else RECIPES[recipe]
            weight.copy_(torch.from_numpy(dequantise(quantise(weight.numpy(), scheme), scheme)))
    expected = logits_of(net, TOKENS)
    engine = load(export_bundle(tmp_path / "m", tmp_path / "b", recipe, level=1), threads=1, context=64, chunk=64)
    found = engine.logits(engine.feed(TOKENS, every=True))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    # What rounding the weights does is far more.
    assert np.abs(plain - expected).max() > 0.02
