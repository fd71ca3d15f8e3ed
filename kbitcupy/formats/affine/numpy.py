"""Affine integers on NumPy: the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..granularity import Blocks, walk
from .levels import ENDS, Levels, compute_dtype, reach_of


def _divisor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales as divisors: x / inf is 0 where a scale does not count."""
    scale = scale.astype(dtype)
    return np.where((scale > 0) & (scale < np.inf), scale, dtype.type(np.inf))


def factor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales as factors."""
    scale = scale.astype(dtype)
    return np.where((scale > 0) & (scale < np.inf), scale, dtype.type(0))


def bounds(zero_point: np.ndarray, levels: Levels) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zero points within the range, and what rint(x / scale) may be."""
    zero = np.clip(zero_point, levels.qmin, levels.qmax).astype(np.int32)
    return zero, levels.qmin - zero, levels.qmax - zero


def _steps(x: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """rint(x / scale) in the dtype of `divisor`."""
    steps = x.astype(divisor.dtype)
    steps /= divisor
    return np.rint(steps, out=steps)


def _clamped(steps: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Within the range, NaN to 0."""
    steps[np.isnan(steps)] = 0
    return np.clip(steps, low, high, out=steps)


def quantize(x: np.ndarray, codes: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `codes` with the integers of `x`, one byte each."""
    dtype = compute_dtype(x.dtype)
    for (part, out), (s, z) in walk(blocks, (x, codes), (scale, zero_point)):
        zero, low, high = bounds(z, levels)
        steps = _clamped(_steps(part, _divisor(s, dtype)), low.astype(dtype), high.astype(dtype))
        steps += zero.astype(dtype)
        out[...] = steps


def dequantize(codes: np.ndarray, out: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `out` with ``scale * (q - zero_point)``."""
    dtype = compute_dtype(out.dtype)
    for (part, y), (s, z) in walk(blocks, (codes, out), (scale, zero_point)):
        steps = part.astype(dtype)
        steps -= bounds(z, levels)[0].astype(dtype)
        steps *= factor(s, dtype)
        y[...] = steps


def fake_quantize(x: np.ndarray, out: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `out` with x quantized and dequantized."""
    dtype = compute_dtype(x.dtype)
    for (part, y), (s, z) in walk(blocks, (x, out), (scale, zero_point)):
        _, low, high = bounds(z, levels)
        steps = _clamped(_steps(part, _divisor(s, dtype)), low.astype(dtype), high.astype(dtype))
        steps += 0  # the integer 0 has no sign
        steps *= factor(s, dtype)
        y[...] = steps


def _mask(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, levels: Levels, margin: int, dtype: np.dtype
) -> np.ndarray:
    """Where rint(x / scale) lies in the range, by `margin` steps from its ends; nowhere under a scale of 0."""
    _, low, high = bounds(zero_point, levels)
    divisor = _divisor(scale, dtype)
    steps = _steps(x, divisor)
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
    """Scales and zero points of the blocks of x."""
    dtype = compute_dtype(x.dtype)
    high, low = np.zeros(blocks.count, dtype), np.zeros(blocks.count, dtype)  # max(x, 0) and max(-x, 0)
    if fraction is None:
        for (part,), (up, down) in walk(blocks, (x,), (high, low)):
            number = _without_nan(part, dtype)
            np.maximum(up, number.max(_reduced(up), keepdims=True), out=up)
            np.maximum(down, -number.min(_reduced(up), keepdims=True), out=down)
    else:
        for piece in blocks.parts:
            ends = piece.of_blocks(high), piece.of_blocks(low)
            rows = piece.view(x)
            if ends[0].shape[0] == 1 and rows.shape[0] > 1:  # a channel's elements lie apart
                rows = rows.transpose(1, 0, 2)
            number = _without_nan(rows, dtype)  # the one copy there is
            _percentile(number.reshape(*ends[0].shape[:2], -1), ends, levels, fraction)
    np.abs(high, out=high), np.abs(low, out=low)  # no -0
    found, zero = _range(high, low, levels, x.dtype, reach_of(levels, fraction))
    scale.reshape(-1)[...] = np.minimum(found, np.finfo(scale.dtype).max)
    if zero_point is not None:
        zero_point.reshape(-1)[...] = zero


def _without_nan(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    number = x.astype(dtype, order="C")
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
            end[...] = np.maximum(sign * rows[..., place, None], 0)


def _range(high: np.ndarray, low: np.ndarray, levels: Levels, of: np.dtype, reach: int) -> tuple[np.ndarray, Any]:
    """Scale and zero point of blocks of the dtype `of` whose numbers lie between -low and high."""
    dtype = high.dtype
    largest = dtype.type(ENDS[of.name].largest)
    with np.errstate(all="ignore"):
        high, low = np.minimum(high, largest), np.minimum(low, largest)
        empty = (high == 0) & (low == 0)
        if levels.symmetric:
            scale = finite_scale(np.maximum(high, low) / dtype.type(levels.divisor), reach, of)
            return np.where(empty, dtype.type(1), scale), levels.zero
        span = np.minimum(high.astype(np.float64) + low, np.finfo(np.float64).max) / levels.divisor
        scale = np.minimum(span, np.finfo(dtype).max).astype(dtype)
        point = np.where(empty, levels.qmin, levels.qmin + np.rint(low / _divisor(scale, dtype)))
        zero = np.clip(point, levels.qmin, levels.qmax).astype(np.int32)
        scale = finite_scale(scale, np.maximum(levels.qmax - zero, zero - levels.qmin), of)
        return np.where(empty, dtype.type(1), scale), zero


def finite_scale(scale: np.ndarray, reach: Any, of: np.dtype) -> np.ndarray:
    """The scale, or the largest one whose product with `reach` stays finite in the dtype `of`."""
    dtype = scale.dtype
    limit, steps = dtype.type(ENDS[of.name].limit), np.asarray(reach).astype(dtype)
    beyond = scale * steps > limit
    if not beyond.any():
        return scale
    most = limit / steps
    most = np.where(most * steps > limit, np.nextafter(most, dtype.type(0)), most)
    return np.where(beyond, most, scale)


def pack_nibbles(codes: np.ndarray, packed: np.ndarray) -> None:
    """Two neighbours a byte, the first in the low nibble."""
    nibbles = codes.view(np.uint8)
    np.bitwise_and(nibbles[::2], 15, out=packed)
    packed[: nibbles.size // 2] |= nibbles[1::2] << 4


def unpack_nibbles(packed: np.ndarray, codes: np.ndarray) -> None:
    """The inverse of `pack_nibbles`."""
    nibbles = codes.view(np.uint8)
    nibbles[::2] = packed & 15
    nibbles[1::2] = packed[: nibbles.size // 2] >> 4
    if codes.dtype == np.int8:
        nibbles ^= 8
        codes -= 8
