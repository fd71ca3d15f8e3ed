"""GGUF's ternary types: ``tq2_0`` of 2 bits, and ``tq1_0``, which has five numbers in a byte.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
qs       tq2_0: uint8, 64            byte 32 p + m, bits 2 s and 2 s + 1: t of element 128 p + 32 s + m: d * (t - 1)
         tq1_0: uint8, 48            byte m < 32: t of the elements 32 n + m, n = 0 .. 4; byte 32 + m, m < 16: of
                                     160 + 16 n + m
qh       tq1_0: uint8, 4             byte m: t of the elements 240 + 4 n + m, n = 0 .. 3
d        float16, 1                  the scale D = max|x| of 256 elements, rounded to a half
=======  ==========================  ==================================================================================

A file has the planes' entries in this order. t = x * (1 / D) + 1, halves away from zero, in float32; 1 / 0 is 0, and t
is 1 where the product is not finite. t = 3 of ``tq2_0``, which no quantizer writes, decodes to 2 d.

A byte of ``tq1_0`` is (256 v + 242) / 243, rounded down, where v has the numbers t as digits in base 3, that of n = 0
first; four digits are followed by a 0. Digit n is (byte * 3^n mod 256) * 3 / 256, rounded down, for any byte.

Source: ggml, ``ggml-quants.c`` (``quantize_row_tq2_0_ref``, ``quantize_row_tq1_0_ref``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from . import Gguf
from .arithmetic import (
    copy_bytes,
    half_bytes,
    largest_magnitude,
    pack_fields,
    quotients,
    scaled,
    unpack_fields,
)

# The parts of a block of tq1_0: first byte, end, digits of a byte.
_PARTS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


class TQ2_0(Gguf):
    """-1, 0 and 1, a half as the scale of 256."""

    name, bits, block, ternary = "tq2_0", 2, 256, True
    summary = "-1, 0 and 1 in 2 bits, a half as the scale of 256"
    fields = (Field("qs", "uint8", 64), Field("d", "float16", 1))
    struct, together, ggml_type = "TQ2_0", True, 35

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, t = _ternary(rows)
        return pack_fields(t, 2, 32), half_bytes(d)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        t = unpack_fields(planes["qs"].reshape(-1, 64), 2, 32).view(np.int8)
        t -= np.int8(1)
        return scaled(t, planes["d"])


class TQ1_0(Gguf):
    """-1, 0 and 1, five to a byte, a half as the scale of 256."""

    name, bits, block, ternary = "tq1_0", 1.625, 256, True
    summary = "-1, 0 and 1, five to a byte, a half as the scale of 256"
    fields = (Field("qs", "uint8", 48), Field("qh", "uint8", 4), Field("d", "float16", 1))
    struct, together, ggml_type, default = "TQ1_0", True, 34, False

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, t = _ternary(rows)
        packed, first = [], 0
        for begin, end, digits in _PARTS:
            width = end - begin
            number = np.zeros((len(rows), width), np.uint16)
            for n in range(digits):
                number += t[:, first + n * width : first + (n + 1) * width] * _POWERS[4 - n]
            packed.append(((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8))
            first += digits * width
        return np.concatenate(packed[:2], axis=1), packed[2], half_bytes(d)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        qs, qh = planes["qs"].reshape(-1, 48), planes["qh"].reshape(-1, 4)
        fractions = np.empty((len(qs), self.block), np.uint8)  # of 256
        for n, power in enumerate(_POWERS):
            both = qs * power
            copy_bytes(both[:, :32], fractions[:, 32 * n : 32 * n + 32])
            copy_bytes(both[:, 32:], fractions[:, 160 + 16 * n : 176 + 16 * n])
            if n < 4:
                copy_bytes(qh * power, fractions[:, 240 + 4 * n : 244 + 4 * n])
        t = (fractions > 85).view(np.int8)
        t += (fractions > 170).view(np.int8)
        t -= np.int8(1)
        return scaled(t, planes["d"])


def _ternary(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale, float32[blocks, 1], and codes 0, 1 and 2, uint8."""
    d = largest_magnitude(rows)
    y = quotients(rows, d)  # at most 1, and a little by rounding
    t = np.greater_equal(y, np.float32(0.5)).view(np.uint8)
    t += np.uint8(1)
    t -= np.less_equal(y, np.float32(-0.5)).view(np.uint8)
    return d, t


for _format in (TQ2_0, TQ1_0):
    register(_format.name, _format)
