"""How much an array lost: errors, SQNR, storage, and the analytical bound.

All functions take NumPy or CuPy arrays, compute in float64 and return Python numbers (on CuPy that waits for the
device). The approximation may still be compressed; its ``sqnr_db`` is noted in it then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _xp
from .array import QuantizedArray
from .errors import FormatError
from .ops import dequantize

__all__ = [
    "BoundCheck",
    "bits_per_element",
    "compression_ratio",
    "cosine",
    "error_bound",
    "max_abs",
    "mse",
    "rmse",
    "sqnr_db",
    "sums",
]

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sums:
    """What all error measures are made of; sums over tensors add up.

    Parameters
    ----------
    count : int
        Number of elements.
    signal, noise : float
        Sum of squares of the original and of the error.
    other : float
        Sum of squares of the approximation.
    product : float
        Sum of products of original and approximation.
    largest : float
        Largest absolute error.
    """

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0
    other: float = 0.0
    product: float = 0.0
    largest: float = 0.0

    def __add__(self, right: Sums) -> Sums:
        return Sums(
            self.count + right.count,
            self.signal + right.signal,
            self.noise + right.noise,
            self.other + right.other,
            self.product + right.product,
            float(np.maximum(self.largest, right.largest)),
        )

    @property
    def mse(self) -> float:
        """Mean squared error; NaN without elements."""
        return self.noise / self.count if self.count else math.nan

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in dB: infinite without an error, NaN without elements."""
        if not self.count or math.isnan(self.signal) or math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine similarity; NaN when either array is all zeros."""
        norm = math.sqrt(self.signal) * math.sqrt(self.other)
        return self.product / norm if norm else math.nan


def _check_pair(x: Any, y: Any) -> None:
    for name, array in (("x", x), ("y", y)):
        if not _xp.is_array(array):
            hint = ": call .dequantize()" if isinstance(array, QuantizedArray) else ""
            raise TypeError(f"{name} is {type(array).__name__}; it must be a NumPy or CuPy array{hint}")
    if x.shape != y.shape:
        raise ValueError(f"x has shape {x.shape} and y {y.shape}; they must be equal")
    _xp.check_same_device(x, y)


def sums(x: Any, y: Any) -> Sums:
    """One pass over original and approximation.

    Parameters
    ----------
    x, y : array
        Original and approximation, of equal shape and on one device. `y` may be a QuantizedArray, which is decoded for
        this and keeps the SQNR as its ``sqnr_db``.

    Returns
    -------
    Sums
        Carries ``mse``, ``sqnr_db``, ``cosine`` and ``largest``; adding two of them joins their arrays.

    Raises
    ------
    TypeError
        When an argument is not an array.
    ValueError
        When shapes or devices differ.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> both = kb.metrics.sums(np.ones(3), np.zeros(3)) + kb.metrics.sums(np.ones(1), np.ones(1))
    >>> both.count, both.mse
    (4, 0.75)
    """
    other = dequantize(y) if isinstance(y, QuantizedArray) else y
    _check_pair(x, other)
    total = Sums()
    with _xp.on_device_of(x), np.errstate(invalid="ignore", over="ignore"):
        flat = x.reshape(-1), other.reshape(-1)
        for start in range(0, x.size, _CHUNK):
            a, b = (array[start : start + _CHUNK].astype(np.float64) for array in flat)
            error = a - b
            total += Sums(
                a.size, float(a @ a), float(error @ error), float(b @ b), float(a @ b), float(abs(error).max())
            )
    if isinstance(y, QuantizedArray):
        y._note_sqnr(total.sqnr_db)
    return total


def mse(x: Any, y: Any) -> float:
    """Mean squared error.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.metrics.mse(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    2.0
    """
    return sums(x, y).mse


def rmse(x: Any, y: Any) -> float:
    """Root of the mean squared error.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.metrics.rmse(np.array([1.0, 1.0]), np.array([3.0, 3.0]))
    2.0
    """
    return math.sqrt(mse(x, y))


def max_abs(x: Any, y: Any) -> float:
    """Largest absolute error; 0 without elements.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.metrics.max_abs(np.array([1.0, 2.0]), np.array([1.0, -4.0]))
    6.0
    """
    return sums(x, y).largest


def sqnr_db(x: Any, y: Any) -> float:
    """Signal to quantization noise ratio, ``10 log10(sum x^2 / sum (x - y)^2)`` in dB; infinite when x equals y.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.metrics.sqnr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    20.0
    >>> x = np.random.default_rng(0).standard_normal(4096)
    >>> q = kb.quantize(x, "kbit4")
    >>> kb.metrics.sqnr_db(x, q) == q.sqnr_db
    True
    """
    return sums(x, y).sqnr_db


def cosine(x: Any, y: Any) -> float:
    """Cosine similarity of the flattened arrays; NaN when one is all zeros.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.metrics.cosine(np.array([1.0, 0.0]), np.array([2.0, 0.0]))
    1.0
    """
    return sums(x, y).cosine


def bits_per_element(q: QuantizedArray) -> float:
    """Bits of all planes for each element.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> round(kb.metrics.bits_per_element(kb.quantize(np.ones(1 << 20, np.float32), "kbit4")), 3)
    4.25
    """
    return q.bits_per_element


def compression_ratio(q: QuantizedArray, dtype: Any = None) -> float:
    """Bytes of the array in `dtype` (by default its own) for each byte of its planes.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> round(kb.metrics.compression_ratio(kb.quantize(np.ones(1 << 20, np.float16), "kbit4")), 2)
    3.76
    """
    wanted = q.dtype if dtype is None else _xp.float_dtype(dtype)
    return q.size * wanted.itemsize / q.nbytes if q.nbytes else math.nan


@dataclass(frozen=True)
class BoundCheck:
    """Result of `error_bound`.

    Parameters
    ----------
    bound : float
        Largest bound of any element.
    error : float
        Largest error of any element.
    violations : int
        Elements whose error exceeds their own bound.
    """

    bound: float
    error: float
    violations: int


def error_bound(x: Any, q: QuantizedArray, y: Any = None) -> BoundCheck:
    """Compare every error with the format's analytical bound, half an ulp of the output's dtype included.

    For a codebook that is ``(max(largest gap / 2, 1 - last, first + 1) + e) * absmax`` of the element's block, where
    e bounds the relative error of the stored scale. It holds for finite blocks.

    Parameters
    ----------
    x : array
        The original, NumPy or CuPy.
    q : QuantizedArray
        Its compressed form.
    y : array, optional
        Its decompressed form; by default it is computed.

    Returns
    -------
    BoundCheck

    Raises
    ------
    FormatError
        When the format has no analytical bound.
    ValueError
        When the shapes differ.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    >>> kb.metrics.error_bound(x, kb.quantize(x, "kbit4")).violations
    0
    """
    y = dequantize(q) if y is None else y
    if x.shape != y.shape or x.shape != q.shape:
        raise ValueError(f"x has shape {x.shape}, q {q.shape} and y {y.shape}; they must be equal")
    host_x, host_y = _xp.to_device(x, "cpu").reshape(-1), _xp.to_device(y, "cpu").reshape(-1)
    blocks = q.format.error_bound(host_x.reshape(x.shape), q.get().planes)
    if blocks is None:
        raise FormatError(f"{q.format} has no analytical error bound; use max_abs")
    largest_bound = largest_error = 0.0
    violations = 0
    info = _float_info(y.dtype.name)
    chunk = _CHUNK // q.format.block * q.format.block
    for start in range(0, host_x.size, chunk):
        a = host_x[start : start + chunk].astype(np.float64)
        b = host_y[start : start + chunk].astype(np.float64)
        first = start // q.format.block
        bound = np.repeat(blocks[first : first + -(-a.size // q.format.block)], q.format.block)[: a.size]
        # Half an ulp of the output, at the larger magnitude that a value within the bound may have.
        bound = bound + np.maximum((abs(a) + bound) * info[0], info[1])
        error = abs(a - b)
        violations += int(np.count_nonzero(error > bound))
        largest_bound = max(largest_bound, float(bound.max()))
        largest_error = max(largest_error, float(error.max()))
    return BoundCheck(largest_bound, largest_error, violations)


def _float_info(name: str) -> tuple[float, float]:
    """(half the relative spacing, half the absolute spacing at the bottom) of a float dtype, flushing included."""
    return {
        "float16": (2.0**-11, 2.0**-25),
        "bfloat16": (2.0**-8, 2.0**-126),
        "float32": (2.0**-24, 2.0**-126),
        "float64": (2.0**-24, 2.0**-126),
    }[name]
