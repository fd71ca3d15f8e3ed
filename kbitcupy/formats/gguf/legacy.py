"""GGUF's types of 32 elements with one scale: ``q8_0`` and ``q4_0``, and the older ones beside them.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
d        float16, 1                  the scale D, rounded to a half
         q4_1, q5_1: float16, 2      ... and m, the least number, rounded to a half
         q8_1: float16, 2            ... and s, the sum of q times the unrounded D, rounded to a half
qh       q5_0, q5_1: uint8, 4        bit i of the 32: bit 4 of q of element i
qs       q8_0, q8_1: int8, 32        q: an element decodes to d * q
         others: uint8, 16           byte i: the low 4 bits of q of element i (low nibble) and i + 16 (high)
=======  ==========================  ==================================================================================

A file has the planes' entries in this order. Elements decode to d * (q - 8) (q4_0), d * (q - 16) (q5_0) and d * q + m
(q4_1, q5_1); products are exact in float32, the sum is rounded once.

q8_0, q8_1: D = max|x| / 127, q = x * (1 / D), halves away from zero. q4_0: D = n / -8 with n the first number of
largest magnitude, q = min(15, trunc(x * (1 / D) + 8.5)); q5_0: n / -16, 31 and 16.5; a block of zeros has d = -0.
q4_1: D = (max - min) / 15, q = min(15, trunc((x - min) * (1 / D) + 0.5)), m = min, the first of those that are equal;
q5_1: 31 for 15. All in float32, each operation rounded; 1 / 0 is 0, and q is 0 where a product is not finite (its d is
0). ``q8_1`` is what activations are staged in: no file has it.

Where a column has the importance v, errors of all types but q8_0 and q8_1 are weighed by v * sqrt(mean + x * x), with
the mean of x * x over the whole row: scale, minimum and codes are what `search.symmetric` (q4_0, q5_0) or
`search.ranged` in 37 steps (q4_1, q5_1) finds, and stay as they are.

Source: ggml, ``ggml-quants.c`` (``quantize_row_q8_0_ref``, ``quantize_row_q4_0_ref``, ``quantize_row_q4_0_impl`` and so
on), built without contraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from . import Gguf, search
from .arithmetic import (
    extremes,
    half_bytes,
    largest_magnitude,
    pack_fields,
    quotients,
    round_away,
    scaled,
    signed_max,
    unpack_fields,
)


class Q8_0(Gguf):
    """8-bit integers, a half as the scale of 32."""

    name, bits, block = "q8_0", 8, 32
    summary = "8-bit integers, a half as the scale of 32"
    fields = (Field("d", "float16", 1), Field("qs", "int8", 32))
    struct, ggml_type = "Q8_0", 8

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, q = _signed_bytes(rows)
        return half_bytes(d), q.view(np.uint8)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        return scaled(planes["qs"].reshape(-1, 32), planes["d"])


class Q8_1(Gguf):
    """8-bit integers, a half as the scale of 32, and their sum: what ggml stages activations in."""

    name, bits, block = "q8_1", 8, 32
    summary = "8-bit integers, halves as scale and sum of 32, for activations"
    fields = (Field("d", "float16", 2), Field("qs", "int8", 32))
    struct, ggml_type, default = "Q8_1", 9, False

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, q = _signed_bytes(rows)
        total = q.sum(axis=1, keepdims=True, dtype=np.int32).astype(np.float32)
        return half_bytes(d, total * d), q.view(np.uint8)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        return scaled(planes["qs"].reshape(-1, 32), planes["d"][::2])


class Q4_0(Gguf):
    """4-bit integers, a half as the scale of 32; the number of largest magnitude is -8."""

    name, bits, block = "q4_0", 4, 32
    summary = "4-bit integers, a half as the scale of 32"
    takes, row_mean = ("importance",), True
    fields = (Field("d", "float16", 1), Field("qs", "uint8", 16))
    struct, together, ggml_type = "Q4_0", True, 2

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, q = _centred(rows, 8) if importance is None else _centred_weighed(rows, importance, 8)
        return half_bytes(d), pack_fields(q, 4, 16)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        q = unpack_fields(planes["qs"].reshape(-1, 16), 4, 16).view(np.int8)
        q -= np.int8(8)
        return scaled(q, planes["d"])


class Q4_1(Gguf):
    """4-bit integers, halves as the scale and the least number of 32."""

    name, bits, block = "q4_1", 4, 32
    summary = "4-bit integers, halves as scale and minimum of 32"
    takes, row_mean = ("importance",), True
    fields = (Field("d", "float16", 2), Field("qs", "uint8", 16))
    struct, together, ggml_type, default = "Q4_1", True, 3, False

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, m, q = _from_minimum(rows, 15) if importance is None else _ranged(rows, importance, 15)
        return half_bytes(d, m), pack_fields(q, 4, 16)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        y = scaled(unpack_fields(planes["qs"].reshape(-1, 16), 4, 16), planes["d"][::2])
        y += planes["d"][1::2, None].astype(np.float32)
        return y


class Q5_0(Gguf):
    """5-bit integers, a half as the scale of 32; the number of largest magnitude is -16."""

    name, bits, block = "q5_0", 5, 32
    summary = "5-bit integers, a half as the scale of 32"
    takes, row_mean = ("importance",), True
    fields = (Field("d", "float16", 1), Field("qh", "uint8", 4), Field("qs", "uint8", 16))
    struct, together, ggml_type, default = "Q5_0", True, 6, False

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, q = _centred(rows, 16) if importance is None else _centred_weighed(rows, importance, 16)
        return half_bytes(d), *_five_bits(q)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        q = _from_five_bits(planes["qh"], planes["qs"]).view(np.int8)
        q -= np.int8(16)
        return scaled(q, planes["d"])


class Q5_1(Gguf):
    """5-bit integers, halves as the scale and the least number of 32."""

    name, bits, block = "q5_1", 5, 32
    summary = "5-bit integers, halves as scale and minimum of 32"
    takes, row_mean = ("importance",), True
    fields = (Field("d", "float16", 2), Field("qh", "uint8", 4), Field("qs", "uint8", 16))
    struct, together, ggml_type, default = "Q5_1", True, 7, False

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        d, m, q = _from_minimum(rows, 31) if importance is None else _ranged(rows, importance, 31)
        return half_bytes(d, m), *_five_bits(q)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        y = scaled(_from_five_bits(planes["qh"], planes["qs"]), planes["d"][::2])
        y += planes["d"][1::2, None].astype(np.float32)
        return y


def _signed_bytes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale, float32[blocks, 1], and codes, int8, of which 127 is the largest magnitude."""
    d = largest_magnitude(rows) / np.float32(127)
    return d, round_away(quotients(rows, d))


