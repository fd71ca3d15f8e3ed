"""What the quantizers of GGUF's types share: ggml's roundings, and codes in the bits of bytes."""

from __future__ import annotations

import numpy as np


def reciprocal(d: np.ndarray) -> np.ndarray:
    """1 / d, and 0 where d is 0."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def finite(y: np.ndarray) -> np.ndarray:
    """`y`, and 0 where it is NaN or infinite: a quotient of two subnormal numbers, whose block decodes to 0."""
    return np.where(np.isfinite(y), y, np.float32(0))


def roundf(y: np.ndarray) -> np.ndarray:
    """The nearest integer; halves go away from zero, as C's roundf has it."""
    whole = np.trunc(y)
    return np.where(np.abs(y - whole) >= 0.5, whole + np.copysign(np.float32(1), y), whole)


def signed_max(rows: np.ndarray) -> np.ndarray:
    """The first number of largest magnitude of each row, [rows, 1]; +0 where all are zero."""
    first = np.abs(rows).argmax(axis=1, keepdims=True)
    return np.take_along_axis(rows, first, axis=1) + np.float32(0)


def half_bytes(*numbers: np.ndarray) -> np.ndarray:
    """Columns of float32 as halves next to each other: uint8[rows, 2 * columns]."""
    return np.concatenate(numbers, axis=1).astype(np.float16).view(np.uint8)


def halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The half at byte `start` of each block, float32[blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def pack_fields(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Codes of so many bits as bytes: byte i of a run holds the elements i, i + run, i + 2 * run, ..., the first
    in the lowest bits.

    `codes` is uint8[blocks, block]; the result uint8[blocks, block * bits / 8].
    """
    parts = codes.reshape(len(codes), -1, 8 // bits, run) << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(parts, axis=2).reshape(len(codes), -1)


def unpack_fields(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The codes that `pack_fields` has packed, uint8[blocks, block]."""
    parts = packed.reshape(len(packed), -1, 1, run) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (parts & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)
