"""Which integers a recipe keeps, bit for bit; what is told of the others; and act-order, undone by gathering."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import Sizes, Tiny, oracle, write_tiny
from folders import write_safetensors
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from quantised import Quantised, write_quantised

from ferrule_convert.archs import build
from ferrule_convert.archs._blocks import each, take
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.estimate import describe
from ferrule_convert.formats import export
from ferrule_convert.gguf_blocks import INTEGERS
from ferrule_convert.graph import Graph, Integers, Linear, Take, Weight
from ferrule_convert.interpret import head_logits, interpret
from ferrule_convert.kept import packed_rows, tally
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import Recipe, Rule, apply, load_recipe
from ferrule_convert.schemes import Packed, Scheme, dequantise, pack
from ferrule_runtime.engines.onnx import Head, Layers
from ferrule_runtime.golden import replay
from ferrule_runtime.head import unpack
from ferrule_targets.target import load_target

TOKENS = np.random.default_rng(8).integers(3, 250, 40).tolist()


def inner(scheme: Scheme) -> Recipe:
    """Quantise the layers alone, so that a model whose integers are kept is the dequantised model exactly."""
    return Recipe("inner", "", (Rule("embedding", None), Rule("head", None), Rule("*", scheme)))


def in_onnxruntime(graph: Graph, folder: Path, level: int = 0) -> np.ndarray:
    """Return the logits of the exported graph."""
    folder.mkdir(exist_ok=True)
    done = export("onnx-cpu", graph, folder, 512, level)
    assert "model.onnx" in done.files
    layers = Layers(folder / "model.onnx", threads=1, context=64)
    embedded = np.concatenate([graph.embedding.rows(token, token + 1) for token in TOKENS])
    return Head(folder / "head.onnx", threads=1).logits(layers.run(embedded))


def transformers(tensors: dict[str, np.ndarray], tokens: int, sizes: Sizes) -> np.ndarray:
    torch = pytest.importorskip("torch")
    model = oracle(tensors, vocabulary=tokens, sizes=sizes, theta=10000.0, epsilon=1e-5)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([TOKENS])).logits[0].numpy())


def written(folder: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return an exported graph and every initializer of it, as its bytes lie in the files."""
    model = onnx.load(folder / "model.onnx")
    return model, {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}


