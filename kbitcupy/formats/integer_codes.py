"""Integer codes with scales of groups along rows: what products of integers need to know of a format.

An element n, k of a matrix decodes to ``A * (c - z) + B``: c is its code, z a zero point, A and B are those of the
group of row n that holds k. Element e in the order of memory has its code in a field of a byte: with f = 8 / bits
fields in a byte, a run of ``width`` bytes holds ``f * width`` elements, the first `width` of them in the lowest field
of each byte, the next in the next field, and so on.

=========================  ====  =====  =====================================================
format                     bits  width  A, z and B
=========================  ====  =====  =====================================================
int8, uint8                8     1      scale; 0 or 128, or zero points; nothing, or offsets
int4, uint4                4     1      scale; 0 or 8, or zero points; nothing, or offsets
q8_0                       8     1      d
q4_0                       4     16     d; 8
q4_k                       4     32     d * sc; 0; -dmin * mn
ternary                    2     32     scale; 1
=========================  ====  =====  =====================================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .granularity import Granularity, blocks_of, stack_blocks

#: What stands beside scales: nothing, an integer that is taken off codes, a number that is added, or the inner scales
#: and minima of q4_k's blocks.
NOTHING, ZERO_POINTS, OFFSETS, INNER = "nothing", "zero_points", "offsets", "inner"
#: What codes of `iq4_nl` and `iq4_xs` stand for, and those of `mxfp4` and `nvfp4`.
IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
FP4 = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
# Elements of q4_k's blocks, and of those that have an inner scale.
_INNER_BLOCK, _INNER_GROUP = 256, 32


class ScaleOf(NamedTuple):
    """Which scale an element has: row n, column k have number ``n // outer * per + n % outer // run + k // group``.

    Parameters
    ----------
    outer, per, run : int
        See above.
    group : int
        Elements of a row that share a scale; 0 where all of them do.
    """

    outer: int
    per: int
    run: int
    group: int

    def groups(self, depth: int) -> int:
        """Groups of a row of so many elements."""
        return -(-depth // self.group) if self.group else 1

    def of_rows(self, scales: np.ndarray, first: int, last: int, depth: int) -> np.ndarray:
        """Those of some rows, [rows, groups]."""
        rows = np.arange(first, last)
        start = rows // self.outer * self.per + rows % self.outer // self.run
        return scales[start[:, None] + np.arange(self.groups(depth))]


@dataclass(frozen=True)
class IntegerCodes:
    """How the last axis of an array is rows of integer codes; the module's text has the terms.

    Parameters
    ----------
    bits, width : int
        Of a code, and bytes of a run.
    signed : bool
        Whether codes are in two's complement.
    zero : int
        The zero point of all codes, where `added` is not "zero_points".
    codes, scales : str
        The planes.
    scale_dtype : str
        Of scales, and of offsets.
    scale_of : ScaleOf
        Which scale an element has.
    positive : bool
        Whether scales that are not positive count as 0; otherwise those that are not finite do, or none where `added`
        is "nothing" or "inner".
    added : str, default "nothing"
        What stands beside the scales.
    beside : str or None
        The plane of that.
    beside_dtype : str, default "int32"
        Its dtype.
    high : str or None
        The plane of upper bits of that, where they have their own.
    table : bool, default False
        Whether codes are places in a table: such have no `rows`.
    """

    bits: int
    width: int
    signed: bool
    zero: int
    codes: str
    scales: str
    scale_dtype: str
    scale_of: ScaleOf
    positive: bool
    added: str = NOTHING
    beside: str | None = None
    beside_dtype: str = "int32"
    high: str | None = None
    table: bool = False

    @property
    def group(self) -> int:
        """Elements of a row that share a scale; 0 where all of them do."""
        return self.scale_of.group

    @functools.cached_property
    def lowest(self) -> int:
        """The lowest code."""
        return -(1 << self.bits - 1) if self.signed else 0

    @functools.cached_property
    def reach(self) -> int:
        """The largest magnitude of a code less its zero point."""
        if self.added == ZERO_POINTS:
            return (1 << self.bits) - 1
        highest = self.lowest + (1 << self.bits) - 1
        return max(highest - self.zero, self.zero - self.lowest)

    def rows(self, planes: Mapping[str, Any], depth: int, first: int, last: int) -> CodeRows:
        """Some rows of a matrix of so many columns, on NumPy."""
        codes = self._codes(planes[self.codes].reshape(-1), first * depth, last * depth).reshape(last - first, depth)
        scale, offset = self._scales(planes, depth, first, last)
        if self.added != ZERO_POINTS:
            codes -= np.int16(self.zero)
        else:
            assert self.beside is not None
            points = self.scale_of.of_rows(planes[self.beside], first, last, depth)
            points = np.clip(points, self.lowest, self.lowest + (1 << self.bits) - 1).astype(np.int16)
            codes -= np.repeat(points, self.group or depth, axis=1)[:, :depth]
        return CodeRows(codes, scale, offset)

    def _codes(self, stored: np.ndarray, first: int, last: int) -> np.ndarray:
        """Codes of elements in the order of memory, int16."""
        fields = 8 // self.bits
        run = self.width * fields
        begin = first // run
        data = stored[begin * self.width : -(-last // run) * self.width].view(np.uint8)
        short = -data.size % self.width
        data = np.pad(data, (0, short)).reshape(-1, 1, self.width)
        shifts = np.arange(fields, dtype=np.uint8)[:, None] * np.uint8(self.bits % 8)
        codes = (data >> shifts & np.uint8((1 << self.bits) - 1)).astype(np.int16).reshape(-1)
        codes = codes[first - begin * run : last - begin * run]
        if self.signed:
            codes ^= np.int16(1 << self.bits - 1)
            codes -= np.int16(1 << self.bits - 1)
        return codes

    def _scales(
        self, planes: Mapping[str, Any], depth: int, first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """A and B of some rows, [rows, groups], float32."""
        if self.added == INNER:
            assert self.beside is not None
            part = slice(first * depth // _INNER_BLOCK, last * depth // _INNER_BLOCK)
            d = planes[self.scales].reshape(-1, 2)[part].astype(np.float32)
            sc, mn = inner_scales(planes[self.beside].reshape(-1, 12)[part])
            with np.errstate(all="ignore"):
                both = d[:, :1] * sc.astype(np.float32), -(d[:, 1:] * mn.astype(np.float32))
            scale, offset = (numbers.reshape(last - first, -1) for numbers in both)
            return scale, offset
        scale = self.scale_of.of_rows(planes[self.scales], first, last, depth).astype(np.float32)
        if self.added == OFFSETS:
            assert self.beside is not None
            offset = self.scale_of.of_rows(planes[self.beside], first, last, depth).astype(np.float32)
            return np.where(np.isfinite(scale), scale, np.float32(0)), offset
        if self.positive:
            scale = np.where((scale > 0) & (scale < np.inf), scale, np.float32(0))
        return scale, None


class CodeRows(NamedTuple):
    """Some rows of a matrix of integers.

    Parameters
    ----------
    codes : numpy.ndarray
        int16 [rows, columns], less their zero points.
    scale : numpy.ndarray
        A, float32 [rows, groups].
    offset : numpy.ndarray or None
        B, as `scale`; None where nothing is added.
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None


