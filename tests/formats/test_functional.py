"""The flat functions: buffers with and without padding, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from inputs import DTYPES, SIZES, make

import kbitcupy as kb

FORMATS = {"e4m4": np.uint8, "fp16": np.float16, "fp32": np.float32}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("absmax_format", FORMATS)
@pytest.mark.parametrize("k", range(1, 9))
def test_buffers(k, absmax_format, size):
    x = make("normal", size, np.dtype("float32"))
    packed, absmax, codebook = kb.quantize_kbit(x, k, None, absmax_format)
    blocks = -(-size // 32)
    assert (packed.dtype, packed.shape) == (np.int32, (blocks * k + k,))
    assert (absmax.dtype, absmax.shape) == (FORMATS[absmax_format], (blocks + 1,))
    assert codebook is kb.create_normal_float_codebook(k)
    padded = kb.dequantize_kbit(packed, absmax, codebook, k, size, "float32")
    exact = kb.dequantize_kbit(packed[: blocks * k].view(np.uint32), absmax[:blocks], codebook, k, size, "float32")
    assert np.array_equal(padded, exact) and padded.shape == (size,)
    with_format = kb.quantize(x, f"kbit{k}", codebook="nf", absmax="float32").dequantize()
    if absmax_format == "fp32":
        assert np.array_equal(padded, with_format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_takes_exactly_n(dtype):
    x = make("normal", 45, dtype)
    packed, absmax, codebook = kb.quantize_kbit(x)
    out = np.full(64, 7, dtype)
    y = kb.dequantize_kbit(packed, absmax, codebook, 4, 45, out=out)
    assert np.shares_memory(y, out) and y.shape == (45,) and (out[45:] == 7).all()
    assert np.array_equal(y, kb.dequantize_kbit(packed, absmax, codebook, 4, 45, dtype))


def test_default_dtype_is_float16_and_float64_works():
    packed, absmax, codebook = kb.quantize_kbit(np.linspace(-1, 1, 40))
    assert kb.dequantize_kbit(packed, absmax, codebook, 4, 40).dtype == np.float16
    assert kb.dequantize_kbit(packed, absmax, codebook, 4, 40, dtype=None).dtype == np.float16
    double = kb.dequantize_kbit(packed, absmax, codebook, 4, 40, "float64")
    assert np.array_equal(double, kb.dequantize_kbit(packed, absmax, codebook, 4, 40, "float32"))


def test_padding_of_one_block_may_be_decoded():
    """Buffers with the padding of n elements are those without of a block more, as the docstring says."""
    packed, absmax, codebook = kb.quantize_kbit(np.linspace(-1, 1, 64))
    longer = kb.dequantize_kbit(packed, absmax, codebook, 4, 96)
    assert np.array_equal(longer[:64], kb.dequantize_kbit(packed, absmax, codebook, 4, 64)) and not longer[64:].any()
    with pytest.raises(ValueError, match="packed has 12 entries; n = 97"):
        kb.dequantize_kbit(packed, absmax, codebook, 4, 97)


def test_a_float32_absmax_is_decoded_as_what_it_is():
    x = np.full(32, 1e-9, np.float32)
    packed, absmax, codebook = kb.quantize_kbit(x, 4, None, "fp32")
    assert absmax[0] == np.float32(1e-9)
    # |x| under 1e-8 is divided by 1e-8: the index of 0.1, not of 1.
    assert kb.dequantize_kbit(packed, absmax, codebook, 4, 32, "float32")[0] == codebook[9] * absmax[0]


@given(st.integers(1, 8), st.binary(max_size=200))
def test_pack_and_unpack_are_inverse(k, data):
    index = np.frombuffer(data, np.uint8) & ((1 << k) - 1)
    packed = kb.pack_kbit(index, k)
    assert packed.dtype == np.int32 and packed.size == -(-index.size // 32) * k
    assert np.array_equal(kb.unpack_kbit(packed, k, index.size), index)
    padded = np.append(packed, np.zeros(k, np.int32))
    assert np.array_equal(kb.unpack_kbit(padded.view(np.uint32), k, index.size), index)
    for j in range(k):  # bit `lane` of word j is bit j of element `lane`
        for lane in range(min(32, index.size)):
            assert int(packed.view(np.uint32)[j]) >> lane & 1 == int(index[lane]) >> j & 1


PACKED, MAXIMA, VALUES = kb.quantize_kbit(np.ones(64, np.float32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": 0}, ValueError, "k is 0; allowed are the integers 1 to 8"),
        ({"k": 4.0}, ValueError, "k is 4.0"),
        ({"k": 5}, ValueError, "packed has 12 entries; n = 64 and k = 5 need 10, or 15 with padding"),
        ({"n": 97}, ValueError, "packed has 12 entries; n = 97 and k = 4 need 16, or 20 with padding"),
        ({"n": -1}, ValueError, "n is -1; it must be a non-negative integer"),
        ({"n": 64.0}, ValueError, "n is 64.0"),
        ({"packed": PACKED.astype(np.int64)}, TypeError, "packed is int64; allowed are int32, uint32"),
        ({"packed": PACKED.tolist()}, TypeError, "packed is list"),
        ({"packed": PACKED.reshape(3, 4)}, ValueError, "one-dimensional and contiguous"),
        ({"packed": np.repeat(PACKED, 2)[::2]}, ValueError, "one-dimensional and contiguous"),
        ({"absmax": MAXIMA.astype(np.int8)}, TypeError, "absmax is int8; allowed are uint8, float32, float16"),
        ({"absmax": MAXIMA[:1]}, ValueError, "absmax has 1 entries"),
        ({"codebook": VALUES[:8]}, ValueError, r"codebook is of shape \(8,\)"),
        ({"codebook": np.full(16, np.inf)}, ValueError, "not finite"),
        ({"dtype": "int8"}, TypeError, "dtype is int8"),
        ({"out": np.empty(63, np.float32)}, ValueError, "at least 64 elements"),
        ({"out": np.empty((8, 8), np.float32)}, ValueError, "one-dimensional"),
        ({"out": np.empty(64, np.int8)}, TypeError, "out.dtype is int8"),
        ({"out": np.empty(128, np.float32)[::2]}, ValueError, "not C-contiguous"),
        ({"out": [0.0] * 64}, TypeError, "out is list"),
        ({"out": np.empty(64, np.float32), "dtype": "float16"}, TypeError, "out is float32 but dtype says float16"),
        ({"out": np.empty(64, np.float16), "dtype": np.float64}, TypeError, "out is float16 but dtype says float64"),
    ],
)
def test_bad_dequantize(change, error, message):
    arguments = {"packed": PACKED, "absmax": MAXIMA, "codebook": VALUES, "k": 4, "n": 64, **change}
    with pytest.raises(error, match=message):
        kb.dequantize_kbit(**arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kb.quantize_kbit(np.arange(3)), TypeError, "A is int64; allowed are float16"),
        (lambda: kb.quantize_kbit(np.ones(3), k=9), ValueError, "k is 9"),
        (lambda: kb.quantize_kbit(np.ones(3), True), ValueError, "k is True"),
        (lambda: kb.quantize_kbit(np.ones(3), 4, np.ones(3)), ValueError, "codebook is of shape"),
        (lambda: kb.quantize_kbit(np.ones(3), 4, None, "float32"), ValueError, "allowed are 'e4m4', 'fp32', 'fp16'"),
        (lambda: kb.pack_kbit([4], 2), ValueError, "indices span 4 to 4; k = 2 allows 0 to 3"),
        (lambda: kb.pack_kbit([-1], 2), ValueError, "indices span -1"),
        (lambda: kb.pack_kbit([0.5], 2), TypeError, "indices is float64"),
        (lambda: kb.unpack_kbit(PACKED, 4, 200), ValueError, "need 28 words, or 32 with padding"),
        (lambda: kb.unpack_kbit(PACKED.astype(np.int64), 4, 64), TypeError, "packed is int64"),
        (lambda: kb.unpack_kbit([1], 4, 1), TypeError, "packed is list"),
        (lambda: kb.create_normal_float_codebook(0), ValueError, "k is 0"),
        (lambda: kb.create_normal_float_codebook(4, "tpu"), ValueError, "device is 'tpu'"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
