import contextlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from folders import write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ferrule_convert.safetensors_file import read
from ferrule_runtime.errors import CheckpointError

TENSORS = {
    "a": np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32),
    "b": np.random.default_rng(1).standard_normal(9).astype(np.float32),
    "c": np.random.default_rng(2).standard_normal((4, 1, 3)).astype(np.float32),
}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_rows_are_those_that_were_written(tmp_path: Path, dtype: str) -> None:
    expected = write_safetensors(tmp_path / "m.safetensors", TENSORS, dtype)
    found = read(tmp_path / "m.safetensors")
    assert set(found) == set(expected)
    for name, weight in found.items():
        np.testing.assert_array_equal(weight.all(), expected[name])
        np.testing.assert_array_equal(weight.rows(1, 3), expected[name][1:3])
        assert weight.stored == dtype


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_the_library_reads_the_same_rows(tmp_path: Path, dtype: str) -> None:
    write_safetensors(tmp_path / "m.safetensors", TENSORS, dtype)
    with safe_open(tmp_path / "m.safetensors", framework="np") as theirs:
        for name, weight in read(tmp_path / "m.safetensors").items():
            assert weight.shape == tuple(theirs.get_slice(name).get_shape())
            np.testing.assert_array_equal(weight.rows(1, 4), theirs.get_slice(name)[1:4].astype(np.float32))


def test_torch_reads_the_same_bf16(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    write_safetensors(tmp_path / "m.safetensors", TENSORS, "BF16")
    theirs = load_file(tmp_path / "m.safetensors")
    for name, weight in read(tmp_path / "m.safetensors").items():
        np.testing.assert_array_equal(weight.all(), theirs[name].float().numpy())


@pytest.mark.parametrize("padding", range(4))
def test_what_the_library_writes_is_read_wherever_the_tensors_begin(tmp_path: Path, padding: int) -> None:
    save_file(TENSORS, tmp_path / "theirs", {"made": "by the library"})
    raw = (tmp_path / "theirs").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    # The format allows spaces behind the header, which move the tensors to any address.
    shifted = struct.pack("<Q", length + padding) + raw[8 : 8 + length] + b" " * padding + raw[8 + length :]
    (tmp_path / "m.safetensors").write_bytes(shifted)
    for name, weight in read(tmp_path / "m.safetensors").items():
        np.testing.assert_array_equal(weight.all(), TENSORS[name])


def test_a_file_that_goes_away_or_shrinks_is_an_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", TENSORS)
    weight = read(tmp_path / "m.safetensors")["c"]
    os.truncate(tmp_path / "m.safetensors", 100)
    with pytest.raises(CheckpointError, match="rows 0 to 3 of `c` cannot be read"):
        weight.all()
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        weight.all()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path / "m.safetensors")


def test_what_will_not_be_read_may_be_of_any_type(tmp_path: Path) -> None:
    path = header(tmp_path / "m.safetensors", ITEM % ("I64", "[2]", "[0, 16]"), bytes(16))
    weight = read(path, lambda name: True)["a"]
    with pytest.raises(CheckpointError, match="stored as I64, which cannot be read"):
        weight.all()


def test_values_that_are_not_finite_are_named_with_their_rows(tmp_path: Path) -> None:
    broken = {"a": TENSORS["a"].copy()}
    broken["a"][4, 2] = np.inf
    write_safetensors(tmp_path / "m.safetensors", broken)
    weight = read(tmp_path / "m.safetensors")["a"]
    weight.rows(0, 4)
    with pytest.raises(CheckpointError, match=r"`a` holds 1 values that are not finite in rows 4 to 6"):
        weight.rows(4, 7)


ITEM = '{"a": {"dtype": "%s", "shape": %s, "data_offsets": %s}}'


