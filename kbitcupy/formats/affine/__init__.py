"""Affine integers: formats ``int8``, ``uint8``, ``int4``, ``uint4``, and the arithmetic behind `kbitcupy.affine`.

An element is stored as the integer ``q = clamp(rint(x / scale) + zero_point, qmin, qmax)`` and comes back as
``scale * (q - zero_point)``. How many elements share a scale is the granularity; a shape and a granularity make one
block shape (`Blocks`), and everything below works on that.

==========  ==============================================================  ===================
granularity  elements that share a scale, of an array of shape [..., N, D]   scales
==========  ==============================================================  ===================
tensor      all                                                             [1]
channel, a  all with the same index on axis a                               [C], C = shape[a]
token       those of one row along the last axis                            [..., N]
group, g    g neighbours along the last axis, the last group may be short   [..., N, ceil(D/g)]
==========  ==============================================================  ===================

===========  =============================  =================================================================
plane        dtype, entries                 contents
===========  =============================  =================================================================
codes        int8 or uint8, n               the integers in C order; ``int4`` and ``uint4``: uint8, ceil(n / 2),
                                            element 2i in the low nibble (two's complement), a last odd high
                                            nibble is 0
scale        float32, one for each block    in C order of the scales
zero_point   int32, one for each block      only with ``symmetric=False``
===========  =============================  =================================================================

Rounding: every operation is one IEEE operation in float32, or in float64 where an array is float64 (a plane of scales
is float32 all the same), and subnormal numbers are kept. rint rounds half to even; its result is clamped before the
zero point is added, so nothing overflows.

Special values: NaN becomes the zero point, infinities the ends of the range. A scale of 0, and on a device also one
that is negative or not finite, gives the zero point, comes back as 0 and has gradient 0. A zero point on a device that
lies outside the range counts as the nearer end of it.

Scales that are found: symmetric ``max|x| / qmax`` with zero point 0; an unsigned range takes the zero point in its
middle, ``2^(bits-1)``, and ``max|x| / (2^(bits-1) - 1)``. Asymmetric ``(max - min) / (qmax - qmin)``, the range widened
to hold 0, the difference (which does not overflow) and the quotient in float64, and ``zero_point = qmin - rint(min /
scale)``, clamped. NaN is ignored, an infinity counts as the largest finite number of the array's dtype, and a block of
zeros has the scale 1. With a percentile p the maximum is the value of rank ``ceil(p / 100 * m)`` among the m of a block
(NaN counts as 0), the minimum that of the same rank from above.

What is decoded may lie half a step beyond what was found. A finite number comes back as a finite number of its dtype
all the same: let r be the larger of ``qmax - zero_point`` and ``zero_point - qmin`` (for a symmetric range what max|x|
becomes, unless a percentile below 100 leaves numbers beyond it), and F the largest float32 that is rounded to a finite
number of the array's dtype (the largest float64, for float64). Where ``scale * r`` exceeds F the scale is ``F / r``
instead, or the number below that where ``(F / r) * r`` exceeds F too.

Sources: the quantize family of baracuda-kernels, PyTorch's fake_quantize, the granularities of torchao.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...backend import xp as _xp
from ...backend.compile import CXX_TYPES, Template
from ...backend.launch import Kernel, by_value, shared_memory
from ...errors import DeviceError, FormatError
from ..base import Format, Integers, Magnitude, Plane, register
from ..decoders import Decoder, templates

#: Bounds of the integers of a fake quantization: float32 rounds to integers exactly well beyond them.
MAX_LEVEL = 1 << 20

_SINGLE, _DOUBLE, _INT32 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32)
_SURELY_FINITE = 2.0**127  # in every dtype of scales

Granularity = str | tuple[str, int]


# ---- granularity ---------------------------------------------------------------------------------------------------


def check_granularity(granularity: Any) -> Granularity:
    """``"tensor"``, ``"token"``, ``("channel", axis)`` or ``("group", size)``, from any of their spellings.

    Raises
    ------
    FormatError
        When it is none of them.
    """
    if isinstance(granularity, str):
        if granularity in ("tensor", "token"):
            return granularity
        kind, colon, number = granularity.partition(":")
        if colon and number.removeprefix("-").isdecimal():
            granularity = kind, int(number)
    if isinstance(granularity, (tuple, list)) and len(granularity) == 2:
        kind, number = granularity
        if kind in ("channel", "group") and isinstance(number, (int, np.integer)) and not isinstance(number, bool):
            if kind == "group" and number < 1:
                raise FormatError(f"the group size of granularity is {number}; it must be at least 1")
            return kind, int(number)
    raise FormatError(
        f"granularity is {granularity!r}; allowed are 'tensor', 'token', ('channel', axis) and ('group', size), in "
        "text channel:0 and group:32"
    )


@dataclass(frozen=True)
class Part:
    """Blocks of one size: an array, cut to ``[:, first:last]`` and viewed as [outer, blocks, inner].

    Parameters
    ----------
    rows : tuple of int
        The array as a matrix.
    first, last : int
        Columns of the part.
    shape : tuple of int
        The part, viewed as three axes.
    scale : tuple of int
        All scales, as a matrix with the same rows or one.
    scale_first, scale_last : int
        Columns of that matrix.
    """

    rows: tuple[int, int]
    first: int
    last: int
    shape: tuple[int, int, int]
    scale: tuple[int, int]
    scale_first: int
    scale_last: int

    def view(self, array: np.ndarray) -> np.ndarray:
        """[outer, blocks, inner] of a contiguous array."""
        return array.reshape(self.rows)[:, self.first : self.last].reshape(self.shape)

    def of_blocks(self, array: np.ndarray) -> np.ndarray:
        """An array of one entry for each block (or for all), to be broadcast against `view`."""
        if array.size == 1:
            return array.reshape(1, 1, 1)
        return array.reshape(self.scale)[:, self.scale_first : self.scale_last].reshape(-1, self.shape[1], 1)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The block shape of an array: element i has scale number ``i // row * per_row + i % row // run``.

    Parameters
    ----------
    size : int
        Elements.
    row, run, per_row : int
        See above.
    shape : tuple of int
        Shape of the scales.
    parts : tuple of Part
        What NumPy works on.
    """

    size: int
    row: int
    run: int
    per_row: int
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @functools.cached_property
    def count(self) -> int:
        """Number of scales."""
        return math.prod(self.shape)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that scales may be given in: that of the granularity, with a 1 behind it, or flat."""
        return self.shape, (*self.shape, 1), (self.count,)

    @property
    def layout(self) -> tuple[int, ...]:
        """Equal for two shapes whose elements share scales in the same way."""
        # Where there are no elements, or one scale for all, the lengths say nothing.
        lengths = (self.row, self.run, self.per_row) if self.size and self.count > 1 else ()
        return self.size, self.count, *lengths


@functools.lru_cache(maxsize=1024)
def blocks_of(shape: tuple[int, ...], granularity: Granularity) -> Blocks:
    """The block shape of an array.

    Raises
    ------
    FormatError
        When the granularity does not go with the shape.
    """
    size = math.prod(shape)
    if granularity == "tensor":
        part = Part((1, size), 0, size, (1, 1, size), (1, 1), 0, 1)
        return Blocks(size, max(size, 1), max(size, 1), 0, (1,), (part,))
    if not shape:
        raise FormatError(f"granularity {granularity!r} needs an axis, and a 0-d array has none: use 'tensor'")
    if granularity[0] == "channel":
        axis = int(granularity[1])
        if not -len(shape) <= axis < len(shape):
            raise FormatError(
                f"axis {axis} of granularity {granularity!r} is out of range for an array of shape {shape}"
            )
        axis %= len(shape)
        outer, count, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        part = Part((outer, count * inner), 0, count * inner, (outer, count, inner), (1, count), 0, count)
        if outer == 1:  # as tokens: block after block
            return Blocks(size, max(inner, 1), max(inner, 1), 1, (count,), (part,))
        return Blocks(size, max(count * inner, 1), max(inner, 1), 0, (count,), (part,))
    length = shape[-1]
    rows = math.prod(shape[:-1])
    if granularity == "token":
        part = Part((1, size), 0, size, (1, rows, length), (1, rows), 0, rows)
        return Blocks(size, max(length, 1), max(length, 1), 1, shape[:-1], (part,))
    group = min(int(granularity[1]), max(length, 1))
    groups = -(-length // group)
    scales = (*shape[:-1], groups)
    if length % group == 0:
        part = Part((1, size), 0, size, (1, rows * groups, group), (1, rows * groups), 0, rows * groups)
        return Blocks(size, group, group, 1, scales, (part,))
    whole = groups - 1
    parts = (
        Part((rows, length), 0, whole * group, (rows, whole, group), (rows, groups), 0, whole),
        Part((rows, length), whole * group, length, (rows, 1, length - whole * group), (rows, groups), whole, groups),
    )
    return Blocks(size, length, group, groups, scales, parts if whole else parts[1:])


@functools.lru_cache(maxsize=1024)
def stack_blocks(shape: tuple[int, ...], granularity: Granularity, lead: int) -> Blocks | None:
    """The block shape of a stack of arrays whose first `lead` lengths count them; None where elements of a block lie
    apart in each of them.
    """
    blocks = blocks_of(shape[lead:], granularity)
    members = math.prod(shape[:lead])
    if members == 1:
        return blocks
    if blocks.count > 1 and not (blocks.per_row == 1 and blocks.row == blocks.run):
        return None
    return blocks_of((members * blocks.count, blocks.size // max(blocks.count, 1)), "token")


# ---- ranges --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Levels:
    """The integers that a quantizer may use. `check_levels` gives the same object for the same range.

    Parameters
    ----------
    qmin, qmax : int
        Ends of the range.
    symmetric : bool, default True
        How a scale is found: around one zero point for all blocks, or each with its own.
    """

    qmin: int
    qmax: int
    symmetric: bool = True

    @property
    def zero(self) -> int:
        """The zero point of a symmetric range: 0, or the middle of a range without negative numbers."""
        return 0 if self.qmin < 0 else (self.qmin + self.qmax + 1) // 2

    @property
    def divisor(self) -> int:
        """What a block's range is divided by to give its scale."""
        return self.qmax - self.zero if self.symmetric else self.qmax - self.qmin


