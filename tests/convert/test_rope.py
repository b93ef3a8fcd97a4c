"""Rotary embeddings of long contexts, against transformers' own, from folders and from GGUF files."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import Sizes, Tiny, oracle, write_tiny
from folders import write_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.archs import build
from ferrule_convert.archs._rope import rope_table
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.graph import RopeTable
from ferrule_convert.interpret import Memory, head_logits, interpret
from ferrule_convert.pack import Options, convert
from ferrule_convert.recipe import load_recipe
from ferrule_runtime.engines import load
from ferrule_runtime.errors import CheckpointError
from ferrule_targets.target import load_target

# Far past the original context of 32.
TOKENS = np.random.default_rng(8).integers(3, 250, 160).tolist()
THETA = 1e4
SCALED: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "linear": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("llama") / "m.gguf", Sizes(layers=1), seed=2)


def logits(tiny: Tiny, rope: dict[str, Any]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    model = oracle(tiny.tensors, vocabulary=len(tiny.tokens), sizes=tiny.sizes, theta=THETA, epsilon=1e-5, **rope)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([TOKENS])).logits[0].numpy())


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALED)
def test_every_kind_of_scaling_equals_transformers(llama: Tiny, tmp_path: Path, kind: str, key: str) -> None:
    rope = SCALED[kind] | {"rope_type": kind}
    # Releases before `rope_parameters` keep the base outside, and call the kind `type`.
    written = {key: rope | {"rope_theta": THETA}} if key == "rope_parameters" else {key: SCALED[kind] | {"type": kind}}
    write_llama(tmp_path / "m", llama, change=written)
    graph, memory = build(open_checkpoint(tmp_path / "m")), Memory()
    expected = logits(llama, rope)
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)
    parts = [interpret(graph, TOKENS[at : at + 40], memory) for at in range(0, len(TOKENS), 40)]
    np.testing.assert_allclose(head_logits(graph, np.concatenate(parts)), expected, atol=1e-4)
    plain = logits(llama, {})
    assert np.abs(expected - plain).max() > 0.1


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_engine_turns_by_the_scaled_tables(llama: Tiny, tmp_path: Path, kind: str) -> None:
    rope = SCALED[kind] | {"rope_type": kind, "rope_theta": THETA}
    write_llama(tmp_path / "m", llama, change={"rope_parameters": rope})
    chosen = (load_target("host"), load_recipe("fp32"), tmp_path / "b", Options(fidelity=False))
    engine = load(
        convert(open_checkpoint(tmp_path / "m"), *chosen, lambda text: None), threads=1, context=256, chunk=48
    )
    found = engine.logits(engine.feed(TOKENS, every=True))
    np.testing.assert_allclose(found, logits(llama, rope), atol=1e-4)


def divisors(rope: dict[str, Any], size: int) -> list[float]:
    """Return what llama.cpp's converter stores as `rope_freqs.weight` (conversion/llama.py, generate_extra_tensors)."""
    found, original = [], rope["original_max_position_embeddings"]
    for pair in range(size // 2):
        wavelength = 2 * math.pi * THETA ** (2 * pair / size)
        if wavelength < original / rope["high_freq_factor"]:
            found.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            found.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return found


@pytest.mark.parametrize("kind", SCALED)
def test_gguf_scales_as_the_release_that_it_was_made_of(tmp_path: Path, kind: str) -> None:
    rope, extra = SCALED[kind], {}
    at = "llama.rope.scaling"
    if kind == "llama3":
        extra["tensors"] = {"rope_freqs.weight": np.array(divisors(rope, 16), dtype=np.float32)}
    else:
        extra["more"] = {f"{at}.type": kind, f"{at}.factor": rope["factor"]}
    if kind == "yarn":
        extra["more"][f"{at}.original_context_length"] = rope["original_max_position_embeddings"]
    tiny = write_tiny(tmp_path / "m.gguf", Sizes(layers=1), seed=2, **extra)
    graph = build(open_checkpoint(tiny.path))
    expected = logits(tiny, rope | {"rope_type": kind})
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"more": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}}, "scaled by `longrope`"),
        ({"more": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -1.0}}, "`factor` is -1.0"),
        ({"more": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}}, "`original_max_position"),
        ({"more": {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 2.0}}, "attn_factor` is not"),
        ({"more": {"llama.rope.dimension_count": 17}}, "dimension_count` is 17"),
        ({"more": {"llama.rope.dimension_count": 7}}, "7 of a head's 16 features are turned"),
        ({"tensors": {"rope_freqs.weight": np.ones(7, dtype=np.float32)}}, "not 8 positive ones"),
        ({"tensors": {"rope_freqs.weight": np.zeros(8, dtype=np.float32)}}, "not 8 positive ones"),
        ({"tensors": {"rope_freqs.weight": np.full(8, np.nan, dtype=np.float32)}}, "not 8 positive ones"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, dtype=np.float16)}}, "is stored as F16, not as F32"),
        (
            {
                "tensors": {"rope_freqs.weight": np.ones(8, dtype=np.float32)},
                "more": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            },
            "is scaled twice",
        ),
    ],
)
def test_gguf_that_cannot_be_scaled_so_is_refused(tmp_path: Path, extra: dict, says: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", Sizes(layers=1), **extra).path
    with pytest.raises(CheckpointError, match=says):
        build(open_checkpoint(path))


@pytest.mark.parametrize("more", [{}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}])
def test_gguf_without_scaling_is_plain(tmp_path: Path, more: dict) -> None:
    path = write_tiny(tmp_path / "m.gguf", Sizes(layers=1), more=more | {"llama.rope.dimension_count": 16}).path
    config = open_checkpoint(path).config
    assert config["rope_scaling"] is None
    assert config["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "scaled by `dynamic`"),
        ({"rope_type": ["yarn"]}, "which is not supported"),
        ({"rope_type": "divided", "factors": [1.0] * 8}, "`factors` are"),
        ({"rope_type": "linear"}, "no `factor`"),
        ({"rope_type": "linear", "factor": "2"}, "`factor` is 2"),
        ({"rope_type": "linear", "factor": float("nan")}, "`factor` is nan"),
        (SCALED["llama3"] | {"rope_type": "llama3", "high_freq_factor": 1.0}, "no range between them"),
        (SCALED["llama3"] | {"rope_type": "llama3", "low_freq_factor": None}, "no `low_freq_factor`"),
        ({"rope_type": "yarn", "factor": 4.0}, "no `original_max_position_embeddings`"),
        (SCALED["yarn"] | {"rope_type": "yarn", "mscale": 0.7}, "`mscale` of YaRN is not supported"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(llama: Tiny, tmp_path: Path, change: dict, says: str) -> None:
    write_llama(tmp_path / "m", llama, change={"rope_scaling": change})
    with pytest.raises(CheckpointError, match=says):
        build(open_checkpoint(tmp_path / "m"))


@pytest.mark.parametrize(
    ("theta", "turned", "says"),
    [(1.0, 16, "base of 1.0"), (None, 16, "base of None"), (1e4, 0, "0 of"), (1e4, 5, "5 of"), (1e4, 18, "18 of")],
)
def test_a_head_that_cannot_be_turned_is_refused(theta: float, turned: int, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        rope_table(theta, 16, turned, None, Path("m"))


@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    values=st.dictionaries(
        st.sampled_from([*SCALED["llama3"], "beta_fast", "beta_slow", "attention_factor", "truncate"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.just("4"),
    ),
)
@settings(max_examples=200)
def test_any_values_give_finite_tables_or_a_reason(kind: str, values: dict[str, Any]) -> None:
    try:
        table = rope_table(1e4, 16, 16, SCALED[kind] | values | {"rope_type": kind}, Path("m"))
    except CheckpointError:
        return
    assert isinstance(table, RopeTable)
    assert np.isfinite(table.cos_sin(0, 4)).all()


def test_the_older_key_beside_the_others_wins(llama: Tiny, tmp_path: Path) -> None:
    rope = SCALED["yarn"] | {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    write_llama(tmp_path / "m", llama, change={"rope_scaling": rope, "original_max_position_embeddings": 32})
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert raw["rope_scaling"]["original_max_position_embeddings"] == 2048
    assert open_checkpoint(tmp_path / "m").config["rope_scaling"]["original_max_position_embeddings"] == 32


def test_the_library_names_the_kinds_as_they_are_read_here() -> None:
    assert {kind.value for kind in gguf.RopeScalingType} - {"longrope"} == {"none", "linear", "yarn"}
