"""GGUF's types of 32 elements with one scale: ``q8_0`` and ``q4_0``.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
d        float16, 1                  the scale D, rounded to a half
qs       q8_0: int8, 32              q: an element decodes to d * q
         q4_0: uint8, 16             byte i: q of element i (low nibble) and i + 16 (high): d * (q - 8)
=======  ==========================  ==================================================================================

A file has d, then qs. q8_0: D = max|x| / 127, q = x * (1 / D), halves away from zero. q4_0: D = m / -8 with m the first
number of largest magnitude, q = min(15, trunc(x * (1 / D) + 8.5)); a block of zeros has d = -0. All in float32, each
operation rounded; 1 / 0 is 0, and q is 0 where a product is not finite (its d is 0).

Source: ggml, ``ggml-quants.c`` (``quantize_row_q8_0_ref``, ``quantize_row_q4_0_ref``), built without contraction.
"""

from __future__ import annotations

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from . import Gguf
from .arithmetic import finite, half_bytes, halves, pack_fields, reciprocal, roundf, signed_max, unpack_fields


class Q8_0(Gguf):
    """8-bit integers, a half as the scale of 32."""

    name, bits, block = "q8_0", 8, 32
    summary = "8-bit integers, a half as the scale of 32"
    fields = (Field("d", "float16", 1), Field("qs", "int8", 32))
    struct = "Q8_0"

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        d = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        q = roundf(finite(rows * reciprocal(d))).astype(np.int8)
        return np.concatenate([half_bytes(d), q.view(np.uint8)], axis=1)

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


class Q4_0(Gguf):
    """4-bit integers, a half as the scale of 32; the number of largest magnitude is -8."""

    name, bits, block = "q4_0", 4, 32
    summary = "4-bit integers, a half as the scale of 32"
    fields = (Field("d", "float16", 1), Field("qs", "uint8", 16))
    struct, together = "Q4_0", True

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        d = signed_max(rows) / np.float32(-8)
        q = finite(rows * reciprocal(d) + np.float32(8.5))
        return np.concatenate([half_bytes(d), pack_fields(np.minimum(q, 15).astype(np.uint8), 4, 16)], axis=1)

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return halves(blocks, 0) * (unpack_fields(blocks[:, 2:], 4, 16).astype(np.float32) - np.float32(8))


register("q8_0", Q8_0)
register("q4_0", Q4_0)
