"""GGUF's ternary type of 2 bits: ``tq2_0``.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
qs       uint8, 64                   byte 32 p + m, bits 2 s and 2 s + 1: t of element 128 p + 32 s + m: d * (t - 1)
d        float16, 1                  the scale D = max|x| of 256 elements, rounded to a half
=======  ==========================  ==================================================================================

A file has qs, then d. t = x * (1 / D) + 1, halves away from zero, in float32; 1 / 0 is 0, and t is 1 where the product
is not finite. t = 3, which no quantizer writes, decodes to 2 d.

Source: ggml, ``ggml-quants.c`` (``quantize_row_tq2_0_ref``).
"""

from __future__ import annotations

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from . import Gguf
from .arithmetic import finite, half_bytes, halves, pack_fields, reciprocal, roundf, unpack_fields


class TQ2_0(Gguf):
    """-1, 0 and 1, a half as the scale of 256."""

    name, bits, block = "tq2_0", 2, 256
    summary = "-1, 0 and 1 in 2 bits, a half as the scale of 256"
    fields = (Field("qs", "uint8", 64), Field("d", "float16", 1))
    struct, together = "TQ2_0", True

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        d = np.abs(rows).max(axis=1, keepdims=True)
        t = roundf(finite(rows * reciprocal(d))) + np.float32(1)
        return np.concatenate([pack_fields(t.astype(np.uint8), 2, 32), half_bytes(d)], axis=1)

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        return halves(blocks, 64) * (unpack_fields(blocks[:, :64], 2, 32).astype(np.float32) - np.float32(1))


register("tq2_0", TQ2_0)
