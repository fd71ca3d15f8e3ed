"""Block scales in one byte: E4M4 (bitsandbytes' absmax format), on NumPy.

A code ``e << 4 | m`` stands for ``2^(e - bias) * (1 + m / 16)``, or ``m * 2^(-bias - 3)`` where ``e`` is 0. With the
usual bias 11 that is 0, 2^-14 .. 31, exact to one part in 32 from 2^-10 on. Encoding rounds the mantissa half to even
and clamps it at 15, without carry; what is too large saturates (bitsandbytes wraps there), NaN and what is not
positive become 0.
"""

from __future__ import annotations

import numpy as np

E4M4_BIAS = 11
#: With a bias outside this range a factor of the decoder would not be a normal float32.
E4M4_BIAS_RANGE = (-96, 120)


def encode_e4m4(x: np.ndarray, bias: int = E4M4_BIAS) -> np.ndarray:
    """float32 of any shape to uint8 codes."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(np.shape(x))
    positive = (bits - np.uint32(1)) < 0x7F800000  # neither zero, negative nor NaN
    exponent = (bits >> 23).astype(np.int32) - 127 + bias
    fraction = bits & np.uint32(0x7FFFFF)
    normal = (fraction + np.uint32(0x3FFFF) + ((fraction >> 19) & 1)) >> 19  # half to even at bit 19
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.rint(np.where(positive & (exponent <= 0), x, 0) * np.float32(2.0 ** (bias + 3)))
    mantissa = np.minimum(np.where(exponent <= 0, scaled, normal).astype(np.int32), 15)
    code = np.where(exponent > 15, 0xFF, np.maximum(exponent, 0) << 4 | mantissa)
    return np.where(positive, code, 0).astype(np.uint8)


def decode_e4m4(codes: np.ndarray, bias: int = E4M4_BIAS) -> np.ndarray:
    """uint8 codes of any shape to float32."""
    every = np.arange(256, dtype=np.int32)
    exponent, mantissa = every >> 4, (every & 15).astype(np.float32)
    small = mantissa * np.float32(2.0 ** (-bias - 3))
    normal = np.ldexp(1 + mantissa / np.float32(16), exponent - bias)
    return np.where(exponent == 0, small, normal).astype(np.float32)[codes]