def header(path: Path, text: str, data: bytes = bytes(64)) -> Path:
    raw = text.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "no object"),
        ('{"a": 1}', "not described by an object"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": {}}', "`a` stands in it twice"),
        ('{"a": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}}', "stored as `Q9`"),
        ('{"a": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}', "stored as I32, which cannot be read"),
        ('{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}', "has the shape"),
        ('{"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}', "has the shape"),
        ('{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "has the shape"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}', "lies at"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}', "lies at bytes 16 to 0"),
        ('{"a": {"dtype": "F32", "shape": [400], "data_offsets": [0, 1600]}}', "lies at bytes 0 to 1600 of 64"),
        ('{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}', "in 16 bytes"),
        ('{"a": {"dtype": "F32", "shape": [4294967296, 4294967296, 1], "data_offsets": [0, 64]}}', "in 64 bytes"),
        (
            '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
            ' "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}',
            "`a` and `b` overlap",
        ),
        (
            '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
            ' "b": {"dtype": "I8", "shape": [], "data_offsets": [15, 16]}}',
            "stored as I8",
        ),
        (ITEM % ("F32", "[2]", "[8, 16]"), "bytes 0 to 8, before tensor `a`, belong to none"),
        (ITEM % ("F32", "[4]", "[0, 16]"), "its tensors end at byte 16 of 64"),
        (ITEM % ("F32", "[0, 99999999999999999999]", "[0, 0]"), "has the shape [0, 99999999999999999999]"),
        (ITEM % ("F32", "[1, 1, 1, 1, 1, 1, 1, 1, 16]", "[0, 64]"), "has the shape"),
        (ITEM % ("F32", str([2**62] * 100_000), "[0, 64]"), "has the shape"),
        ('{"__metadata__": {"a": 1}}', "no object of texts"),
        ("[" * 100_000, "not JSON"),
        ('{"\\ud800\\u001b[2J": 1}', "tensor `\\ud800\\x1b[2J` is not"),
    ],
)
def test_a_malformed_header_is_refused_with_the_numbers(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(header(tmp_path / "m.safetensors", text))
    assert says in str(caught.value)


def test_a_header_in_another_encoding_is_refused(tmp_path: Path) -> None:
    raw = (ITEM % ("F32", "[4]", "[0, 16]")).encode("utf-16")
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
    with pytest.raises(CheckpointError, match="not JSON"):
        read(tmp_path / "m.safetensors")


def test_a_header_longer_than_the_file_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(CheckpointError, match="a header of 4611686018427387904 bytes in a file of 10"):
        read(tmp_path / "m.safetensors")


def agree(path: Path) -> None:
    """What we take the library takes too, with the same values; nothing is larger than the file."""
    try:
        found = read(path)
    except CheckpointError:
        return
    try:
        with safe_open(path, framework="np") as theirs:
            for name, weight in found.items():
                values = np.zeros(0)
                # A changed exponent may make a value that is not finite, which we refuse and the library does not.
                with contextlib.suppress(CheckpointError):
                    values = weight.all()
                if not values.size:
                    continue
                assert values.nbytes <= 2 * path.stat().st_size
                if weight.stored != "BF16":
                    np.testing.assert_array_equal(values, theirs.get_tensor(name).astype(np.float32))
    except SafetensorError as error:
        raise AssertionError("we take a file that the library refuses") from error


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_where_the_library_refuses_them(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(data)
    agree(path)


@given(st.data())
@settings(max_examples=200)
def test_a_mutated_file_is_read_or_refused_and_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    write_safetensors(path, TENSORS)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    agree(path)


@given(st.data())
@settings(max_examples=200)
def test_any_header_of_the_right_form_is_read_or_refused_as_the_library_does(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    small = st.integers(0, 6)
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16"]),
            "shape": st.lists(small | st.integers(), max_size=3),
            "data_offsets": st.lists(st.integers(0, 32) | st.integers(), min_size=2, max_size=2),
        }
    )
    entries = data.draw(st.dictionaries(st.text(max_size=4), entry | st.integers() | st.none(), max_size=3))
    agree(
        header(tmp_path_factory.getbasetemp() / "formed.safetensors", json.dumps(entries), bytes(data.draw(small) * 4))
    )


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": TENSORS["a"]})
    text = json.loads((tmp_path / "m.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert "__metadata__" in text
    assert list(read(tmp_path / "m.safetensors")) == ["a"]
