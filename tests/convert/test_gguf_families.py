"""Qwen3.5 and Gemma 3 from GGUF, stored as llama.cpp's converter stores them, against transformers' own."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from folders import GEMMA3, QWEN35, gemma3_tensors, logits_of, qwen35_tensors
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gemma3, write_qwen35

from ferrule_convert.archs import build, gemma3, qwen3_5
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.graph import Attention, Graph
from ferrule_convert.interpret import head_logits, interpret
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_runtime.errors import CheckpointError
from ferrule_targets.target import load_target

TOKENS = np.random.default_rng(10).integers(3, 260, 60).tolist()
# What llama.cpp's converter cannot say: the scale of scores is the head's size, and every second layer is not written.
GEMMA = GEMMA3 | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3}


def logits(graph: Graph) -> np.ndarray:
    return head_logits(graph, interpret(graph, TOKENS))


def test_qwen35_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tensors = qwen35_tensors(QWEN35, seed=1)
    write_qwen35(tmp_path / "m.gguf", QWEN35, tensors)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert set(checkpoint.tensors) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_allclose(checkpoint.tensors[name].all(), values, atol=2e-7, err_msg=name)
    config = transformers.Qwen3_5TextConfig(**QWEN35, attn_implementation="eager")
    expected = logits_of(config, transformers.Qwen3_5ForCausalLM, tensors, TOKENS)
    np.testing.assert_allclose(logits(build(checkpoint)), expected, atol=1e-4)


def test_qwen35_with_four_value_heads_to_a_key_head_is_put_in_order(tmp_path: Path) -> None:
    c = QWEN35 | {"linear_num_value_heads": 8, "linear_value_head_dim": 8}
    tensors = qwen35_tensors(c, seed=2)
    write_qwen35(tmp_path / "m.gguf", c, tensors)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    build(checkpoint)
    for name, values in tensors.items():
        np.testing.assert_allclose(checkpoint.tensors[name].all(), values, atol=2e-7, err_msg=name)


def test_quantised_rows_and_columns_are_put_in_order_in_blocks_too(tmp_path: Path) -> None:
    tensors = qwen35_tensors(QWEN35, seed=3)
    write_qwen35(tmp_path / "m.gguf", QWEN35, tensors, kind=Kind.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert "Q8_0" in checkpoint.stored
    for name, values in tensors.items():
        weight = checkpoint.tensors[name]
        found = np.concatenate([weight.rows(*span) for span in weight.spans(elements=5 * values[0].size)])
        np.testing.assert_allclose(found, values, atol=np.abs(values).max() / 200, err_msg=name)


def test_layers_that_predict_further_tokens_are_left_out_openly(tmp_path: Path) -> None:
    tensors = qwen35_tensors(QWEN35, seed=1)
    # The layer behind the last one, as llama.cpp's converter numbers it.
    extra = {name.replace(".3.", ".4."): values for name, values in tensors.items() if ".layers.3." in name}
    write_qwen35(tmp_path / "m.gguf", QWEN35, tensors | extra, block_count=5, nextn_predict_layers=1)
    write_qwen35(tmp_path / "without.gguf", QWEN35, tensors)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.notes == (f"{len(extra)} tensors of the multi-token prediction head left out",)
    assert checkpoint.config["num_hidden_layers"] == 4
    np.testing.assert_array_equal(logits(build(checkpoint)), logits(build(open_checkpoint(tmp_path / "without.gguf"))))


def test_a_layer_that_is_not_counted_is_refused(tmp_path: Path) -> None:
    write_qwen35(tmp_path / "m.gguf", QWEN35, qwen35_tensors(QWEN35), block_count=3)
    with pytest.raises(CheckpointError, match=r"tensor `blk\.3\.[\w.]+` is not one that a qwen3_5 model has"):
        open_checkpoint(tmp_path / "m.gguf")


def test_the_kinds_of_qwen35s_layers_are_told_one_by_one_or_by_an_interval(tmp_path: Path) -> None:
    c = QWEN35 | {"layer_types": ["linear_attention", "full_attention"] * 2}
    tensors = qwen35_tensors(c)
    for name, how in {
        "each": {"attention.recurrent_layers": [True, False, True, False]},
        "interval": {"full_attention_interval": 2},
    }.items():
        write_qwen35(tmp_path / f"{name}.gguf", c, tensors, **how)
        checkpoint = open_checkpoint(tmp_path / f"{name}.gguf")
        assert checkpoint.config["layer_types"] == c["layer_types"]
        build(checkpoint)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}])
def test_gemma3_equals_transformers(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    transformers = pytest.importorskip("transformers")
    c = GEMMA | {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    tensors = gemma3_tensors(c, seed=1)
    more = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0} if scaling else {}
    write_gemma3(tmp_path / "m.gguf", c, tensors, **more)
    config = transformers.Gemma3TextConfig(**c, rope_scaling=scaling, attn_implementation="eager")
    expected = logits_of(config, transformers.Gemma3ForCausalLM, tensors, TOKENS)
    np.testing.assert_allclose(logits(build(open_checkpoint(tmp_path / "m.gguf"))), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, [24, 24, 24]),
        ({"attention.sliding_window_pattern": 2}, [24, None, 24]),
        ({"attention.sliding_window_pattern": [False, True, False]}, [None, 24, None]),
        ({"attention.sliding_window": None}, [None, None, None]),
    ],
)
def test_gemma3s_windows_are_where_the_file_says(tmp_path: Path, more: dict, windows: list) -> None:
    write_gemma3(tmp_path / "m.gguf", GEMMA, gemma3_tensors(GEMMA), **more)
    graph = build(open_checkpoint(tmp_path / "m.gguf"))
    assert [node.window for node in graph.nodes if isinstance(node, Attention)] == windows
    assert graph.tied


@pytest.mark.parametrize(
    ("write", "more", "says"),
    [
        (write_qwen35, {"ssm.group_count": None}, "no `qwen35.ssm.group_count`"),
        (write_qwen35, {"ssm.group_count": 3}, "does not divide"),
        (write_qwen35, {"ssm.inner_size": 66}, "`qwen35.ssm.inner_size` is 66"),
        (write_qwen35, {"ssm.state_size": (1 << 31) - 1}, "its configuration says"),
        (write_qwen35, {"full_attention_interval": 0}, "`qwen35.full_attention_interval` is 0"),
        (write_qwen35, {"attention.recurrent_layers": [True]}, r"recurrent_layers` is \[True\]"),
        (write_qwen35, {"nextn_predict_layers": 4}, "`qwen35.block_count` is 4"),
        (write_qwen35, {"block_count": 1 << 30}, "`qwen35.block_count` is"),
        (write_qwen35, {"attention.head_count": "4"}, "`qwen35.attention.head_count` is 4"),
        (write_gemma3, {"rope.freq_base": -1.0}, r"`gemma3.rope.freq_base` is -1\.0"),
        (write_gemma3, {"rope.freq_base_swa": 0.0}, r"a base of 0\.0"),
        (write_gemma3, {"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is set"),
        (write_gemma3, {"attention.sliding_window_pattern": [True]}, r"sliding_window_pattern` is \[True\]"),
        (write_gemma3, {"attention.sliding_window_pattern": 0}, "sliding_window_pattern` is 0"),
        (write_gemma3, {"attention.key_length": 32}, "its configuration says"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path: Path, write: Any, more: dict, says: str) -> None:
    c, tensors = (QWEN35, qwen35_tensors(QWEN35)) if write is write_qwen35 else (GEMMA, gemma3_tensors(GEMMA))
    write(tmp_path / "m.gguf", c, tensors, **more)
    with pytest.raises(CheckpointError, match=says):
        build(open_checkpoint(tmp_path / "m.gguf"))


def test_a_rate_that_no_logarithm_has_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = qwen35_tensors(QWEN35)
    tensors["model.layers.0.linear_attn.A_log"][:] = -np.inf
    write_qwen35(tmp_path / "m.gguf", QWEN35, tensors)
    with pytest.raises(CheckpointError, match="A_log` holds rates that are not negative"):
        open_checkpoint(tmp_path / "m.gguf").tensors["model.layers.0.linear_attn.A_log"].all()


@pytest.mark.parametrize(("family", "architecture"), [(qwen3_5, "QWEN35"), (gemma3, "GEMMA3")])
def test_every_tensor_that_the_library_knows_of_a_family_has_a_name(family: Any, architecture: str) -> None:
    kinds = gguf.MODEL_TENSORS[gguf.MODEL_ARCH[architecture]]
    names = {gguf.TENSOR_NAMES[kind].removeprefix("blk.{bid}.") for kind in kinds} - {
        "token_embd",
        "output_norm",
        "output",
    }
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in family.GGUF.layer} == names


def test_qwen35_from_gguf_becomes_a_bundle(tmp_path: Path) -> None:
    write_qwen35(tmp_path / "m.gguf", QWEN35, qwen35_tensors(QWEN35), kind=Kind.Q8_0)
    chosen = (load_target("host"), load_recipe("w8"), tmp_path / "b", Options(fidelity=False))
    manifest = convert(open_checkpoint(tmp_path / "m.gguf"), *chosen, lambda text: None).manifest
    assert manifest.architecture["family"] == "qwen3_5"
