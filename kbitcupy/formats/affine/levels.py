"""Ranges of integers, and where the numbers of a dtype end."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import FormatError

#: Bounds of the integers of a fake quantization: float32 rounds to integers exactly well beyond them.
MAX_LEVEL = 1 << 20
SINGLE, DOUBLE, INT32 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class Levels:
    """The integers that a quantizer may use. `check_levels` gives the same object for the same range.

    Parameters
    ----------
    qmin, qmax : int
        Ends of the range.
    symmetric : bool, default True
        How a scale is found: around one zero point for all blocks, or each with its own.
    floating : bool, default False
        Whether each block has an offset, which need not be a multiple of its scale, in place of a zero point.
    """

    qmin: int
    qmax: int
    symmetric: bool = True
    floating: bool = False

    @property
    def zero(self) -> int:
        """The zero point of a symmetric range: 0, or the middle of a range without negative numbers."""
        return 0 if self.qmin < 0 else (self.qmin + self.qmax + 1) // 2

    @property
    def divisor(self) -> int:
        """What a block's range is divided by to give its scale."""
        return self.qmax - self.zero if self.symmetric else self.qmax - self.qmin


def check_levels(
    qmin: Any,
    qmax: Any,
    limits: tuple[int, int] = (-MAX_LEVEL, MAX_LEVEL),
    symmetric: bool = True,
    floating: bool = False,
) -> Levels:
    """A range from its ends.

    Raises
    ------
    FormatError
        When they are not integers in order within `limits`.
    """
    if type(qmin) is type(qmax) is int and limits[0] <= qmin < qmax <= limits[1]:
        return _levels(qmin, qmax, symmetric, floating)
    for name, value in (("qmin", qmin), ("qmax", qmax)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise FormatError(f"{name} is {value!r}; it must be an integer")
    if not limits[0] <= qmin < qmax <= limits[1]:
        raise FormatError(f"qmin is {qmin} and qmax {qmax}; allowed is {limits[0]} <= qmin < qmax <= {limits[1]}")
    return _levels(int(qmin), int(qmax), symmetric, floating)


_levels = functools.lru_cache(maxsize=256)(Levels)
SIGNED8, UNSIGNED8 = _levels(-128, 127, True, False), _levels(0, 255, True, False)


@dataclass(frozen=True)
class Ends:
    """Where the numbers of a dtype end.

    Parameters
    ----------
    largest : float
        The largest finite number.
    limit : float
        The largest float32 that is rounded to a finite one (of float64 the same as `largest`).
    """

    largest: float
    limit: float


ENDS = {
    "float16": Ends(65504.0, 65520.0 - 2.0**-8),
    "bfloat16": Ends((2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8 - 2.0**-23) * 2.0**127),
    "float32": Ends(float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
    "float64": Ends(float(np.finfo(np.float64).max), float(np.finfo(np.float64).max)),
}


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of scales and of arithmetic beside an array of `dtype`."""
    return DOUBLE if dtype == DOUBLE else SINGLE


@functools.lru_cache(maxsize=1024)
def scalar(dtype: np.dtype, value: float) -> Any:
    """A number as a kernel takes it; to make one costs more than to find it."""
    return dtype.type(value)


def reach_of(levels: Levels, fraction: float | None, rounded: bool = False) -> int:
    """The most steps from the zero point of a symmetric range that a finite number may become.

    `rounded`: the scale may be smaller than the range asks for.
    """
    if not rounded and (fraction is None or fraction == 1):
        return levels.divisor
    return max(levels.qmax - levels.zero, levels.zero - levels.qmin)
