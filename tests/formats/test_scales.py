"""E4M4 against its definition, over every code and every neighbourhood."""

import numpy as np
import oracle
import pytest
from inputs import BFLOAT16

import kbitcupy as kb

CODES = np.arange(256, dtype=np.uint8)
VALUES = np.array([oracle.e4m4_value(code) for code in range(256)])


def interesting():
    """Every code's value, every rounding border, and their neighbours; powers of two; special values."""
    borders = (VALUES[:-1] + VALUES[1:]) / 2
    powers = 2.0 ** np.arange(-149, 128)
    x = np.concatenate([VALUES, borders, powers, powers * 1.999, [0.0, 3.4e38, np.inf]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf)), -x])
    return np.append(x, np.float32(np.nan))


def test_all_codes_decode_to_their_value():
    decoded = kb.decode_absmax_e4m4(CODES)
    assert np.array_equal(decoded, VALUES) and decoded.dtype == np.float32
    assert (np.diff(decoded) > 0).all() and decoded[1] == 2.0**-14 and decoded[-1] == 31


def test_codes_survive_a_round_trip():
    assert np.array_equal(kb.encode_absmax_e4m4(kb.decode_absmax_e4m4(CODES)), CODES)


def test_encode_equals_the_definition():
    x = interesting()
    assert kb.encode_absmax_e4m4(x).tolist() == [oracle.e4m4_code(float(v)) for v in x]


@pytest.mark.parametrize(
    ("x", "code"), [(32.0, 0xFF), (40.0, 0xFF), (np.inf, 0xFF), (np.nan, 0), (-1.0, 0), (2.0**-15, 0), (1.999, 0xBF)]
)
def test_borders(x, code):
    assert kb.encode_absmax_e4m4(np.float32([x])).tolist() == [code]


def test_relative_error_on_log_uniform_absmax():
    """bitsandbytes' own check: mean 1.1 %, 95th percentile 2.4 %."""
    x = np.exp(np.random.default_rng(0).uniform(np.log(2.0**-10), np.log(31), 1 << 18)).astype(np.float32)
    error = np.abs(kb.decode_absmax_e4m4(kb.encode_absmax_e4m4(x)) / x - 1)
    assert error.mean() == pytest.approx(0.011, abs=0.001)
    assert np.percentile(error, 95) == pytest.approx(0.024, abs=0.001)
    assert error.max() <= 1 / 16


@pytest.mark.parametrize("bias", [-96, 0, 7, 20, 120])
def test_other_biases_shift_the_exponent(bias):
    decoded = kb.decode_absmax_e4m4(CODES, bias)
    assert np.array_equal(decoded, VALUES * 2.0 ** (11 - bias))
    assert np.array_equal(kb.encode_absmax_e4m4(decoded, bias), CODES)


def test_shapes_and_dtypes():
    assert kb.encode_absmax_e4m4(np.ones((2, 0, 3), np.float16)).shape == (2, 0, 3)
    assert kb.encode_absmax_e4m4(np.ones((2, 3), BFLOAT16)).tolist() == [[0xB0] * 3] * 2
    assert kb.encode_absmax_e4m4(np.float64(1e300)) == 0xFF
    with pytest.raises(TypeError, match=r"absmax is int64; allowed are float16"):
        kb.encode_absmax_e4m4(np.arange(3))
    with pytest.raises(TypeError, match="encoded is float32; it must be uint8"):
        kb.decode_absmax_e4m4(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="bias is 1000; allowed are the integers -96 to 120"):
        kb.encode_absmax_e4m4(np.ones(3, np.float32), 1000)


def test_every_float_has_the_code_of_the_definition():
    """Codes are looked up by the upper bits: where others are nothing, the least and the most."""
    upper = np.arange(1 << 14, dtype=np.uint32) << 18
    for lower in (0, 1, (1 << 18) - 1):
        x = (upper + np.uint32(lower)).view(np.float32)
        assert kb.encode_absmax_e4m4(x).tolist() == [oracle.e4m4_code(float(v)) for v in x]
