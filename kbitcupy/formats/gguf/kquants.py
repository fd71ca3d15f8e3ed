"""GGUF's K types, blocks of 256 whose inner scales are quantized themselves: ``q4_k``.

=======  ==========================  ==================================================================================
plane    dtype, entries of a block   contents
=======  ==========================  ==================================================================================
d        float16, 2                  d and dmin, the scales of the inner scales and of the inner minima
scales   uint8, 12                   sc and mn of 8 sub-blocks of 32, 6 bits each. Bytes 0 to 3: sc of sub-block j,
                                     bytes 4 to 7: mn of j (j < 4), in the low 6 bits; bytes 8 to 11: the low 4 bits of
                                     sc (low nibble) and mn of j + 4, whose 2 high bits are those of bytes j and j + 4
qs       uint8, 128                  byte 32 p + m: q of element 64 p + m (low nibble) and 64 p + 32 + m (high)
=======  ==========================  ==================================================================================

An element decodes to (d * sc) * q - dmin * mn: the products are exact in float32, the difference is rounded once.

A sub-block's scale and minimum are found by 21 attempts at the least squared error, weighted by |x| plus the root mean
square (`find_scales`). With S and M, their largest ones in a block, d = half(S / 63), sc = round(63 / S * scale),
dmin = half(M / 63), mn = round(63 / M * minimum), and q is found again with what was stored, from 0 to 15:
q = round((x + dmin * mn) / (d * sc)). Where d * sc is 0 the codes of the attempts stay. All in float32, each operation
rounded, sums in the order of the elements; halves are rounded to even, and to the code 0 what is not finite.

Source: ggml, ``ggml-quants.c`` (``quantize_row_q4_K_ref``, ``make_qkx2_quants``), built without contraction.
"""

from __future__ import annotations

import numpy as np

from ..base import register
from ..blocks import Field, Importance
from . import Gguf
from .arithmetic import finite, half_bytes, halves, pack_fields, unpack_fields

# Sub-blocks of a block, and their elements.
_SUBS, _SUB = 8, 32


class Q4_K(Gguf):
    """4-bit integers with 6-bit scales and minima of 32, halves as the scales of those of 256."""

    name, bits, block = "q4_k", 4, 256
    summary = "4-bit integers, 6-bit scales and minima of 32, halves for 256"
    fields = (Field("d", "float16", 2), Field("scales", "uint8", 12), Field("qs", "uint8", 128))
    header, struct, together, lanes, ggml_type = "formats/gguf_k.cuh", "Q4_K", True, 8, 12

    def quantize_blocks(self, rows: np.ndarray, importance: Importance | None = None) -> np.ndarray:
        x = np.ascontiguousarray(rows.reshape(-1, _SUB).T)
        scale, minimum, codes = find_scales(x, 15, -1.0, 20)
        d, sc = _quantize_scales(scale.reshape(-1, _SUBS))
        dmin, mn = _quantize_scales(minimum.reshape(-1, _SUBS))
        stored = half_bytes(d, dmin)
        factor = (halves(stored, 0) * sc).reshape(-1)
        again = to_code((x + (halves(stored, 2) * mn).reshape(-1)) / factor, 15)
        q = np.where(factor == 0, codes, again).T.astype(np.uint8).reshape(len(rows), -1)
        packed = _pack_scales(sc.astype(np.uint8), mn.astype(np.uint8))
        return np.concatenate([stored, packed, pack_fields(q, 4, _SUB)], axis=1)

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        sc, mn = _unpack_scales(blocks[:, 4:16])
        q = unpack_fields(blocks[:, 16:], 4, _SUB).reshape(-1, _SUBS, _SUB).astype(np.float32)
        y = (halves(blocks, 0) * sc)[..., None] * q - (halves(blocks, 2) * mn)[..., None]
        return y.reshape(-1, self.block)


def to_code(y: np.ndarray, largest: int) -> np.ndarray:
    """The nearest of 0 to `largest`, halves to even; 0 for NaN and infinities."""
    return np.minimum(np.maximum(np.rint(finite(y)), np.float32(0)), np.float32(largest))


def _sum(x: np.ndarray) -> np.ndarray:
    """The sum over the first axis, in ascending order: np.sum's order is not given."""
    total = x[0].copy()
    for row in x[1:]:
        total += row
    return total


def find_scales(x: np.ndarray, largest: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, minus minimum and codes of sub-blocks, the columns of float32[32, n]: code * scale - minimum comes near.

    The first attempt is the range of the numbers, from at most 0, in `largest` steps. Then `steps` + 1 times: the codes
    for a range of `largest` + `first`, `largest` + `first` + 0.1, ... steps, and the scale and minimum that are best
    for these codes; of all the one of least error stays. An attempt starts from the minimum that was best so far.
    """
    zero, wide = np.float32(0), np.float32(largest)
    w = np.sqrt(_sum(x * x) / np.float32(len(x))) + np.abs(x)
    sum_w, sum_x = _sum(w), _sum(w * x)
    low = np.minimum(x.min(axis=0), zero)
    high = x.max(axis=0)
    constant = high == low
    step = wide / (high - low)
    scale, codes = np.float32(1) / step, to_code(step * (x - low), largest)
    error = _error(scale, codes, low, x, w)
    for number in range(steps + 1):
        step = (np.float32(first) + np.float32(0.1) * np.float32(number) + wide) / (high - low)
        tried = to_code(step * (x - low), largest)
        weighted = w * tried
        sum_l, sum_ll, sum_xl = _sum(weighted), _sum(weighted * tried), _sum(weighted * x)
        determinant = sum_w * sum_ll - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        positive = new_low > 0
        new_low = np.where(positive, zero, new_low)
        new_scale = np.where(positive, sum_xl / sum_ll, new_scale)
        new_error = _error(new_scale, tried, new_low, x, w)
        better = (determinant > 0) & (new_error < error)
        error = np.where(better, new_error, error)
        scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
        codes = np.where(better, tried, codes)
    return np.where(constant, zero, scale), -low, np.where(constant, zero, codes)


def _error(scale: np.ndarray, codes: np.ndarray, low: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    difference = (scale * codes + low) - x
    return _sum(w * (difference * difference))


def _quantize_scales(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[blocks, 8] as their largest over 63, [blocks, 1], and codes from 0 to 63, as float32."""
    largest = np.maximum(numbers.max(axis=1, keepdims=True), np.float32(0)) + np.float32(0)
    step = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    return largest / np.float32(63), to_code(step * numbers, 63)


def _pack_scales(sc: np.ndarray, mn: np.ndarray) -> np.ndarray:
    low, high = sc[:, :4] | sc[:, 4:] >> 4 << 6, mn[:, :4] | mn[:, 4:] >> 4 << 6
    return np.concatenate([low, high, sc[:, 4:] & 15 | mn[:, 4:] << 4], axis=1)


def _unpack_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sc and mn as float32[blocks, 8]."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    sc = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    mn = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    return sc.astype(np.float32), mn.astype(np.float32)


register("q4_k", Q4_K)
