"""Block scales of k-bit formats, on NumPy: in one byte (E4M4 of bitsandbytes' pull request 1858), two or four.

A code ``e << 4 | m`` stands for ``2^(e - bias) * (1 + m / 16)``, or ``m * 2^(-bias - 3)`` where ``e`` is 0. With the
usual bias 11 that is 0, 2^-14 .. 31, exact to one part in 32 from 2^-10 on. Encoding rounds the mantissa half to even
and clamps it at 15, without carry; what is too large saturates (the pull request wraps there), NaN and what is not
positive become 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

E4M4_BIAS = 11
#: With a bias outside this range a factor of the decoder would not be a normal float32.
E4M4_BIAS_RANGE = (-96, 120)
# Where the bits of a float32 are cut to look up its code.
_UPPER_BITS, _OTHER_BITS = np.uint32(18), np.uint32((1 << 18) - 1)


def encode_e4m4(x: np.ndarray, bias: int = E4M4_BIAS) -> np.ndarray:
    """float32 of any shape to uint8 codes."""
    x = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    # Twice the upper 14 bits, and one more where there are others: steps begin, and ties are, where there are none.
    which = bits + _OTHER_BITS
    which >>= _UPPER_BITS
    which += bits >> _UPPER_BITS
    return np.asarray(_e4m4_codes(bias).take(which, mode="clip"))


@functools.lru_cache(maxsize=16)
def _e4m4_codes(bias: int) -> np.ndarray:
    """The codes of the numbers that `encode_e4m4` tells from each other, by the rule."""
    every = np.arange(1 << 15, dtype=np.uint32)
    bits = (every >> 1 << _UPPER_BITS) + (every & 1)
    positive = (bits - np.uint32(1)) < 0x7F800000  # neither zero, negative nor NaN
    leading = bits >> 19  # exponent and the four bits that stay, as in a code
    rounded = (bits + np.uint32(0x3FFFF) + (leading & 1)) >> 19  # half to even
    code = np.minimum(rounded, leading | 15).astype(np.int32) - ((127 - bias) << 4)  # no carry out of the mantissa
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.rint(np.where(positive & (code < 16), bits.view(np.float32), 0) * np.float32(2.0 ** (bias + 3)))
    code = np.where(code < 16, np.minimum(scaled, 15).astype(np.int32), np.minimum(code, 0xFF))
    return np.where(positive, code, 0).astype(np.uint8)


def decode_e4m4(codes: np.ndarray, bias: int = E4M4_BIAS) -> np.ndarray:
    """uint8 codes of any shape to float32."""
    return _e4m4_values(bias)[codes]


@functools.lru_cache(maxsize=16)
def _e4m4_values(bias: int) -> np.ndarray:
    """The 256 numbers that codes stand for."""
    every = np.arange(256, dtype=np.int32)
    exponent, mantissa = every >> 4, (every & 15).astype(np.float32)
    small = mantissa * np.float32(2.0 ** (-bias - 3))
    normal = np.ldexp(1 + mantissa / np.float32(16), exponent - bias)
    return np.where(exponent == 0, small, normal).astype(np.float32)


@dataclass(frozen=True)
class AbsmaxFormat:
    """How block scales are stored.

    Parameters
    ----------
    dtype : str
        NumPy dtype of the plane.
    kernel : str
        Name of the enumerator in ``kernels/formats/scales.cuh``.
    relative_error : float
        Bound of the stored scale's own relative error in its normal range (rounding of the decoder included).
    absolute_error : float
        The same below the normal range, as a multiple of the tensor scale.
    """

    dtype: str
    kernel: str
    relative_error: float
    absolute_error: float


ABSMAX = {
    "e4m4": AbsmaxFormat("uint8", "E4M4", 2.0**-4, 2.0**-15),
    "float16": AbsmaxFormat("float16", "FLOAT16", 2.0**-11 + 2.0**-22, 2.0**-25),
    "float32": AbsmaxFormat("float32", "FLOAT32", 2.0**-22, 0.0),
}


def tensor_scale(largest: np.float32, absmax: str) -> np.float32:
    """The power of two that brings the largest finite absmax of a tensor to where `absmax` is accurate."""
    low, high = {"e4m4": (2.0**-4, 31.0), "float16": (2.0**-4, 65504.0), "float32": (0.0, np.inf)}[absmax]
    if largest == 0 or low <= largest <= high:
        return np.float32(1)
    fraction, exponent = np.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    if absmax == "e4m4":
        shift = 5 if fraction <= 31 / 32 else 4  # into (15.5, 31]
    else:
        shift = 16 if fraction == 0.5 else 15  # into (2^14, 2^15]
    return np.ldexp(np.float32(1), max(int(exponent) - shift, -126))


def encode_absmax(absmax: np.ndarray, kind: str) -> np.ndarray:
    """Block scales as they are stored."""
    if kind == "e4m4":
        return encode_e4m4(absmax)
    with np.errstate(over="ignore"):
        return absmax.astype(ABSMAX[kind].dtype)


def decode_absmax(codes: np.ndarray) -> np.ndarray:
    """Stored block scales as float32, by the dtype they are stored in."""
    return decode_e4m4(codes) if codes.dtype == np.uint8 else codes.astype(np.float32)
