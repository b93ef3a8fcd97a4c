"""GPTQ and AWQ releases: the floats that they stand for, against transformers; and what damaged ones are answered."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised import (
    Quantised,
    awq_parts,
    awq_words,
    gptq_parts,
    gptq_words,
    random_matrix,
    reconfigure,
    rewrite,
    write_quantised,
)
from safetensors.numpy import save_file

from ferrule_convert import stored
from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.graph import Weight
from ferrule_convert.interpret import head_logits, interpret
from ferrule_convert.safetensors_file import read
from ferrule_runtime.errors import CheckpointError

TOKENS = np.random.default_rng(8).integers(3, 250, 40).tolist()
KINDS: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq-asym": {"sym": False},
    "gptq-act": {"act_order": True},
    "gptq-act-asym-v2": {"act_order": True, "sym": False, "version": "gptq_v2"},
    "gptq-8": {"bits": 8, "sym": False},
    "gptq-2": {"bits": 2, "act_order": True},
    "gptq-rows": {"group": -1},
    "awq": {"method": "awq", "version": "gemm", "sym": False},
    "awq-rows": {"method": "awq", "version": "GEMM", "sym": False, "group": -1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_reads_as_its_integers_dequantise(tmp_path: Path, kind: str) -> None:
    made = write_quantised(tmp_path / "m", **KINDS[kind])
    checkpoint = open_checkpoint(tmp_path / "m")
    assert set(checkpoint.tensors) == set(made.tensors)
    for name, expected in made.tensors.items():
        weight = checkpoint.tensors[name]
        np.testing.assert_array_equal(weight.all(), expected, err_msg=name)
        # 13 columns of the file at a time: no whole word.
        blocks = [weight.rows(*span) for span in weight.spans(elements=13 * expected.shape[-1])]
        np.testing.assert_array_equal(np.concatenate(blocks), expected)
    assert (method := KINDS[kind].get("method", "gptq").upper()) in checkpoint.stored, method


@pytest.mark.parametrize("kind", ["gptq-asym", "gptq-act", "awq"])
def test_the_model_is_transformers_over_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    made = write_quantised(tmp_path / "m", **KINDS[kind])
    graph = build(open_checkpoint(made.folder))
    np.testing.assert_allclose(head_logits(graph, interpret(graph, TOKENS)), theirs(made), atol=1e-4)


def theirs(made: Quantised) -> np.ndarray:
    torch = pytest.importorskip("torch")
    model = oracle(made.tensors, vocabulary=len(made.tokens), sizes=made.sizes, theta=10000.0, epsilon=1e-5)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([TOKENS])).logits[0].numpy())


def test_a_zero_point_of_nought_in_the_first_format_borrows_from_its_neighbour(tmp_path: Path) -> None:
    # GPTQModel takes one from every zero point of a word at once, so that a nought borrows.
    one = random_matrix(np.random.default_rng(1), 8, 32, bits=4, group=32, sym=False, order=None)
    one.zeros[0, ::3] = 0
    parts = gptq_parts(one, 4, less_one=False)
    parts["qzeros"] = (parts["qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    np.testing.assert_array_equal(alone(tmp_path, parts, sym=False).all(), one.floats())


def alone(folder: Path, parts: dict[str, np.ndarray], method: str = "gptq", **change: Any) -> Weight:
    """Read one matrix `x` by itself."""
    save_file({f"x.{part}": np.ascontiguousarray(values) for part, values in parts.items()}, folder / "x.safetensors")
    config = {"quant_method": method, "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    if method == "gptq":
        config |= {"sym": True, "desc_act": False, "version": None}
    config |= change
    module = stored.container(config, folder)
    assert module
    tensors = read(folder / "x.safetensors", lambda name: stored.is_packed(module, name))
    return stored.assembled(module, config, tensors, folder)["x.weight"]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_memory_is_a_block_and_not_the_matrix(tmp_path: Path, method: str) -> None:
    rng, rows, columns = np.random.default_rng(2), 4096, 2048
    words = {"gptq": (columns // 8, rows), "awq": (columns, rows // 8)}[method]
    parts = {
        "qweight": rng.integers(0, 2**31, words).astype(np.int32),
        "qzeros": np.full((columns // 32, rows // 8), 0x77777777, dtype=np.int32),
        "scales": np.ones((columns // 32, rows), dtype=np.float16),
    }
    weight = alone(tmp_path, parts, method)
    assert weight.integers
    tracemalloc.start()
    for start, stop in weight.spans():
        weight.integers.packed(start, stop)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A block of 256 thousand values is a byte each while it is unpacked; the matrix is 8 million.
    assert peak < 2 << 20


DAMAGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "3 bits": ("gptq", {"bits": 3}, "says 3 for `bits`"),
    "no bits": ("gptq", {"bits": None}, "does not say `bits`"),
    "other bits": ("gptq", {"bits": 8}, "do not fit one another in 8 bits"),
    "bits no number": ("gptq", {"bits": 4.0}, r"says 4\.0 for `bits`"),
    "group": ("gptq", {"group_size": 24}, "do not fit one another in 4 bits by groups of 24"),
    "other group": ("gptq", {"group_size": 64}, "do not fit one another"),
    "group of nothing": ("gptq", {"group_size": 0}, "says 0 for `group_size`"),
    "no symmetry": ("gptq", {"sym": None}, "does not say `sym`"),
    "no order": ("gptq", {"desc_act": "yes"}, "says yes for `desc_act`"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, "says marlin for `checkpoint_format`"),
    "marlin of old": ("gptq", {"is_marlin_format": True}, "for `is_marlin_format`"),
    "mixed": ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "for `dynamic`"),
    "wide words": ("gptq", {"pack_dtype": "int64"}, "says int64 for `pack_dtype`"),
    "awq bits": ("awq", {"bits": 8}, "says 8 for `bits`"),
    "awq gemv": ("awq", {"version": "gemv"}, "says gemv for `version`"),
    "awq of no version": ("awq", {"version": None}, "does not say `format`"),
    "awq without zeros": ("awq", {"zero_point": False}, "says False for `zero_point`"),
    "awq group": ("awq", {"group_size": 16}, "do not fit one another in 4 bits by groups of 16"),
    "another method": ("gptq", {"quant_method": "bitsandbytes"}, r"quantised already \(bitsandbytes\)"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_configuration_that_is_not_read_is_refused_by_name(tmp_path: Path, case: str) -> None:
    method, change, says = DAMAGE[case]
    write_quantised(tmp_path / "m", method, version="gemm" if method == "awq" else "gptq", change=change, layers=1)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(tmp_path / "m")
    assert caught.value.hint


STEM = "model.layers.0.mlp.down_proj"  # 64 rows of 128 columns, in 4 groups


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("qweight", None, r"no tensor `.*down_proj\.qweight`"),
        ("qzeros", None, r"no tensor `.*down_proj\.qzeros`"),
        ("scales", None, r"no tensor `.*down_proj\.scales`"),
        ("g_idx", None, r"no tensor `.*down_proj\.g_idx`"),
        ("weight", np.zeros((64, 128), dtype=np.float32), "is there twice"),
        ("qweight", np.zeros((8, 64), dtype=np.int32), "qweight 8×64"),
        ("qweight", np.zeros((16, 32), dtype=np.int32), "qweight 16×32"),
        ("qweight", np.zeros(1024, dtype=np.int32), "qweight 1024, "),
        ("qweight", np.zeros((16, 64), dtype=np.float32), "is stored as F32"),
        ("qzeros", np.zeros((4, 16), dtype=np.int32), "qzeros 4×16"),
        ("scales", np.ones((2, 64), dtype=np.float16), "scales 2×64"),
        ("scales", np.ones((4, 64), dtype=np.int32), "is stored as I32"),
        ("g_idx", np.zeros(64, dtype=np.int32), "g_idx 64"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused_from_headers(
    tmp_path: Path, part: str, values: np.ndarray | None, says: str
) -> None:
    write_quantised(tmp_path / "m", act_order=True, layers=1)
    rewrite(tmp_path / "m", {f"{STEM}.{part}": values})
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(tmp_path / "m")
    assert caught.value.hint


def _scales(value: float) -> np.ndarray:
    scales = np.ones((4, 64), dtype=np.float16)
    scales[1:3, 5] = value
    return scales


def _groups(column: int, group: int) -> np.ndarray:
    groups = (np.arange(128) // 32).astype(np.int32)
    groups[column] = group
    return groups


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("scales", _scales(np.nan), "holds 2 scales that are zero or not finite"),
        ("scales", _scales(np.inf), "holds 2 scales that are zero or not finite"),
        ("scales", _scales(0), "holds 2 scales that are zero or not finite"),
        ("g_idx", _groups(7, 4), "names groups 0 to 4 of 4"),
        ("g_idx", _groups(7, -1), "names groups -1 to 3 of 4"),
        ("g_idx", _groups(7, 1), "gives group 0 31 columns of 32"),
        ("qzeros", np.zeros((4, 8), dtype=np.int32), "holds 256 zero points other than 8"),
    ],
)
def test_damage_among_the_numbers_is_named_and_counted_when_they_are_read(
    tmp_path: Path, part: str, values: np.ndarray, says: str
) -> None:
    write_quantised(tmp_path / "m", act_order=True, layers=1)
    rewrite(tmp_path / "m", {f"{STEM}.{part}": values})
    weight = open_checkpoint(tmp_path / "m").tensors[f"{STEM}.weight"]
    with pytest.raises(CheckpointError, match=says):
        weight.all()


def test_an_order_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path / "m", act_order=True, layers=1)
    reconfigure(tmp_path / "m", {"desc_act": False})
    with pytest.raises(CheckpointError, match="says no `desc_act`"):
        open_checkpoint(tmp_path / "m").tensors[f"{STEM}.weight"].all()


def test_without_an_order_its_index_may_be_missing(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m", layers=1)
    rewrite(tmp_path / "m", {f"{STEM}.g_idx": None})
    weight = open_checkpoint(tmp_path / "m").tensors[f"{STEM}.weight"]
    np.testing.assert_array_equal(weight.all(), made.tensors[f"{STEM}.weight"])


def test_a_configuration_of_quantised_weights_over_floats_is_refused(tmp_path: Path) -> None:
    made = write_quantised(tmp_path / "m", layers=1)
    save_file(made.tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="says quantised by gptq, no tensor is"):
        open_checkpoint(tmp_path / "m")


VALUES = st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from([32, 64, 1 << 70, 0.5, "gptq", "", [], {}])
CONFIGS = st.dictionaries(
    st.sampled_from(["bits", "group_size", "sym", "desc_act", "checkpoint_format", "version", "zero_point", "dynamic"]),
    VALUES,
    max_size=3,
)
SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@given(
    method=st.sampled_from(["gptq", "awq"]),
    change=CONFIGS,
    part=st.sampled_from(["qweight", "qzeros", "scales", "g_idx"]),
    shape=SHAPES,
    fill=st.integers(-(2**31), 2**31 - 1),
)
@settings(max_examples=150, deadline=None)
def test_any_setting_over_any_shape_is_read_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, method: str, change: dict, part: str, shape: list[int], fill: int
) -> None:
    one = random_matrix(np.random.default_rng(0), 16, 64, bits=4, group=32, sym=True, order=None)
    parts = awq_parts(one) if method == "awq" else gptq_parts(one, 4, less_one=True)
    kind = np.float16 if part == "scales" else np.int32
    parts[part] = np.full(shape, fill % 1000 if part == "scales" else fill, dtype=kind)
    said = ""
    try:
        values = alone(tmp_path_factory.getbasetemp(), parts, method, **change).all()
    except CheckpointError as error:
        said = str(error)
    else:
        assert values.shape == (16, 64)
        assert np.isfinite(values).all()
    assert said.isprintable()


def test_the_writers_agree_with_words_written_by_hand() -> None:
    assert gptq_words(np.arange(8).reshape(8, 1), 4).tolist() == [[0x76543210]]
    assert gptq_words(np.array([[1], [2], [3], [4]]), 8).tolist() == [[0x04030201]]
    # The order that AWQ's own kernels are known by.
    assert awq_words(np.arange(8).reshape(1, 8)).tolist() == [[0x75316420]]
