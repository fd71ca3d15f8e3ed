"""The codebook formats on NumPy: k-bit indices in bit planes, and codes into blockwise tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import tables
from ...tables import SMALLEST_NORMAL, Codebook, flush, flushed_product
from ..chunks import (
    CHUNK,
    Buckets,
    Buffers,
    block_absmax,
    chunk_absmax,
    chunks,
    fill_absmax,
    flush_chunk,
    flush_products,
    narrow,
)
from .scales import decode_absmax, encode_absmax, tensor_scale
from .search import NESTED_BLOCK, Table, dynamic_table

#: Elements that share a scale in bit planes.
BLOCK = 32

# ---- indices in bit planes -----------------------------------------------------------------------------------------

# With divisors from here on, a subnormal x and 0 have quotients on the same side of every threshold.
_SAFE_DIVISOR = np.float32(2.0**-80)
# By a scale that is stored the largest number of its block has no larger quotient, if all are finite: the smallest
# scale is that of what is just not half as large again.
_LARGEST_QUOTIENT = np.float32(1.5)
# Up to this many thresholds, counting those below y beats a table.
_COUNTED = 7
# The bits of an index, one below the other.
_BITS = np.uint8(1 << np.arange(8)).reshape(-1, 1)
_WORD = np.dtype("<u4")
# Scales that are encoded at once, where they are known: a call takes as long for some hundred numbers as for one.
_SCALES = 1 << 16
# Decoding looks up two neighbours at a time up to this k.
_PAIRED = 6


def encode_blocks(
    x: np.ndarray,
    planes: Mapping[str, Any],
    k: int,
    table: Codebook,
    kind: str,
    scale: np.float32 | None,
    known: np.ndarray | None,
    finite: bool = False,
) -> None:
    """Scales and indices of a flat array: by the rule of the format, or where `scale` is None by the flat rule.

    `known` holds max|x| of each block where that has been found already, and may share memory with the planes;
    `finite`: whether it is known that all numbers are.
    """
    buffers = Buffers(x.size, BLOCK)
    begin = ready = 0
    counted, packed = _is_counted(table), planes["packed"][: -(-x.size // BLOCK) * k].reshape(-1, k)
    buckets = None if counted or table.thresholds is None else _buckets(table)
    in_place = finite and buckets is not None and buckets.limit >= _LARGEST_QUOTIENT
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for first, block in chunks(x, buffers, finite):
            last = first + len(block)
            if last > ready:
                if known is None:
                    absmax = np.empty(len(block), np.float32)
                    chunk_absmax(block, buffers, absmax)
                else:
                    absmax = known[first : max(first + _SCALES, last)]
                begin, ready = first, first + absmax.size
                divisors = _divisors(absmax, kind, scale, planes["absmax"][begin:ready]).reshape(-1, 1)
                least = np.minimum.reduce(divisors, axis=None)
            parts, divisor, out = buffers.parts(block.size), divisors[first - begin : last - begin], packed[first:last]
            if in_place and least >= _SAFE_DIVISOR and last * BLOCK <= x.size:
                assert buckets is not None
                np.divide(block, divisor, out=parts.x_rows)
                rare = buckets.search_in_place(parts)
                if rare.size:
                    numbers = x[first * BLOCK : last * BLOCK][rare].astype(np.float32)
                    buckets.settle(parts, rare, numbers / divisor[rare // BLOCK, 0])
                _pack(parts.index, k, out, parts.planes[:k])
                continue
            if table.thresholds is None or least < _SAFE_DIVISOR:
                np.copyto(parts.y_rows, block)
                block = flush_chunk(parts.y_rows)
            np.divide(block, divisor, out=parts.y_rows)
            if counted:
                assert table.thresholds is not None
                _pack_counts(parts.y, table.thresholds, k, out, buffers.position.view(np.bool_))
            else:
                _pack(_search(parts.y, table, scale is not None, buffers), k, out, parts.planes[:k])


def _divisors(absmax: np.ndarray, kind: str, scale: np.float32 | None, out: np.ndarray) -> np.ndarray:
    """By what the numbers of blocks are divided, float32; `out` receives their scales as they are stored."""
    out[...] = codes = encode_absmax(absmax if scale is None or scale == 1 else absmax / scale, kind)
    if scale is None:
        return np.maximum(absmax, np.float32(1e-8))
    return _divisors_of_codes(scale).take(codes) if codes.dtype == np.uint8 else _stored_divisors(codes, scale)


@functools.lru_cache(maxsize=16)
def _divisors_of_codes(scale: np.float32) -> np.ndarray:
    """Those of the scales that are a byte each."""
    return _stored_divisors(np.arange(256, dtype=np.uint8), scale)


def _stored_divisors(codes: np.ndarray, scale: np.float32) -> np.ndarray:
    """Those of the scales that are decoded."""
    divisor = flush(decode_absmax(codes) * scale)  # what leaves the range of float32 is infinite or zero
    divisor[divisor == 0] = np.inf  # x / inf is x * 0
    return divisor


def nearest(y: np.ndarray, table: Codebook, clamp: bool) -> np.ndarray:
    """uint8 indices of the nearest codebook values: ties to the lower index, NaN to index 0."""
    index = np.empty(y.shape, np.uint8)
    buffers = Buffers(y.size, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, y.size, CHUNK):
            part = buffers.y[: min(CHUNK, y.size - start)]
            part[:] = y.reshape(-1)[start : start + CHUNK]
            index.reshape(-1)[start : start + CHUNK] = _search(part, table, clamp, buffers)
    return index


def _search(y: np.ndarray, table: Codebook, clamp: bool, buffers: Buffers) -> np.ndarray:
    """`nearest` of a chunk, which it may overwrite; the result lies in a buffer."""
    index, flag = buffers.index[: y.size].reshape(y.shape), buffers.flag[: y.size].reshape(y.shape)
    if table.thresholds is None:
        return _search_all(y, table, clamp, index)
    if _is_counted(table):
        np.greater(y, table.thresholds[0], out=index.view(np.bool_))
        for threshold in table.thresholds[1:]:
            np.greater(y, threshold, out=flag)
            index += flag.view(np.uint8)
        return index
    return _buckets(table).search(y, buffers)


def _is_counted(table: Codebook) -> bool:
    return table.ordered and table.thresholds is not None and table.thresholds.size <= _COUNTED


def _search_all(y: np.ndarray, table: Codebook, clamp: bool, index: np.ndarray) -> np.ndarray:
    """The distance to every codebook value, for codebooks without thresholds."""
    flush_chunk(y)
    if clamp:
        np.clip(y, table.lowest, table.highest, out=y)
    best = np.full(y.shape, np.inf, np.float32)
    index[...] = 0
    for i, value in enumerate(table.values):
        distance = flush_chunk(np.abs(y - value))
        closer = distance < best
        np.putmask(index, closer, np.uint8(i))
        np.putmask(best, closer, distance)
    return index


@functools.lru_cache(maxsize=64)
def _buckets(table: Codebook) -> Buckets:
    assert table.thresholds is not None
    return Buckets(table.thresholds, table.index)


def pack_words(index: np.ndarray, k: int, out: np.ndarray) -> None:
    """uint8[blocks, 32] indices to uint32[blocks * k] bit planes."""
    words, flat = out.reshape(-1, k), index.reshape(-1)
    work = np.empty(k * min(index.size, CHUNK), np.uint8)
    for first in range(0, flat.size, CHUNK):
        part = flat[first : first + CHUNK]
        _pack(part, k, words[first // BLOCK : (first + CHUNK) // BLOCK], work[: k * part.size].reshape(k, -1))


def _pack(index: np.ndarray, k: int, out: np.ndarray, work: np.ndarray) -> None:
    """`pack_words` of a chunk, flat, to uint32[blocks, k], with room for k times as many bytes: uint8[k, size]."""
    np.bitwise_and(index, _BITS[:k], out=work)
    out[...] = np.packbits(work, axis=1, bitorder="little").view(_WORD).T  # takes any other number than 0 for a one


def _pack_counts(y: np.ndarray, thresholds: np.ndarray, k: int, out: np.ndarray, work: np.ndarray) -> None:
    """`_pack` of how many thresholds, 2^k - 1 of them, are below each number; `work` has a byte for each of both.

    Bit b of the count changes at each threshold whose number, from 1 on, is a multiple of 2^b.
    """
    above = work[: thresholds.size * y.size].reshape(thresholds.size, y.size)
    np.greater(y, thresholds[:, None], out=above)
    words = np.packbits(above, axis=1, bitorder="little").view(_WORD)
    for bit in range(k):
        np.bitwise_xor.reduce(words[(1 << bit) - 1 :: 1 << bit], axis=0, out=out[:, bit])


def unpack_words(packed: np.ndarray, k: int) -> np.ndarray:
    """uint32[blocks * k] bit planes to uint8[blocks, 32] indices."""
    index = np.empty((packed.size // k, BLOCK), np.uint8)
    words = packed.reshape(-1, k)
    step = CHUNK // BLOCK
    for first in range(0, len(index), step):
        part = index[first : first + step]
        part[...] = _unpack(words[first : first + step]).reshape(part.shape)
    return index


def _unpack(words: np.ndarray) -> np.ndarray:
    """uint32[blocks, k] bit planes to uint8[blocks * 32] indices."""
    # The planes one by one, the highest first; eight indices are shifted at a time, as a uint64.
    planes = np.ascontiguousarray(words.T, "<u4").view(np.uint8)
    index = np.unpackbits(planes[-1], bitorder="little").view(np.uint64)
    for plane in planes[-2::-1]:
        index += index
        index |= np.unpackbits(plane, bitorder="little").view(np.uint64)
    return index.view(np.uint8)


def decode_blocks(
    packed: np.ndarray, absmax: np.ndarray, scale: np.ndarray | None, values: np.ndarray, k: int, out: np.ndarray
) -> None:
    """``values[index] * (decoded absmax * scale)`` in float32, then one rounding to out's dtype."""
    flat_out = out.reshape(-1)
    values = flush(values.astype(np.float32))
    smallest_value = np.abs(values).min(initial=np.inf, where=values != 0)
    # One look-up gives two neighbours, where the table of pairs is small beside the work.
    pairs = k <= _PAIRED and flat_out.size >= 1 << k + 8
    item, code = ("u8", "u2") if pairs else ("f4", "u1")
    items = _pairs(values, k) if pairs else values
    words = packed.reshape(-1, k)
    buffer = np.empty(min(flat_out.size + -flat_out.size % BLOCK, CHUNK), np.float32)
    step = CHUNK // BLOCK
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for first in range(0, absmax.size, step):
            factor = flushed_product(
                decode_absmax(absmax[first : first + step]), np.float32(1) if scale is None else scale
            )
            decoded = buffer[: factor.size * BLOCK]
            index = _unpack(words[first : first + factor.size]).view(code)
            np.take(items, index, out=decoded.view(item), mode="clip")
            target = flat_out[first * BLOCK : first * BLOCK + decoded.size]
            rows = decoded.reshape(-1, BLOCK)
            # Products are zero, of a sign that flushing drops, or subnormal only below this.
            normal = factor.min() * smallest_value >= SMALLEST_NORMAL
            if normal and target.dtype == np.float32 and target.size == decoded.size:
                np.multiply(rows, factor[:, None], out=target.reshape(rows.shape))
                continue
            np.multiply(rows, factor[:, None], out=rows)
            if not normal:
                flush_products(decoded, items, index, factor, BLOCK)
            narrow(decoded[: target.size], target)


