"""GGUF's K types, blocks of 256 whose inner scales are quantized themselves: ``q2_k`` to ``q6_k``, and ``q8_k``.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
``q2_k``: sub-blocks of 16, an element is (d * sc) * q - dmin * mn
scales   uint8, 16                   sc of sub-block j in the low nibble of byte j, mn in the high one
qs       uint8, 64                   byte 32 p + m, bits 2 s and 2 s + 1: q of element 128 p + 32 s + m
d        float16, 2                  d and dmin, the scales of the inner scales and of the inner minima
``q3_k``: sub-blocks of 16, an element is (d * (sc - 32)) * (q + 4 h - 4)
hmask    uint8, 32                   byte m, bit s: h of element 32 s + m
qs       uint8, 64                   as q2_k
scales   uint8, 12                   sc of 16 sub-blocks, 6 bits each: the low 4 of sub-block j in byte j mod 8 (low
                                     nibble for j < 8), the 2 high ones in byte 8 + j mod 4, bits 2 (j div 4) and next
d        float16, 1                  the scale of the inner scales
``q4_k``: sub-blocks of 32, an element is (d * sc) * q - dmin * mn
d        float16, 2                  d and dmin
scales   uint8, 12                   sc and mn of 8 sub-blocks, 6 bits each. Bytes 0 to 3: sc of sub-block j,
                                     bytes 4 to 7: mn of j (j < 4), in the low 6 bits; bytes 8 to 11: the low 4 bits of
                                     sc (low nibble) and mn of j + 4, whose 2 high bits are those of bytes j and j + 4
qs       uint8, 128                  byte 32 p + m: q of element 64 p + m (low nibble) and 64 p + 32 + m (high)
``q5_k``: sub-blocks of 32, an element is (d * sc) * (q + 16 h) - dmin * mn
d        float16, 2                  d and dmin
scales   uint8, 12                   as q4_k
qh       uint8, 32                   byte m, bit s: h of element 32 s + m
qs       uint8, 128                  as q4_k
``q6_k``: sub-blocks of 16, an element is (d * sc) * (q + 16 h - 32)
ql       uint8, 128                  byte 64 p + m: q of element 128 p + m (low nibble) and 128 p + 64 + m (high)
qh       uint8, 64                   byte 32 p + m, bits 2 s and 2 s + 1: h of element 128 p + 32 s + m
scales   int8, 16                    sc
d        float16, 1                  the scale of the inner scales
``q8_k``: an element is d * q; what activations are staged in
d        float32, 1                  the scale
qs       int8, 256                   q
bsums    int16, 16                   the sum of 16 q
=======  ==========================  ==================================================================================

The planes of a type are in the order of its bytes in a file. A product of scale and code is exact in float32 (but in
q8_k), a difference is rounded once.

How they are quantized: all in float32, each operation rounded, sums in ascending order; searches in `search`.

q2_k, q4_k, q5_k
    `search.ranged` finds scale and minimum of each sub-block, for weights |x| (q2_k) or sqrt(mean of x * x) + |x|.
    With S and M, the largest ones in a block and R = 15 (q2_k) or 63: d = half(S / R), sc = round((R / S) * scale),
    dmin = half(M / R), mn = round((R / M) * minimum).
q3_k, q6_k
    `search.refined` or, for weights x * x, `search.symmetric` finds the scales. With S, the first of the largest
    magnitude, and I = -32 / S or -128 / S: sc = round(I * scale), d = half(1 / I).
Codes
    are found again with what was stored: round((x + dmin * mn) / (d * sc)), in their range. Where d * sc is 0 those of
    the search stay, and sub-blocks that have nothing in them have the bits 0.
Importance v, one number for each column
    w = v * sqrt(2 * (sum of x * x in the block) / 256 + x * x), of which q2_k leaves out the first 2; in q6_k w = v.
    q2_k, q4_k, q5_k: `search.ranged` with w, in 37 steps, then d and sc, dmin and mn by `search.positive`, which weighs
    a sub-block by its sum of w. q3_k: `search.symmetric` with w, and again for d and sc. q6_k: `search.symmetric`.
    Where nearly all columns of a sub-block have no importance its scale may be negative, and sc a byte out of range
    (`search.positive`): q5_k then stores 63, but in q2_k and q4_k the bits beyond run into the neighbours, and q is
    found with what can be read from there.
q8_k
    I = -127 / m with m the first number of largest magnitude, q = min(127, round(I * x)), d = 1 / I.

Source: ggml, ``ggml-quants.c`` (``quantize_row_q2_K_ref`` and its like, ``quantize_q2_K`` and its like), built without
contraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from ..integer_codes import inner_scales
from . import Gguf, search
from .arithmetic import finite, half_bytes, halves, pack_fields, scaled, signed_max, unpack_fields
from .search import Steps

_BLOCK = 256


class KType(Gguf):
    """A type of blocks of 256."""

    chunk = search.CHUNK
    block = _BLOCK
    header = "formats/gguf_k.cuh"
    #: Elements of a sub-block.
    sub: ClassVar[int]


class _Ranged(KType):
    """Codes from 0 on, scales and minima of sub-blocks."""

    takes = ("importance",)
    #: Without importance, and the largest inner scale and inner minimum.
    steps: ClassVar[Steps]
    wide: ClassVar[int]

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        subs, largest = self.block // self.sub, self.steps.largest
        # scale, minimum, and the step and the lowest number that the codes of a sub-block are made again with
        found = np.empty((5, len(rows) * subs), np.float32)
        steps = self.steps if importance is None else search.weighed(largest)
        weights = None if importance is None else self._weights(rows, importance)
        for at, (x, w, *room) in search.tiles(rows, self.sub, 4):
            if weights is None:
                self._own_weights(x, w)
            else:
                w[...] = weights.reshape(-1, self.sub)[at].T
            columns = at.stop - at.start
            for kept, new in zip(found, (*search.ranged(x, w, steps, room), search.total(w)), strict=True):
                kept[at] = new[:columns]
        scale, minimum, step, low, weight = found
        grid = (len(rows), subs)
        if weights is None:
            d, sc = _quantize_range(scale.reshape(grid), self.wide)
            dmin, mn = _quantize_range(minimum.reshape(grid), self.wide)
        else:
            of = np.ascontiguousarray(weight.reshape(grid).T)
            d, sc = _quantize_weighed(scale.reshape(grid), of, self.wide)
            dmin, mn = _quantize_weighed(minimum.reshape(grid), of, self.wide)
        stored, scales = half_bytes(d, dmin), self._pack(sc.astype(np.uint8), mn.astype(np.uint8))
        sc, mn = self._unpack(scales)
        factor, offset = (halves(stored, 0) * sc).reshape(-1), (halves(stored, 2) * mn).reshape(-1)
        q = np.empty((len(rows) * subs, self.sub), np.uint8)
        for at, (x, codes) in search.tiles(rows, self.sub, 1):
            np.add(x, offset[at], out=codes)
            np.divide(codes, factor[at], out=codes)
            np.rint(codes, out=codes)
            np.clip(codes, np.float32(0), np.float32(largest), out=codes)
            none = np.flatnonzero(factor[at] == 0)
            if none.size:
                part = x[:, none]
                codes[:, none] = search.range_codes(part, step[at][none], low[at][none], largest, part)
            q[at] = codes.T[: at.stop - at.start]
        return self._assembled(stored, scales, q.reshape(len(rows), -1))

    def _own_weights(self, x: np.ndarray, out: np.ndarray) -> None:
        """The weights of sub-blocks that are columns, without importance."""
        np.square(x, out=out)
        root = np.sqrt(search.total(out) / np.float32(self.sub))
        np.abs(x, out=out)
        out += root

    def _weights(self, rows: np.ndarray, importance: Importance) -> np.ndarray:
        """The weights where importance is given, float32[blocks, block]."""
        return _weights(rows, importance, np.float32(2 / _BLOCK))

    def _pack(self, sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
        """The bytes of inner scales and minima, from uint8[blocks, subs]."""
        return _pack_scales(sc, mn)

    def _unpack(self, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """sc and mn, of [blocks, subs]."""
        return _unpack_scales(packed)

    def _assembled(self, d: np.ndarray, scales: np.ndarray, q: np.ndarray) -> np.ndarray:
        """A file's bytes."""
        raise NotImplementedError


