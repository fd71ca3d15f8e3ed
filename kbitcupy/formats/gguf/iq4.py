"""GGUF's 4-bit types with a table: ``iq4_nl`` and ``iq4_xs``.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
``iq4_nl``: blocks of 32, an element is d * IQ4[q]
d        float16, 1                  the scale D, rounded to a half
qs       uint8, 16                   byte i: q of element i (low nibble) and i + 16 (high)
``iq4_xs``: blocks of 256, sub-blocks of 32, an element is (d * (ls - 32)) * IQ4[q]
d        float16, 1                  the scale of the inner scales
scales_h uint16, 1                   bits 2 j and 2 j + 1: the high bits of ls of sub-block j
scales_l uint8, 4                    nibble j, the low one of a byte first: the low bits of ls of sub-block j
qs       uint8, 128                  byte 16 j + i: q of elements 32 j + i (low nibble) and 32 j + i + 16 (high)
=======  ==========================  ==================================================================================

IQ4 is -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113. The planes of a type are in the order of its bytes in
a file, and decoding is exact in float32.

`search.tabled` finds the scale D of 32 elements, for weights x * x, or v * sqrt(2 * (sum of x * x in the block) / block
+ x * x) where a column has the importance v. iq4_nl: d = half(D), q is next to (1 / D) * x, 1 / 0 being 0. iq4_xs: with
S, the first of the 8 scales of the largest magnitude, D0 = -S / 32, d = half(D0), ls - 32 = round((1 / D0) * D), from
-32 to 31, and q is next to (1 / (D0 * (ls - 32))) * x. Of two that are as near, the upper one is taken.

Where columns of no importance leave only subnormal numbers, 1 / D0 may be infinite: what is infinite then becomes -32,
and what is NaN becomes 0, or the last q.

Source: ggml, ``ggml-quants.c`` (``quantize_row_iq4_nl_impl``), built without contraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from . import Gguf, search
from .arithmetic import half_bytes, pack_fields, reciprocal, scaled, signed_max, unpack_fields

_SUB = 32


class _Table(Gguf):
    """4-bit codes of the numbers of `search.IQ4`, scales of 32."""

    chunk = search.CHUNK
    bits, takes, header = 4, ("importance",), "formats/gguf_k.cuh"

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        weights = None if importance is None else self._weights(rows, importance).reshape(-1, _SUB)
        scale = np.empty(rows.size // _SUB, np.float32)
        for at, (x, w, *room) in search.tiles(rows, _SUB, 3):
            if weights is None:
                np.square(x, out=w)
            else:
                w[...] = weights[at].T
            scale[at] = search.tabled(x, w, room)[: at.stop - at.start]
        stored, used = self._stored(scale)
        inverse = reciprocal(used)
        q = np.empty((rows.size // _SUB, _SUB), np.uint8)
        for at, (x, y) in search.tiles(rows, _SUB, 1):
            q[at] = search.nearest(np.multiply(x, inverse[at], out=y)).T[: at.stop - at.start]
        return np.concatenate([stored, pack_fields(q, 4, 16).reshape(len(rows), -1)], axis=1)

    def _weights(self, rows: np.ndarray, importance: Importance) -> np.ndarray:
        squares = rows * rows
        # np.sum's order is not given, that of a running sum is.
        mean = np.add.accumulate(squares, axis=1, dtype=np.float32)[:, -1:] * np.float32(2 / self.block)
        return importance.weights * np.sqrt(mean + squares)

    def _stored(self, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes before the codes, and the scales that codes are found with, from those of the search."""
        raise NotImplementedError


class IQ4_NL(_Table):
    """4-bit codes of a table, a half as the scale of 32."""

    name, block, default, ggml_type = "iq4_nl", 32, False, 20
    summary = "4-bit table values, a half as the scale of 32"
    fields = (Field("d", "float16", 1), Field("qs", "uint8", 16))
    struct, together, lanes = "IQ4_NL", True, 1

    def _stored(self, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return half_bytes(scale[:, None]), scale

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        return scaled(search.IQ4_BYTES[unpack_fields(planes["qs"].reshape(-1, 16), 4, 16)], planes["d"])


class IQ4_XS(_Table):
    """4-bit codes of a table, 6-bit scales of 32, a half as the scale of those of 256."""

    name, block, ggml_type = "iq4_xs", 256, 23
    summary = "4-bit table values, 6-bit scales of 32, a half for 256"
    fields = (
        Field("d", "float16", 1),
        Field("scales_h", "uint16", 1),
        Field("scales_l", "uint8", 4),
        Field("qs", "uint8", 128),
    )
    struct, together, lanes = "IQ4_XS", True, 8

    def _stored(self, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scales = scale.reshape(-1, 8)
        d = -signed_max(scales) / np.float32(32)
        steps = reciprocal(d) * scales
        steps[np.isnan(steps)] = 0
        steps[np.isinf(steps)] = -32
        sc = np.clip(np.rint(steps), np.float32(-32), np.float32(31))
        ls = (sc + np.float32(32)).astype(np.uint8)
        high = np.bitwise_or.reduce((ls >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
        low = ls[:, ::2] & 15 | ls[:, 1::2] << 4
        return np.concatenate([half_bytes(d), high[:, None].view(np.uint8), low], axis=1), (d * sc).reshape(-1)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        high = planes["scales_h"].astype("<u2").view(np.uint8).reshape(-1, 2)
        ls = unpack_fields(planes["scales_l"].reshape(-1, 4), 4, 1) | unpack_fields(high, 2, 1) << 4
        sc = ls.view(np.int8) - np.int8(32)
        factor = planes["d"][:, None].astype(np.float32) * sc
        values = search.IQ4_BYTES[unpack_fields(planes["qs"].reshape(-1, 16), 4, 16)]
        return scaled(values, factor.reshape(-1)).reshape(-1, self.block)


for _type in (IQ4_NL, IQ4_XS):
    register(_type.name, _type)
