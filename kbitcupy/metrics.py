"""How much an array lost: errors, SQNR, storage, and the analytical bound.

All functions take NumPy or CuPy arrays, compute in float64 and return Python numbers (on CuPy that waits for the
device). The approximation may still be compressed; measuring changes nothing in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .array import QuantizedArray
from .backend import xp as _xp
from .ops import dequantize, source

__all__ = [
    "BoundCheck",
    "bits_per_element",
    "compression_ratio",
    "cosine",
    "error_bound",
    "max_abs",
    "mse",
    "offset_note",
    "rmse",
    "sqnr_db",
    "sums",
]

# Elements that are looked at together. NumPy's stay in the cache, and are so few that OpenBLAS adds up their products
# in one thread: several wait for each other longer than they add. A GPU has few kernels to begin.
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 13, 1 << 22

#: |mean| / standard deviation from which `offset_note` speaks: the SQNR is 10 dB over the centred one from there on,
#: which is more than a bit and a half, and next to nothing of a normal distribution lies on the other side of 0.
FAR_OFFSET = 3.0


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
    mean : float
        Mean of the original.
    spread : float
        Sum of squares of the original's distances to its mean.
    """

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0
    other: float = 0.0
    product: float = 0.0
    largest: float = 0.0
    mean: float = 0.0
    spread: float = 0.0

    def __add__(self, right: Sums) -> Sums:
        count = self.count + right.count
        share = right.count / count if count else 0.0
        apart = right.mean - self.mean
        return Sums(
            count,
            self.signal + right.signal,
            self.noise + right.noise,
            self.other + right.other,
            self.product + right.product,
            float(np.maximum(self.largest, right.largest)),
            self.mean + share * apart if self.count else right.mean,
            self.spread + right.spread + apart * apart * share * self.count,
        )

    @property
    def mse(self) -> float:
        """Mean squared error; NaN without elements."""
        return self.noise / self.count if self.count else math.nan

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in dB: infinite without an error, NaN without elements."""
        return self._ratio_db(self.signal)

    @property
    def sqnr_centered_db(self) -> float:
        """The same with the variance of the original as its signal: what an offset of the data adds is left out."""
        return self._ratio_db(self.spread)

    def _ratio_db(self, signal: float) -> float:
        if not self.count or math.isnan(signal) or math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(signal / self.noise) if signal else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine similarity; NaN when either array is all zeros."""
        norm = math.sqrt(self.signal) * math.sqrt(self.other)
        return self.product / norm if norm else math.nan


def _array(x: Any, argument: str) -> Any:
    """A NumPy or CuPy array, without masks."""
    if not _xp.is_array(x):
        hint = ": call .dequantize()" if isinstance(x, QuantizedArray) else ""
        raise TypeError(f"{argument} is {type(x).__name__}; it must be a NumPy or CuPy array{hint}")
    return _xp.as_array(x, argument)


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    x, y = _array(x, "x"), _array(y, "y")
    if x.shape != y.shape:
        raise ValueError(f"x has shape {x.shape} and y {y.shape}; they must be equal")
    _xp.check_same_device(x, y)
    return x, y


def sums(x: Any, y: Any) -> Sums:
    """One pass over original and approximation.

    Parameters
    ----------
    x, y : array
        Original and approximation, of equal shape and on one device. `y` may be a QuantizedArray, which is decoded for
        this.

    Returns
    -------
    Sums
        Carries ``mse``, ``sqnr_db``, ``sqnr_centered_db``, ``cosine`` and ``largest``; adding two of them joins their
        arrays.

    Raises
    ------
    TypeError
        When an argument is not an array, or has a mask.
    ValueError
        When shapes or devices differ.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> both = kb.metrics.sums(np.ones(3), np.zeros(3)) + kb.metrics.sums(np.ones(1), np.ones(1))
    >>> both.count, both.mse
    (4, 0.75)
    """
    x, other = _pair(x, dequantize(y) if isinstance(y, QuantizedArray) else y)
    total = Sums()
    with _xp.on_device_of(x), np.errstate(invalid="ignore", over="ignore"):
        flat, chunk = (x.reshape(-1), other.reshape(-1)), _DEVICE_CHUNK if _xp.is_cupy(x) else _HOST_CHUNK
        for start in range(0, x.size, chunk):
            a, b = (array[start : start + chunk].astype(np.float64) for array in flat)
            error = a - b
            products = float(a @ a), float(error @ error), float(b @ b), float(a @ b)
            total += Sums(a.size, *products, float(abs(error).max()), *_moments(a))
    return total


def _moments(a: Any) -> tuple[float, float]:
    """Mean, and sum of squared distances to it, of a flat float64 array that is not empty."""
    first = a[:1]
    a = a - first  # a constant array has a spread of exactly 0
    mean = a.mean()
    a -= mean
    return float(first[0] + mean), float(a @ a)


