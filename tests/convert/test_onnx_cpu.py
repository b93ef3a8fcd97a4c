"""The onnxruntime form against the numpy reference, and its state against itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from checkpoints import Sizes, Tiny, write_tiny
from families import export_bundle

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.interpret import head_logits, interpret
from ferrule_convert.recipe import apply, load_recipe
from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load
from ferrule_runtime.engines.onnx import OnnxEngine
from ferrule_runtime.errors import ContextError, EngineError, TargetError

TOKENS = np.random.default_rng(6).integers(3, 250, 150).tolist()


def engine_of(bundle: Bundle, chunk: int = 64, context: int = 256) -> OnnxEngine:
    engine = load(bundle, threads=1, context=context, chunk=chunk)
    assert isinstance(engine, OnnxEngine)
    return engine


@pytest.fixture(scope="module")
def float_bundle(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_bundle(tiny.path, tmp_path_factory.mktemp("float") / "b", "fp32")


@pytest.mark.parametrize(
    ("recipe", "level", "tolerance"),
    [
        ("fp32", 4, 1e-4),
        ("w8", 1, 1e-3),
        ("w4g32", 1, 1e-3),
        ("w4g32z", 1, 1e-3),
        ("w4g16_head4", 1, 1e-3),
        ("w8", 4, 0.2),
    ],
)
def test_logits_equal_the_graph_with_the_same_integers(
    tiny: Tiny, tmp_path: Path, recipe: str, level: int, tolerance: float
) -> None:
    graph = apply(build(open_checkpoint(tiny.path)), load_recipe(recipe))
    engine = engine_of(export_bundle(tiny.path, tmp_path / "b", recipe, level=level))
    ours = engine.logits(engine.feed(TOKENS[:64], every=True))
    expected = head_logits(graph, interpret(graph, TOKENS[:64]))
    # The head keeps int8 activations in no test but the last, where both differ by the kernel's rounding.
    assert np.abs(ours - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(tied=False), seed=9)
    graph = build(open_checkpoint(tiny.path))
    engine = engine_of(export_bundle(tiny.path, tmp_path / "b", "fp32"))
    expected = head_logits(graph, interpret(graph, TOKENS[:20]))
    np.testing.assert_allclose(engine.logits(engine.feed(TOKENS[:20], every=True)), expected, atol=1e-4)


def test_reset_forgets_everything(float_bundle: Bundle) -> None:
    engine = engine_of(float_bundle)
    first = engine.feed(TOKENS[:30])
    engine.reset()
    np.testing.assert_array_equal(engine.feed(TOKENS[:30]), first)


def test_a_full_context_is_refused_before_anything_is_fed(float_bundle: Bundle) -> None:
    engine = engine_of(float_bundle, context=64)
    engine.feed(TOKENS[:60])
    with pytest.raises(ContextError, match="5 tokens behind 60 do not fit a context of 64"):
        engine.feed(TOKENS[:5])
    assert engine.position == 60
    engine.feed(TOKENS[:4])


def test_a_context_beyond_the_tables_is_refused(float_bundle: Bundle) -> None:
    with pytest.raises(ContextError, match="reach 512"):
        engine_of(float_bundle, context=513)


def test_a_damaged_graph_is_an_engine_error(float_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0b" + b"\xff" * 40)
    for name in ("head.onnx", "weights.bin", "embedding.bin"):
        (tmp_path / name).write_bytes(float_bundle.file(name).read_bytes())
    with pytest.raises(EngineError, match="cannot load it"):
        engine_of(replace(float_bundle, path=tmp_path))


def test_the_checker_is_content_and_weights_are_page_aligned(float_bundle: Bundle) -> None:
    for name in ("model.onnx", "head.onnx"):
        path = float_bundle.file(name)
        onnx.checker.check_model(str(path))
        model = onnx.load(path, load_external_data=False)
        offsets = [
            int(entry.value)
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "offset"
        ]
        assert offsets
        assert not any(offset % 4096 for offset in offsets)


def test_every_node_is_named_for_its_place_in_the_model(float_bundle: Bundle) -> None:
    model = onnx.load(float_bundle.file("model.onnx"), load_external_data=False)
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert "layers.1.mlp.down" in names
    assert "layers.0.attention" in names


def test_a_head_that_the_kernel_cannot_turn_is_refused_before_it_runs(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(heads=8, kv_heads=2))
    with pytest.raises(TargetError, match="heads turn 4 pairs"):
        export_bundle(tiny.path, tmp_path / "b", "fp32")
