"""Gemma 3 against transformers' own, within its window and beyond, in numpy and in onnxruntime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import Tiny
from families import assert_engine_gives
from folders import GEMMA3, logits_of, write_gemma3, write_llama, write_qwen35
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.archs import build
from ferrule_convert.archs.gemma3 import DEFAULTS
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.graph import Attention, Graph
from ferrule_convert.interpret import Memory, head_logits, interpret
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_runtime.errors import CheckpointError
from ferrule_targets.target import load_target

# The window is 24.
TOKENS = np.random.default_rng(9).integers(3, 260, 90).tolist()


def theirs(tensors: dict[str, np.ndarray], tokens: list[int] = TOKENS, **change: Any) -> np.ndarray:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(**(GEMMA3 | change), attn_implementation="eager")
    return logits_of(config, transformers.Gemma3ForCausalLM, tensors, tokens)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gemma3") / "m"
    return folder, write_gemma3(folder)


def windows(graph: Graph) -> list[int | None]:
    return [node.window for node in graph.nodes if isinstance(node, Attention)]


@pytest.mark.parametrize("count", [20, 24, 25, 90])
def test_in_numpy_it_equals_transformers_within_its_window_and_beyond(
    gemma: tuple[Path, dict[str, np.ndarray]], count: int
) -> None:
    graph = build(open_checkpoint(gemma[0]))
    expected = theirs(gemma[1], TOKENS[:count])
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS[:count])), expected, atol=1e-4)


def test_the_window_matters_where_it_is_tested(gemma: tuple[Path, dict[str, np.ndarray]]) -> None:
    wide = theirs(gemma[1], sliding_window=512)
    np.testing.assert_allclose(wide[:24], theirs(gemma[1])[:24], atol=1e-4)
    assert np.abs(wide - theirs(gemma[1]))[24:].max() > 0.1


def test_token_by_token_equals_all_at_once(gemma: tuple[Path, dict[str, np.ndarray]]) -> None:
    graph, memory = build(open_checkpoint(gemma[0])), Memory()
    parts = [interpret(graph, TOKENS[:31], memory), *(interpret(graph, [token], memory) for token in TOKENS[31:])]
    np.testing.assert_allclose(np.concatenate(parts), interpret(graph, TOKENS), atol=1e-4)


def test_in_onnxruntime_it_equals_transformers_in_any_chunks_and_after_a_snapshot(
    gemma: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    chosen = (load_target("host"), load_recipe("fp32"), tmp_path / "b", Options(fidelity=False))
    bundle = convert(open_checkpoint(gemma[0]), *chosen, lambda text: None)
    assert_engine_gives(bundle, TOKENS, theirs(gemma[1]), (1, 16, 40, 128))
    # Every layer keeps every position: the kernel's buffer has no window.
    facts = bundle.manifest.memory
    assert facts.kv_per_token == 3 * 2 * 2 * 16 * 4
    model = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer if tensor.name.startswith("rotary.")}
    assert shapes == {f"rotary.{table}.{wave}": [2048, 8] for table in (0, 1) for wave in ("cos", "sin")}


def test_the_multimodal_release_gives_the_same_model_and_says_what_is_left_out(
    gemma: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    write_gemma3(tmp_path / "m", multimodal=True)
    checkpoint = open_checkpoint(tmp_path / "m")
    for name, values in gemma[1].items():
        np.testing.assert_array_equal(checkpoint.tensors[name].all(), values)
    assert set(checkpoint.tensors) == set(gemma[1])
    assert "2 tensors of the vision tower left out" in checkpoint.notes
    assert checkpoint.stop_tokens == (1, 106)
    assert build(checkpoint).tied


@pytest.mark.parametrize("nested", [False, True])
def test_the_layers_that_see_everything_may_be_scaled(tmp_path: Path, nested: bool) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old: dict[str, Any] = {"rope_scaling": scaling, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    new: dict[str, Any] = {
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    left_out = {"rope_theta": None, "rope_local_base_freq": None}
    tensors = write_gemma3(tmp_path / "m", change=left_out | new if nested else old)
    graph = build(open_checkpoint(tmp_path / "m"))
    expected = theirs(tensors, **new)
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)
    assert np.abs(expected - theirs(tensors)).max() > 0.1


def test_what_a_release_leaves_out_is_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig()
    rope = config.rope_parameters
    flat = {
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "sliding_window_pattern": config.layer_types.index("full_attention") + 1,
    }
    assert dict(DEFAULTS) == {key: flat[key] if key in flat else getattr(config, key) for key in DEFAULTS}


def test_a_small_configuration_is_filled_up(tmp_path: Path) -> None:
    change = dict.fromkeys(DEFAULTS) | {"layer_types": None, "num_hidden_layers": 14}
    write_gemma3(tmp_path / "m", change=change)
    config = open_checkpoint(tmp_path / "m").config
    assert {key: config[key] for key in DEFAULTS} == dict(DEFAULTS)


@pytest.mark.parametrize(("pattern", "expected"), [(2, [24, None, 24]), (3, [24, 24, None]), (None, [24, 24, 24])])
def test_releases_before_layer_types_repeat_a_pattern(
    tmp_path: Path, pattern: int | None, expected: list[int | None]
) -> None:
    write_gemma3(tmp_path / "m", change={"layer_types": None, "sliding_window_pattern": pattern})
    assert windows(build(open_checkpoint(tmp_path / "m"))) == expected


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none(), max_size=3)


@given(key=st.sampled_from([*GEMMA3, "rope_scaling", "rope_parameters", "sliding_window_pattern"]), value=VALUES)
@settings(max_examples=150)
def test_any_value_in_any_place_is_taken_or_refused_with_a_reason(
    gemma: tuple[Path, dict[str, np.ndarray]], key: str, value: Any
) -> None:
    path, said = gemma[0] / "config.json", ""
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | {key: value}))
        build(open_checkpoint(gemma[0]))
    except CheckpointError as error:
        said = str(error)
    finally:
        path.write_text(before)
    assert said.isprintable()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` is set"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is set"),
        ({"use_bidirectional_attention": True}, "`use_bidirectional_attention` is set"),
        ({"hidden_activation": "gelu"}, "`hidden_activation` is `gelu`"),
        ({"sliding_window": -1}, "`sliding_window` is -1"),
        ({"query_pre_attn_scalar": "32"}, "`query_pre_attn_scalar` is 32"),
        ({"layer_types": ["full_attention"]}, "for 3 layers"),
        ({"layer_types": [["full_attention"]] * 3}, "for 3 layers"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "`sliding_window_pattern` is 0"),
        ({"rope_local_base_freq": 0.5}, "a base of 0.5"),
        ({"head_dim": 1 << 29}, "536870912 of a head's 536870912 features"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "scaled by `longrope`"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "with a window is scaled",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    write_gemma3(tmp_path / "m", change=change)
    with pytest.raises(CheckpointError, match=says):
        build(open_checkpoint(tmp_path / "m"))


def test_an_activation_that_is_not_the_familys_own_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", tiny, change={"hidden_act": "gelu"})
    write_qwen35(tmp_path / "qwen")
    config = tmp_path / "qwen" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": ["relu"]}))
    for folder, name in (("llama", "gelu"), ("qwen", "relu")):
        with pytest.raises(CheckpointError, match=f"`hidden_act` is `.*{name}.*`, only `silu` is built"):
            build(open_checkpoint(tmp_path / folder))