def check_levels(
    qmin: Any, qmax: Any, limits: tuple[int, int] = (-MAX_LEVEL, MAX_LEVEL), symmetric: bool = True
) -> Levels:
    """A range from its ends.

    Raises
    ------
    FormatError
        When they are not integers in order within `limits`.
    """
    if type(qmin) is type(qmax) is int and limits[0] <= qmin < qmax <= limits[1]:
        return _levels(qmin, qmax, symmetric)
    for name, value in (("qmin", qmin), ("qmax", qmax)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise FormatError(f"{name} is {value!r}; it must be an integer")
    if not limits[0] <= qmin < qmax <= limits[1]:
        raise FormatError(f"qmin is {qmin} and qmax {qmax}; allowed is {limits[0]} <= qmin < qmax <= {limits[1]}")
    return _levels(int(qmin), int(qmax), symmetric)


_levels = functools.lru_cache(maxsize=256)(Levels)
SIGNED8, UNSIGNED8 = _levels(-128, 127, True), _levels(0, 255, True)


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


_ENDS = {
    "float16": Ends(65504.0, 65520.0 - 2.0**-8),
    "bfloat16": Ends((2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8 - 2.0**-23) * 2.0**127),
    "float32": Ends(float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
    "float64": Ends(float(np.finfo(np.float64).max), float(np.finfo(np.float64).max)),
}


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of scales and of arithmetic beside an array of `dtype`."""
    return _DOUBLE if dtype == _DOUBLE else _SINGLE


@functools.lru_cache(maxsize=1024)
def _scalar(dtype: np.dtype, value: float) -> Any:
    """A number as a kernel takes it; to make one costs more than to find it."""
    return dtype.type(value)


def check_scale(scale: Any, blocks: Blocks, beside: Any, dtype: np.dtype, argument: str = "scale") -> Any:
    """A scale as a Python float, or as a contiguous array of one entry for each block beside the array `beside`.

    Values of a device array are not looked at.

    Raises
    ------
    FormatError
        When there is neither one, nor one for each block in one of their shapes, or one is negative or not finite.
    DeviceError
        When it is an array on another device.
    TypeError
        When it is not numeric.
    """
    if type(scale) is float and 0 <= scale < _SURELY_FINITE:
        return float(_scalar(dtype, scale))
    if _fits(scale, blocks, beside, dtype):
        return scale
    if type(scale) in (float, int):
        scale = np.asarray(scale, np.float64)
    array = _block_values(scale, blocks, beside, dtype, "fiu", argument)
    if _xp.is_cupy(array):
        return array
    if not (np.isfinite(array) & (array >= 0)).all():
        bad = array[~(np.isfinite(array) & (array >= 0))][0]
        raise FormatError(f"{argument} holds {bad}; scales must be finite in {dtype} and not negative")
    return float(array[0]) if array.size == 1 else array


def check_zero_point(zero_point: Any, blocks: Blocks, beside: Any, levels: Levels) -> Any:
    """A zero point as a Python int, or as a contiguous int32 array of one entry for each block beside `beside`.

    Raises
    ------
    FormatError
        When there is neither one, nor one for each block in one of their shapes, or one is outside the range.
    DeviceError, TypeError
        As `check_scale`.
    """
    if type(zero_point) is int and levels.qmin <= zero_point <= levels.qmax:
        return zero_point
    if _fits(zero_point, blocks, beside, _INT32):
        return zero_point
    array = _block_values(zero_point, blocks, beside, None, "iu", "zero_point")
    if _xp.is_cupy(array):
        return array
    if ((array < levels.qmin) | (array > levels.qmax)).any():
        bad = array[(array < levels.qmin) | (array > levels.qmax)][0]
        raise FormatError(f"zero_point holds {bad}; it must lie in the range, {levels.qmin} to {levels.qmax}")
    array = array.astype(_INT32, copy=False)
    return int(array[0]) if array.size == 1 else array


def _fits(values: Any, blocks: Blocks, beside: Any, dtype: np.dtype) -> bool:
    """Whether this is what a kernel takes: nothing has to be converted, and no value on a device is looked at."""
    return (
        _xp.same_gpu(values, beside)
        and values.dtype == dtype
        and (values.size == 1 or values.shape in blocks.shapes)
        and values.flags.c_contiguous
    )


def _block_values(values: Any, blocks: Blocks, beside: Any, dtype: np.dtype | None, kinds: str, argument: str) -> Any:
    """One number, or one for each block in their order, flat on the host; a single one there may go with any array."""
    array = _xp.as_array(values, argument)
    if array.dtype.kind not in kinds and not ("f" in kinds and array.dtype.name == "bfloat16"):
        raise TypeError(f"{argument} is {array.dtype}; it must hold {'numbers' if 'f' in kinds else 'integers'}")
    if array.size != 1 and array.shape not in blocks.shapes:
        hint = ": transpose it" if array.shape[::-1] in blocks.shapes else ""
        raise FormatError(
            f"{argument} has shape {array.shape}; this granularity needs shape {blocks.shape} (or that with a 1 behind "
            f"it, or flat: ({blocks.count},)) or a single number{hint}"
        )
    if not _xp.same_device(array, beside) and not (isinstance(array, np.ndarray) and array.size == 1):
        raise DeviceError(
            f"{argument} is on {_xp.device_of(array)} and the data on {_xp.device_of(beside)}; move it with "
            ".get() or cupy.asarray"
        )
    if _xp.is_cupy(array):
        wanted = dtype or _INT32
        if array.dtype == wanted and array.flags.c_contiguous:
            return array
        with _xp.on_device_of(array):
            return converted(array, wanted)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array if dtype is None else array.astype(dtype, copy=False)).reshape(-1)


# ---- NumPy ---------------------------------------------------------------------------------------------------------

# Elements that are worked on at a time: what is computed in between stays in the cache.
_SLAB = 1 << 15


def _slabs(shape: tuple[int, int, int]) -> Iterator[tuple[slice, slice, slice]]:
    """Cuts of three axes, each of about _SLAB elements."""
    outer, blocks, inner = shape
    steps = (max(1, _SLAB // (blocks * inner)), max(1, min(blocks, _SLAB // inner)), min(inner, _SLAB))
    for a in range(0, outer, steps[0]):
        for b in range(0, blocks, steps[1]):
            for c in range(0, inner, steps[2]):
                yield slice(a, a + steps[0]), slice(b, b + steps[1]), slice(c, c + steps[2])


def _walk(
    blocks: Blocks, arrays: tuple[np.ndarray, ...], per_block: tuple[Any, ...]
) -> Iterator[tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]:
    """Views of the same elements of all arrays, and of their blocks' entries, that broadcast against them."""
    with np.errstate(all="ignore"):
        for part in blocks.parts if blocks.size else ():
            views = [part.view(array) for array in arrays]
            entries = [part.of_blocks(np.asarray(values)) for values in per_block]
            for cut in _slabs(part.shape):
                yield (
                    tuple(view[cut] for view in views),
                    tuple(
                        e[tuple(c if n > 1 else slice(None) for c, n in zip(cut, e.shape, strict=True))]
                        for e in entries
                    ),
                )


def _divisor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales as divisors: x / inf is 0 where a scale does not count."""
    scale = scale.astype(dtype)
    return np.where((scale > 0) & (scale < np.inf), scale, dtype.type(np.inf))


def _factor(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The scales as factors."""
    scale = scale.astype(dtype)
    return np.where((scale > 0) & (scale < np.inf), scale, dtype.type(0))


def _bounds(zero_point: np.ndarray, levels: Levels) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zero points within the range, and what rint(x / scale) may be."""
    zero = np.clip(zero_point, levels.qmin, levels.qmax).astype(np.int32)
    return zero, levels.qmin - zero, levels.qmax - zero


def _steps(x: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """rint(x / scale) in the dtype of `divisor`."""
    steps = x.astype(divisor.dtype)
    steps /= divisor
    return np.rint(steps, out=steps)


def _clamped(steps: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Within the range, NaN to 0."""
    steps[np.isnan(steps)] = 0
    return np.clip(steps, low, high, out=steps)


def _quantize_host(
    x: np.ndarray, codes: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels
) -> None:
    dtype = compute_dtype(x.dtype)
    for (part, out), (s, z) in _walk(blocks, (x, codes), (scale, zero_point)):
        zero, low, high = _bounds(z, levels)
        steps = _clamped(_steps(part, _divisor(s, dtype)), low.astype(dtype), high.astype(dtype))
        steps += zero.astype(dtype)
        out[...] = steps


def _dequantize_host(
    codes: np.ndarray, out: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels
) -> None:
    dtype = compute_dtype(out.dtype)
    for (part, y), (s, z) in _walk(blocks, (codes, out), (scale, zero_point)):
        steps = part.astype(dtype)
        steps -= _bounds(z, levels)[0].astype(dtype)
        steps *= _factor(s, dtype)
        y[...] = steps


def _fake_quantize_host(
    x: np.ndarray, out: np.ndarray, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels
) -> None:
    dtype = compute_dtype(x.dtype)
    for (part, y), (s, z) in _walk(blocks, (x, out), (scale, zero_point)):
        _, low, high = _bounds(z, levels)
        steps = _clamped(_steps(part, _divisor(s, dtype)), low.astype(dtype), high.astype(dtype))
        steps += 0  # the integer 0 has no sign
        steps *= _factor(s, dtype)
        y[...] = steps


def _mask_host(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, levels: Levels, margin: int, dtype: np.dtype
) -> np.ndarray:
    """Where rint(x / scale) lies in the range, by `margin` steps from its ends; nowhere under a scale of 0."""
    _, low, high = _bounds(zero_point, levels)
    divisor = _divisor(scale, dtype)
    steps = _steps(x, divisor)
    return (steps >= (low + margin).astype(dtype)) & (steps <= (high - margin).astype(dtype)) & (divisor < np.inf)


def _backward_host(
    dy: np.ndarray,
    x: np.ndarray | None,
    dx: np.ndarray,
    scale: Any,
    zero_point: Any,
    blocks: Blocks,
    levels: Levels,
    margin: int,
    divide: bool,
) -> None:
    dtype = compute_dtype(dy.dtype)
    arrays = (dy, dx) if x is None else (dy, dx, x)
    for (dy_part, out, *rest), (s, z) in _walk(blocks, arrays, (scale, zero_point)):
        gradient = dy_part
        if divide:
            divisor = _divisor(s, dtype)
            gradient = np.where(divisor < np.inf, dy_part.astype(dtype) / divisor, dtype.type(0))
        if rest:
            gradient = np.where(_mask_host(rest[0], s, z, levels, margin, dtype), gradient, gradient.dtype.type(0))
        out[...] = gradient


def _multiply_host(dy: np.ndarray, dq: np.ndarray, scale: Any, blocks: Blocks) -> None:
    dtype = compute_dtype(dy.dtype)
    for (part, out), (s,) in _walk(blocks, (dy, dq), (scale,)):
        out[...] = part.astype(dtype) * _factor(s, dtype)


def _find_host(
    x: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    blocks: Blocks,
    levels: Levels,
    fraction: float | None,
) -> None:
    """Scales and zero points of the blocks of x."""
    dtype = compute_dtype(x.dtype)
    high, low = np.zeros(blocks.count, dtype), np.zeros(blocks.count, dtype)  # max(x, 0) and max(-x, 0)
    if fraction is None:
        for (part,), (up, down) in _walk(blocks, (x,), (high, low)):
            number = _without_nan(part, dtype)
            np.maximum(up, number.max(_reduced(up), keepdims=True), out=up)
            np.maximum(down, -number.min(_reduced(up), keepdims=True), out=down)
    else:
        for piece in blocks.parts:
            ends = piece.of_blocks(high), piece.of_blocks(low)
            rows = piece.view(x)
            if ends[0].shape[0] == 1 and rows.shape[0] > 1:  # a channel's elements lie apart
                rows = rows.transpose(1, 0, 2)
            number = _without_nan(rows, dtype)  # the one copy there is
            _percentile_host(number.reshape(*ends[0].shape[:2], -1), ends, levels, fraction)
    np.abs(high, out=high), np.abs(low, out=low)  # no -0
    found, zero = _range_host(high, low, levels, x.dtype, _reach(levels, fraction))
    scale.reshape(-1)[...] = np.minimum(found, np.finfo(scale.dtype).max)
    if zero_point is not None:
        zero_point.reshape(-1)[...] = zero


def _without_nan(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    number = x.astype(dtype, order="C")
    number[np.isnan(number)] = 0
    return number


def _reduced(entries: np.ndarray) -> tuple[int, ...]:
    """The axes of a view that one entry stands for."""
    return (0, 2) if entries.shape[0] == 1 else (2,)


def _percentile_host(rows: np.ndarray, ends: tuple[np.ndarray, np.ndarray], levels: Levels, fraction: float) -> None:
    """The ends of the range by rank, among the last axis, whose order is not kept."""
    count = rows.shape[-1]
    rank = max(math.ceil(fraction * count) - 1, 0)
    if levels.symmetric:
        np.abs(rows, out=rows)
        rows.partition(rank, axis=-1)
        ends[0][...] = rows[..., rank, None]
    else:
        for end, place, sign in ((ends[0], rank, 1), (ends[1], count - 1 - rank, -1)):
            rows.partition(place, axis=-1)
            end[...] = np.maximum(sign * rows[..., place, None], 0)


def _range_host(high: np.ndarray, low: np.ndarray, levels: Levels, of: np.dtype, reach: int) -> tuple[np.ndarray, Any]:
    """Scale and zero point of blocks of the dtype `of` whose numbers lie between -low and high."""
    dtype = high.dtype
    largest = dtype.type(_ENDS[of.name].largest)
    with np.errstate(all="ignore"):
        high, low = np.minimum(high, largest), np.minimum(low, largest)
        empty = (high == 0) & (low == 0)
        if levels.symmetric:
            scale = _finite_scale(np.maximum(high, low) / dtype.type(levels.divisor), reach, of)
            return np.where(empty, dtype.type(1), scale), levels.zero
        span = np.minimum(high.astype(np.float64) + low, np.finfo(np.float64).max) / levels.divisor
        scale = np.minimum(span, np.finfo(dtype).max).astype(dtype)
        point = np.where(empty, levels.qmin, levels.qmin + np.rint(low / _divisor(scale, dtype)))
        zero = np.clip(point, levels.qmin, levels.qmax).astype(np.int32)
        scale = _finite_scale(scale, np.maximum(levels.qmax - zero, zero - levels.qmin), of)
        return np.where(empty, dtype.type(1), scale), zero


def _reach(levels: Levels, fraction: float | None) -> int:
    """The most steps from the zero point of a symmetric range that a finite number may become."""
    if fraction is None or fraction == 1:
        return levels.divisor
    return max(levels.qmax - levels.zero, levels.zero - levels.qmin)


def _finite_scale(scale: np.ndarray, reach: Any, of: np.dtype) -> np.ndarray:
    """The scale, or the largest one whose product with `reach` stays finite in the dtype `of`."""
    dtype = scale.dtype
    limit, steps = dtype.type(_ENDS[of.name].limit), np.asarray(reach).astype(dtype)
    beyond = scale * steps > limit
    if not beyond.any():
        return scale
    most = limit / steps
    most = np.where(most * steps > limit, np.nextafter(most, dtype.type(0)), most)
    return np.where(beyond, most, scale)


def _pack_host(codes: np.ndarray, packed: np.ndarray) -> None:
    """Two neighbours a byte, the first in the low nibble."""
    nibbles = codes.view(np.uint8)
    np.bitwise_and(nibbles[::2], 15, out=packed)
    packed[: nibbles.size // 2] |= nibbles[1::2] << 4


def _unpack_host(packed: np.ndarray, codes: np.ndarray) -> None:
    nibbles = codes.view(np.uint8)
    nibbles[::2] = packed & 15
    nibbles[1::2] = packed[: nibbles.size // 2] >> 4
    if codes.dtype == np.int8:
        nibbles ^= 8
        codes -= 8


# ---- one entrance for both libraries -------------------------------------------------------------------------------
#
# Arrays are contiguous and beside each other, scales and zero points what check_scale and check_zero_point return, or
# planes. The device of a CuPy array is the current one.


def find(
    x: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, fraction: float | None = None
) -> None:
    """Fill `scale` and `zero_point` (or None) with what dynamic range gives for the blocks of x.

    `fraction` is a percentile / 100.
    """
    if blocks.size == 0:
        scale.fill(1)
        if zero_point is not None:
            zero_point.fill(levels.zero if levels.symmetric else levels.qmin)
    elif _xp.is_cupy(x):
        _find_cuda(x, scale, zero_point, blocks, levels, fraction)
    else:
        _find_host(x, scale, zero_point, blocks, levels, fraction)


def quantize(
    x: Any,
    codes: Any,
    scale: Any,
    zero_point: Any,
    blocks: Blocks,
    levels: Levels,
    bits: int = 8,
    scale_out: Any | None = None,
    zero_point_out: Any | None = None,
) -> None:
    """Fill `codes`: int8 or uint8, or with 4 bits the packed bytes, signed when ``levels.qmin`` is.

    The planes `scale_out` and `zero_point_out`, if any, receive what is used.
    """
    if blocks.size and _xp.is_cupy(x):
        _each_cuda(
            "quantize", x.dtype, bits, blocks, levels, (x, codes), scale, zero_point, 0, (scale_out, zero_point_out)
        )
        return
    for plane, values in ((scale_out, scale), (zero_point_out, zero_point)):
        if plane is not None:
            plane[...] = values if isinstance(values, (float, int)) else values.reshape(-1)
    if blocks.size == 0:
        return
    if bits == 8:
        _quantize_host(x, codes, scale, zero_point, blocks, levels)
    else:
        whole = np.empty(blocks.size, np.int8 if levels.qmin < 0 else np.uint8)
        _quantize_host(x, whole, scale, zero_point, blocks, levels)
        _pack_host(whole, codes)


def quantize_dynamic(
    x: Any, codes: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, bits: int = 8
) -> None:
    """`find` and `quantize`; where a block fits on chip, with one reading of x."""
    if blocks.size and _xp.is_cupy(x) and _dynamic_cuda(x, codes, scale, zero_point, blocks, levels, bits):
        return
    find(x, scale, zero_point, blocks, levels)
    quantize(x, codes, scale, levels.zero if zero_point is None else zero_point, blocks, levels, bits)


def dequantize(
    codes: Any, out: Any, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels, bits: int = 8
) -> None:
    """Fill `out` with ``scale * (q - zero_point)``; zero points outside `levels` count as the nearer end."""
    if blocks.size == 0:
        return
    if _xp.is_cupy(codes):
        _each_cuda("dequantize", out.dtype, bits, blocks, levels, (codes, out), scale, zero_point)
        return
    if bits == 4:
        packed, codes = codes, np.empty(blocks.size, np.int8 if levels.qmin < 0 else np.uint8)
        _unpack_host(packed, codes)
    _dequantize_host(codes, out, scale, zero_point, blocks, levels)


def fake_quantize(x: Any, out: Any, scale: Any, zero_point: Any, blocks: Blocks, levels: Levels) -> None:
    """Fill `out` with x quantized and dequantized."""
    if blocks.size and _xp.is_cupy(x):
        _each_cuda("fake_quantize", x.dtype, None, blocks, levels, (x, out), scale, zero_point)
    elif blocks.size:
        _fake_quantize_host(x, out, scale, zero_point, blocks, levels)


def backward(
    dy: Any,
    x: Any | None,
    dx: Any,
    scale: Any,
    zero_point: Any,
    blocks: Blocks,
    levels: Levels,
    margin: int,
    divide: bool,
) -> None:
    """Fill `dx` with dy, divided by the scale for `divide`, where x (if any) is within the range less `margin`."""
    if blocks.size and _xp.is_cupy(dy):
        kind = "quantize_backward" if divide else "fake_quantize_backward"
        _each_cuda(kind, dy.dtype, None, blocks, levels, (dy, 0 if x is None else x, dx), scale, zero_point, margin)
    elif blocks.size:
        _backward_host(dy, x, dx, scale, zero_point, blocks, levels, margin, divide)


def multiply(dy: Any, dq: Any, scale: Any, blocks: Blocks) -> None:
    """Fill `dq` with dy times the scale."""
    if blocks.size and _xp.is_cupy(dy):
        _each_cuda("dequantize_backward", dy.dtype, None, blocks, SIGNED8, (dy, dq), scale, 0)
    elif blocks.size:
        _multiply_host(dy, dq, scale, blocks)


# ---- CUDA ----------------------------------------------------------------------------------------------------------

_TYPES = {**CXX_TYPES, "float64": "double"}
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_FILE, _RANGE_FILE = "affine.cu", "affine_range.cu"
_THREADS = 256
_EACH_THREADS = 128
_UNIT = 8
_LAYOUTS = ("RUNS", "COLUMNS")
# The walks of kernels/affine.cuh by operation and bytes of an element: elements of a unit, and units of a thread, which
# has the loads of all under way.
_RUNS_WALKS = {
    "quantize8": {2: (16, 1), 4: (8, 1), 8: (4, 2)},
    "quantize4": {2: (16, 2), 4: (8, 1), 8: (4, 2)},
    "dequantize8": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
    "dequantize4": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
    "fake_quantize": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
    "quantize_backward": {2: (8, 2), 4: (4, 1), 8: (4, 1)},
    "fake_quantize_backward": {2: (8, 2), 4: (4, 1), 8: (4, 1)},
    "dequantize_backward": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
}
# Others for blocks that are no multiple of these units.
_NARROW_WALKS = {"quantize8": (8, 2), "quantize4": (8, 4)}
# The same where scales repeat with a short period: elements of a unit, units under way, all units.
_COLUMNS_WALKS = {
    "quantize8": {2: (8, 4, 8), 4: (4, 4, 4), 8: (4, 1, 8)},
    "quantize4": {2: (8, 4, 16), 4: (4, 4, 8), 8: (4, 1, 8)},
    "dequantize8": {2: (8, 4, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "dequantize4": {2: (8, 4, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "fake_quantize": {2: (8, 4, 4), 4: (4, 4, 4), 8: (4, 1, 8)},
    "quantize_backward": {2: (8, 2, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "fake_quantize_backward": {2: (8, 2, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "dequantize_backward": {2: (8, 2, 4), 4: (4, 4, 4), 8: (4, 1, 8)},
}
_DEPTH = {"find_range": {2: 4, 4: 2, 8: 1}}
_FIND_ROWS = 64
# Tiles that a thread block takes one after the other where it gathers ranges: each run ends in an atomic operation.
_FIND_ROUNDS = 16
_WHOLE_BYTES = 128  # of a thread in one of them, where there is one block
# Of teams of lanes that hold blocks in registers: units of a lane, few or many; the most units of a block that few are
# for, and for all blocks of float64; threads of a thread block.
_SLOTS, _MANY_SLOTS, _OF_FEW_SLOTS, _TEAM_THREADS = 4, 8, 32, 128
# Of thread blocks that hold a block in shared memory: the most threads, about how many units each has, the most units.
_ROW_THREADS, _ROW_UNITS = 512, 8
_ON_CHIP = {2: 8192, 4: 4096, 8: 1024}
_STATIC_BYTES = 2048  # at most, of shared memory
# Blocks of so many elements are held 32 elements a lane.
_LANE_BLOCKS = tuple(32 << j for j in range(6))
_LANE_ROUNDS = 4
# Rows from this length on, and below the length of a unit, are divided by in 64 bits.
_WIDE_ROW = 1 << 30
_WIDEST_PERIOD = 1 << 28

_EVERY = tuple(_TYPES.values())


def _walk_of(operation: str, dtype: str, layout: str, narrow: bool = False) -> tuple[int, int, int]:
    """SIZE, DEPTH and UNITS of a kernel (see kernels/affine.cu)."""
    itemsize = _ITEMSIZES[dtype]
    if layout == "COLUMNS":
        return _COLUMNS_WALKS[operation][itemsize]
    size, units = _RUNS_WALKS[operation][itemsize]
    if narrow and itemsize == 2:
        size, units = _NARROW_WALKS.get(operation, (size, units))
    return size, units, units


def _arguments(operation: str, dtype: str, layout: str, narrow: bool = False) -> str:
    """The template arguments of a kernel that goes from element to element."""
    bits = [operation[-1]] if operation[-1] in "84" else []
    return ", ".join([_TYPES[dtype], *bits, layout, *map(str, _walk_of(operation, dtype, layout, narrow))])


def _each_template(name: str, operations: tuple[str, ...]) -> Template:
    every = itertools.product(operations, _TYPES, _LAYOUTS, (False, True))
    return Template(_FILE, f"{name}_affine", (tuple(dict.fromkeys(_arguments(*each) for each in every)),))


KERNELS = (
    _each_template("quantize", ("quantize8", "quantize4")),
    _each_template("dequantize", ("dequantize8", "dequantize4")),
    *(_each_template(name, (name,)) for name in _RUNS_WALKS if name[-1] not in "84"),
    Template(_FILE, "convert_scales_affine", (("float",), ("double",))),
    Template(_FILE, "convert_scales_affine", (("double",), ("float",))),
    Template(_RANGE_FILE, "find_range_affine", (_EVERY, _LAYOUTS)),
    Template(_RANGE_FILE, "find_whole_affine", (_EVERY,)),
    Template(_RANGE_FILE, "finish_range_affine", (("float", "double"),)),
    Template(_RANGE_FILE, "quantize_dynamic_affine", (_EVERY, ("8", "4"), (f"{_SLOTS}, 1", f"{_SLOTS}, {_SLOTS}"))),
    Template(_RANGE_FILE, "quantize_dynamic_affine", (_EVERY[:3], ("8", "4"), (f"{_MANY_SLOTS}, 1",))),
    Template(_RANGE_FILE, "quantize_rows_affine", (_EVERY, ("8", "4"))),
    Template(_RANGE_FILE, "quantize_lanes_affine", (_EVERY[:3], ("8", "4"))),
    Template(_RANGE_FILE, "percentile_affine", (_EVERY,)),
)
_HEADER = "formats/affine.cuh"
_BLOCKS = templates(
    _HEADER,
    *(f"Affine<{bits}, {signed}>" for bits in (8, 4) for signed in ("true", "false")),
    kernels=("take_blocks", "linear_blocks"),
)

_GEOMETRY = np.dtype(
    [
        *((name, "i8") for name in ("n", "row", "run", "per_row", "count", "columns", "rows")),
        ("inverse", "f8"),
        ("long_by_row", "u8"),
        *((name, [("magic", "u4"), ("shift", "i4")]) for name in ("by_row", "by_run")),
        *((name, "i4") for name in ("wide", "qmin", "qmax", "margin", "zero", "divisor", "symmetric", "reach")),
        *((name, "u8") for name in ("largest", "limit", "surely")),
    ],
    align=True,
)


class _Geometry:
    """``struct Geometry`` of kernels/affine.cuh, and the grid that goes with it.

    Parameters
    ----------
    blocks : Blocks
        The block shape.
    levels : Levels
        The range.
    margin : int, default 0
        How far from the ends of the range a mask begins.
    whole : bool, default False
        Whether a block that is the whole array counts as one run, however long.
    of : dtype, optional
        dtype of the array whose ranges are found.
    reach : int, default 0
        See `_reach`.
    """

    __slots__ = ("_struct", "argument", "columns", "layout", "narrow", "rows", "size")

    def __init__(
        self,
        blocks: Blocks,
        levels: Levels,
        margin: int = 0,
        whole: bool = False,
        of: np.dtype | None = None,
        reach: int = 0,
    ):
        row, run, per_row = blocks.row, blocks.run, blocks.per_row
        if blocks.count == 1:
            row = run = blocks.size if whole else 1 << 20  # any multiple of a unit: all have scale number 0
            per_row = 1 if whole else 0
        self.size = blocks.size
        self.layout = "COLUMNS" if per_row == 0 and run < min(row, _UNIT) and row <= _WIDEST_PERIOD else "RUNS"
        self.narrow = row % (2 * _UNIT) != 0 or run % (2 * _UNIT) != 0
        self.columns = _columns(row, self.size) if self.layout == "COLUMNS" else self.size
        self.rows = -(-self.size // self.columns)
        struct = np.zeros((), _GEOMETRY)
        struct["n"], struct["row"], struct["run"], struct["per_row"] = self.size, row, run, per_row
        struct["count"], struct["columns"], struct["rows"] = blocks.count, self.columns, self.rows
        struct["wide"] = not _UNIT <= row < _WIDE_ROW or run < 2
        for name, divisor in (("by_row", row), ("by_run", run)):
            if not struct["wide"]:
                bits = (divisor - 1).bit_length()
                struct[name]["magic"], struct[name]["shift"] = -(-(1 << 31 + bits) // divisor), bits - 1
        if not struct["wide"]:
            struct["long_by_row"] = -(-(1 << 63 + (row - 1).bit_length()) // row)
        struct["qmin"], struct["qmax"], struct["margin"] = levels.qmin, levels.qmax, margin
        struct["inverse"] = 1 / levels.divisor if levels.divisor else 0
        struct["zero"], struct["divisor"], struct["symmetric"] = levels.zero, levels.divisor, levels.symmetric
        struct["reach"] = reach
        if of is not None:
            # The largest number of steps is below qmax - qmin + 1, so no product with a scale up to `surely` is larger
            # than the limit.
            ends, dtype = _ENDS[of.name], compute_dtype(of)
            surely = ends.limit / (levels.qmax - levels.qmin + 1)
            for name, end in (("largest", ends.largest), ("limit", ends.limit), ("surely", surely)):
                struct[name] = np.array(end, dtype).view(f"u{dtype.itemsize}")
        self._struct = struct
        self.argument = by_value(struct)

    def units(self, depth: int, rows: int, width: int = _THREADS * _UNIT) -> int:
        """Thread blocks that have work, when a thread takes `depth` units, or `rows` rows of the columns of a unit.

        `width` is the number of elements in the units of a thread block.
        """
        if self.layout == "RUNS":
            return -(-self.size // (width * depth))
        return -(-self.rows // rows) * -(-self.columns // width)


def _columns(period: int, size: int) -> int:
    """Columns of a matrix whose rows are whole periods and whole units, with few idle threads at its right edge."""
    least = math.lcm(period, _UNIT)
    best, best_use = least, 0.0
    for times in range(1, 65):
        columns = least * times
        width = _EACH_THREADS * _UNIT
        use = columns / (-(-columns // width) * width)
        if use > best_use + 0.02 and (times == 1 or columns <= size):
            best, best_use = columns, use
    return best


_geometry = functools.lru_cache(maxsize=1024)(_Geometry)


@functools.cache
def _kernel(name: str, axes: tuple[str, ...], threads: int = _THREADS, rounds: int = 1, shared: int = 0) -> Kernel:
    """A kernel of the family by the name of its template and the template's arguments."""
    template = next(template for template in KERNELS if template.name == name)
    return Kernel(template, axes, threads, shared, rounds)


@functools.lru_cache(maxsize=1024)
def _launch(
    kind: str, dtype: np.dtype, bits: int | None, blocks: Blocks, levels: Levels, margin: int
) -> tuple[Kernel, _Geometry, int, tuple[Any, Any]]:
    """Kernel, geometry and grid of an operation that goes from element to element, and who writes scales."""
    geometry = _geometry(blocks, levels, margin)
    operation = kind if bits is None else f"{kind}{bits}"
    walk = operation, dtype.name, geometry.layout, geometry.narrow
    size, _, units = _walk_of(*walk)
    kernel = _kernel(f"{kind}_affine", (_arguments(*walk),), _EACH_THREADS)
    grid = geometry.units(units, units, _EACH_THREADS * size)
    # A scale for each thread of those thread blocks that write some, unless there are more.
    every = max(1, min(grid, grid * _EACH_THREADS // blocks.count))
    share = -(-blocks.count // -(-grid // every))
    return kernel, geometry, grid, (np.uint32(every), np.uint32(share))


def converted(values: Any, dtype: np.dtype) -> Any:
    """Scales or zero points on a device as a contiguous array of another dtype, subnormal numbers kept."""
    if {values.dtype, dtype} != {_SINGLE, _DOUBLE}:
        return values.astype(dtype, order="C")
    values = _xp.contiguous(values)
    result = _xp.namespace(values).empty(values.shape, dtype)
    if values.size:
        kernel = _kernel("convert_scales_affine", (_TYPES[values.dtype.name], _TYPES[dtype.name]))
        kernel(values, -(-values.size // _THREADS), (values, result, values.size))
    return result


def _each_cuda(
    kind: str,
    dtype: np.dtype,
    bits: int | None,
    blocks: Blocks,
    levels: Levels,
    arrays: tuple[Any, ...],
    scale: Any,
    zero_point: Any,
    margin: int = 0,
    planes: tuple[Any, ...] = (),
) -> None:
    kernel, geometry, units, shares = _launch(kind, dtype, bits, blocks, levels, margin)
    computed = compute_dtype(dtype)
    value, point = _scalar(computed, 0), _scalar(_INT32, 0)
    if isinstance(scale, float):
        scale, value = 0, _scalar(computed, scale)
    else:
        if scale.dtype != computed:  # a plane beside float64
            scale = converted(scale, computed)
        if scale.size < blocks.count:  # one for all
            scale = scale.repeat(blocks.count)
    if isinstance(zero_point, int):
        zero_point, point = 0, _scalar(_INT32, zero_point)
    elif zero_point.size < blocks.count:
        zero_point = zero_point.repeat(blocks.count)
    last = (*(0 if plane is None else plane for plane in planes), *shares) if planes else ()
    kernel(arrays[-1], units, (*arrays, scale, value, zero_point, point, geometry.argument, *last))


@functools.lru_cache(maxsize=1024)
def _find_launch(dtype: np.dtype, blocks: Blocks, levels: Levels) -> tuple[Kernel, int, Kernel, int, _Geometry]:
    """The kernel that finds ranges, the one that makes scales of them, their grids and geometry."""
    geometry, name = _geometry(blocks, levels, 0, False, dtype, _reach(levels, None)), _TYPES[dtype.name]
    if blocks.count == 1:
        find_range = _kernel("find_whole_affine", (name,), rounds=_FIND_ROUNDS)
        units = -(-blocks.size * dtype.itemsize // (_THREADS * _WHOLE_BYTES))
    else:
        rounds = 1 if geometry.layout == "COLUMNS" else _FIND_ROUNDS
        find_range = _kernel("find_range_affine", (name, geometry.layout), rounds=rounds)
        units = geometry.units(_DEPTH["find_range"][dtype.itemsize], _FIND_ROWS)
    finish = _kernel("finish_range_affine", (_TYPES[compute_dtype(dtype).name],))
    return find_range, units, finish, -(-blocks.count // _THREADS), geometry


def _find_cuda(
    x: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, fraction: float | None
) -> None:
    computed = compute_dtype(x.dtype)
    empty = _xp.namespace(x).empty
    exact = scale if scale.dtype == computed else empty(blocks.count, computed)
    point = 0 if zero_point is None else zero_point
    if fraction is not None:
        geometry = _geometry(blocks, levels, 0, True, x.dtype, _reach(levels, fraction))
        period = blocks.row if blocks.per_row == 0 and blocks.count > 1 else 0
        kernel = _kernel("percentile_affine", (_TYPES[x.dtype.name],), 2 * _THREADS)
        kernel(x, blocks.count, (x, exact, point, np.float64(fraction), period, geometry.argument))
    else:
        find_range, units, finish, groups, geometry = _find_launch(x.dtype, blocks, levels)
        low: Any = 0
        if not levels.symmetric:
            low = empty(blocks.count, computed)
            low.data.memset_async(0, low.nbytes)
        exact.data.memset_async(0, exact.nbytes)
        find_range(x, units, (x, exact, low, geometry.argument))
        finish(x, groups, (exact, low, exact, point, geometry.argument))
    if exact is not scale:
        limit = float(np.finfo(scale.dtype).max)
        scale[...] = converted(_xp.namespace(x).minimum(exact, limit), scale.dtype)


def _run_on_chip(blocks: Blocks) -> int:
    """Elements of a block where all blocks are runs, else 0; blocks must begin and end with a unit."""
    if blocks.count == 1:
        return 0 if blocks.size % _UNIT else blocks.size
    return 0 if blocks.per_row == 0 or blocks.row % _UNIT or blocks.run % _UNIT else blocks.run


@functools.lru_cache(maxsize=1024)
def _dynamic_launch(
    dtype: np.dtype, bits: int, blocks: Blocks, levels: Levels, memory: int
) -> tuple[Kernel, int, tuple[Any, ...], _Geometry] | None:
    """Kernel, grid and last arguments of a search for ranges that quantizes at once, and what they point to.

    None where blocks do not fit on chip. `memory` is the shared memory of a thread block.
    """
    run, size = _run_on_chip(blocks), dtype.itemsize
    units, whole = run // _UNIT, blocks.row == run
    if not 0 < units <= _ON_CHIP[size]:
        return None
    geometry = _geometry(blocks, levels, 0, True, dtype, _reach(levels, None))
    axes = _TYPES[dtype.name], str(bits)
    if size < 8 and run in _LANE_BLOCKS and whole:
        kernel = _kernel("quantize_lanes_affine", axes, _THREADS, _LANE_ROUNDS, 2 * 32 * _THREADS * size)
        return kernel, -(-blocks.size // (32 * _THREADS)), (np.int32(run // 32), geometry.argument), geometry
    if units <= 32 * _SLOTS:
        each = _SLOTS if units <= _SLOTS else 1
        slots = _MANY_SLOTS if units > _OF_FEW_SLOTS and size < 8 else _SLOTS
        team = 1 << (-(-units * each // slots) - 1).bit_length()
        kernel = _kernel("quantize_dynamic_affine", (*axes, f"{slots}, {each}"), _TEAM_THREADS)
        units = -(-blocks.count // (_TEAM_THREADS // team * each))
        return kernel, units, (np.int32(team), geometry.argument), geometry
    if not whole or run * size + _STATIC_BYTES > memory:
        return None
    kernel = _kernel("quantize_rows_affine", axes, _row_threads(units), 1, run * size)
    return kernel, blocks.count, (geometry.argument,), geometry


def _row_threads(units: int) -> int:
    """Threads for a block of so many units: whole warps, of which few are idle in the last round."""
    most = min(_ROW_THREADS, -(-units // (32 * _ROW_UNITS)) * 64)
    return min(
        range(max(32, most // 128 * 32), most + 1, 32),
        key=lambda threads: (-(-units // threads) * threads, abs(_ROW_UNITS * threads - units)),
    )


def _dynamic_cuda(
    x: Any, codes: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, bits: int
) -> bool:
    """Whether blocks fit on chip, and it is done."""
    launch = _dynamic_launch(x.dtype, bits, blocks, levels, shared_memory(x.data.device_id))
    if launch is None or x.data.ptr % 16 or codes.data.ptr % 16:
        return False
    kernel, units, last, _ = launch
    kernel(x, units, (x, codes, scale, 0 if zero_point is None else zero_point, *last))
    return True


# ---- formats -------------------------------------------------------------------------------------------------------


class Affine(Format):
    """Integers of 8 or 4 bits with scales of any granularity.

    Parameters
    ----------
    bits : {8, 4}
        Bits of an integer.
    signed : bool
        Whether integers are two's complement.
    granularity : {"tensor", "token", ("channel", axis), ("group", size)}, optional
        Elements that share a scale; as text ``"channel:0"``, ``"group:32"``. ``"tensor"`` where `block` is not given
        either.
    block : int, optional
        Another way to say ``("group", block)``.
    symmetric : bool, default True
        One zero point for all blocks (0, or 2^(bits - 1) of unsigned integers) instead of one for each.
    percentile : float, optional
        Find the range as this percentile of a block's magnitudes (of its values on both sides, where it is not
        symmetric) instead of the extremes; above 0, up to 100.
    scale : float or array, optional
        Scales to use, instead of finding them: one number, or one for each block in the shape of the granularity, in
        that with a 1 behind it, or flat; with NumPy checked to be finite and not negative.
    zero_point : int or array, optional
        Zero points to use with `scale` and ``symmetric=False``; 0 by default.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> kb.get_format("int8", granularity=("channel", 0))
    get_format('int8:granularity=channel:0')
    >>> kb.get_format("int4", granularity=("group", 32))
    get_format('int4:block=32')
    """

    block = 1
    dtypes = ("float16", "bfloat16", "float32", "float64")
    origin = "baracuda-kernels, PyTorch, torchao"
    summary = "integers with a scale for a tensor, channel, token or group"
    kernels = (*KERNELS, *_BLOCKS)

    def __init__(
        self,
        bits: int,
        signed: bool,
        *,
        granularity: Any = None,
        block: int | None = None,
        symmetric: bool = True,
        percentile: float | None = None,
        scale: Any = None,
        zero_point: Any = None,
    ):
        self.bits = bits
        self.name = f"{'int' if signed else 'uint'}{bits}"
        self.granularity = _granularity_of(granularity, block)
        if not isinstance(symmetric, bool):
            raise FormatError(f"symmetric is {symmetric!r}; allowed are True and False")
        low = -(1 << bits - 1) if signed else 0
        self.levels = check_levels(low, low + (1 << bits) - 1, symmetric=symmetric)
        self.percentile = check_percentile(percentile)
        if scale is not None and percentile is not None:
            raise FormatError("percentile says how a scale is found, and scale gives one: leave one of them away")
        if zero_point is not None and (scale is None or symmetric):
            raise FormatError("zero_point goes with scale and symmetric=False")
        self._key = self.name, self.granularity, symmetric, self.percentile  # what options() says
        self._scale, self._zero_point = scale, zero_point
        self._stored: Affine = self
        if scale is not None or self.percentile is not None:
            self._stored = Affine(bits, signed, granularity=self.granularity, symmetric=symmetric)

    def options(self) -> dict[str, Any]:
        granularity = self.granularity
        options = {
            "granularity": granularity if isinstance(granularity, str) else list(granularity),
            "symmetric": self.levels.symmetric,
        }
        return options if self.percentile is None else {**options, "percentile": self.percentile}

    def spelled(self) -> dict[str, Any]:
        options = self.options()
        if isinstance(self.granularity, str):
            return options
        kind, number = self.granularity
        del options["granularity"]
        return {"block": number, **options} if kind == "group" else {"granularity": f"{kind}:{number}", **options}

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Affine) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._key)

    def given(self) -> dict[str, Any]:
        found = {"scale": self._scale, "zero_point": self._zero_point}
        return {name: value for name, value in found.items() if value is not None}

    def stored(self) -> Format:
        return self._stored

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks = blocks_of(shape, self.granularity)
        codes = "uint8" if self.bits == 4 or self.levels.qmin == 0 else "int8"
        # Rows along axis 0 own scales, or all rows share them.
        if self.granularity[0] == "channel":
            own = self.granularity[1] in (0, -len(shape))
        else:
            own = self.granularity != "tensor" and len(shape) > 1
        scope = "block" if own else "tensor"
        planes = {
            "codes": Plane(codes, (-(-blocks.size * self.bits // 8),)),
            "scale": Plane("float32", (blocks.count,), scope),
        }
        if not self.levels.symmetric:
            planes["zero_point"] = Plane("int32", (blocks.count,), scope)
        return planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._encode(x, planes)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._encode(x, planes)

    def _encode(self, x: Any, planes: Mapping[str, Any]) -> None:
        blocks = blocks_of(x.shape, self.granularity)
        scale, zero = planes["scale"], planes.get("zero_point")
        if self._scale is not None:
            given, point = check_scale(self._scale, blocks, x, _SINGLE), self.levels.zero
            if zero is not None:
                point = 0 if self._zero_point is None else self._zero_point
                point = check_zero_point(point, blocks, x, self.levels)
            quantize(x, planes["codes"], given, point, blocks, self.levels, self.bits, scale, zero)
            return
        if self.percentile is None and x.dtype != _DOUBLE:
            quantize_dynamic(x, planes["codes"], scale, zero, blocks, self.levels, self.bits)
            return
        find(x, scale, zero, blocks, self.levels, None if self.percentile is None else self.percentile / 100)
        quantize(x, planes["codes"], scale, self._zero_of(planes), blocks, self.levels, self.bits)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        self._decode(planes, out, blocks_of(out.shape, self.granularity))

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        self._decode(planes, out, blocks_of(out.shape, self.granularity))

    def decode_stack(self, planes: Mapping[str, Any], out: Any, lead: int) -> bool:
        blocks = stack_blocks(out.shape, self.granularity, lead)
        if blocks is not None:
            self._decode(planes, out, blocks)
        return blocks is not None

    def _decode(self, planes: Mapping[str, Any], out: Any, blocks: Blocks) -> None:
        dequantize(planes["codes"], out, planes["scale"], self._zero_of(planes), blocks, self.levels, self.bits)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        blocks = blocks_of(x.shape, self.granularity)
        bound = np.empty(x.shape, np.float64)
        for (part, out), (s, z) in _walk(blocks, (x, bound), (planes["scale"], self._zero_of(planes))):
            _, low, high = _bounds(z, self.levels)
            number, step = part.astype(np.float64), _factor(s, _DOUBLE)
            outside = np.maximum(np.maximum(number - high * step, low * step - number), 0)
            # Half a step or the distance to the range; and the quotient and the product are rounded to float32.
            out[...] = np.maximum(step / 2, outside) + 2.0**-22 * np.abs(number) + 2.0**-149
            out[...] = np.where(step > 0, out, np.abs(number))
        return bound.reshape(-1)

    def integers(self, shape: tuple[int, ...], lead: int = 0) -> Integers | None:
        if self.name != "int8" or not self.levels.symmetric or not shape:
            return None
        if self.layout_of(shape, lead) == blocks_of(shape, "token").layout:
            return Integers("codes", "scale", "row")
        return (
            Integers("codes", "scale", "tensor") if not lead and blocks_of(shape, self.granularity).count == 1 else None
        )

    def magnitude(self) -> Magnitude:
        return Magnitude("scale", largest=float(1 << self.bits))  # of a code less its zero point

    def keeps_blocks(self, shape: tuple[int, ...], new: tuple[int, ...], lead: int = 0, new_lead: int = 0) -> bool:
        return self.layout_of(shape, lead) == self.layout_of(new, new_lead)

    def layout_of(self, shape: tuple[int, ...], lead: int = 0) -> tuple[int, ...]:
        """Equal where elements share scales in the same way (`Blocks.layout`), of stacks as well."""
        blocks = stack_blocks(shape, self.granularity, lead)
        if blocks is not None:
            return blocks.layout
        return *blocks_of(shape[lead:], self.granularity).layout, math.prod(shape[:lead])

    def counted_from_end(self, ndim: int) -> Format:
        if self.granularity[0] != "channel" or int(self.granularity[1]) <= 0:
            return self  # the first axis of a member is told apart from that of the stack by the number of scales
        return self._with(("channel", int(self.granularity[1]) - ndim))

    def of_row(self, shape: tuple[int, ...]) -> Format:
        granularity = self.granularity
        if granularity == "token" and len(shape) == 1:
            return self._with("tensor")
        if granularity[0] != "channel":
            return self
        axis = int(granularity[1])
        if axis in (0, -len(shape)):
            return self._with("tensor")
        return self if axis < 0 else self._with(("channel", axis - 1))

    def _with(self, granularity: Granularity) -> Affine:
        """The stored format under another granularity."""
        return _of_granularity(self.name, granularity, self.levels.symmetric)

    def rows_are_blocks(self, shape: tuple[int, ...]) -> bool:
        if not shape or (len(shape) == 1 and self.granularity[0] == "group"):
            return False
        return math.prod(shape[1:]) * self.bits % 8 == 0

    def why_not_blocks(self, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 and self.granularity[0] == "group":
            return f"rows of shape () are not whole blocks: those are groups of {self.granularity[1]} elements"
        codes = math.prod(shape[1:])
        return f"rows of shape {shape[1:]} are not whole blocks: {codes} codes of {self.bits} bits are no whole bytes"

    @functools.cached_property
    def decoder(self) -> Decoder:
        return _decoder(self.bits, self.granularity, self.levels)

    def _zero_of(self, planes: Mapping[str, Any]) -> Any:
        return planes.get("zero_point", self.levels.zero)


def _granularity_of(granularity: Any, block: Any) -> Granularity:
    """The granularity of a format, from the two options that say it."""
    if block is None:
        return "tensor" if granularity is None else check_granularity(granularity)
    if isinstance(block, bool) or not isinstance(block, (int, np.integer)) or block < 1:
        raise FormatError(f"block is {block!r}; it must be a positive integer, the elements of a group")
    groups = ("group", int(block))
    if granularity is not None and check_granularity(granularity) != groups:
        raise FormatError(
            f"granularity is {granularity!r} and block {block}, which means ('group', {block}): leave one of them away"
        )
    return groups


@functools.lru_cache(maxsize=1024)
def _decoder(bits: int, granularity: Granularity, levels: Levels) -> Decoder:
    def numbers(shape: tuple[int, ...]) -> tuple[int, ...]:
        blocks = blocks_of(shape, granularity)
        return blocks.row, blocks.run, blocks.per_row, levels.zero

    struct = f"Affine<{bits}, {str(levels.qmin < 0).lower()}>"
    return Decoder(_HEADER, struct, ("codes", "scale", "zero_point"), numbers)


@functools.lru_cache(maxsize=256)
def _of_granularity(name: str, granularity: Granularity, symmetric: bool) -> Affine:
    return Affine(int(name[-1]), name[0] == "i", granularity=granularity, symmetric=symmetric)


def check_percentile(percentile: Any) -> float | None:
    """A percentile as a float.

    Raises
    ------
    FormatError
        When it is not a number above 0, up to 100.
    """
    if percentile is None:
        return None
    number = isinstance(percentile, (int, float, np.integer, np.floating)) and not isinstance(percentile, bool)
    if not number or not 0 < percentile <= 100:
        raise FormatError(f"percentile is {percentile!r}; it must be a number above 0, up to 100, such as 99.9")
    return float(percentile)


for _bits in (8, 4):
    for _signed in (True, False):
        register(f"{'int' if _signed else 'uint'}{_bits}", functools.partial(Affine, _bits, _signed))
