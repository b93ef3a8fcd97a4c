import struct
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
from checkpoints import Sizes, Tiny, write_tiny
from folders import GEMMA3, QWEN35, gemma3_tensors, qwen35_tensors
from gguf import GGMLQuantizationType as Kind
from gguf_files import tokenizer_meta, write_gguf
from headers import ARRAY, BOOL, F32, I32, STRING, U32, array, key, text, write_header
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint
from ferrule_convert.gguf_names import interleaved
from ferrule_runtime.errors import CheckpointError, FerruleError


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_every_stored_type_reads_as_the_library_dequantises_it_in_hugging_face_layout(
    tmp_path: Path, kind: Kind
) -> None:
    tiny = write_tiny(tmp_path / "m.gguf", kind=kind, seed=3)
    checkpoint = open_checkpoint(tiny.path)
    assert set(checkpoint.tensors) == set(tiny.tensors)
    for name, expected in tiny.tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].all(), expected, err_msg=name)


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Return rows of random blocks whose values are finite, [rows, bytes]: any bits but a scale's are a block."""
    rng, (size, bytes_) = np.random.default_rng(kind), gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // size, bytes_), dtype=np.uint8)
    with np.errstate(all="ignore"):
        while bad := np.flatnonzero(~np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=1)).tolist():
            blocks[bad] = rng.integers(0, 256, (len(bad), bytes_), dtype=np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(
    "kind",
    [
        Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K,
        Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL,
    ],
)  # fmt: skip
def test_any_block_of_any_type_is_read_as_the_library_reads_it_whatever_rows_are_asked_for(
    tmp_path: Path, kind: Kind
) -> None:
    rows, columns, heads = 48, 512, 4
    meta = {
        "block_count": 1, "context_length": 64, "embedding_length": columns, "feed_forward_length": rows,
        "attention.head_count": heads, "attention.head_count_kv": heads, "attention.key_length": rows // heads,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4,
    }  # fmt: skip
    raw = {name: random_blocks(kind, rows, columns) for name in ("blk.0.ffn_up.weight", "blk.0.attn_q.weight")}
    of_llama = {f"llama.{key}": value for key, value in meta.items()}
    write_gguf(tmp_path / "m.gguf", "llama", of_llama | tokenizer_meta(272), {}, kind, raw)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    up = gguf.quants.dequantize(raw["blk.0.ffn_up.weight"], kind).astype(np.float32)
    q = gguf.quants.dequantize(raw["blk.0.attn_q.weight"], kind).astype(np.float32)
    # llama.cpp stores the halves of a head interleaved.
    q = q.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    for name, expected in (("mlp.up_proj", up), ("self_attn.q_proj", q)):
        weight = tensors[f"model.layers.0.{name}.weight"]
        assert (weight.stored, weight.shape) == (kind.name, (rows, columns))
        np.testing.assert_array_equal(weight.all(), expected)
        for step in (1, 7, 32):
            parts = [weight.rows(*span) for span in weight.spans(elements=step * columns)]
            np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_rows_read_in_blocks_are_the_rows_of_the_whole(tiny: Tiny) -> None:
    weight = open_checkpoint(tiny.path).tensors["model.layers.1.self_attn.q_proj.weight"]
    parts = [weight.rows(*span) for span in weight.spans(elements=5 * 64)]
    assert len(parts) == 13
    np.testing.assert_array_equal(np.concatenate(parts), weight.all())


def test_headers_say_what_the_model_is(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny.path)
    graph = build(checkpoint)
    assert checkpoint.config["head_dim"] == 16
    assert checkpoint.licence == "apache-2.0"
    assert checkpoint.stop_tokens == (2,)
    assert checkpoint.stored == "GGUF F32"
    assert graph.parameters == sum(tensor.size for tensor in tiny.tensors.values())
    assert graph.tied


def test_an_untied_head_is_its_own_weight(tmp_path: Path) -> None:
    graph = build(open_checkpoint(write_tiny(tmp_path / "m.gguf", Sizes(tied=False)).path))
    assert not graph.tied
    assert graph.head.name == "head"


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"leave_out": "blk.1.attn_v.weight"}, "no tensor `model.layers.1.self_attn.v_proj.weight`"),
        ({"leave_out": "output_norm.weight"}, "no tensor `model.norm.weight`"),
        ({"leave_out": "tokenizer.ggml.tokens"}, "no tokenizer"),
        ({"leave_out": "tokenizer.ggml.merges"}, "no merges"),
        ({"change": {"tokenizer.ggml.model": "t5"}}, "of kind `t5` is not read"),
        ({"more": {"tokenizer.ggml.bos_token_id": 1000}}, "bos_token_id` is 1000 of 268 tokens"),
        ({"leave_out": "llama.block_count"}, "no `llama.block_count`"),
        ({"change": {"general.architecture": "mamba"}}, "architecture `mamba`"),
        ({"change": {"tokenizer.ggml.pre": "klingon"}}, "rule `klingon`"),
        ({"change": {"llama.embedding_length": 96}}, "its configuration says"),
        ({"change": {"tokenizer.ggml.merges": ["q zz"]}}, "merges do not fit"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, broken: dict, says: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", **broken).path
    with pytest.raises(CheckpointError, match=says.replace("(", r"\(")):
        build(open_checkpoint(path))


def test_tokens_that_cannot_be_printed_are_not_when_they_are_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", change={"tokenizer.ggml.merges": ["\x1b \x03"]}).path
    with pytest.raises(CheckpointError, match="merges do not fit its tokens") as caught:
        open_checkpoint(path)
    assert str(caught.value).isprintable()


def test_weights_that_are_not_finite_are_named_and_counted_when_read(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", poison="blk.0.ffn_up.weight").path
    weight = open_checkpoint(path).tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"mlp.up_proj.weight` holds 1 values that are not finite"):
        weight.all()


def test_scales_that_are_not_finite_are_counted_when_read(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", kind=Kind.Q4_0).path
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.0.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    for block in (0, 5):  # of 18 bytes, a float16 first
        struct.pack_into("<e", raw, found.data_offset + 18 * block, float("nan"))
    path.write_bytes(raw)
    weight = open_checkpoint(path).tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"mlp.up_proj.weight` holds 2 scales that are not finite"):
        weight.all()


def test_a_quantised_vector_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    raw = bytearray(tiny.path.read_bytes())
    # The last, so that none lies behind a gap.
    name = b"output_norm.weight"
    struct.pack_into("<I", raw, raw.index(name) + len(name) + 4 + 8, Kind.Q8_0)
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match="is stored as Q8_0, but is no matrix"):
        open_checkpoint(tmp_path / "m.gguf")


