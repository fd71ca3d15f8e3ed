"""Affine integers on NumPy: the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..chunks import AT_ONCE, CHUNK, converted, narrow, room, widen
from ..granularity import Blocks, slab_size, walk
from .levels import DOUBLE, ENDS, SINGLE, Levels, compute_dtype, reach_of
from .stored import Stored, stored

_HALF_INFINITY, _HALF_SIGN = np.uint16(0x7C00), np.uint16(0x8000)
# Elements of rows that are too short to reduce as they are.
_SHORT_RUN = 1 << 10
# Blocks whose scales are worked out at a time: the arrays in between, of float64, stay small.
_BLOCKS = 1 << 14


def _divisor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales as divisors: x / inf is 0 where a scale does not count."""
    scale = scale.astype(dtype)
    return np.where((scale > 0) & (scale < np.inf), scale, dtype.type(np.inf))


def factor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales as factors."""
    scale = scale.astype(dtype)
    return np.where((scale > 0) & (scale < np.inf), scale, dtype.type(0))


def signed_factor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales beside offsets as factors: any finite number."""
    scale = scale.astype(dtype)
    return np.where(np.isfinite(scale), scale, dtype.type(0))


def bounds(zero_point: np.ndarray, levels: Levels) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zero points within the range, and what rint(x / scale) may be."""
    zero = np.clip(zero_point, levels.qmin, levels.qmax).astype(np.int32)
    return zero, levels.qmin - zero, levels.qmax - zero


def _steps(x: np.ndarray, divisor: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Fill `out`, whose dtype is that of `divisor`, with rint(x / scale)."""
    if out.dtype == SINGLE != x.dtype:
        widen(x, out)
        x = out
    np.divide(x, divisor, out=out)
    return np.rint(out, out=out)


