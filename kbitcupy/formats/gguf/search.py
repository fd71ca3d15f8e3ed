"""The searches for the scales of GGUF's K types and of iq4, on NumPy: the reference for the kernels.

A sub-block is a column: arrays are float32[sub, n], the elements of n sub-blocks of 16 or 32 and their weights; what is
found is float32[n]. Constants are float32 too, each operation is rounded, by the brackets, else from left to right, and
sums run over the elements in ascending order. A code is the nearest integer, halves to even, cut to its range, and 0
for what is not finite, as where a range of subnormal numbers is divided by.

- `symmetric`: codes -N to N - 1, of which code * scale comes near: 19 attempts.
- `refined`: the same for weights x * x: one attempt, then one element after the other in up to 5 sweeps.
- `ranged`: codes 0 to N, of which code * scale - minimum comes near: an attempt, and as many more as `Steps` says.
- `positive`: codes 0 to N of numbers that are not negative: 9 attempts, then up to 5 sweeps.
- `tabled`: codes of the 16 numbers of `IQ4`, which times a scale come near: 16 attempts.

Source: ggml, ``ggml-quants.c`` (``make_qx_quants``, ``make_q3_quants``, ``make_qkx2_quants``, ``make_qkx3_quants``,
``make_qp_quants``, ``quantize_row_iq4_nl_impl``), built without contraction. Beyond +-4194303 ggml's rounding wraps,
and its builds differ; here such a code is cut to its range like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .. import integer_codes
from ..chunks import AT_ONCE

#: What the codes of iq4_nl and iq4_xs stand for.
IQ4_BYTES = np.array(integer_codes.IQ4, np.int8)
IQ4 = IQ4_BYTES.astype(np.float32)
# Sub-blocks of smaller numbers have the scale 0.
_NOTHING = np.float32(1e-15)
#: Elements that a type quantizes at a time: a search has calls of NumPy for each sub-block of a block.
CHUNK = 1 << 19
# Elements of a tile: few calls of NumPy, and arrays that stay in the cache.
_TILE = 1 << 16
# Sweeps of `refined` and `positive` over the elements.
_SWEEPS = 5
# With a step beyond this the distance to a minimum may become infinite.
_STEEP = np.float32(1e32)
# Beyond this ggml's rounding wraps.
_FURTHEST = -4194303
_ZERO, _ONE, _TENTH = np.float32(0), np.float32(1), np.float32(0.1)


class Steps(NamedTuple):
    """What `ranged` tries: ranges of `largest` steps, then of `largest` + `first` + `each` * t, t = 0 .. `last`.

    Errors count by their squares or by their magnitudes.
    """

    largest: int
    first: float
    last: int
    each: float
    squares: bool


def weighed(largest: int) -> Steps:
    """What `ranged` tries where importance is given."""
    return Steps(largest, -0.9, 36, 0.05, True)


def tiles(rows: np.ndarray, sub: int, rooms: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """The sub-blocks of float32[blocks, block] as columns, some at a time: which, then x and `rooms` arrays like it.

    There are two columns at least, the one that there is twice, since np.add.reduce has its own order for one.
    """
    parts = rows.reshape(-1, sub)
    tile = _TILE * AT_ONCE.get()
    count = max(-(-rows.size // tile), 1)
    bounds = [len(parts) * i // count for i in range(count + 1)]
    memory = np.empty((rooms + 1, min(tile, 2 * sub + rows.size)), np.float32)
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        columns = max(stop - start, 2)
        arrays = [room[: sub * columns].reshape(sub, columns) for room in memory]
        arrays[0][...] = parts[start:stop].T
        yield slice(start, stop), arrays


def total(x: np.ndarray) -> np.ndarray:
    """The sum of each column, in ascending order, as np.add.reduce has it where there are two columns or more."""
    return np.add.reduce(x, axis=0)


def range_codes(x: np.ndarray, step: np.ndarray, low: np.ndarray, largest: int, out: np.ndarray) -> np.ndarray:
    """The codes of `ranged`: how many steps an element lies over `low`. A step that is infinite comes as 0."""
    np.subtract(x, low, out=out)
    np.multiply(out, step, out=out)
    if np.less(step, -_STEEP).any():
        out[~np.isfinite(out)] = 0
    np.rint(out, out=out)
    return np.clip(out, _ZERO, np.float32(largest), out=out)


def ranged(
    x: np.ndarray, w: np.ndarray, steps: Steps, room: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scale and minimum, not negative, of which code * scale - minimum comes near; step and low for `range_codes`.

    Each attempt takes the codes for a range of so many steps, and the scale and minimum that are best for them; of all
    the one of least error stays, and the next attempts start from its minimum. `room` is three arrays like `x`.
    """
    codes, weighted, other = room
    wide = np.float32(steps.largest)

    def error_of(scale: np.ndarray, low: np.ndarray) -> np.ndarray:
        np.multiply(codes, scale, out=other)
        np.add(other, low, out=other)
        np.subtract(other, x, out=other)
        np.square(other, out=other) if steps.squares else np.abs(other, out=other)
        np.multiply(w, other, out=other)
        return total(other)

    sum_w, sum_x = total(w), total(np.multiply(w, x, out=other))
    low, high = x.min(axis=0), x.max(axis=0)
    zero = np.flatnonzero(low == 0)
    if zero.size:  # the sign of the first one is that of the minimum
        low[zero] = x[x[:, zero].argmin(axis=0), zero]
    low[low > 0] = 0
    constant = high == low
    step = wide / (high - low)
    scale = _ONE / step
    step[~np.isfinite(step)] = 0
    first, start = step, low.copy()
    range_codes(x, step, low, steps.largest, codes)
    error = error_of(scale, low)
    for t in range(steps.last + 1):
        step = ((np.float32(steps.first) + np.float32(steps.each) * np.float32(t)) + wide) / (high - low)
        step[~np.isfinite(step)] = 0
        range_codes(x, step, low, steps.largest, codes)
        np.multiply(w, codes, out=weighted)
        sum_l = total(weighted)
        sum_ll = total(np.multiply(weighted, codes, out=other))
        sum_xl = total(np.multiply(weighted, x, out=other))
        determinant = sum_w * sum_ll - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        above = new_low > 0
        np.copyto(new_low, _ZERO, where=above)
        np.copyto(new_scale, sum_xl / sum_ll, where=above)
        new_error = error_of(new_scale, new_low)
        better = (determinant > 0) & (new_error < error)
        np.copyto(start, low, where=better)
        for kept, found in ((error, new_error), (scale, new_scale), (low, new_low), (first, step)):
            np.copyto(kept, found, where=better)
    for kept in (scale, first):
        kept[constant] = 0
    return scale, -low, first, start


