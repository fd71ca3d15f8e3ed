"""Block scales in one byte: E4M4 (the absmax format of bitsandbytes' pull request 1858), on NumPy.

A code ``e << 4 | m`` stands for ``2^(e - bias) * (1 + m / 16)``, or ``m * 2^(-bias - 3)`` where ``e`` is 0. With the
usual bias 11 that is 0, 2^-14 .. 31, exact to one part in 32 from 2^-10 on. Encoding rounds the mantissa half to even
and clamps it at 15, without carry; what is too large saturates (the pull request wraps there), NaN and what is not
positive become 0.
"""

from __future__ import annotations

import functools

import numpy as np

E4M4_BIAS = 11
#: With a bias outside this range a factor of the decoder would not be a normal float32.
E4M4_BIAS_RANGE = (-96, 120)


def encode_e4m4(x: np.ndarray, bias: int = E4M4_BIAS) -> np.ndarray:
    """float32 of any shape to uint8 codes."""
    x = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    positive = (bits - np.uint32(1)) < 0x7F800000  # neither zero, negative nor NaN
    leading = bits >> 19  # exponent and the four bits that stay, as in a code
    rounded = (bits + np.uint32(0x3FFFF) + (leading & 1)) >> 19  # half to even
    code = np.minimum(rounded, leading | 15).astype(np.int32) - ((127 - bias) << 4)  # no carry out of the mantissa
    small = code < 16
    code = np.minimum(code, 0xFF)
    if small.any():
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.rint(np.where(positive & small, x, 0) * np.float32(2.0 ** (bias + 3)))
        code = np.where(small, np.minimum(scaled, 15).astype(np.int32), code)
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