def _clamp(steps: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Bring contiguous numbers into the range, NaN to 0."""
    flat = steps.reshape(-1)
    # Two readings of all numbers show that they need no clamping, which they seldom do under one scale.
    largest, least = np.maximum.reduce(flat), np.minimum.reduce(flat)
    if low.size == 1 and largest <= high.item() and least >= low.item():  # NaN is neither
        return
    if np.isnan(largest):
        flat[np.isnan(flat)] = 0
    np.maximum(steps, low, out=steps)
    np.minimum(steps, high, out=steps)


def quantize(x: np.ndarray, codes: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `codes` with the integers of `x`, one byte each; `zero_point` holds offsets if `levels` say so."""
    dtype = compute_dtype(x.dtype)
    memory = room("steps", min(blocks.size, slab_size()), dtype)
    scales = points = None
    for (part, out), (s, z) in walk(blocks, (x, codes), (scale, zero_point)):
        steps = memory[: part.size].reshape(part.shape)
        if s is not scales:  # one scale for all is the same array each time
            divisor, scales = _divisor(s, dtype), s
        if levels.floating:
            zero, low, high = z.astype(dtype), np.asarray(levels.qmin, dtype), np.asarray(levels.qmax, dtype)
            if part.dtype == dtype:
                np.subtract(part, zero, out=steps)
            else:
                widen(part, steps)
                steps -= zero
            part, shifted = steps, False
        elif z is not points:
            zero, low, high = (ends.astype(dtype) for ends in bounds(z, levels))
            shifted, points = bool(zero.any()), z
        _steps(part, divisor, steps)
        _clamp(steps, low, high)
        if shifted:
            steps += zero
        out[...] = steps


def dequantize(codes: np.ndarray, out: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `out` with ``scale * (q - zero_point)``, or with ``scale * q + offset`` if `levels` say so."""
    dtype = SINGLE if levels.floating else compute_dtype(out.dtype)
    for (part, y), (s, z) in walk(blocks, (codes, out), (scale, zero_point)):
        steps = part.astype(dtype)
        if levels.floating:
            steps *= signed_factor(s, dtype)
            steps += z.astype(dtype)
        else:
            steps -= bounds(z, levels)[0].astype(dtype)
            steps *= factor(s, dtype)
        narrow(steps, y)


def fake_quantize(x: np.ndarray, out: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `out` with x quantized and dequantized."""
    dtype = compute_dtype(x.dtype)
    for (part, y), (s, z) in walk(blocks, (x, out), (scale, zero_point)):
        _, low, high = bounds(z, levels)
        steps = _steps(part, _divisor(s, dtype), np.empty(part.shape, dtype))
        _clamp(steps, low.astype(dtype), high.astype(dtype))
        steps += 0  # the integer 0 has no sign
        steps *= factor(s, dtype)
        y[...] = steps


def _mask(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, levels: Levels, margin: int, dtype: np.dtype
) -> np.ndarray:
    """Where rint(x / scale) lies in the range, by `margin` steps from its ends; nowhere under a scale of 0."""
    _, low, high = bounds(zero_point, levels)
    divisor = _divisor(scale, dtype)
    steps = _steps(x, divisor, np.empty(x.shape, dtype))
    return (steps >= (low + margin).astype(dtype)) & (steps <= (high - margin).astype(dtype)) & (divisor < np.inf)


def backward(
    dy: np.ndarray,
    x: np.ndarray | None,
    dx: np.ndarray,
    scale: Any,
    zero_point: Any,
    blocks: Blocks,
    levels: Levels,
    margin: int,
    divide: bool,
) -> None:
    """Fill `dx` with the straight-through gradient."""
    dtype = compute_dtype(dy.dtype)
    arrays = (dy, dx) if x is None else (dy, dx, x)
    for (dy_part, out, *rest), (s, z) in walk(blocks, arrays, (scale, zero_point)):
        gradient = dy_part
        if divide:
            divisor = _divisor(s, dtype)
            gradient = np.where(divisor < np.inf, dy_part.astype(dtype) / divisor, dtype.type(0))
        if rest:
            gradient = np.where(_mask(rest[0], s, z, levels, margin, dtype), gradient, gradient.dtype.type(0))
        out[...] = gradient


def multiply(dy: np.ndarray, dq: np.ndarray, scale: Any, blocks: Blocks) -> None:
    """Fill `dq` with dy times the scale."""
    dtype = compute_dtype(dy.dtype)
    for (part, out), (s,) in walk(blocks, (dy, dq), (scale,)):
        out[...] = part.astype(dtype) * factor(s, dtype)


def find(
    x: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    blocks: Blocks,
    levels: Levels,
    fraction: float | None,
) -> None:
    """Scales, and zero points or offsets, of the blocks of x."""
    high, low = ends_of(x, blocks, levels, fraction)
    store(high, low, levels, x.dtype, fraction, scale, zero_point)


def ends_of(x: np.ndarray, blocks: Blocks, levels: Levels, fraction: float | None) -> tuple[np.ndarray, np.ndarray]:
    """max(x) and max(-x) of each block, of what counts."""
    dtype = compute_dtype(x.dtype)
    least = dtype.type(-np.inf if levels.floating else 0)
    high, low = np.full(blocks.count, least), np.full(blocks.count, least)
    if fraction is None:
        for (part,), (up, down) in walk(blocks, (x,), (high, low)):
            _join_range(part, up, down, levels)
        return high, low
    for piece in blocks.parts:
        ends = piece.of_blocks(high), piece.of_blocks(low)
        rows = piece.view(x)
        if ends[0].shape[0] == 1 and rows.shape[0] > 1:  # a channel's elements lie apart
            rows = rows.transpose(1, 0, 2)
        number = _without_nan(rows, dtype)  # the one copy there is
        _percentile(number.reshape(*ends[0].shape[:2], -1), ends, levels, fraction)
    return high, low


def store(
    high: np.ndarray,
    low: np.ndarray,
    levels: Levels,
    of: np.dtype,
    fraction: float | None,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
) -> None:
    """Fill in scales, and zero points or offsets, of blocks of the dtype `of` whose ends `ends_of` has found."""
    scales = scale.reshape(-1)
    zeros = None if zero_point is None else zero_point.reshape(-1)
    reach = reach_of(levels, fraction, scale.dtype not in (SINGLE, DOUBLE))
    for first in range(0, high.size, _BLOCKS):
        some = slice(first, first + _BLOCKS)
        _store(high[some], low[some], levels, of, reach, scales[some], None if zeros is None else zeros[some])


def _store(
    high: np.ndarray,
    low: np.ndarray,
    levels: Levels,
    of: np.dtype,
    reach: int,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
) -> None:
    kind = None if scale.dtype == DOUBLE else stored(scale.dtype.name)
    if levels.floating:
        assert kind is not None, "offsets are planes"
        found, zero = _offsets(high, low, levels, of, kind)
    else:
        high, low = np.abs(high), np.abs(low)  # no -0
        rounded = kind if kind is not None and kind.name != "float32" else None
        found, zero = _range(high, low, levels, of, reach, rounded)
    scale[...] = np.minimum(found, ENDS["float64" if kind is None else kind.name].largest)
    if zero_point is not None:
        zero_point[...] = zero


def _join_range(part: np.ndarray, up: np.ndarray, down: np.ndarray, levels: Levels) -> None:
    """Join the largest and the smallest number of a part to those of its blocks; NaN is none."""
    if levels.floating:
        number = part if part.dtype == up.dtype else converted(part, up.dtype)
        high, low = _extremes(number, number, _reduced(up), np.maximum, np.minimum)
        if np.isnan(high).any():  # np.fmax forgets what came before a signaling one
            none = np.isnan(number)
            high = np.where(none, up.dtype.type(-np.inf), number).max(_reduced(up), keepdims=True)
            low = np.where(none, up.dtype.type(np.inf), number).min(_reduced(up), keepdims=True)
        np.maximum(up, high, out=up)
        np.maximum(down, -low, out=down)
        return
    axes = _reduced(up)
    if part.dtype == np.float16:  # those of one sign have the order of their bits, and 0 is in every range
        high, low = _extremes(part.view(np.int16), part.view(np.uint16), axes, np.maximum, np.maximum)
        nan = high.max() > _HALF_INFINITY or low.max() > _HALF_INFINITY + _HALF_SIGN
        high = np.maximum(high, 0).view(np.float16)
        low = np.where(low > _HALF_SIGN, low - _HALF_SIGN, np.uint16(0)).view(np.float16)
    else:
        part = part if part.dtype == up.dtype else converted(part, up.dtype)
        high, low = _extremes(part, part, axes, np.maximum, np.minimum)
        low = -low
        nan = bool(np.isnan(high).any())
    if nan:
        number = _without_nan(part, up.dtype)
        high, low = number.max(axes, keepdims=True), -number.min(axes, keepdims=True)
    np.maximum(up, high.astype(up.dtype), out=up)
    np.maximum(down, low.astype(up.dtype), out=down)


def _extremes(
    x: np.ndarray, as_other: np.ndarray, axes: tuple[int, ...], largest: np.ufunc, smallest: np.ufunc
) -> tuple[np.ndarray, np.ndarray]:
    """`largest` of the blocks of a view, and `smallest` of the same memory in a dtype that may be another."""
    outer, _, run = x.shape
    along = len(axes) == 1 or outer == 1
    if not along or run > _SHORT_RUN or run * x.itemsize % 16 or not x.flags.c_contiguous:
        return largest.reduce(x, axes, keepdims=True), smallest.reduce(as_other, axes, keepdims=True)
    # Reducing short rows is slow. Columns of 16 bytes become rows first: then it goes along them.
    columns = np.ascontiguousarray(x.reshape(-1, run).view(np.complex128).T)
    found = []
    for ufunc, dtype in ((largest, x.dtype), (smallest, as_other.dtype)):
        lanes = ufunc.reduce(columns.view(dtype), axis=0).reshape(-1, 16 // x.itemsize)
        found.append(ufunc.reduce(np.ascontiguousarray(lanes.T), axis=0).reshape(*x.shape[:2], 1))
    return found[0], found[1]


def _without_nan(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    number = converted(x, dtype)
    number[np.isnan(number)] = 0
    return number


def _reduced(entries: np.ndarray) -> tuple[int, ...]:
    """The axes of a view that one entry stands for."""
    return (0, 2) if entries.shape[0] == 1 else (2,)


def _percentile(rows: np.ndarray, ends: tuple[np.ndarray, np.ndarray], levels: Levels, fraction: float) -> None:
    """The ends of the range by rank, among the last axis, whose order is not kept."""
    count = rows.shape[-1]
    rank = max(math.ceil(fraction * count) - 1, 0)
    if levels.symmetric:
        np.abs(rows, out=rows)
        rows.partition(rank, axis=-1)
        ends[0][...] = rows[..., rank, None]
    else:
        for end, place, sign in ((ends[0], rank, 1), (ends[1], count - 1 - rank, -1)):
            rows.partition(place, axis=-1)
            end[...] = np.maximum(sign * rows[..., place, None], end)


def _range(
    high: np.ndarray, low: np.ndarray, levels: Levels, of: np.dtype, reach: int, kind: Stored | None
) -> tuple[np.ndarray, Any]:
    """Scale and zero point of blocks of the dtype `of` whose numbers lie between -low and high.

    `kind` says what a scale is rounded to before a zero point is found; None where it stays as it is.
    """
    dtype = high.dtype
    largest = dtype.type(ENDS[of.name].largest)
    with np.errstate(all="ignore"):
        high, low = np.minimum(high, largest), np.minimum(low, largest)
        empty = (high == 0) & (low == 0)
        if levels.symmetric:
            scale = np.maximum(high, low) / dtype.type(levels.divisor)
            scale = finite_scale(scale if kind is None else kind.scale(scale), reach, of, kind)
            return np.where(empty, dtype.type(1), scale), levels.zero
        span = np.minimum(high.astype(np.float64) + low, np.finfo(np.float64).max) / levels.divisor
        scale = np.minimum(span, np.finfo(dtype).max).astype(dtype)
        scale = scale if kind is None else kind.scale(scale)
        point = np.where(empty, levels.qmin, levels.qmin + np.rint(low / _divisor(scale, dtype)))
        zero = np.clip(point, levels.qmin, levels.qmax).astype(np.int32)
        scale = finite_scale(scale, np.maximum(levels.qmax - zero, zero - levels.qmin), of, kind)
        return np.where(empty, dtype.type(1), scale), zero


def finite_scale(scale: np.ndarray, reach: Any, of: np.dtype, kind: Stored | None = None) -> np.ndarray:
    """The scale, or the largest one (of `kind`) whose product with `reach` stays finite in the dtype `of`."""
    dtype = scale.dtype
    limit, steps = dtype.type(ENDS[of.name].limit), np.asarray(reach).astype(dtype)
    beyond = scale * steps > limit
    if not beyond.any():
        return scale
    most = limit / steps
    most = np.where(most * steps > limit, np.nextafter(most, dtype.type(0)), most)
    return np.where(beyond, most if kind is None else kind.below(most), scale)


def _offsets(
    high: np.ndarray, low: np.ndarray, levels: Levels, of: np.dtype, kind: Stored
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of blocks of the dtype `of` whose numbers lie between -low and high, of an empty one if not."""
    end, steps = kind.range_end(of.name), levels.qmax - levels.qmin
    with np.errstate(all="ignore"):
        upper = np.clip(high.astype(np.float64), -end, end)
        lower = np.clip(-low.astype(np.float64), -end, end)
        empty = upper < lower
        upper[empty], lower[empty] = 0, 0
        wanted, most = (upper - lower) / steps, kind.most(levels)
        scale = np.maximum(np.minimum(wanted, most).astype(np.float32).astype(np.float64), kind.smallest)
        equal = upper == lower
        scale[equal] = 1
        first = np.where(wanted > most, (upper + lower) / 2 - scale * (steps / 2), lower)
        offset = np.where(equal, lower, first - scale * levels.qmin)
        if kind.name == "float32":
            return scale, kind.nearest(offset) + 0.0
        offset = (kind.nearest if levels.qmin else kind.below)(offset) + 0.0
        reached = (upper - offset) / levels.qmax
        if levels.qmin:
            reached = np.maximum(reached, (lower - offset) / levels.qmin)
        scale = np.maximum(kind.above(np.minimum(reached, most)), kind.smallest)
        scale[equal & (offset == lower)] = 1
        return scale, offset


def pack_nibbles(codes: np.ndarray, packed: np.ndarray) -> None:
    """Two neighbours a byte, the first in the low nibble."""
    nibbles = codes.view(np.uint8)
    pairs = nibbles[: nibbles.size // 2 * 2].view("<u2")
    step = CHUNK * AT_ONCE.get()
    memory = room("pairs", min(pairs.size, step), "<u2")
    for first in range(0, pairs.size, step):
        part = pairs[first : first + step]
        both = memory[: part.size]
        np.bitwise_and(part, 0x0F0F, out=both)
        both *= np.uint16((1 << 8) + (1 << 4))  # the second one above the first, in the high byte
        packed[first : first + part.size] = both.view(np.uint8)[1::2]
    if nibbles.size % 2:
        packed[-1] = nibbles[-1] & 15


def unpack_nibbles(packed: np.ndarray, codes: np.ndarray) -> None:
    """The inverse of `pack_nibbles`."""
    nibbles = codes.view(np.uint8)
    nibbles[::2] = packed & 15
    nibbles[1::2] = packed[: nibbles.size // 2] >> 4
    if codes.dtype == np.int8:
        nibbles ^= 8
        codes -= 8
