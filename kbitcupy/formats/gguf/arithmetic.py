"""What the quantizers of GGUF's types share: ggml's roundings, and codes in the bits of bytes."""

from __future__ import annotations

import numpy as np

from ..chunks import (
    copy_bytes as copy_bytes,
    pack_fields as pack_fields,
    room,
    row_starts,
    unpack_fields as unpack_fields,
)

_SIGN, _BELOW_HALF = np.uint32(1 << 31), np.float32(0.5 - 2.0**-25).view(np.uint32)
_MAGNITUDE = np.uint32((1 << 31) - 1)
# Shorter rows are reduced faster by columns.
_LONG = 32


def reciprocal(d: np.ndarray) -> np.ndarray:
    """1 / d, and 0 where d is 0."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def finite(y: np.ndarray) -> np.ndarray:
    """`y`, and 0 where it is NaN or infinite: a quotient of two subnormal numbers, whose block decodes to 0."""
    return np.where(np.isfinite(y), y, np.float32(0))


def quotients(rows: np.ndarray, d: np.ndarray, plus: float = 0.0) -> np.ndarray:
    """rows * (1 / d) + plus as numbers to be rounded: 0 in rows where 1 / d is infinite, `plus` where d is 0.

    They lie where those of the next call will.
    """
    factor = np.float32(1) / d
    y = room("quotients", rows.size, np.float32).reshape(rows.shape)
    infinite = np.maximum.reduce(factor, axis=None) == np.inf or np.minimum.reduce(factor, axis=None) == -np.inf
    if infinite:
        factor = reciprocal(d)
    np.multiply(rows, factor, out=y)
    if plus:
        y += np.float32(plus)
    if infinite:
        y[np.isinf(factor[:, 0])] = 0
    return y


def round_away(y: np.ndarray) -> np.ndarray:
    """The nearest integer, int8; halves go away from zero, as C's roundf has it."""
    # With the float32 below a half no sum is rounded up to a whole number that y is not near to; a cast truncates.
    bits = room("halves", y.size, np.uint32).reshape(y.shape)
    np.bitwise_and(y.view(np.uint32), _SIGN, out=bits)  # np.copysign takes twice as long
    bits |= _BELOW_HALF
    nearest = bits.view(np.float32)
    nearest += y
    return nearest.astype(np.int8)


def extremes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest number of each row of a multiple of 4, float32[rows, 1]; a zero may be of either sign.

    Short rows are slow to reduce. Columns of 16 bytes (as complex128) become rows first, then it goes along those.
    """
    width = min(rows.shape[1], 32)
    items = np.ascontiguousarray(rows).reshape(-1, width).view(np.complex128)
    columns = np.ascontiguousarray(items.T).view(np.float32)
    found = []
    for ufunc in (np.minimum, np.maximum):
        quarter = ufunc.reduce(columns, axis=0).reshape(-1, 4)
        each = ufunc.reduce(np.ascontiguousarray(quarter.T), axis=0).reshape(len(rows), -1)
        while each.shape[1] % 2 == 0:  # many times as fast as a reduction of so few
            each = ufunc(each[:, ::2], each[:, 1::2])
        found.append(each if each.shape[1] == 1 else ufunc.reduce(each, axis=1, keepdims=True))
    return found[0], found[1]


def largest_magnitude(rows: np.ndarray) -> np.ndarray:
    """max|x| of each row of numbers, float32[rows, 1]."""
    if rows.shape[1] < _LONG:
        low, high = extremes(rows)
        return np.maximum(np.abs(low), np.abs(high))
    bits = room("magnitudes", rows.size, np.uint32)
    np.bitwise_and(rows.reshape(-1).view(np.uint32), _MAGNITUDE, out=bits)
    return _largest(bits, rows.shape[1]).view(np.float32)


def _largest(integers: np.ndarray, width: int) -> np.ndarray:
    """The largest of each row of so many integers, [rows, 1]: of floats, which are slower, the bits have an order."""
    return np.maximum.reduceat(integers, row_starts(integers.size, width)).reshape(-1, 1)


def signed_max(rows: np.ndarray) -> np.ndarray:
    """The first number of largest magnitude of each row, [rows, 1]; +0 where all are zero."""
    low, high = extremes(rows)
    found = np.where(high > -low, high, low) + np.float32(0)
    either = np.flatnonzero((high == -low) & (high != 0))
    if either.size:
        tied = rows[either]
        found[either] = np.take_along_axis(tied, np.abs(tied).argmax(axis=1, keepdims=True), axis=1)
    return found


def half_bytes(*numbers: np.ndarray) -> np.ndarray:
    """Columns of float32 as halves next to each other: uint8[rows, 2 * columns]."""
    return np.concatenate(numbers, axis=1).astype(np.float16).view(np.uint8)


def halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The half at byte `start` of each block, float32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def scaled(q: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Integers times the scale of each row, float32; `d` has one for each row, of any float dtype."""
    y = q.astype(np.float32)
    y *= d[:, None].astype(np.float32)
    return y