def signed_max(x: np.ndarray) -> np.ndarray:
    """The first number of largest magnitude of each column."""
    low, high = x.min(axis=0), x.max(axis=0)
    largest = np.where(high > -low, high, low)
    both = np.flatnonzero((high == -low) & (high != 0))
    if both.size:
        part = x[:, both]
        largest[both] = part[np.abs(part).argmax(axis=0), np.arange(both.size)]
    return largest


def step_codes(x: np.ndarray, step: np.ndarray, largest: int, out: np.ndarray) -> np.ndarray:
    """The codes of `symmetric` and `refined` at a finite step: the nearest of -`largest` to `largest` - 1."""
    np.multiply(x, step, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(-largest), np.float32(largest - 1), out=out)


def symmetric(
    x: np.ndarray, w: np.ndarray, largest: int, room: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A scale of which code * scale comes near, the step for `step_codes`, and which columns have nothing in them.

    These are those of magnitudes under 1e-15: their scale is 0, their codes are the lowest. `room` is three arrays like
    `x`.
    """
    codes, weighted, other = room
    longest = signed_max(x)
    nothing = np.abs(longest) < _NOTHING
    wx = np.multiply(w, x, out=weighted)

    def attempt(t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        step = -(np.float32(largest) + _TENTH * np.float32(t)) / longest
        step[nothing] = 0
        step_codes(x, step, largest, codes)
        sum_xl = total(np.multiply(wx, codes, out=other))
        np.multiply(w, codes, out=other)
        return step, sum_xl, total(np.multiply(other, codes, out=other))

    kept, sum_xl, sum_ll = attempt(0)
    scale = np.where(sum_ll != 0, sum_xl / sum_ll, _ZERO)
    best = scale * sum_xl
    for t in (*range(-9, 0), *range(1, 10)):
        step, sum_xl, sum_ll = attempt(t)
        better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll)
        new_scale = sum_xl / sum_ll
        for old, new in ((scale, new_scale), (best, new_scale * sum_xl), (kept, step)):
            np.copyto(old, new, where=better)
    return scale, kept, nothing


class _Fit:
    """Codes of columns that `improve` makes better, with their sums: of (w * x) * code and of (w * code) * code.

    ggml keeps the codes of `positive` in bytes: with `in_bytes` those that are negative are kept with 256 added, while
    the sums are of those before.
    """

    def __init__(self, x: np.ndarray, w: np.ndarray, codes: np.ndarray, in_bytes: bool = False):
        self.x, self.w, self.wx, self.in_bytes = x, w, w * x, in_bytes
        self.sum_xl, self.sum_ll = total(self.wx * codes), total((w * codes) * codes)
        self.codes = _in_bytes(codes) if in_bytes else codes

    def improve(self, lowest: int, largest: int) -> np.ndarray:
        """The scale, once sweeps have changed the codes."""
        active = np.arange(self.x.shape[1])
        for _ in range(_SWEEPS):
            active = self._sweep(active, np.float32(lowest), np.float32(largest))
            if not active.size:
                break
        return np.where(self.sum_ll > 0, self.sum_xl / self.sum_ll, _ZERO)

    def _sweep(self, active: np.ndarray, lowest: np.float32, largest: np.float32) -> np.ndarray:
        """Take the code that is best for each element, one after the other; the columns in which one has changed."""
        x, w, wx, codes = (array[:, active] for array in (self.x, self.w, self.wx, self.codes))
        sum_xl, sum_ll = self.sum_xl[active], self.sum_ll[active]
        changed = np.zeros(len(active), bool)
        for i, code in enumerate(codes):
            rest_xl = sum_xl - wx[i] * code
            rest_ll = sum_ll - (w[i] * code) * code
            y = (x[i] * rest_ll) / rest_xl
            y[~np.isfinite(y)] = 0
            new = np.clip(np.rint(y, out=y), lowest, largest, out=y)
            take = (rest_xl > 0) & (new != code)
            if self.in_bytes:
                take &= rest_ll > 0
            rest_xl += wx[i] * new
            rest_ll += (w[i] * new) * new
            take &= (rest_ll > 0) & ((rest_xl * rest_xl) * sum_ll > (sum_xl * sum_xl) * rest_ll)
            if self.in_bytes:
                new = _in_bytes(new)
            for old, found in ((code, new), (sum_xl, rest_xl), (sum_ll, rest_ll)):
                np.copyto(old, found, where=take)
            changed |= take
        self.codes[:, active], self.sum_xl[active], self.sum_ll[active] = codes, sum_xl, sum_ll
        return active[changed]


def _in_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes as bytes have them."""
    return (codes.astype(np.int32) & 255).astype(np.float32)


def refined(x: np.ndarray, largest: int, room: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A scale of which code * scale comes near, and the codes: the lowest in columns of magnitudes under 1e-15."""
    longest = signed_max(x)
    nothing = np.abs(longest) < _NOTHING
    step = np.float32(-largest) / longest
    step[nothing] = 0
    fit = _Fit(x, x * x, step_codes(x, step, largest, room[0]))
    scale = fit.improve(-largest, largest - 1)
    scale[nothing] = 0
    fit.codes[:, nothing] = -largest
    return scale, fit.codes


def positive(x: np.ndarray, w: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """A scale of which code * scale comes near numbers that are not negative, and the codes, from 0 on.

    Of numbers that are negative after all the codes are so too, and ggml keeps them in bytes: see `_Fit`. The error of
    the first attempt, too, is that of the bytes.
    """
    wide = np.float32(largest)
    high = x.max(axis=0)
    nothing = high < _NOTHING
    # Columns of nothing go along; what comes of them is put right at the end.
    high = np.where(nothing, _ONE, high)

    def codes_at(step: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(step * x), np.float32(_FURTHEST), wide)

    def error_of(step: np.ndarray, codes: np.ndarray) -> np.ndarray:
        e = x - (_ONE / step) * codes
        return total((w * e) * e)

    step = wide / high
    error = error_of(step, _in_bytes(codes_at(step)))
    for t in (-4, -3, -2, -1, 1, 2, 3, 4):
        new_step = (_TENTH * np.float32(t) + wide) / high
        new_error = error_of(new_step, codes_at(new_step))
        better = new_error < error
        np.copyto(error, new_error, where=better)
        np.copyto(step, new_step, where=better)
    fit = _Fit(x, w, codes_at(step), in_bytes=True)
    scale = fit.improve(_FURTHEST, largest)
    scale[nothing] = 0
    fit.codes[:, nothing] = 0
    return scale, fit.codes


# Half way between neighbours of IQ4, doubled: whole numbers, so that twice a number need only be cut to a whole one.
_HALFWAY = (IQ4[1:] + IQ4[:-1]).astype(np.intp)
_BEYOND = 256
_NEAREST = np.searchsorted(_HALFWAY, np.arange(-_BEYOND, _BEYOND), side="right")
_NEAREST_VALUE = IQ4[_NEAREST]


def _halves(y: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Where `_NEAREST` has the code of each number; `y` is spent."""
    y += y
    np.floor(y, out=y)
    y += np.float32(_BEYOND)
    np.clip(y, _ZERO, np.float32(2 * _BEYOND - 1), out=y)
    np.copyto(index, y, casting="unsafe")
    return index


def nearest(y: np.ndarray) -> np.ndarray:
    """The codes of the numbers of `IQ4` next to `y`, the upper of two that are as near; `y` is spent.

    NaN, which 0 over a subnormal scale becomes, has the last code.
    """
    y[np.isnan(y)] = IQ4[-1]
    return _NEAREST.astype(np.uint8)[_halves(y, np.empty(y.shape, np.intp))]


def tabled(x: np.ndarray, w: np.ndarray, room: list[np.ndarray]) -> np.ndarray:
    """The scale of which IQ4[code] * scale comes near; 0 in columns of magnitudes under 1e-15."""
    values, other = room
    index = np.empty(x.shape, np.intp)
    longest = signed_max(x)
    nothing = np.abs(longest) < _NOTHING

    def attempt(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        step[nothing] = 0
        np.take(_NEAREST_VALUE, _halves(np.multiply(x, step, out=other), index), out=values, mode="wrap")
        np.multiply(w, values, out=other)
        sum_ll = total(np.multiply(other, values, out=values))
        return total(np.multiply(other, x, out=other)), sum_ll

    sum_xl, sum_ll = attempt(_ONE / (longest / np.float32(127)))
    scale = np.where(sum_ll > 0, sum_xl / sum_ll, _ZERO)
    best = scale * sum_xl
    for t in range(-7, 8):
        sum_xl, sum_ll = attempt(np.float32(t - 127) / longest)
        better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll)
        new_scale = sum_xl / sum_ll
        np.copyto(scale, new_scale, where=better)
        np.copyto(best, new_scale * sum_xl, where=better)
    scale[nothing] = 0
    return scale
