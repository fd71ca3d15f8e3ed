"""Codebooks designed for a distribution: Lloyd-Max on the exact density of block-normalised values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FormatError
from ..formats.codebook.search import check_block, check_k

# The cumulative weight of the quotients is known at so many points, exactly, and between them by cubic polynomials.
_POINTS = 4097
# Steps of the integral over the largest element: double exponential, so neither tails nor singular ends need care.
_STEP, _FROM, _TO = 0.05, -5.5, 3.2
# Levels that move by less have converged; they are rounded to float32 anyway.
_TOLERANCE = 1e-11
_LLOYD, _NEWTON = 20, 200


def design_codebook(distribution: Any, k: int = 4, block: int = 64) -> np.ndarray:
    """The 2^k values with the least squared error for independent elements of a distribution, without a sample.

    What a codebook sees are quotients: elements divided by the absmax of their block. Their density is computed, not
    drawn, and each quotient is weighted with the square of its absmax: then the error that is minimised is that of the
    decoded array, as with `fit_table`.

    Parameters
    ----------
    distribution : frozen scipy.stats distribution
        A continuous one of finite variance, such as ``scipy.stats.t(5)``. A scale has no influence, a location has.
    k : int, default 4
        1 to 8.
    block : int, default 64
        Elements that share an absmax: that of the format the codebook is for; 32 for ``kbit1`` to ``kbit8``.

    Returns
    -------
    numpy.ndarray
        float32[2^k], ascending: ``codebook=`` of ``kbit1`` to ``kbit8`` (block 32) and of ``table4`` (k = 4). Each
        value is the centre of mass of what is nearest to it. That holds for the first and the last one too: they are
        not forced to -1 and 1, where the largest elements lie, but what those elements weigh pulls them there. Nor is
        0 forced to be a value.

    Raises
    ------
    TypeError
        When `distribution` is not a frozen continuous distribution.
    FormatError
        When `k` or `block` is not allowed, or the variance is not finite (the error would not be either).

    See Also
    --------
    fit_table : the same for data.

    Notes
    -----
    With F the distribution function of an element, G(a) = F(a) - F(-a) that of its magnitude and n elements in a block,
    an element that is not the largest has the quotient y or less with the weight

        integral of a^2 F(a y) d G(a)^(n - 1),

    and one that is the largest has the quotient 1 with the weight: integral of a^2 G(a)^(n - 1) d F(a) over a > 0; -1
    likewise. Both are taken by double exponential quadrature. Lloyd's iteration (S. P. Lloyd, 1982; J. Max, 1960)
    starts at the quantiles of the cube root of the density. After 20 steps Newton's method on the same conditions takes
    over, and falls back to a step of Lloyd's wherever it would put the values out of order or further from the
    conditions. It ends when no value moves by more than 1e-11.

    Examples
    --------
    >>> import numpy as np, kbitcupy as kb
    >>> from scipy import stats
    >>> kb.explore.design_codebook(stats.norm(), 2, block=32).round(4)
    array([-0.6515, -0.1903,  0.1903,  0.6515], dtype=float32)
    >>> x = stats.laplace().rvs(1 << 16, random_state=0).astype(np.float32)
    >>> own = kb.explore.design_codebook(stats.laplace(), 3, block=32)
    >>> plain, better = kb.quantize(x, "kbit3"), kb.quantize(x, "kbit3", codebook=own)
    >>> bool(kb.metrics.sqnr_db(x, better) > kb.metrics.sqnr_db(x, plain) + 0.3)
    True
    """
    k, block = check_k(k), check_block(block)
    return _converged(_quotients(_Magnitudes(distribution), block), 1 << k).astype(np.float32)


class _Magnitudes:
    """A distribution where integrals over its elements take its values: nodes on either side of 0 and their weights."""

    def __init__(self, distribution: Any):
        def method(*names: str) -> Callable[[Any], Any]:
            found = next((getattr(distribution, name) for name in names if hasattr(distribution, name)), None)
            if found is None or hasattr(distribution, "freeze") or not hasattr(distribution, "pdf"):
                raise TypeError(
                    f"distribution is {distribution!r:.80}; it must be a frozen continuous distribution of "
                    "scipy.stats, such as scipy.stats.norm() or scipy.stats.t(5)"
                )
            return found

        self.below, self.above = method("cdf"), method("sf", "ccdf")
        least, most = method("ppf", "icdf"), method("isf", "iccdf")
        steps = np.arange(_FROM, _TO, _STEP)
        share = 1 / (1 + np.exp(-math.pi * np.sinh(steps)))
        weight = _STEP * math.pi * np.cosh(steps) * share / (1 + np.exp(math.pi * np.sinh(steps)))
        with np.errstate(all="ignore"):
            variance = float(distribution.var() if hasattr(distribution, "var") else distribution.variance())
            negative, positive = float(self.below(np.float64(0))), float(self.above(np.float64(0)))
            # The largest element of a block is positive, or negative: nodes for both, ends of the distribution first.
            self.largest = np.concatenate((most(positive * share), -least(negative * share)))
        if not math.isfinite(variance) or variance <= 0:
            raise FormatError(
                f"distribution has the variance {variance}; it must be positive and finite, or no codebook has a "
                "finite error: truncate the distribution"
            )
        self.weight = np.concatenate((positive * weight, negative * weight))
        self.is_positive = np.arange(2 * len(steps)) < len(steps)
        used = np.isfinite(self.largest) & (self.largest > 0) & (self.weight > 0)
        # In units of the standard deviation, so that squares stay in range.
        self.unit = math.sqrt(variance)
        self.largest, self.weight, self.is_positive = self.largest[used], self.weight[used], self.is_positive[used]

    def others_are_smaller(self, count: int) -> np.ndarray:
        """Probability that so many elements are smaller than each node."""
        outside = self.above(self.largest) + self.below(-self.largest)
        with np.errstate(divide="ignore"):
            return np.exp(count * np.log1p(-np.minimum(outside, 1.0))) if count else np.ones_like(outside)


@dataclass(frozen=True)
class _Quotients:
    """Weights of the quotients in [-1, 1]: a density, and what lies at -1 and at 1."""

    below: Any  # cumulative weight of the density, a piecewise polynomial, with its integral and its derivative
    integral: Any
    density: Any
    ends: tuple[float, float]
    low: float
    high: float

    def cells(self, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weight and first moment between neighbouring bounds, the outermost of which are -1 and 1."""
        at = np.clip(bounds, self.low, self.high)
        weight = self.below(at)
        mass, moment = np.diff(weight), np.diff(at * weight - self.integral(at))
        mass[0] += self.ends[0]
        mass[-1] += self.ends[1]
        moment[0] -= self.ends[0]
        moment[-1] += self.ends[1]
        return mass, moment