def inner_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inner scales and minima of q4_k's blocks, uint8 [blocks, 8], from their 12 bytes."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    return scale, np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)


def of_blocks(group: int, depth: int) -> ScaleOf:
    """Blocks of so many elements, one after the other, of which rows have a whole number."""
    return ScaleOf(1, depth // group, 1, group)


@functools.lru_cache(maxsize=1024)
def scale_of(shape: tuple[int, ...], granularity: Granularity, lead: int) -> ScaleOf | None:
    """Which scale an element of an array has, whose first `lead` lengths count members; None where neighbours in a row
    have scales that are not those of groups.
    """
    depth = shape[-1]
    blocks = stack_blocks(shape, granularity, lead) if lead else blocks_of(shape, granularity)
    if blocks is None:
        # Groups of which the last of each row is short: those of one array of all rows.
        if not isinstance(granularity, tuple) or granularity[0] != "group" or lead >= len(shape):
            return None
        blocks = blocks_of(shape, granularity)
    if not blocks.size:
        return ScaleOf(1, 1, 1, 0)
    if blocks.run % depth == 0:
        return ScaleOf(blocks.row // depth, blocks.per_row, blocks.run // depth, 0)
    if blocks.row == blocks.run and depth % blocks.run == 0:
        return ScaleOf(1, depth // blocks.run, 1, blocks.run)
    if blocks.row == depth and blocks.per_row == -(-depth // blocks.run):
        return ScaleOf(1, blocks.per_row, 1, blocks.run)
    return None


def lies_whole(shape: tuple[int, ...], lead: int, run: int) -> bool:
    """Whether codes of members lie as those of one array: each has whole runs of so many elements."""
    return not lead or int(np.prod(shape[lead:])) % run == 0