def test_an_unknown_tensor_is_refused_and_not_dropped(tmp_path: Path, tiny: Tiny) -> None:
    data = tiny.path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_uq\.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("number", ["00", "٠", "9" * 5000])
def test_a_layer_whose_number_is_spelled_otherwise_is_refused_and_not_taken_for_another(
    tmp_path: Path, number: str
) -> None:
    extra = {f"blk.{number}.ffn_up.weight": np.ones((128, 64), dtype=np.float32)}
    path = write_tiny(tmp_path / "m.gguf", tensors=extra).path
    with pytest.raises(CheckpointError, match="is not one that a llama model has"):
        open_checkpoint(path)


@pytest.mark.parametrize("rows", [60, 6])
def test_heads_that_have_no_two_halves_are_refused(rows: int) -> None:
    order = interleaved({"self_attn.q_proj.weight": "num_attention_heads"})
    with pytest.raises(CheckpointError, match=f"`self_attn.q_proj.weight` has {rows} rows, .* says 4 heads"):
        order("self_attn.q_proj.weight", rows, {"num_attention_heads": 4})


def test_an_unknown_tensor_type_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    raw = bytearray(tiny.path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", raw, at)[0] == Kind.F32
    for type_ in (99, int(Kind.I8)):
        struct.pack_into("<I", raw, at, type_)
        path = tmp_path / f"{type_}.gguf"
        path.write_bytes(raw)
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("head", "says"),
    [(b"PK\x03\x04rest", "starts with"), (b"GGUF\x09\x00\x00\x00", "version 9"), (b"GG", "starts with")],
)
def test_another_kind_of_file_is_refused_by_its_first_bytes(tmp_path: Path, head: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path)


@given(cut=st.floats(0.0, 0.999))
@settings(max_examples=40)
def test_a_truncated_file_is_refused_wherever_it_was_cut(tiny: Tiny, cut: float) -> None:
    data = tiny.path.read_bytes()
    path = tiny.path.with_name("cut.gguf")
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(FerruleError):
        build(open_checkpoint(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_the_library_reads_what_the_tests_write(tiny: Tiny) -> None:
    names = {tensor.name for tensor in gguf.GGUFReader(tiny.path).tensors}
    assert "blk.0.attn_q.weight" in names
    assert len(names) == len(tiny.tensors)


VALUES = st.one_of(
    (st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 3])).map(lambda v: (U32, struct.pack("<I", v))),
    st.integers(-(2**31), 2**31 - 1).map(lambda v: (I32, struct.pack("<i", v))),
    st.floats(width=32).map(lambda v: (F32, struct.pack("<f", v))),
    st.booleans().map(lambda v: (BOOL, struct.pack("<?", v))),
    st.text(max_size=4).map(lambda v: (STRING, text(v))),
    st.lists(st.text(max_size=3), max_size=3).map(lambda v: (ARRAY, array(STRING, len(v), b"".join(map(text, v))))),
    st.lists(st.integers(0, 300), max_size=3).map(
        lambda v: (ARRAY, array(U32, len(v), struct.pack(f"<{len(v)}I", *v)))
    ),
)


def written(kind: str, folder: Path) -> Path:
    """Return a good file of a family, written once."""
    path = folder / f"{kind}.gguf"
    if not path.is_file():
        if kind == "llama":
            write_tiny(path)
        elif kind == "qwen35":
            gguf_files.write_qwen35(path, QWEN35, qwen35_tensors(QWEN35))
        else:
            gguf_files.write_gemma3(path, GEMMA3, gemma3_tensors(GEMMA3))
        build(open_checkpoint(path))
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma3"])
@given(data=st.data())
@settings(max_examples=150)
def test_any_value_of_any_key_is_taken_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    good = written(kind, tmp_path_factory.getbasetemp())
    reader = gguf.GGUFReader(good)
    raw = good.read_bytes()
    fields = [field for field in reader.fields.values() if not field.name.startswith("GGUF.")]
    ends = [*(field.offset for field in fields[1:]), reader.tensors[0].field.offset]
    parts = {field.name: raw[field.offset : end] for field, end in zip(fields, ends, strict=True)}
    name = data.draw(st.sampled_from(sorted(parts)))
    type_, value = data.draw(VALUES)
    parts[name] = key(name, type_, value)
    entries = raw[ends[-1] : ends[-1] + sum(sum(part.nbytes for part in one.field.parts) for one in reader.tensors)]
    path = good.with_name(f"any-value-{kind}.gguf")
    counts = (len(reader.tensors), len(parts))
    write_header(path, list(parts.values()), [entries], raw[reader.data_offset :], counts=counts)
    said = ""
    try:
        build(open_checkpoint(path))
    except CheckpointError as error:
        said = str(error)
    assert said.isprintable()
