"""Granularity: which elements of an array share a scale.

How many do is said by a word; a shape and a granularity make one block shape (`Blocks`), on which arithmetic works.

==========  ==============================================================  ===================
granularity  elements that share a scale, of an array of shape [..., N, D]   scales
==========  ==============================================================  ===================
tensor      all                                                             [1]
channel, a  all with the same index on axis a                               [C], C = shape[a]
token       those of one row along the last axis                            [..., N]
group, g    g neighbours along the last axis, the last group may be short   [..., N, ceil(D/g)]
==========  ==============================================================  ===================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import xp as _xp
from ..errors import DeviceError, FormatError
from .chunks import AT_ONCE

Granularity = str | tuple[str, int]


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


def granularity_of(granularity: Any, block: Any) -> Granularity:
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


def check_entries(values: Any, blocks: Blocks, beside: Any, kinds: str, argument: str) -> Any:
    """An array of one number, or of one for each block in one of their shapes, beside the array `beside`; a single one
    on the host may go with any array.

    Raises
    ------
    FormatError
        When it has another shape.
    DeviceError
        When it is an array on another device.
    TypeError
        When its dtype is none of these `kinds`; where "f" is one of them, bfloat16 is allowed too.
    """
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
    return array


def check_host_scales(array: np.ndarray, dtype: np.dtype, argument: str = "scale") -> None:
    """Check that no scale is negative or not finite.

    Raises
    ------
    FormatError
        When one is.
    """
    good = np.isfinite(array) & (array >= 0)
    if not good.all():
        raise FormatError(f"{argument} holds {array[~good][0]}; scales must be finite in {dtype} and not negative")


# ---- NumPy: blocks in slabs ------------------------------------------------------------------------------------------

# Elements that are worked on at a time by one thread: with more the cache holds less of what is computed in between;
# with less calls cost more than the arithmetic.
_SLAB = 1 << 17


def slab_size() -> int:
    """The most elements of a slab."""
    at_once = AT_ONCE.get()
    return _SLAB * (at_once if at_once == 1 else 2 * at_once)  # a slab has half the buffers of a chunk or less


def _slabs(shape: tuple[int, int, int]) -> Iterator[tuple[slice, slice, slice]]:
    """Cuts of three axes, each of up to `slab_size` elements."""
    outer, blocks, inner = shape
    slab = slab_size()
    steps = (max(1, slab // (blocks * inner)), max(1, min(blocks, slab // inner)), min(inner, slab))
    for a in range(0, outer, steps[0]):
        for b in range(0, blocks, steps[1]):
            for c in range(0, inner, steps[2]):
                yield slice(a, a + steps[0]), slice(b, b + steps[1]), slice(c, c + steps[2])


def walk(
    blocks: Blocks, arrays: tuple[np.ndarray, ...], per_block: tuple[Any, ...]
) -> Iterator[tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]:
    """Views of the same elements of all arrays, and of their blocks' entries, that broadcast against them."""
    with np.errstate(all="ignore"):
        for part in blocks.parts if blocks.size else ():
            views = [part.view(array) for array in arrays]
            entries = [part.of_blocks(np.asarray(values)) for values in per_block]
            for cut in _slabs(part.shape):
                yield (
                    tuple([view[cut] for view in views]),
                    tuple(
                        [
                            e
                            if e.size == 1
                            else e[tuple([c if n > 1 else slice(None) for c, n in zip(cut, e.shape, strict=True)])]
                            for e in entries
                        ]
                    ),
                )
