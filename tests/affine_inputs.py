"""What the tests of affine integers share: shapes with granularities, numbers of every kind, an oracle."""

import math

import numpy as np
from inputs import BFLOAT16, make

DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
MASKS = ["inclusive", "strict", "none"]

# (shape, granularity): units of eight inside a block, across two, across many; short groups; every axis.
CASES = [
    ((), "tensor"),
    ((0,), "tensor"),
    ((1,), "tensor"),
    ((4099,), "tensor"),
    ((3, 5, 7), "tensor"),
    ((6, 8), "tensor"),
    ((1, 64), "token"),
    ((1, 2, 8), ("channel", 0)),
    ((16,), ("group", 16)),
    ((5, 64), "token"),
    ((3, 4, 33), "token"),
    ((7, 3), "token"),
    ((9,), "token"),
    ((4, 0), "token"),
    ((2, 2100), "token"),
    ((6, 40), ("channel", 0)),
    ((6, 40), ("channel", 1)),
    ((5, 3), ("channel", 1)),
    ((3, 6, 8), ("channel", 1)),
    ((3, 6, 11), ("channel", -2)),
    ((4, 5, 3), ("channel", 1)),
    ((70, 100), ("channel", -1)),
    ((2, 2056), ("channel", -1)),
    ((3, 1, 16), ("channel", 1)),
    ((1, 9, 5), ("channel", 1)),
    ((5, 64), ("group", 32)),
    ((5, 72), ("group", 32)),
    ((5, 70), ("group", 32)),
    ((3, 50), ("group", 5)),
    ((3, 5), ("group", 64)),
    ((3, 256), ("group", 128)),
    ((2, 3, 520), ("group", 512)),
    ((2, 0), ("group", 8)),
]


def numbers(kind, shape, dtype, seed=0):
    """An array of one kind of numbers (see `inputs.make`)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return make(kind, math.prod(shape), np.dtype("float32"), seed).astype(dtype).reshape(shape)


def block_numbers(shape, granularity):
    """The number of the block of each element, and the shape of the scales, straight from the definition."""
    index = np.indices(shape)
    if granularity == "tensor":
        return np.zeros(shape, int), (1,)
    if granularity == "token":
        return np.arange(math.prod(shape[:-1])).reshape(shape[:-1])[..., None] + np.zeros(shape, int), shape[:-1]
    kind, number = granularity
    if kind == "channel":
        return index[number], (shape[number],)
    groups = -(-shape[-1] // number)
    rows = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])[..., None] + np.zeros(shape, int)
    return rows * groups + index[-1] // number, (*shape[:-1], groups)


def wide_divide(x, s):
    """x / s rounded once to float32: float64 has more than twice its digits, so rounding twice does no harm."""
    with np.errstate(all="ignore"):
        return (x.astype(np.float64) / s.astype(np.float64)).astype(np.float32)


def oracle_steps(x, scale, low, high):
    """clamp(rint(x / scale)) of an array with a scale and a range for each element."""
    with np.errstate(all="ignore"):
        q = x / scale if x.dtype == np.float64 else wide_divide(x, scale)
    whole = np.rint(q.astype(np.float64))
    whole = np.where(np.isnan(whole) | (scale == 0), 0, whole)
    return np.minimum(np.maximum(whole, low), high)
