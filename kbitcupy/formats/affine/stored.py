"""The dtypes in which scales and offsets are stored, and how numbers become theirs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ...backend.xp import named_dtype
from .levels import ENDS, SINGLE, Levels

# What rounding to a dtype may add to a range, relative: ranges of offsets stay so far below the end of float32.
_ROOM = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}
_SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
#: Names of the dtypes.
SCALE_DTYPES = tuple(_ROOM)


@dataclass(frozen=True)
class Stored:
    """A dtype of scales and offsets.

    Parameters
    ----------
    name : str
        One of `SCALE_DTYPES`.
    """

    name: str

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The dtype itself."""
        return named_dtype(self.name)

    @property
    def smallest(self) -> float:
        """The smallest positive number."""
        return _SMALLEST[self.name]

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return ENDS[self.name].largest

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """float32 or float64 numbers rounded by way of float32, none of them beyond `largest`, in their own dtype."""
        with np.errstate(all="ignore"):
            near = np.clip(values.astype(SINGLE).astype(self.dtype).astype(SINGLE), -self.largest, self.largest)
        return near.astype(values.dtype)

    def scale(self, values: np.ndarray) -> np.ndarray:
        """Scales, as `nearest`; positive ones stay positive."""
        near = self.nearest(values)
        return np.where(values > 0, np.maximum(near, values.dtype.type(self.smallest)), near)

    def below(self, values: np.ndarray) -> np.ndarray:
        """Numbers rounded down, but none beyond `largest`, in their own dtype."""
        near = self.nearest(values)
        return np.where(near > values, self._beside(near, -1), near)

    def above(self, values: np.ndarray) -> np.ndarray:
        """Numbers rounded up, but none beyond `largest`, in their own dtype."""
        near = self.nearest(values)
        return np.where((near < values) & (near < self.largest), self._beside(near, 1), near)

    def _beside(self, values: np.ndarray, step: int) -> np.ndarray:
        """The numbers of the dtype before or behind those that are given, which are of it, too; none is infinite."""
        word = np.dtype(f"i{self.dtype.itemsize}")
        bits = values.astype(self.dtype).view(word).astype(np.int64)
        sign = np.int64(np.iinfo(word).min)
        order = np.where(bits < 0, sign - bits, bits) + step  # counts numbers from 0 on; -0 is 0
        bits = np.where(order < 0, sign - order, order)
        near = bits.astype(word).view(self.dtype).astype(values.dtype)
        return np.clip(near, -values.dtype.type(self.largest), values.dtype.type(self.largest))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (there are three, and they stay)
    def most(self, levels: Levels) -> float:
        """The largest scale whose products with codes are finite in float32."""
        reach, limit = max(-levels.qmin, levels.qmax), np.float64(ENDS["float32"].limit)
        found = self.below(np.minimum(limit / reach, self.largest)[None])[0]
        assert found * reach <= limit
        return float(found)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def range_end(self, of: str) -> float:
        """A float32: what lies beyond it, in an array of the dtype `of`, counts as it where a range is found."""
        ends = ENDS["float32" if of == "float64" else of]
        return float(SINGLE.type(min(ends.largest, ends.limit * (1 - _ROOM[self.name]))))


_KINDS = {name: Stored(name) for name in SCALE_DTYPES}
FLOAT32 = _KINDS["float32"]


def stored(name: str) -> Stored:
    """By the name of the dtype."""
    return _KINDS[name]