def _pairs(values: np.ndarray, k: int) -> np.ndarray:
    """The values of two neighbours as one uint64, by their two uint8 indices as one uint16."""
    pair = np.arange(((1 << k) - 1) * 257 + 1, dtype=np.uint16).view(np.uint8)
    return values[np.minimum(pair, values.size - 1)].view(np.uint64)


# ---- codes into blockwise tables -----------------------------------------------------------------------------------

# An absmax over this has no normal reciprocal; it and its block are scaled down first.
_LARGE = np.float32(2.0**126)
_DOWN = np.float32(2.0**-64)
# A number that is larger has no subnormal quotient by a number up to 1, however that was rounded.
_ROOMY = np.float32(2.0**-124)
# With an absmax from here on, the quotients of subnormal numbers are on the same side of every threshold as 0.
_SAFE_ABSMAX = np.float32(2.0**-80)


def encode_chunks(x: np.ndarray, block: int, table: Table, out: np.ndarray) -> Any:
    """(first element, codes of whole blocks) chunk by chunk; max|x| of each block goes to `out`."""
    buffers = Buffers(x.size, block)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for first, rows in chunks(x, buffers):
            absmax = out[first : first + len(rows)]
            chunk_absmax(rows, buffers, absmax)
            y = buffers.y[: rows.size].reshape(rows.shape)
            x_rows = rows
            most = np.maximum.reduce(absmax)
            flushes = table.flushes and _may_flush(y, most)
            if flushes or np.minimum.reduce(absmax) < _SAFE_ABSMAX:
                np.copyto(y, rows)
                rows = flush_chunk(y)
            down: Any = np.float32(1)
            if most > _LARGE:
                down = np.where((absmax > _LARGE) & (absmax < np.inf), _DOWN, np.float32(1))
                rows = np.multiply(rows, down[:, None], out=y)
            reciprocal = np.float32(1) / (absmax * down)
            np.multiply(rows, reciprocal[:, None], out=y)
            if flushes:
                # The GPU rounds to 24 bits before it looks whether that is subnormal; here 23 bits have become 2^-126.
                rare = np.flatnonzero(
                    np.abs(y, out=buffers.position.view(np.float32)[: y.size].reshape(y.shape)) == SMALLEST_NORMAL
                )
                exact = (
                    x_rows.reshape(-1)[rare].astype(np.float64) * (down * reciprocal.astype(np.float64))[rare // block]
                )
                y.reshape(-1)[rare[np.abs(exact) < float(SMALLEST_NORMAL) * (1 - 2.0**-25)]] = 0
            yield first * block, table.search(y, buffers)


def _may_flush(magnitudes: np.ndarray, most: np.float32) -> bool:
    """Whether a number, or its quotient by up to `most`, may be subnormal; the magnitudes are lost."""
    bits = magnitudes.view(np.uint32).reshape(-1)
    bits -= np.uint32(1)  # zeros are the largest then
    least = (np.minimum.reduce(bits) + np.uint32(1)).view(np.float32)  # a zero only if all are
    return not least > _ROOMY * max(most, np.float32(1))


def decode_chunks(
    codes: np.ndarray, items: np.ndarray, values: np.ndarray, absmax: np.ndarray, block: int, out: np.ndarray
) -> None:
    """Write items[code] * absmax to `out`; an item is one float32 or two."""
    flat = out.reshape(-1)
    each = items.itemsize // 4  # elements of a code
    smallest_value = np.abs(values).min(initial=np.inf, where=values != 0)
    work = np.empty(min(flat.size + -flat.size % block, CHUNK), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, flat.size, CHUNK):
            part = codes[start // each : (start + CHUNK) // each]
            factor = absmax[start // block : (start + CHUNK) // block]
            rows = work[: factor.size * block].reshape(-1, block)
            decoded = work[: part.size * each]
            np.take(items, part, out=decoded.view(items.dtype), mode="clip")
            work[decoded.size : rows.size] = 0  # the end of a short last block
            normal = np.abs(factor).min() * smallest_value >= SMALLEST_NORMAL
            if not normal:
                factor = flush(factor.copy())
            np.multiply(rows, factor[:, None], out=rows)
            if not normal:
                flush_products(decoded, items, part, factor, block)
            target = flat[start : start + CHUNK]
            narrow(decoded[: target.size], target)


def host_absmax(planes: Mapping[str, Any]) -> np.ndarray:
    """max|x| of each block as float32, decoded where it was quantized itself."""
    absmax = planes["absmax"]
    if "nested_offset" not in planes:
        return np.asarray(absmax)
    factor = np.repeat(planes["nested_absmax"], NESTED_BLOCK)[: absmax.size]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return flush(flushed_product(tables.dynamic_map()[absmax], factor) + flush(planes["nested_offset"].copy()))


def nest(absmax: np.ndarray, planes: Mapping[str, Any]) -> None:
    """Double quantization: offset, then codes and absmax of the differences."""
    offset = _mean(absmax)
    planes["nested_offset"][:] = offset
    with np.errstate(over="ignore", invalid="ignore"):
        difference = flush(absmax - offset)
    for first, index in encode_chunks(difference, NESTED_BLOCK, dynamic_table(), planes["nested_absmax"]):
        size = min(index.size, absmax.size - first)
        planes["absmax"][first : first + size] = index.reshape(-1)[:size]


def _mean(x: np.ndarray) -> np.float32:
    """The mean by a fixed order of additions in float64, which the GPU keeps, too."""
    if x.size == 0:
        return np.float32(0)
    rows = np.zeros((-(-x.size // NESTED_BLOCK), NESTED_BLOCK))
    rows.reshape(-1)[: x.size] = x
    with np.errstate(invalid="ignore"):
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        lanes = np.zeros((-(-len(rows) // MEAN_LANES), MEAN_LANES))
        lanes.reshape(-1)[: len(rows)] = rows[:, 0]
        total = np.zeros(MEAN_LANES)
        for line in lanes:
            total += line
        while total.size > 1:
            total = total[: total.size // 2] + total[total.size // 2 :]
        with np.errstate(over="ignore"):
            return np.float32(total[0] / x.size)


# Accumulators of the mean: threads of the kernel `absmax_mean`.
MEAN_LANES = 1024


def table_error_bound(x: Any, block: int, table: Table, planes: Mapping[str, Any]) -> Any:
    """The error bound of blockwise tables, one float64 for each block."""
    absmax = block_absmax(x.reshape(-1), block)
    wide = absmax.astype(np.float64)
    scale_error = 2.0**-22 * wide
    if "nested_offset" in planes:  # the decoded absmax is off by as much as this
        nested = np.repeat(planes["nested_absmax"].astype(np.float64), NESTED_BLOCK)[: absmax.size]
        scale_error = scale_error + (dynamic_table().edge + 2.0**-22) * nested + 2.0**-22 * (wide + nested)
    return table.edge * wide + tables.reach(table.values) * scale_error


def largest(absmax: np.ndarray) -> np.float32:
    """The largest finite absmax."""
    return absmax.max(initial=0, where=absmax < np.inf)


def leave_absmax(x: np.ndarray, planes: Mapping[str, Any], k: int) -> tuple[np.float32, bool]:
    """max|x| of each block, which wait in `planes` for `quantize_kbit`: the largest that is finite, and whether all
    numbers are.
    """
    waiting = _waiting(planes, k)
    finite = fill_absmax(x.reshape(-1), BLOCK, waiting)
    return largest(waiting), finite


def _waiting(planes: Mapping[str, Any], k: int) -> np.ndarray:
    """Where numbers of blocks wait: in a word of each that has yet to be written."""
    return planes["packed"][::k].view(np.float32)


def quantize_kbit(
    x: np.ndarray,
    planes: Mapping[str, Any],
    k: int,
    absmax: str,
    table: Codebook,
    left: tuple[np.float32, bool] | None,
) -> None:
    """Quantize to k bits, with a tensor scale; `left` is what `leave_absmax` has said if it was called already."""
    scale, finite = np.float32(1), False
    waiting = None
    if absmax != "float32":
        most, finite = leave_absmax(x, planes, k) if left is None else left
        scale = tensor_scale(most, absmax)
        waiting = _waiting(planes, k)
    planes["scale"][:] = scale
    encode_blocks(x.reshape(-1), planes, k, table, absmax, scale, waiting, finite)
    if "codebook" in planes:
        planes["codebook"][:] = table.values


def quantize_table4(x: np.ndarray, planes: Mapping[str, Any], table: Table, block: int) -> None:
    """Quantize to 4-bit codes, with double quantization where the planes ask for it."""
    absmax, nested = planes["absmax"], "nested_offset" in planes
    if nested:
        absmax = np.empty(absmax.shape, np.float32)
    packed = planes["packed"]
    for first, index in encode_chunks(x.reshape(-1), block, table, absmax):
        # As little-endian pairs the first code of a byte is the low one.
        pair = index.reshape(-1).view("<u2")
        size = min(pair.size, packed.size - first // 2)
        pair *= np.uint16((1 << 12) + 1)  # the first code above the second, in the high byte
        packed[first // 2 : first // 2 + size] = pair.view(np.uint8)[1 : 2 * size : 2]
    if nested:
        nest(absmax, planes)
    if "table" in planes:
        planes["table"][:] = table.values


def dequantize_table4(planes: Mapping[str, Any], out: np.ndarray, values: np.ndarray, block: int) -> None:
    """Decode 4-bit codes by `values`, whose subnormal numbers have been flushed."""
    byte = np.arange(256)
    pairs = np.stack((values[byte >> 4], values[byte & 15]), axis=1).view(np.uint64).reshape(-1)
    decode_chunks(planes["packed"], pairs, values, host_absmax(planes), block, out)


def quantize_dynamic8(x: np.ndarray, planes: Mapping[str, Any], block: int) -> None:
    """Quantize to codes of the dynamic map."""
    codes = planes["codes"]
    for first, index in encode_chunks(x.reshape(-1), block, dynamic_table(), planes["absmax"]):
        size = min(index.size, codes.size - first)
        codes[first : first + size] = index.reshape(-1)[:size]


def dequantize_dynamic8(planes: Mapping[str, Any], out: np.ndarray, block: int) -> None:
    """Decode codes of the dynamic map."""
    values = tables.dynamic_map()
    decode_chunks(planes["codes"], values, values, planes["absmax"], block, out)
