import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ferrule_convert.schemes import Scheme, dequantise, pack, quantise
from ferrule_runtime.errors import RecipeError
from ferrule_runtime.head import unpack

rows = hnp.arrays(np.float32, (5, 64), elements=st.floats(-100, 100, width=32))
schemes = st.builds(Scheme, bits=st.sampled_from([2, 4, 8]), group=st.sampled_from([16, 32, 64]), zero=st.booleans())


@given(st.data(), st.sampled_from([2, 4, 8]), st.integers(1, 33))
def test_packed_integers_come_back(data: st.DataObject, bits: int, count: int) -> None:
    values = data.draw(hnp.arrays(np.uint8, (3, count), elements=st.integers(0, (1 << bits) - 1)))
    np.testing.assert_array_equal(unpack(pack(values, bits), bits, count), values)


def test_the_first_of_two_nibbles_is_the_low_half() -> None:
    # onnxruntime's documentation of MatMulNBits: two 4-bit values in a byte, the first in the lower four bits.
    assert pack(np.array([[0x3, 0xC]], dtype=np.uint8), 4).tolist() == [[0xC3]]
    assert pack(np.array([[1, 2, 3, 0]], dtype=np.uint8), 2).tolist() == [[0b00_11_10_01]]


@given(rows, schemes)
def test_no_weight_moves_by_more_than_its_step(values: np.ndarray, scheme: Scheme) -> None:
    packed = quantise(values, scheme)
    step = np.repeat(np.abs(packed.scales), scheme.group, axis=1)
    # Half a step; a whole one where the range's short side cuts (symmetric) or the zero point was rounded.
    assert (np.abs(dequantise(packed, scheme) - values) <= step * 1.001 + 1e-6).all()


@given(rows, schemes)
def test_a_scheme_knows_its_bytes(values: np.ndarray, scheme: Scheme) -> None:
    packed = quantise(values, scheme)
    zeros = 0 if packed.zeros is None else packed.zeros.nbytes
    assert packed.values.nbytes + packed.scales.nbytes + zeros == scheme.bytes_for(5, 64)


@given(rows, schemes)
def test_quantising_twice_changes_nothing_more(values: np.ndarray, scheme: Scheme) -> None:
    once = dequantise(quantise(values, scheme), scheme)
    twice = dequantise(quantise(once, scheme), scheme)
    np.testing.assert_allclose(twice, once, atol=float(np.abs(values).max()) * 2e-2 + 1e-6)


def test_symmetric_four_bits_equal_q4_0() -> None:
    # The library's Q4_0 is the same choice of scale, stored as float16: an independent implementation.
    import gguf

    values = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    ours = dequantise(quantise(values, Scheme(4, 32)), Scheme(4, 32))
    step = np.abs(values.reshape(8, 2, 32)).max(axis=2).repeat(32, axis=1) / 8
    same = np.abs(ours - theirs) < step * 0.02
    assert same.mean() > 0.99  # Q4_0 rounds halves upwards and its scale to float16


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(RecipeError, match="128 does not divide rows of 576"):
        quantise(np.zeros((1, 576), dtype=np.float32), Scheme(4, 128))