def offset_note(x: Any) -> str | None:
    """Say it when the mean of an array is far from 0, compared with its standard deviation.

    Formats have a scale and no offset: they keep what lies around 0, and the SQNR of data far from there is high
    however little of their variation is left.

    Parameters
    ----------
    x : array or Sums
        The original, or what `sums` has measured of it.

    Returns
    -------
    str or None
        One sentence with the remedy; None where the mean is at most 3 standard deviations from 0, or all elements are
        equal, or one is NaN or infinite.

    Raises
    ------
    TypeError
        When `x` is not an array, or has a mask.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kelvin = np.array([285.0, 295.0] * 100)
    >>> kb.metrics.offset_note(kelvin)  # doctest: +ELLIPSIS
    "the mean is 290 and the standard deviation 5: the SQNR is 35 dB over that of the variation ...; subtract ..."
    >>> kb.metrics.offset_note(kelvin - 290) is None
    True
    """
    if not isinstance(x, Sums):
        x = _array(x, "x")
        x = sums(x, x)
    if not 0 < x.spread < math.inf:
        return None
    deviation = math.sqrt(x.spread / x.count)
    ratio = abs(x.mean) / deviation
    if not ratio > FAR_OFFSET:
        return None
    return (
        f"the mean is {x.mean:.4g} and the standard deviation {deviation:.4g}: the SQNR is "
        f"{10 * math.log10(1 + ratio * ratio):.0f} dB over that of the variation (sqnr_centered_db); subtract the mean "
        "before quantizing and add it afterwards, or take affine integers with zero='float'"
    )


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


def sqnr_db(x: Any, y: Any, *, centered: bool = False) -> float:
    """Signal to quantization noise ratio, ``10 log10(sum x^2 / sum (x - y)^2)`` in dB; infinite when x equals y.

    Parameters
    ----------
    x, y : array
        Original and approximation, as for `sums`.
    centered : bool, default False
        Take the distances of x to its mean for the signal, instead of x: then an offset of the data does not count.

    Returns
    -------
    float

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> kb.metrics.sqnr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    20.0
    >>> x = 290 + 5 * np.random.default_rng(0).standard_normal(4096)
    >>> q = kb.quantize(x, "kbit8")
    >>> round(kb.metrics.sqnr_db(x, q), 1), round(kb.metrics.sqnr_db(x, q, centered=True), 1)
    (47.4, 12.2)
    """
    found = sums(x, y)
    return found.sqnr_centered_db if centered else found.sqnr_db


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
        Largest bound of any finite element; infinite where a block holds an infinity.
    error : float
        Largest error of any element; infinite where one was lost.
    violations : int
        Elements whose error exceeds their own bound, and elements that were lost: NaN that did not come back as NaN,
        infinities that did not come back as themselves, and finite numbers that came back as NaN.
    """

    bound: float
    error: float
    violations: int


def error_bound(x: Any, q: QuantizedArray, y: Any = None) -> BoundCheck | None:
    """Compare every error with the format's analytical bound, half an ulp of the output's dtype included.

    For a codebook that is ``(max(largest gap / 2, 1 - last, first + 1) + e * max(1, largest magnitude)) * absmax`` of
    the element's block, where e bounds the relative error of the stored scale. It holds for finite blocks.

    Parameters
    ----------
    x : array
        The original, NumPy or CuPy. float64 beyond the range of float32 counts as infinite where the format is given
        float32.
    q : QuantizedArray
        Its compressed form.
    y : array, optional
        Its decompressed form; by default it is computed.

    Returns
    -------
    BoundCheck or None
        None where no bound of the format is known.

    Raises
    ------
    TypeError
        When an argument is of the wrong type or dtype, or has a mask.
    ValueError
        When the shapes differ.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    >>> kb.metrics.error_bound(x, kb.quantize(x, "kbit4")).violations
    0
    >>> x[7] = np.nan  # which comes back as a number
    >>> kb.metrics.error_bound(x, kb.quantize(x, "kbit4")).violations
    1
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q is {type(q).__name__}; it must be a QuantizedArray, as quantize returns")
    x, y = _array(x, "x"), dequantize(q) if y is None else _array(y, "y")
    _xp.float_dtype(x.dtype, "x")
    half, least = _float_info(_xp.float_dtype(y.dtype, "y").name)
    if x.shape != y.shape or x.shape != q.shape:
        raise ValueError(f"x has shape {x.shape}, q {q.shape} and y {y.shape}; they must be equal")
    host_x, host_y = _xp.to_device(x, "cpu"), _xp.to_device(y, "cpu").reshape(-1)
    largest_bound = largest_error = 0.0
    violations = 0
    with np.errstate(invalid="ignore", over="ignore"):
        given = source(host_x, q.format.dtypes)
        blocks = q.format.bounds(given, q.get().planes, q.lead)
        if blocks is None:
            return None
        host_x, given = host_x.reshape(-1), given.reshape(-1)
        each = q.format.block if blocks.size < host_x.size else 1  # elements of a bound
        chunk = max(_HOST_CHUNK // each, 1) * each
        for start in range(0, host_x.size, chunk):
            a = host_x[start : start + chunk].astype(np.float64)
            b = host_y[start : start + chunk].astype(np.float64)
            entered = given[start : start + chunk].astype(np.float64)
            first = start // each
            bound = np.repeat(blocks[first : first + -(-a.size // each)], each)[: a.size]
            # Half an ulp of the output, at the larger magnitude that a value within the bound may have.
            bound = bound + np.maximum((abs(a) + bound) * half, least)
            finite = np.isfinite(entered)
            kept = np.where(finite, ~np.isnan(b), (entered == b) | (np.isnan(entered) & np.isnan(b)))
            error = np.where(finite, abs(a - b), 0.0)
            error[~kept] = np.inf
            violations += int(np.count_nonzero(~kept | (finite & ~(error <= bound))))
            largest_bound = float(np.maximum(largest_bound, bound.max(initial=0, where=finite)))
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
