"""What every family refuses: configurations that no such model has, and tensors that it would leave out."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Sizes, Tiny, write_tiny
from folders import QWEN35, write_gemma3, write_llama, write_qwen35, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised import write_quantised

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_runtime.errors import CheckpointError


def changed(folder: Path, change: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"linear_num_key_heads": None}, "no `linear_num_key_heads`"),
        ({"linear_num_key_heads": 0}, "`linear_num_key_heads` is 0"),
        ({"linear_num_key_heads": -2}, "`linear_num_key_heads` is -2"),
        ({"linear_num_key_heads": True}, "`linear_num_key_heads` is True"),
        ({"linear_num_key_heads": 3}, "`linear_num_key_heads` is 3, which does not divide `linear_num_value_heads`, 4"),
        ({"linear_num_key_heads": 1, "linear_num_value_heads": 65}, "65 value heads share 1 key heads"),
        ({"linear_key_head_dim": "16"}, "`linear_key_head_dim` is 16"),
        ({"linear_value_head_dim": 1 << 40}, "`linear_value_head_dim` is 1099511627776"),
        ({"linear_conv_kernel_dim": 4.0}, r"`linear_conv_kernel_dim` is 4\.0"),
        ({"linear_key_head_dim": 2**31 - 1}, "its configuration says"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3, which does not divide `num_attention_heads`, 4"),
        ({"hidden_act": "gelu"}, "`hidden_act` is `gelu`, only `silu` is built"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` is false"),
        ({"tie_word_embeddings": 0}, "`tie_word_embeddings` is 0"),
        ({"layer_types": None}, "layer types None for 4 layers"),
        ({"layer_types": "full"}, "layer types full for 4 layers"),
        ({"layer_types": [["full_attention"]] * 4}, "layer types .* for 4 layers"),
        ({"layer_types": ["full_attention"] * 5}, "for 4 layers"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}}, "0 of a head's 64 features"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.05}}, "3 of a head's 64 features"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}}, "`partial_rotary_factor` is 2"),
        ({"rope_parameters": {"rope_theta": 5e-324, "partial_rotary_factor": 1}}, "a base of 5e-324 turns"),
    ],
)
def test_a_configuration_that_no_such_model_has_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    write_qwen35(tmp_path / "m")
    with pytest.raises(CheckpointError, match=says):
        build(open_checkpoint(changed(tmp_path / "m", change)))


def llama(folder: Path, **change: Any) -> None:
    write_llama(folder, write_tiny(folder.with_suffix(".gguf"), Sizes(layers=1)), change=change)


LONG = {"factor": 4.0, "original_max_position_embeddings": 64}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "llama": llama,
    "llama3": lambda folder: llama(
        folder, rope_scaling={"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}
    ),
    "yarn": lambda folder: llama(
        folder, rope_scaling={"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **LONG}
    ),
    "qwen3_5": write_qwen35,
    "gemma3": write_gemma3,
    "gptq": lambda folder: write_quantised(folder, act_order=True, layers=1),
    "awq": lambda folder: write_quantised(folder, "awq", sym=False, version="gemm", layers=1),
}


DAMAGE = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**63, 10**400]),
    st.sampled_from(["64", "", "\x1b", [], [64], {}, 0.5, 64.0, -0.0, 1e-320, 1e308, float("inf"), float("nan")]),
    st.integers(), st.floats(), st.text(max_size=3), st.lists(st.text(max_size=3), max_size=4),
)  # fmt: skip


@pytest.mark.parametrize("kind", sorted(WRITERS))
@given(data=st.data())
@settings(max_examples=100)
def test_whatever_is_dropped_retyped_negated_or_enlarged_is_taken_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"configured-{kind}"
    if not folder.is_dir():
        folder.mkdir()
        WRITERS[kind](folder)
        build(open_checkpoint(folder))
    before = (folder / "config.json").read_text()
    config = json.loads(before)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3, unique=True)):
        value = config[key]
        owner, name = config, key
        if isinstance(value, dict) and data.draw(st.booleans()):
            owner, name = value, data.draw(st.sampled_from(sorted(value)))
            value = owner[name]
        ways = [st.none(), DAMAGE]
        if isinstance(value, int | float) and not isinstance(value, bool):
            ways += [st.just(-value), st.integers(1, 200).map(lambda by, value=value: value * by)]
        owner[name] = data.draw(st.one_of(ways))
    (folder / "config.json").write_text(json.dumps(config))
    said = ""
    tracemalloc.start()
    try:
        build(open_checkpoint(folder))
    except CheckpointError as error:
        said = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        (folder / "config.json").write_text(before)
    assert peak < 16 << 20
    assert said.isprintable()


@pytest.mark.parametrize(
    "extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight", "score"]
)
def test_a_tensor_that_the_family_does_not_ask_for_is_refused_and_not_dropped(
    tiny: Tiny, tmp_path: Path, extra: str
) -> None:
    tensors = write_llama(tmp_path / "m", tiny)
    write_safetensors(tmp_path / "m" / "model.safetensors", tensors | {extra: np.ones((4, 4))})
    with pytest.raises(CheckpointError, match=f"1 of {len(tensors) + 1} tensors are not of a llama .*: `{extra}`"):
        build(open_checkpoint(tmp_path / "m"))


def test_layers_beyond_those_configured_are_counted_and_some_named(tiny: Tiny, tmp_path: Path) -> None:
    write_llama(tmp_path / "m", tiny, change={"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"9 of 20 tensors .*: `model\.layers\.1\.[a-z_.]+`, .*, …"):
        build(open_checkpoint(tmp_path / "m"))
    short = write_tiny(tmp_path / "m.gguf", change={"llama.block_count": 1}).path
    with pytest.raises(CheckpointError, match=r"`blk\.1\.attn_norm\.weight` is not one that a llama model has"):
        open_checkpoint(short)


def test_rotary_tables_of_old_releases_are_skipped_openly(tiny: Tiny, tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "m", tiny)
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for layer in range(2)}
    write_safetensors(tmp_path / "m" / "model.safetensors", tensors | old)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert build(checkpoint).parameters == sum(values.size for values in tensors.values())
    assert checkpoint.notes == ("2 tensors of the rotary embedding left out",)


def test_the_sizes_of_the_configuration_are_those_of_the_model(tmp_path: Path) -> None:
    write_qwen35(tmp_path / "m")
    facts = build(open_checkpoint(tmp_path / "m")).facts
    assert facts == {
        "layers": QWEN35["num_hidden_layers"], "hidden": QWEN35["hidden_size"], "vocabulary": QWEN35["vocab_size"],
        "intermediate": QWEN35["intermediate_size"], "heads": QWEN35["num_attention_heads"],
        "kv_heads": QWEN35["num_key_value_heads"], "head_dim": QWEN35["head_dim"],
    }  # fmt: skip
