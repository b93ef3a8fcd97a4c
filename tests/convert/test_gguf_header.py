"""The reader of GGUF headers against the library's, and against headers that lie."""

import contextlib
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import Sizes, Tiny, write_tiny
from gguf import GGMLQuantizationType as Kind
from headers import ARRAY, STRING, U8, U32, array, key, tensor, text, write_header
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_convert.gguf_header import GgufHeader, read
from ferrule_runtime.errors import CheckpointError


def same(ours: GgufHeader, path: Path) -> None:
    """Compare with the library's reading of the same file."""
    theirs = gguf.GGUFReader(path)
    named = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(named) == set(ours.metadata)
    for name, value in named.items():
        found = ours.metadata[name]
        assert type(found) is type(value)
        assert found == value or found != found
    assert [one.name for one in ours.tensors] == [one.name for one in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.tensor_type == other.tensor_type
        assert mine.shape == tuple(other.shape.tolist())
        assert mine.offset == other.data_offset
        assert mine.data.tobytes() == other.data.tobytes()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_it_says_what_the_library_says(tmp_path: Path, kind: Kind) -> None:
    path = write_tiny(tmp_path / "m.gguf", Sizes(layers=1, tied=False), kind=kind).path
    same(read(path), path)


def test_every_type_of_value_is_read_as_the_library_does(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(name, 100)
    writer.add_float32("f", 0.1)
    writer.add_float64("d", 0.1)
    writer.add_bool("b", True)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 0.1])
    writer.add_array("texts", ["", "é", "日本"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    same(read(tmp_path / "m.gguf"), tmp_path / "m.gguf")


ONE = [tensor("a", [16])]
HUGE = 1 << 60


@pytest.mark.parametrize(
    ("keys", "tensors", "says"),
    [
        ([key("a", ARRAY, array(U32, HUGE))], ONE, "value of `a` of 4611686018427387904 bytes"),
        ([key("a", ARRAY, array(U8, HUGE, bytes(99)))], ONE, "value of `a` of 1152921504606846976 bytes"),
        ([key("a", ARRAY, array(STRING, HUGE))], ONE, "a text of `a`"),
        ([key("a", ARRAY, array(ARRAY, HUGE))], ONE, "`a` is of type 9 in an array"),
        ([key("a", ARRAY, array(77, 1))], ONE, "`a` is of type 77 in an array"),
        ([key("a", STRING, struct.pack("<Q", 2**64 - 1))], ONE, "a text of `a` of 18446744073709551615 bytes"),
        ([key("a", 13, b"")], ONE, "`a` is of type 13"),
        ([struct.pack("<Q", HUGE) + b"a"], ONE, "a key of 1152921504606846976 bytes"),
        ([key(b"\xff", U8, b"1")], ONE, "a key is not UTF-8"),
        ([key("a", U8, b"1"), key("a", U8, b"1")], ONE, "the key `a` stands in it twice"),
        ([key("general.alignment", U32, struct.pack("<I", 0))], ONE, "its alignment is 0"),
        ([key("general.alignment", U32, struct.pack("<I", 24))], ONE, "its alignment is 24"),
        ([key("general.alignment", STRING, text("32"))], ONE, "its alignment is 32"),
        ([], [tensor("a", [])], "`a` has 0 dimensions"),
        ([], [tensor("a", [1] * 5)], "`a` has 5 dimensions"),
        ([], [tensor("a", [4], axes=2**32 - 1)], "`a` has 4294967295 dimensions"),
        ([], [tensor("a", [4, 0])], "`a` is 4×0, stored as F32"),
        ([], [tensor("a", [2**32, 2**32])], "`a` ends at byte"),
        ([], [tensor("a", [2**62, 4, 2])], "`a` ends at byte"),
        ([], [tensor("a", [17])], "`a` ends at byte"),
        ([], [tensor("a", [4], offset=HUGE)], "`a` lies at 1152921504606846976, behind one that ends at 0"),
        ([], [tensor("a", [4], offset=4)], "`a` lies at 4, behind one that ends at 0"),
        ([], [tensor("a", [4]), tensor("b", [4], offset=16)], "`b` lies at 16, behind one that ends at 16"),
        ([], [tensor("a", [16]), tensor("b", [4], offset=32)], "tensors `a` and `b` overlap"),
        ([], [tensor("a", [4]), tensor("a", [4], offset=32)], "tensor `a` stands in it 2 times"),
        ([], [tensor("a", [4], kind=99)], "`a` is stored as type 99"),
        ([], [tensor("a", [31], kind=int(Kind.Q8_0))], "`a` is 31, stored as Q8_0 in blocks of 32"),
        ([], [tensor("a", [33, 2], kind=int(Kind.Q8_0))], "`a` is 33×2, stored as Q8_0"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_made_of_it(
    tmp_path: Path, keys: list[bytes], tensors: list[bytes], says: str
) -> None:
    path = write_header(tmp_path / "m.gguf", keys, tensors)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert says in str(caught.value)
    assert "at byte" in str(caught.value)
    assert peak < 64 << 10


@pytest.mark.parametrize(
    ("counts", "says"), [((HUGE, 0), "1152921504606846976 tensors"), ((0, 1 << 17), "131072 keys")]
)
def test_more_entries_than_any_model_has_are_refused(tmp_path: Path, counts: tuple[int, int], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(write_header(tmp_path / "m.gguf", [], [], counts=counts))


def test_a_count_beyond_the_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read(write_header(tmp_path / "m.gguf", [key("a", U8, b"1")], ONE, b"", counts=(1, 60000)))
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read(write_header(tmp_path / "m.gguf", [], ONE, b"", counts=(60000, 0)))


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF\x03\x00", "header of 8 bytes"),
        (b"", "is an empty file"),
    ],
)
def test_another_version_or_byte_order_is_named(tmp_path: Path, head: bytes, says: str) -> None:
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path / "m.gguf")


def test_an_array_that_nobody_asks_for_costs_nothing(tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf", [key("a", ARRAY, array(U8, 4 << 20, bytes(4 << 20)))], ONE)
    tracemalloc.start()
    header = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 10
    assert header.metadata["a"] == [0] * (4 << 20)


def test_a_text_that_is_not_unicode_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    header = read(write_header(tmp_path / "m.gguf", [key("a", STRING, text(b"\xff"))], ONE))
    with pytest.raises(CheckpointError, match="`a`: 'utf-8' codec"):
        header.metadata["a"]


def test_a_file_that_shrinks_or_goes_away_is_an_error(tmp_path: Path) -> None:
    path = write_header(tmp_path / "m.gguf", [], ONE)
    (one,) = read(path).tensors
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="`a` cannot be read"):
        _ = one.data
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        _ = one.data


@given(st.data())
@settings(max_examples=200)
def test_what_is_taken_of_a_mutated_file_is_what_the_library_takes(tiny: Tiny, data: st.DataObject) -> None:
    raw = bytearray(tiny.path.read_bytes())
    entries = st.integers(raw.index(b"token_embd"), raw.index(b"output_norm") + 60)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 4000) | entries)
        raw[at] = data.draw(st.sampled_from([0, 1, 255]) | st.integers(0, 255))
    path = tiny.path.with_name("mutated-header.gguf")
    path.write_bytes(raw)
    try:
        found = read(path)
        values: dict[str, Any] = dict(found.metadata)
    except CheckpointError:
        return
    assert len(values) == len(found.metadata)
    same(found, path)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + data)
    with contextlib.suppress(CheckpointError):
        assert sum(one.data.size for one in read(path).tensors) <= len(data)


def test_rows_of_a_vector_are_its_values(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float16)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (one,) = read(path).tensors
    assert one.data.shape == (8, 2)
    assert one.data.tobytes() == values.tobytes()