def _quotients(magnitudes: _Magnitudes, block: int) -> _Quotients:
    from scipy.interpolate import PchipInterpolator  # 0.2 s, for this alone

    a, size = magnitudes.largest, (magnitudes.largest / magnitudes.unit) ** 2 * magnitudes.weight
    alone = size * magnitudes.others_are_smaller(block - 1)
    ends = float(alone[~magnitudes.is_positive].sum()), float(alone[magnitudes.is_positive].sum())
    # The largest is another one of block - 1, and the rest smaller still.
    beside = size * (block - 1) * magnitudes.others_are_smaller(max(block - 2, 0))
    beside, a = beside[beside > 0], a[beside > 0]
    low, high = -1.0, 1.0
    while True:
        points = np.linspace(low, high, _POINTS)
        weight = np.zeros(_POINTS)
        for node, share in zip(a, beside, strict=True):
            weight += share * magnitudes.below(node * points)
        weight -= weight[0]
        inside = np.flatnonzero(np.diff(weight) > 1e-15 * weight[-1])
        if not inside.size:
            raise FormatError(f"block is {block}; a codebook needs blocks of two elements or more")
        start, stop = points[inside[0]], points[inside[-1] + 1]
        if stop - start > (high - low) / 4 or high - low < 1e-6:
            break
        low, high = float(start), float(stop)  # all weight lies in a small part: look closer
    below = PchipInterpolator(points, weight)
    return _Quotients(below, below.antiderivative(), below.derivative(), ends, low, high)


def _converged(quotients: _Quotients, size: int) -> np.ndarray:
    """Levels of least weighted squared error."""
    from scipy.linalg import solve_banded

    points = np.linspace(quotients.low, quotients.high, _POINTS)
    spread = np.cumsum(np.cbrt(np.maximum(quotients.density(points), 0.0)))
    level = np.interp((np.arange(size) + 0.5) / size * spread[-1], spread, points)

    def lloyd(level: np.ndarray) -> np.ndarray:
        mass, moment = quotients.cells(_bounds(level))
        return np.where(mass > 0, moment / np.where(mass > 0, mass, 1.0), level)

    def missed(level: np.ndarray) -> np.ndarray:
        mass, moment = quotients.cells(_bounds(level))
        return level * mass - moment

    for _ in range(_LLOYD):
        level = lloyd(level)
    for _ in range(_NEWTON):
        bounds = _bounds(level)
        mass, moment = quotients.cells(bounds)
        density = np.where((bounds > quotients.low) & (bounds < quotients.high), quotients.density(bounds), 0.0)
        density[0] = density[-1] = 0.0
        to_left, to_right = (level - bounds[:-1]) * density[:-1] / 2, (bounds[1:] - level) * density[1:] / 2
        bands = np.zeros((3, size))
        bands[0, 1:], bands[1], bands[2, :-1] = -to_right[:-1], mass - to_left - to_right, -to_left[1:]
        residual = level * mass - moment
        try:
            step = level - solve_banded((1, 1), bands, residual)
        except (ValueError, np.linalg.LinAlgError):  # a cell without weight
            step = lloyd(level)
        ordered = bool((np.diff(step) > 0).all() and abs(step).max() <= 1)
        if not ordered or abs(missed(step)).sum() > abs(residual).sum():
            step = lloyd(level)
        moved, level = float(abs(step - level).max()), step
        if moved <= _TOLERANCE:
            break
    return np.sort(level)


def _bounds(level: np.ndarray) -> np.ndarray:
    """Where cells begin and end: -1, the middles between the levels, 1."""
    return np.concatenate(([-1.0], (level[:-1] + level[1:]) / 2, [1.0]))