def _centred(rows: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale and codes, uint8, from 0 to 2 * middle - 1; 0 is the number of largest magnitude."""
    d = signed_max(rows) / np.float32(-middle)
    return d, _truncated(quotients(rows, d, middle + 0.5), 2 * middle - 1)


def _from_minimum(rows: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scale, the minimum and codes, uint8, from 0 at the minimum to `largest` at the maximum."""
    low, high = extremes(rows)
    zero = np.flatnonzero(low == 0)
    if zero.size:  # the sign of the first of them; that of the maximum does not matter
        part = rows[zero]
        low[zero] = np.take_along_axis(part, part.argmin(axis=1, keepdims=True), axis=1)
    d = (high - low + np.float32(0)) / np.float32(largest)
    return d, low, _truncated(quotients(rows - low, d, 0.5), largest)


def _truncated(y: np.ndarray, largest: int) -> np.ndarray:
    """The whole parts of numbers that are not negative, at most `largest`, uint8."""
    return np.minimum(y, np.float32(largest), out=y).astype(np.uint8)


def _weigh(rows: np.ndarray, importance: Importance) -> np.ndarray:
    """Importance times the root of the mean square of the row and the element's own square, float32[blocks, block]."""
    squares = rows * rows
    squares += importance.mean
    np.sqrt(squares, out=squares)
    return np.multiply(importance.weights, squares, out=squares)


def _centred_weighed(rows: np.ndarray, importance: Importance, middle: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_centred`, by a search."""
    weights = _weigh(rows, importance)
    d, q = np.empty((len(rows), 1), np.float32), np.empty(rows.shape, np.uint8)
    for at, (x, w, *room) in search.tiles(rows, rows.shape[1], 4):
        columns = at.stop - at.start
        w[...] = weights[at].T
        scale, step, nothing = search.symmetric(x, w, middle, room)
        codes = search.step_codes(x, step, middle, room[0])
        codes[:, nothing] = -middle
        codes += np.float32(middle)
        d[at, 0], q[at] = scale[:columns], codes.T[:columns]
    return d, q


def _ranged(rows: np.ndarray, importance: Importance, largest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_from_minimum`, by a search."""
    weights = _weigh(rows, importance)
    d, low = np.empty((2, len(rows), 1), np.float32)
    q = np.empty(rows.shape, np.uint8)
    for at, (x, w, *room) in search.tiles(rows, rows.shape[1], 4):
        columns = at.stop - at.start
        w[...] = weights[at].T
        scale, minimum, step, start = search.ranged(x, w, search.weighed(largest), room)
        codes = search.range_codes(x, step, start, largest, room[0])
        d[at, 0], low[at, 0], q[at] = scale[:columns], -minimum[:columns], codes.T[:columns]
    return d, low, q


def _five_bits(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of 5 bits as the bytes of their bits 4, and those of the rest."""
    high = np.packbits((q >> 4).reshape(-1), bitorder="little").reshape(len(q), -1)  # rows are whole bytes
    return high, pack_fields(q & 15, 4, 16)


def _from_five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    q = np.unpackbits(high, bitorder="little").reshape(-1, 32)
    q <<= np.uint8(4)
    q |= unpack_fields(low.reshape(-1, 16), 4, 16)
    return q


for _format in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_1):
    register(_format.name, _format)
