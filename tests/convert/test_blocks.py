"""Blocks in processes of their own against the whole graph in one; and a gate that finds what is planted."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import Sizes, Tiny, write_tiny

from ferrule_convert.archs import build
from ferrule_convert.blocks import plan_blocks, stream
from ferrule_convert.check import run_blocks
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.graph import INPUT, Graph
from ferrule_convert.heads import head_parts, parted_logits
from ferrule_convert.interpret import Memory, embed, interpret, run_nodes
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import apply, load_recipe
from ferrule_runtime.bundle import Bundle
from ferrule_runtime.engines import load
from ferrule_runtime.engines.onnx import Head
from ferrule_runtime.errors import BundleError, EngineError
from ferrule_targets.target import load_target

TOKENS = np.random.default_rng(8).integers(3, 250, 200).tolist()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("deep") / "m.gguf", Sizes(layers=5))


@pytest.fixture
def made(deep: Tiny, tmp_path: Path) -> tuple[Bundle, Graph]:
    checkpoint = open_checkpoint(deep.path)
    chosen = (load_target("host"), load_recipe("w8"), tmp_path / "b", Options(fidelity=False))
    bundle = convert(checkpoint, *chosen, lambda text: None)
    return bundle, apply(build(checkpoint), load_recipe("w8"))


def test_blocks_follow_one_another_and_leave_no_node_out(deep: Tiny) -> None:
    graph = build(open_checkpoint(deep.path))
    for most in (1, 100_000, 1 << 40):
        blocks = plan_blocks(graph, most)
        assert blocks[0].start == INPUT
        assert [one.stop for one in blocks[:-1]] == [one.start for one in blocks[1:]]
        assert tuple(node for block in blocks for node in block.nodes) == graph.nodes
    assert len(plan_blocks(graph, 1)) > 5
    assert len(plan_blocks(graph, 1 << 40)) == 1


def test_a_block_needs_nothing_but_the_value_that_enters(deep: Tiny) -> None:
    graph = build(open_checkpoint(deep.path))
    rows = [embed(graph, TOKENS[:20])]
    for block in plan_blocks(graph, 1):
        rows = run_nodes(block.nodes, block.start, rows, [Memory()])
    np.testing.assert_array_equal(rows[0], interpret(graph, TOKENS[:20]))


def test_block_by_block_is_the_whole_graph_bit_for_bit(made: tuple[Bundle, Graph]) -> None:
    bundle, graph = made
    talks = [TOKENS[:150], TOKENS[150:]]
    *_, (_, _, found) = stream(
        bundle.file("model.onnx"), plan_blocks(graph, 1), [embed(graph, talk) for talk in talks], threads=1
    )
    engine = load(bundle, threads=1, context=256, chunk=128)
    for talk, rows in zip(talks, found, strict=True):
        engine.reset()
        np.testing.assert_array_equal(rows, engine.feed(talk, every=True))
    assert not list(bundle.path.glob(".block*"))


@pytest.mark.parametrize("recipe", ["w8", "w4g32", "fp32"])
def test_the_head_in_parts_gives_the_logits_of_the_whole(
    deep: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    checkpoint = open_checkpoint(deep.path)
    chosen = (load_target("host"), load_recipe(recipe), tmp_path / "b", Options(fidelity=False))
    path = convert(checkpoint, *chosen, lambda text: None).file("head.onnx")
    hidden = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    whole = Head(path, threads=1).logits(hidden)
    monkeypatch.setattr("ferrule_convert.heads._PART", 64 * 100)
    parts = [(start, stop) for start, stop, _ in head_parts(path)]
    assert parts == [(0, 100), (100, 200), (200, whole.shape[1])]
    np.testing.assert_allclose(parted_logits(path, hidden), whole, atol=1e-5)
    assert not list(path.parent.glob(".part*"))


def test_two_conversations_at_once_are_each_alone(deep: Tiny) -> None:
    graph = build(open_checkpoint(deep.path))
    one, two = TOKENS[:30], TOKENS[40:55]
    together = run_nodes(graph.nodes, INPUT, [embed(graph, one), embed(graph, two)], [Memory(), Memory()])
    np.testing.assert_allclose(together[0], interpret(graph, one), atol=1e-5)
    np.testing.assert_allclose(together[1], interpret(graph, two), atol=1e-5)


def test_weights_that_are_not_those_of_the_graph_fail_the_gate_and_name_the_block(made: tuple[Bundle, Graph]) -> None:
    bundle, graph = made
    assert run_blocks(bundle, graph, [TOKENS])[2] < 0.1
    path = bundle.file("weights.bin")
    data = bytearray(path.read_bytes())
    data[: len(data) // 4] = bytes(255 - byte for byte in data[: len(data) // 4])
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"layers up to `norm` differ from the graph by"):
        run_blocks(bundle, graph, [TOKENS])


def test_a_block_that_cannot_be_loaded_says_which(made: tuple[Bundle, Graph]) -> None:
    bundle, graph = made
    bundle.file("weights.bin").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"layers up to `norm` cannot be run here"):
        run_blocks(bundle, graph, [TOKENS])


def test_another_graph_of_the_same_shape_is_told_apart(made: tuple[Bundle, Graph], tmp_path: Path) -> None:
    bundle, _ = made
    other = apply(
        build(open_checkpoint(write_tiny(tmp_path / "o.gguf", Sizes(layers=5), seed=1).path)), load_recipe("w8")
    )
    with pytest.raises(BundleError, match="differ from the graph"):
        run_blocks(bundle, other, [TOKENS])
