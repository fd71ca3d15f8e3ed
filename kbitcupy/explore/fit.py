"""Tables fitted to data: Lloyd-Max on blocks divided by their absmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import xp as _xp
from ..errors import FormatError
from ..formats.codebook.search import check_block, check_k

# Quotients are counted in this many bins of [-1, 1]; the centre of mass of each bin is kept, so levels are not rounded.
_BINS = 1 << 16
_CHUNK = 1 << 22
_NUMBERS = (int, float, np.integer, np.floating)


def fit_table(x: Any, k: int = 4, *, block: int = 64, tolerance: float = 1e-7, iterations: int = 10_000) -> np.ndarray:
    """The 2^k values with the least squared error for these data.

    Each block is divided by its absmax, and weighted with the square of it: then the error that is minimised is that of
    the decoded array. The levels are those of Lloyd's iteration, which begins at the quantiles of the cube root of the
    density.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32 or float64 data, any shape; taken flat. float64 is rounded to float32 first, as
        `quantize` does. NaN and infinities are left out.
    k : int, default 4
        1 to 8.
    block : int, default 64
        Elements that share an absmax: that of the format the table is for.
    tolerance : float, default 1e-7
        The iteration ends when no level moves by more; 0 or more.
    iterations : int, default 10000
        ... or after so many steps; 1 or more.

    Returns
    -------
    numpy.ndarray
        float32[2^k], ascending: ``codebook=`` of `quantize`, for ``table4`` (k = 4) or ``kbit1`` to ``kbit8`` (block
        32).
        Of a CuPy array, too: the result is read back.

    Raises
    ------
    TypeError
        When `x` is not a float array.
    FormatError
        When `k`, `block`, `tolerance` or `iterations` is not allowed, or the data hold fewer than 2^k different
        quotients.

    Notes
    -----
    S. P. Lloyd, "Least squares quantization in PCM" (1982); J. Max, "Quantizing for minimum distortion" (1960).

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).laplace(size=(256, 256)).astype(np.float32)
    >>> table = kb.fit_table(x, 4, block=64)
    >>> own, nf4 = kb.quantize(x, "table4", codebook=table), kb.quantize(x, "nf4")
    >>> bool(kb.metrics.sqnr_db(x, own.dequantize()) > kb.metrics.sqnr_db(x, nf4.dequantize()) + 0.4)
    True
    """
    array = _xp.as_array(x)
    _xp.float_dtype(array.dtype, "x")
    k, block = check_k(k), check_block(block)
    if isinstance(tolerance, bool) or not isinstance(tolerance, _NUMBERS) or not 0 <= tolerance < math.inf:
        raise FormatError(f"tolerance is {tolerance!r}; it must be a finite number from 0 on, such as 1e-7")
    if isinstance(iterations, bool) or not isinstance(iterations, (int, np.integer)) or iterations < 1:
        raise FormatError(f"iterations is {iterations!r}; it must be a positive integer")
    with _xp.on_device_of(array):
        weight, moment = _histogram(array.reshape(-1), block)
    used = weight > 0
    weight, moment = weight[used], moment[used]
    if not weight.size:
        raise FormatError(
            "x holds no finite number but 0, of which no table can be made; float32 holds magnitudes from 1e-45 to "
            "3.4e38: scale what lies beyond"
        )
    if weight.size < 1 << k:
        raise FormatError(
            f"x holds {weight.size} different quotients of an element and its block's absmax; a table of {1 << k} "
            "needs at least as many: use a smaller k"
        )
    return _lloyd(weight, moment, 1 << k, tolerance, iterations)


def _histogram(x: Any, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Weight and first moment of the quotients in each bin, float64 on the host."""
    xp = _xp.namespace(x)
    weight, moment = xp.zeros(_BINS), xp.zeros(_BINS)
    for start in range(0, x.size, _CHUNK):
        part = x[start : start + _CHUNK]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what float32 has not is left out
            part = part.astype(np.float32).astype(np.float64)
        rows = xp.zeros((math.ceil(part.size / block), block))
        rows.reshape(-1)[: part.size] = xp.where(xp.isfinite(part), part, 0)
        absmax = abs(rows).max(axis=1, keepdims=True)
        quotient = rows / xp.where(absmax > 0, absmax, 1)
        square = xp.broadcast_to(absmax * absmax, rows.shape)
        counted = xp.isfinite(square).reshape(-1)
        counted[part.size :] = False
        counted[: part.size] &= xp.isfinite(part)
        y, w = quotient.reshape(-1)[counted], square.reshape(-1)[counted]
        bins = xp.minimum((y + 1) * (_BINS / 2), _BINS - 1).astype(np.int64)
        weight += xp.bincount(bins, weights=w, minlength=_BINS)
        moment += xp.bincount(bins, weights=w * y, minlength=_BINS)
    if _xp.is_cupy(x):
        weight, moment = weight.get(), moment.get()
    return weight, moment


def _lloyd(weight: np.ndarray, moment: np.ndarray, size: int, tolerance: float, iterations: int) -> np.ndarray:
    """Levels of least weighted squared error for points in ascending order."""
    point = moment / weight
    mass, first = np.concatenate(([0], np.cumsum(weight))), np.concatenate(([0], np.cumsum(moment)))
    density = np.cumsum(np.cbrt(weight))
    start = np.searchsorted(density, (np.arange(size) + 0.5) / size * density[-1])
    start = np.maximum.accumulate(start - np.arange(size)) + np.arange(size)  # distinct, in order
    start = np.minimum(start, point.size - size + np.arange(size))
    level = point[start]
    for _ in range(iterations):
        cut = np.concatenate(([0], np.searchsorted(point, (level[:-1] + level[1:]) / 2, side="right"), [point.size]))
        cell = np.diff(mass[cut])
        # A cell without a point keeps its level.
        moved = np.where(cell > 0, np.diff(first[cut]) / np.where(cell > 0, cell, 1), level)
        done = np.abs(moved - level).max() <= tolerance
        level = moved
        if done:
            break
    return np.sort(level).astype(np.float32)