class Q2_K(_Ranged):
    """2-bit integers with 4-bit scales and minima of 16, halves as the scales of those of 256."""

    name, bits, sub, default, ggml_type = "q2_k", 2, 16, False, 10
    summary = "2-bit integers, 4-bit scales and minima of 16, halves for 256"
    fields = (Field("scales", "uint8", 16), Field("qs", "uint8", 64), Field("d", "float16", 2))
    struct, together, lanes = "Q2_K", True, 16
    steps, wide = Steps(3, -0.5, 15, 0.1, False), 15

    def _own_weights(self, x: np.ndarray, out: np.ndarray) -> None:
        np.abs(x, out=out)

    def _weights(self, rows: np.ndarray, importance: Importance) -> np.ndarray:
        return _weights(rows, importance, np.float32(1 / _BLOCK))

    def _pack(self, sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
        return sc | mn << 4

    def _unpack(self, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return packed & 15, packed >> 4

    def _assembled(self, d: np.ndarray, scales: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.concatenate([scales, pack_fields(q, 2, 32), d], axis=1)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        q = unpack_fields(planes["qs"].reshape(-1, 64), 2, 32)
        return _ranged(q, planes["d"], *self._unpack(planes["scales"].reshape(-1, 16)))


class Q4_K(_Ranged):
    """4-bit integers with 6-bit scales and minima of 32, halves as the scales of those of 256."""

    name, bits, sub, ggml_type = "q4_k", 4, 32, 12
    summary = "4-bit integers, 6-bit scales and minima of 32, halves for 256"
    fields = (Field("d", "float16", 2), Field("scales", "uint8", 12), Field("qs", "uint8", 128))
    struct, together, lanes = "Q4_K", True, 8
    steps, wide = Steps(15, -1.0, 20, 0.1, True), 63

    def _assembled(self, d: np.ndarray, scales: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.concatenate([d, scales, pack_fields(q, 4, 32)], axis=1)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        q = unpack_fields(planes["qs"].reshape(-1, 128), 4, 32)
        return _ranged(q, planes["d"], *self._unpack(planes["scales"].reshape(-1, 12)))


class Q5_K(_Ranged):
    """5-bit integers with 6-bit scales and minima of 32, halves as the scales of those of 256."""

    name, bits, sub, ggml_type = "q5_k", 5, 32, 13
    summary = "5-bit integers, 6-bit scales and minima of 32, halves for 256"
    fields = (*Q4_K.fields[:2], Field("qh", "uint8", 32), Field("qs", "uint8", 128))
    struct, together, lanes = "Q5_K", True, 8
    steps, wide = Steps(31, -0.5, 15, 0.1, True), 63

    def _pack(self, sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
        return _pack_scales(np.minimum(sc, 63), mn)

    def _assembled(self, d: np.ndarray, scales: np.ndarray, q: np.ndarray) -> np.ndarray:
        parts = [d, scales, pack_fields(q >> 4, 1, 32), pack_fields(q & 15, 4, 32)]
        return np.concatenate(parts, axis=1)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        q = unpack_fields(planes["qh"].reshape(-1, 32), 1, 32)
        q <<= np.uint8(4)
        q |= unpack_fields(planes["qs"].reshape(-1, 128), 4, 32)
        return _ranged(q, planes["d"], *self._unpack(planes["scales"].reshape(-1, 12)))


class _Symmetric(KType):
    """Codes around 0 and scales of sub-blocks of 16."""

    takes = ("importance",)
    sub = 16
    #: Codes go from -`middle` to `middle` - 1, and are stored with that added.
    middle: ClassVar[int]
    #: Whether `search.refined` finds the scales without importance, not `search.symmetric` with weights x * x.
    refines: ClassVar[bool]

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        subs, middle = self.block // self.sub, self.middle
        scale, weight = np.empty((2, len(rows) * subs), np.float32)
        weights = None if importance is None else self._weights(rows, importance)
        q = np.empty((len(rows) * subs, self.sub), np.uint8)
        for at, (x, w, *room) in search.tiles(rows, self.sub, 4):
            if weights is None and self.refines:
                found, codes = search.refined(x, middle, room)
            else:
                if weights is None:
                    np.square(x, out=w)
                else:
                    w[...] = weights.reshape(-1, self.sub)[at].T
                found, step, nothing = search.symmetric(x, w, middle, room)
                codes = search.step_codes(x, step, middle, room[0])
                codes[:, nothing] = -middle
                weight[at] = search.total(w)[: at.stop - at.start]
            codes += np.float32(middle)
            scale[at], q[at] = found[: at.stop - at.start], codes.T[: at.stop - at.start]
        of = None if importance is None else weight.reshape(-1, subs)
        d, sc = self._inner(scale.reshape(-1, subs), of)
        stored = half_bytes(d)
        factor = (halves(stored, 0) * sc).reshape(-1)
        for at, (x, codes) in search.tiles(rows, self.sub, 1):
            np.divide(x, factor[at], out=codes)
            np.rint(codes, out=codes)
            np.clip(codes, np.float32(-middle), np.float32(middle - 1), out=codes)
            codes += np.float32(middle)
            where = (factor[at] != 0)[:, None]
            np.copyto(q[at], codes.T[: at.stop - at.start], where=where, casting="unsafe")
        return self._assembled(stored, sc, q.reshape(len(rows), -1))

    def _weights(self, rows: np.ndarray, importance: Importance) -> np.ndarray:
        """The weights where importance is given, float32[blocks, block]."""
        raise NotImplementedError

    def _inner(self, scale: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The scales of sub-blocks, float32[blocks, 16], as their scale, [blocks, 1], and codes around 0."""
        raise NotImplementedError

    def _assembled(self, d: np.ndarray, sc: np.ndarray, q: np.ndarray) -> np.ndarray:
        """A file's bytes."""
        raise NotImplementedError


class Q3_K(_Symmetric):
    """3-bit integers with 6-bit scales of 16, a half as the scale of those of 256."""

    name, bits, default, ggml_type = "q3_k", 3, False, 11
    summary = "3-bit integers, 6-bit scales of 16, a half for 256"
    fields = (
        Field("hmask", "uint8", 32),
        Field("qs", "uint8", 64),
        Field("scales", "uint8", 12),
        Field("d", "float16", 1),
    )
    struct, together, lanes = "Q3_K", True, 16
    middle, refines = 4, True

    def _weights(self, rows: np.ndarray, importance: Importance) -> np.ndarray:
        return _weights(rows, importance, np.float32(2 / _BLOCK))

    def _inner(self, scale: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if weight is None:
            longest = signed_max(scale)
            inverse = np.where(longest == 0, np.float32(0), np.float32(-32) / longest)
            sc = np.clip(np.rint(finite(inverse * scale)), np.float32(-32), np.float32(31))
            sc[longest[:, 0] == 0] = -32
            return np.where(longest == 0, np.float32(0), np.float32(1) / inverse), sc
        x, w = np.ascontiguousarray(scale.T), np.ascontiguousarray(weight.T)
        x, w = (np.repeat(array, 2, axis=1) if array.shape[1] == 1 else array for array in (x, w))
        d, step, nothing = search.symmetric(x, w, 32, list(np.empty((3, *x.shape), np.float32)))
        sc = search.step_codes(x, step, 32, np.empty_like(x))
        sc[:, nothing] = -32
        return d[: len(scale), None], sc.T[: len(scale)]

    def _assembled(self, d: np.ndarray, sc: np.ndarray, q: np.ndarray) -> np.ndarray:
        stored = (sc + np.float32(32)).astype(np.uint8)
        low, high = stored & 15, stored >> 4
        scales = [
            low[:, :8] | low[:, 8:] << 4,
            high[:, :4] | high[:, 4:8] << 2 | high[:, 8:12] << 4 | high[:, 12:] << 6,
        ]
        return np.concatenate([pack_fields(q >> 2, 1, 32), pack_fields(q & 3, 2, 32), *scales, d], axis=1)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        packed = planes["scales"].reshape(-1, 12)
        sc = unpack_fields(packed[:, :8], 4, 8) | unpack_fields(packed[:, 8:], 2, 4) << 4
        q = unpack_fields(planes["hmask"].reshape(-1, 32), 1, 32)
        q <<= np.uint8(2)
        q |= unpack_fields(planes["qs"].reshape(-1, 64), 2, 32)
        return _centred(q, 4, planes["d"], sc.view(np.int8) - np.int8(32))


class Q6_K(_Symmetric):
    """6-bit integers with 8-bit scales of 16, a half as the scale of those of 256."""

    name, bits, ggml_type = "q6_k", 6, 14
    summary = "6-bit integers, 8-bit scales of 16, a half for 256"
    fields = (
        Field("ql", "uint8", 128),
        Field("qh", "uint8", 64),
        Field("scales", "int8", 16),
        Field("d", "float16", 1),
    )
    struct, together, lanes = "Q6_K", True, 16
    middle, refines = 32, False

    def _weights(self, rows: np.ndarray, importance: Importance) -> np.ndarray:
        return importance.weights

    def _inner(self, scale: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        longest = signed_max(scale)
        nothing = np.abs(longest) < np.float32(1e-15)
        inverse = np.where(nothing, np.float32(0), np.float32(-128) / longest)
        sc = np.minimum(np.rint(finite(inverse * scale)), np.float32(127))
        return np.where(nothing, np.float32(0), np.float32(1) / inverse), sc

    def _assembled(self, d: np.ndarray, sc: np.ndarray, q: np.ndarray) -> np.ndarray:
        q = np.where(sc.any(axis=1, keepdims=True), q, 0)
        parts = [pack_fields(q & 15, 4, 64), pack_fields(q >> 4, 2, 32), sc.astype(np.int8).view(np.uint8), d]
        return np.concatenate(parts, axis=1)

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        q = unpack_fields(planes["qh"].reshape(-1, 64), 2, 32)
        q <<= np.uint8(4)
        q |= unpack_fields(planes["ql"].reshape(-1, 128), 4, 64)
        return _centred(q, 32, planes["d"], planes["scales"].reshape(-1, 16))


class Q8_K(KType):
    """8-bit integers with sums of 16 and a scale of 256: what activations are staged in."""

    name, bits, default, ggml_type = "q8_k", 8, False, 15
    summary = "8-bit integers, sums of 16, a scale of 256, for activations"
    fields = (Field("d", "float32", 1), Field("qs", "int8", 256), Field("bsums", "int16", 16))
    struct = "Q8_K"

    def quantize_fields(self, rows: np.ndarray, importance: Importance | None = None) -> tuple[np.ndarray, ...]:
        longest = signed_max(rows)
        inverse = np.where(longest == 0, np.float32(0), np.float32(-127) / longest)
        q = np.minimum(np.rint(finite(inverse * rows)), np.float32(127)).astype(np.int8)
        d = np.where(longest == 0, np.float32(0), np.float32(1) / inverse)
        sums = q.reshape(len(rows), -1, 16).sum(axis=2, dtype=np.int16)
        return tuple(part.view(np.uint8) for part in (d, q, sums))

    def dequantize_planes(self, planes: Mapping[str, Any]) -> np.ndarray:
        return scaled(planes["qs"].reshape(-1, self.block), planes["d"])


def _weights(rows: np.ndarray, importance: Importance, share: np.float32) -> np.ndarray:
    """Importance times the root of `share` of a block's sum of squares and of the element's own square."""
    squares = rows * rows
    # np.sum's order is not given, that of a running sum is.
    mean = np.add.accumulate(squares, axis=1, dtype=np.float32)[:, -1:] * share
    squares += mean
    np.sqrt(squares, out=squares)
    return np.multiply(importance.weights, squares, out=squares)


def _quantize_range(numbers: np.ndarray, wide: int) -> tuple[np.ndarray, np.ndarray]:
    """float32[blocks, subs] as their largest over `wide`, [blocks, 1], and codes from 0 to `wide`, as float32."""
    largest = np.maximum(numbers.max(axis=1, keepdims=True), np.float32(0)) + np.float32(0)
    step = np.where(largest > 0, np.float32(wide) / largest, np.float32(0))
    codes = np.clip(np.rint(finite(step * numbers)), np.float32(0), np.float32(wide))
    return largest / np.float32(wide), codes


def _quantize_weighed(numbers: np.ndarray, weight: np.ndarray, wide: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by `search.positive`, with the weights float32[subs, blocks]."""
    x, w = np.ascontiguousarray(numbers.T), weight
    x, w = (np.repeat(array, 2, axis=1) if array.shape[1] == 1 else array for array in (x, w))
    d, codes = search.positive(x, w, wide)
    return d[: len(numbers), None], codes.T[: len(numbers)]


def _ranged(q: np.ndarray, d: np.ndarray, sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
    """(d * sc) * q - dmin * mn of uint8[blocks, 256]; `d` has d and dmin of each block."""
    both = d.reshape(-1, 2).astype(np.float32)
    y = q.reshape(sc.size, -1).astype(np.float32)
    y *= (both[:, :1] * sc).reshape(-1, 1)
    y -= (both[:, 1:] * mn).reshape(-1, 1)
    return y.reshape(q.shape)


def _centred(q: np.ndarray, middle: int, d: np.ndarray, sc: np.ndarray) -> np.ndarray:
    """(d * sc) * (q - middle) of uint8[blocks, 256]."""
    codes = q.view(np.int8).reshape(sc.size, -1)
    codes -= np.int8(middle)
    y = codes.astype(np.float32)
    y *= (d[:, None].astype(np.float32) * sc).reshape(-1, 1)
    return y.reshape(q.shape)


def _pack_scales(sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
    low, high = sc[:, :4] | sc[:, 4:] >> 4 << 6, mn[:, :4] | mn[:, 4:] >> 4 << 6
    return np.concatenate([low, high, sc[:, 4:] & 15 | mn[:, 4:] << 4], axis=1)


def _unpack_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sc and mn as float32[blocks, 8]."""
    sc, mn = inner_scales(packed)
    return sc.astype(np.float32), mn.astype(np.float32)


for _type in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K):
    register(_type.name, _type)