def nibbles(values: np.ndarray, bits: int) -> np.ndarray:
    """Spread bytes into integers, the first in the lowest bits."""
    places = [(values >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(places, axis=-1).reshape(*values.shape[:-1], -1)


OURS = {
    "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}  # fmt: skip

# A way to store, the scheme of a recipe that keeps it, and the nodes that gather features in each layer.
STORED: dict[str, tuple[dict[str, Any], Scheme, int]] = {
    "gptq": ({}, Scheme(4, 32), 0),
    "gptq in smaller groups": ({"group": 64}, Scheme(4, 16), 0),
    "gptq with room for zeros": ({}, Scheme(4, 32, True), 0),
    "gptq-asym": ({"sym": False}, Scheme(4, 32, True), 0),
    "gptq-act": ({"act_order": True}, Scheme(4, 32), 4),
    "gptq-act-asym": ({"act_order": True, "sym": False, "version": "gptq_v2"}, Scheme(4, 16, True), 4),
    "gptq-8": ({"bits": 8, "act_order": True}, Scheme(8, 32), 4),
    "gptq-2": ({"bits": 2}, Scheme(2, 32), 0),
    "gptq-rows": ({"group": -1, "act_order": True}, Scheme(4, 64), 0),
    "awq": ({"method": "awq", "version": "gemm", "sym": False}, Scheme(4, 32, True), 0),
}


@pytest.mark.parametrize("kind", STORED)
def test_a_release_keeps_its_integers_and_is_transformers_model_in_numpy_and_onnxruntime(
    tmp_path: Path, kind: str
) -> None:
    how, scheme, gathers = STORED[kind]
    made = write_quantised(tmp_path / "m", **how)
    graph = apply(build(open_checkpoint(made.folder)), inner(scheme))
    assert tally(graph).to_json() == {"kept": 14, "quantised": 0, "requantised": {}, "float32": 1}
    expected = transformers(made.tensors, len(made.tokens), made.sizes)
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)
    for level in (0, 1):
        np.testing.assert_allclose(in_onnxruntime(graph, tmp_path / f"o{level}", level), expected, atol=1e-3)
    model, stored = written(tmp_path / "o0")
    nodes = model.graph.node
    assert sum(node.op_type == "Gather" for node in nodes) == 2 * gathers
    onnx.checker.check_model(str(tmp_path / "o0" / "model.onnx"))
    for node in nodes:
        if node.op_type == "MatMulNBits":  # x, values, scales, and integer zero points: no g_idx behind them
            assert len(node.input) == (4 if scheme.zero else 3)
            assert not scheme.zero or stored[node.input[3]].dtype == np.uint8
    same_integers(made, stored, scheme)


def same_integers(made: Quantised, stored: dict[str, np.ndarray], scheme: Scheme) -> None:
    """Compare what was written with the source, bit for bit, columns brought group by group."""
    for stem, matrix in made.matrices.items():
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        name = f"layers.{layer}.{OURS[part]}"
        order = np.argsort(matrix.groups, kind="stable")
        integers = nibbles(stored[f"{name}.weight"], scheme.bits).reshape(matrix.integers.shape)
        np.testing.assert_array_equal(integers, matrix.integers[:, order], err_msg=name)
        # Every group of the recipe's is part of one of the source's.
        of = matrix.groups[order][:: scheme.group]
        np.testing.assert_array_equal(stored[f"{name}.scales"], matrix.scales.astype(np.float32)[of].T, err_msg=name)
        if scheme.zero:
            zeros = nibbles(stored[f"{name}.zeros"], scheme.bits)[:, : len(of)]
            np.testing.assert_array_equal(zeros, matrix.zeros[of].T, err_msg=name)


@pytest.mark.parametrize(("kind", "scheme"), [(Kind.Q4_0, Scheme(4, 32)), (Kind.Q8_0, Scheme(8, 16))])
def test_a_gguf_keeps_its_integers_and_is_transformers_model(tmp_path: Path, kind: Kind, scheme: Scheme) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", kind=kind, seed=3)
    checkpoint = open_checkpoint(tiny.path)
    graph = apply(build(checkpoint), inner(scheme))
    assert tally(graph).kept == 14
    expected = transformers(tiny.tensors, len(tiny.tokens), tiny.sizes)
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)
    np.testing.assert_allclose(in_onnxruntime(graph, tmp_path / "o"), expected, atol=1e-3)
    # The library's float values fix integers and scales: within a block they are q · d, a step apart.
    _, stored = written(tmp_path / "o")
    for stem, ours in OURS.items():
        values = tiny.tensors[f"model.layers.1.{stem}.weight"]
        integers = nibbles(stored[f"layers.1.{ours}.weight"], scheme.bits).reshape(values.shape)
        scales = stored[f"layers.1.{ours}.scales"].repeat(scheme.group, axis=1)
        assert np.array_equal(scales, scales.astype(np.float16))
        zero = 1 << (scheme.bits - 1)
        np.testing.assert_array_equal((integers.astype(np.float32) - zero) * scales, values)


def test_blocks_of_q4_0_and_q8_0_written_by_hand_are_read_in_their_order() -> None:
    scale = np.array([0.5], dtype="<f2").tobytes()
    # Byte i holds weight i in its low half and weight i + 16 in its high half.
    block = scale + bytes((15 - i) << 4 | i for i in range(16))
    packed = INTEGERS["Q4_0"][1](np.frombuffer(block, dtype=np.uint8).reshape(1, 18))
    assert nibbles(packed.values, 4).ravel().tolist() == [*range(16), *range(15, -1, -1)]
    assert packed.scales.tolist() == [[0.5]]
    signed = np.arange(-16, 16, dtype=np.int8)
    packed = INTEGERS["Q8_0"][1](np.frombuffer(scale + signed.tobytes(), dtype=np.uint8).reshape(1, 34))
    assert packed.values.ravel().tolist() == [int(one) + 128 for one in signed]


@given(
    data=st.data(),
    bits=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([8, 16, 24, 32, 48, 64, 96, 192]),
    source_zero=st.booleans(),
    scheme=st.builds(Scheme, st.sampled_from([2, 4, 8]), st.sampled_from([16, 32, 64]), st.booleans()),
    ordered=st.booleans(),
)
def test_what_is_kept_stands_for_the_sources_values_exactly(
    data: st.DataObject, bits: int, group: int, source_zero: bool, scheme: Scheme, ordered: bool
) -> None:
    rows, columns = 3, 192
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    integers = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    zeros = rng.integers(0, 1 << bits, (rows, columns // group)).astype(np.uint8)
    scales = rng.standard_normal((rows, columns // group)).astype(np.float16).astype(np.float32)
    values = pack(integers, bits).reshape(rows, columns // group, -1)
    order = rng.permutation(columns) if ordered else None

    def packed(start: int, stop: int) -> Packed:
        some = pack(zeros[start:stop], bits) if source_zero else None
        return Packed(values[start:stop], scales[start:stop], some)

    reader = Integers(Scheme(bits, group, source_zero), packed, (lambda: order) if ordered else None)
    weight = Weight("x", (rows, columns), reader, "mine")
    node = Linear("x", "embeddings", weight)
    graph = Graph("", (node,), plain("embedding", 4), plain("head", 4), columns, 8, {})
    quantised = apply(graph, inner(scheme))
    last = quantised.nodes[-1]
    assert isinstance(last, Linear)
    found = dequantise(packed_rows(last.weight, scheme, 0, rows), scheme)
    if order is not None and len(quantised.nodes) == 2:
        gather = quantised.nodes[0]
        assert isinstance(gather, Take)
        np.testing.assert_array_equal(gather.index, order)
        straight = np.empty_like(found)
        straight[:, order] = found
        found = straight
    half = np.full_like(zeros, 1 << (bits - 1))
    exact = integers.astype(np.float32) - (zeros if source_zero else half).repeat(group, axis=1).astype(np.float32)
    exact *= scales.repeat(group, axis=1)
    if order is not None:
        exact[:, order] = exact.copy()
    fits = bits == scheme.bits and group % scheme.group == 0 and (scheme.zero or not source_zero)
    count = tally(quantised)
    assert (count.kept, sum(count.requantised.values())) == (int(fits), int(not fits))
    np.testing.assert_array_equal(weight.all(), exact)
    if fits:
        np.testing.assert_array_equal(found, exact)
    else:
        assert len(quantised.nodes) == 1


def plain(name: str, rows: int) -> Weight:
    return Weight(name, (rows, 192), lambda start, stop: np.ones((stop - start, 192), dtype=np.float32), "F32")


@pytest.mark.parametrize(
    ("how", "recipe", "reason"),
    [
        ({}, "w8", "GPTQ int4: 4 bits where the recipe has 8"),
        ({"bits": 8}, "w4g32", "GPTQ int8: 8 bits where the recipe has 4"),
        ({}, "w4g64", "GPTQ int4: groups of 32 where the recipe has 64"),
        ({"sym": False}, "w4g32", "GPTQ int4: zero points where the recipe has none (it would with a z)"),
        (
            {"method": "awq", "version": "gemm", "sym": False},
            "w4g32",
            "AWQ int4: zero points where the recipe has none (it would with a z)",
        ),
    ],
)
def test_a_recipe_that_cannot_keep_integers_says_why(tmp_path: Path, how: dict, recipe: str, reason: str) -> None:
    made = write_quantised(tmp_path / "m", act_order=how.get("method") != "awq", **how)
    graph = apply(build(open_checkpoint(made.folder)), load_recipe(recipe))
    count = tally(graph)
    assert count.to_json() == {"kept": 0, "quantised": 1, "requantised": {reason: 14}, "float32": 0}
    assert count.lines() == ["0 of 15 matrices keep their integers", f"14 requantised from {reason}"]
    # What is quantised anew has its columns in their places, and is near the floats.
    assert not any(isinstance(node, Take) for node in graph.nodes)
    for node in graph.nodes:
        if isinstance(node, Linear) and node.name == "layers.1.mlp.up" and node.weight.scheme:
            scheme = node.weight.scheme
            packed = packed_rows(node.weight, scheme, 0, 128)
            step = np.abs(packed.scales).repeat(scheme.group, axis=1)
            expected = made.tensors["model.layers.1.mlp.up_proj.weight"]
            assert (np.abs(dequantise(packed, scheme) - expected) <= step * 1.001).all()
            break
    else:
        pytest.fail("no such matrix")


@pytest.mark.parametrize(
    ("kind", "recipe", "reason"),
    [
        (Kind.Q4_1, "w4g32z", "Q4_1: float zero points are 110 times slower in the kernel"),
        (Kind.Q5_0, "w8", "Q5_0: the kernel has no 5 bits"),
        (Kind.Q4_0, "w4g64", "Q4_0: groups of 32 where the recipe has 64"),
    ],
)
def test_a_gguf_that_must_be_requantised_says_why(tmp_path: Path, kind: Kind, recipe: str, reason: str) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", kind=kind)
    count = tally(apply(build(open_checkpoint(tiny.path)), load_recipe(recipe)))
    assert count.requantised[reason] >= 14


def test_floats_have_no_integers_to_speak_of(tiny: Tiny) -> None:
    count = tally(apply(build(open_checkpoint(tiny.path)), load_recipe("w4g32")))
    assert (count.kept, count.quantised, count.requantised, count.lines()) == (0, 15, {}, [])


def test_projections_of_one_input_and_order_share_a_gather_and_others_do_not(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m", act_order=True, layers=1)
    graph = apply(build(open_checkpoint(made.folder)), inner(Scheme(4, 32)))
    reads = {node.name: node.inputs for node in graph.nodes if isinstance(node, Linear)}
    assert reads["layers.0.attention.q"] == reads["layers.0.attention.k"] == reads["layers.0.attention.v"]
    assert reads["layers.0.mlp.gate"] == reads["layers.0.mlp.up"]
    assert len(set(reads.values())) == 4

    # Another order for the keys alone: one more node, over the same input.
    def otherwise(weight: Weight) -> Weight:
        if weight.name != "layers.0.attention.k" or not weight.integers:
            return weight
        return replace(weight, rows=replace(weight.integers, order=lambda: np.arange(64)[::-1].copy()))

    graph = apply(build(open_checkpoint(made.folder)).map_weights(otherwise), inner(Scheme(4, 32)))
    gathers = [node for node in graph.nodes if isinstance(node, Take)]
    assert len(gathers) == 5
    assert len({node.name for node in gathers}) == 5
    assert gathers[0].x == gathers[1].x


def test_chosen_rows_keep_their_integers_and_changed_values_lose_them(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m", act_order=True, sym=False, layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = open_checkpoint(made.folder).tensors[name]
    index = np.random.default_rng(0).permutation(128)[:50]
    some = take(weight, index, "some")
    assert some.integers
    np.testing.assert_array_equal(some.all(), made.tensors[name][index])
    matrix = made.matrices["model.layers.0.mlp.up_proj"]
    packed = some.integers.packed(10, 20)
    order = np.argsort(matrix.groups, kind="stable")
    expected = matrix.integers[index[10:20]][:, order]
    np.testing.assert_array_equal(unpack(packed.values, 4, 32).reshape(10, 64), expected)
    doubled = each(weight, lambda rows: 2 * rows)
    assert doubled.integers is None
    assert doubled.lost
    np.testing.assert_array_equal(doubled.all(), 2 * made.tensors[name])


def test_an_adapter_takes_the_integers_of_what_it_changes(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    stem, rng = "base_model.model.model.layers.0.self_attn.q_proj.lora_", np.random.default_rng(0)
    halves = {f"{stem}A.weight": rng.standard_normal((2, 64)), f"{stem}B.weight": rng.standard_normal((64, 2))}
    write_safetensors(adapter / "adapter_model.safetensors", halves)
    graph = apply(build(open_checkpoint(made.folder, adapter)), load_recipe("w4g32"))
    count = tally(graph)
    assert count.kept == 13
    assert count.requantised == {"GPTQ int4+LoRA: an adapter is merged into it": 1}


def test_a_head_in_another_order_is_requantised(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m", act_order=True, layers=1)
    graph = build(open_checkpoint(made.folder))
    head = replace(next(node.weight for node in graph.nodes if isinstance(node, Linear)), name="head")
    graph = replace(graph, head=head)
    count = tally(apply(graph, load_recipe("w4g32_head4")))
    assert count.requantised == {"GPTQ int4: columns in another order, which no node undoes here": 1}


@pytest.mark.parametrize(
    ("how", "recipe"),
    [({"act_order": True}, "w4g32"), ({"method": "awq", "version": "gemm", "sym": False}, "w4g16z")],
)
def test_a_quantised_release_becomes_a_bundle_that_passes_the_gate(tmp_path: Path, how: dict, recipe: str) -> None:
    made, said = write_quantised(tmp_path / "m", **how), []
    bundle = convert(
        open_checkpoint(made.folder), load_target("host"), load_recipe(recipe), tmp_path / "b", Options(), said.append
    )
    assert all(verdict.passed for verdict in replay(bundle))
    assert bundle.manifest.recipe["matrices"] == {"kept": 14, "quantised": 1, "requantised": {}, "float32": 0}
    assert "14 of 15 matrices keep their integers" in said
    # What is left are the kernel's int8 activations and the table in 8 bits; quantised anew it was 0.06 and 0.2.
    assert bundle.manifest.fidelity["kl"] < 1e-2


def test_inspect_counts_by_recipe_and_adds_the_one_that_keeps(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m", "awq", version="gemm", sym=False)
    found = describe(str(made.folder), "host")
    assert found.matrices["w4g32z"].kept == 14
    assert found.matrices["w4g32"].kept == 0
    assert sum(found.matrices["w4g32"].requantised.values()) == 14
    assert found.matrices["fp32"].floats == 15
    assert "AWQ int4" in found.facts["stored"]
