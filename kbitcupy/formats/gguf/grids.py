"""GGUF's types whose groups of elements are entries of a grid: ``iq1_s`` to ``iq3_s``, blocks of 256, decoded only.

A group is 8 elements, a part 32 of them, 4 groups. An element decodes to A * c, which is exact:

=========  =====================  =============================================================================
type       A                      c
=========  =====================  =============================================================================
iq2_*      d * (2 s + 1) / 8      a coordinate of the group's entry, 8, 25 or 43, with the element's sign
iq3_xxs    d * (2 s + 1) / 4      one of the group's two entries of 4 coordinates, 4 to 62, with a sign
iq3_s      d * (2 s + 1)          the same of the odd numbers 1 to 15
iq1_*      d * (2 s + 1) / 8      8 times a coordinate, -1, 0 or 1, and 1 more, or less where the group's bit says so
=========  =====================  =============================================================================

=========  ==========================  ================================================================================
plane      dtype, entries of a block   contents
=========  ==========================  ================================================================================
d          float16, 1                  of all types but iq1_m
qs         iq2_xxs: uint16, 32         8 bytes a part: 4 indices; 4 numbers of signs, 7 bits each; s in the 4 highest
           iq2_xs: uint16, 32          a group: index (9 bits), number of signs (7 bits)
           iq2_s: uint8, 64            32 bytes: the low 8 bits of an index; 32 bytes of signs
           iq3_xxs: uint8, 96          64 indices; 4 bytes a part: 4 numbers of signs, 7 bits each; s in the 4 highest
           iq3_s: uint8, 64            the low 8 bits of two indices a group
           iq1_s, iq1_m: uint8, 32     the low 8 bits of an index
qh         iq2_s: uint8, 8             a part: 2 bits of each index
           iq3_s: uint8, 8             a part: 1 bit of each of 8 indices
           iq1_s: uint16, 8            a part: 3 bits of each index; s (bits 12 to 14); less instead of more (bit 15)
           iq1_m: uint8, 16            a group: 4 bits, low nibble first: 3 of the index; less instead of more
signs      iq3_s: uint8, 32            a byte of signs a group
scales     iq2_xs, iq2_s: uint8, 8     a part: s of its first two groups (low nibble), and of the others
           iq3_s: uint8, 4             s of a part, low nibble first
           iq1_m: uint8, 8             four words of 16 bits: four s of two groups each, 3 bits, and 4 bits of d
=========  ==========================  ================================================================================

Bit i of a byte of signs is set where element i is negative. A number of signs is such a byte without its highest bit,
which makes the count of set bits even. Bits 12 to 15 of words 0 to 3 of iq1_m are bits 0 to 3, 4 to 7, ... of d.

The grids are those of ``kbitcupy.tables.iq_grid``. Quantizing, a search among neighbours by importance, is left out.

Source: ggml, ``ggml-quants.c`` (``dequantize_row_iq2_xxs`` and its like), ``ggml-common.h``.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from ...backend.structs import Table
from ...tables import iq_digits, iq_grid
from ..base import register
from ..blocks import BlockFormat, Field
from . import Gguf
from .arithmetic import halves


def _packed(name: str) -> np.ndarray:
    """The digits of a grid as kernels look them up: four bits each, whole words."""
    digits = iq_digits(name).reshape(-1, 8).astype(np.uint32)
    return np.bitwise_or.reduce(digits << np.arange(0, 32, 4, dtype=np.uint32), axis=1)


_TABLES = tuple(
    Table(f"{name.upper()}_GRID", functools.partial(_packed, name))
    for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1")
)


class Grid(BlockFormat):
    """What they have in common."""

    block, default, together = 256, False, True
    header, declared = "formats/gguf_grids.cuh", _TABLES
    #: The grid's name, and what d (2 s + 1) is divided by.
    grid: ClassVar[str]
    divisor: ClassVar[int] = 8

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        d, s, c = self.coordinates(blocks)
        scale = d / np.float32(self.divisor) * (2 * s + 1).astype(np.float32)
        y = c.reshape(*scale.shape, -1).astype(np.float32)
        y *= scale[..., None]
        return y.reshape(-1, self.block)

    @abstractmethod
    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """d, float32[blocks, 1]; s, integers [blocks, runs of elements]; and c, int8, of all elements in order."""

    def entries(self, index: np.ndarray) -> np.ndarray:
        """The entries of some indices, int8[..., coordinates]."""
        return _rows(iq_grid(self.grid), index)


@functools.cache
def _signs() -> np.ndarray:
    """1 and -1 of each byte of signs, int8[256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


@functools.cache
def _numbered_signs() -> np.ndarray:
    """The same of each number of signs, int8[128, 8]."""
    number = np.arange(128)
    odd = np.bitwise_xor.reduce(number >> np.arange(7)[:, None] & 1)
    return _signs()[number | odd << 7]


def _rows(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``table[index]`` of a table of int8 with rows of 4 or 8, which NumPy takes as single numbers."""
    whole = np.dtype(f"u{table.shape[1]}")
    found: np.ndarray = table.view(whole)[:, 0][index]
    return found.view(np.int8).reshape(*index.shape, -1)


def _field(blocks: np.ndarray, start: int, dtype: str, entries: int) -> np.ndarray:
    """Entries from byte `start` of each block on, [blocks, entries]."""
    dtype_ = np.dtype(dtype)
    return np.ascontiguousarray(blocks[:, start : start + dtype_.itemsize * entries]).view(dtype_)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Both nibbles of each byte, the low one first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _fields(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """`count` fields of so many bits of each number, the lowest first."""
    shifts = np.arange(0, bits * count, bits, dtype=packed.dtype)
    return (packed[..., None] >> shifts & packed.dtype.type((1 << bits) - 1)).reshape(len(packed), -1)


class IQ2_XXS(Grid, Gguf):
    """Entries of 8 of 256, signs of an even count, 4-bit scales of 32."""

    name = grid = "iq2_xxs"
    bits = 2
    summary = "8 elements an entry of a grid of 256, 4-bit scales of 32; decoded only"
    fields = (Field("d", "float16", 1), Field("qs", "uint16", 32))
    struct, ggml_type = "IQ2_XXS", 16

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        words = _field(blocks, 2, "<u4", 16).reshape(-1, 8, 2)
        index, rest = np.ascontiguousarray(words[..., 0]).view(np.uint8), words[..., 1]
        c = self.entries(index)
        c *= _rows(_numbered_signs(), _fields(rest, 7, 4))
        return halves(blocks, 0), rest >> np.uint32(28), c


class IQ2_XS(Grid, Gguf):
    """Entries of 8 of 512, signs of an even count, 4-bit scales of 16."""

    name = grid = "iq2_xs"
    bits = 2
    summary = "8 elements an entry of a grid of 512, 4-bit scales of 16; decoded only"
    fields = (Field("d", "float16", 1), Field("qs", "uint16", 32), Field("scales", "uint8", 8))
    struct, ggml_type = "IQ2_XS", 17

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        both = _field(blocks, 2, "<u2", 32)
        c = self.entries(both & np.uint16(511))
        c *= _rows(_numbered_signs(), both >> np.uint16(9))
        return halves(blocks, 0), _nibbles(blocks[:, 66:]), c


class IQ2_S(Grid, Gguf):
    """Entries of 8 of 1024, a byte of signs each, 4-bit scales of 16."""

    name = grid = "iq2_s"
    bits = 2
    summary = "8 elements an entry of a grid of 1024, 4-bit scales of 16; decoded only"
    fields = (Field("d", "float16", 1), Field("qs", "uint8", 64), Field("qh", "uint8", 8), Field("scales", "uint8", 8))
    struct, ggml_type = "IQ2_S", 22

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        high = _fields(blocks[:, 66:74], 2, 4)
        c = self.entries(blocks[:, 2:34] | high.astype(np.uint16) << 8)
        c *= _rows(_signs(), blocks[:, 34:66])
        return halves(blocks, 0), _nibbles(blocks[:, 74:]), c


class IQ3_XXS(Grid, Gguf):
    """Entries of 4 of 256, signs of an even count of 8, 4-bit scales of 32."""

    name = grid = "iq3_xxs"
    bits = 3
    summary = "4 elements an entry of a grid of 256, 4-bit scales of 32; decoded only"
    fields = (Field("d", "float16", 1), Field("qs", "uint8", 96))
    struct, ggml_type, divisor = "IQ3_XXS", 18, 4

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rest = _field(blocks, 66, "<u4", 8)
        c = self.entries(blocks[:, 2:66]).reshape(len(blocks), 32, 8)
        c *= _rows(_numbered_signs(), _fields(rest, 7, 4))
        return halves(blocks, 0), rest >> np.uint32(28), c


class IQ3_S(Grid, Gguf):
    """Entries of 4 of 512, a byte of signs for two, 4-bit scales of 32."""

    name = grid = "iq3_s"
    bits = 3
    summary = "4 elements an entry of a grid of 512, 4-bit scales of 32; decoded only"
    fields = (
        *(Field("d", "float16", 1), Field("qs", "uint8", 64), Field("qh", "uint8", 8), Field("signs", "uint8", 32)),
        Field("scales", "uint8", 4),
    )
    struct, ggml_type, divisor = "IQ3_S", 21, 1

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
        c = self.entries(blocks[:, 2:66] | high.astype(np.uint16) << 8).reshape(len(blocks), 32, 8)
        c *= _rows(_signs(), blocks[:, 74:106])
        return halves(blocks, 0), _nibbles(blocks[:, 106:]), c


def _moved(entries: np.ndarray, less: np.ndarray) -> np.ndarray:
    """8 times the coordinates and 1, or less 1 where `less`."""
    c = entries * np.int8(8)
    c += (1 - 2 * less.astype(np.int8))[..., None]
    return c


class IQ1_S(Grid, Gguf):
    """Entries of 8 of 2048, all of 32 moved by an eighth, 3-bit scales of 32."""

    name, grid, bits = "iq1_s", "iq1", 1
    summary = "8 elements an entry of a grid of 2048, 3-bit scales of 32; decoded only"
    fields = (Field("d", "float16", 1), Field("qs", "uint8", 32), Field("qh", "uint16", 8))
    struct, ggml_type = "IQ1_S", 19

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        more = _field(blocks, 34, "<u2", 8)
        index = blocks[:, 2:34] | _fields(more, 3, 4) << np.uint16(8)
        c = _moved(self.entries(index).reshape(-1, 8, 32), more >> np.uint16(15))
        return halves(blocks, 0), more >> np.uint16(12) & np.uint16(7), c


class IQ1_M(Grid, Gguf):
    """Entries of 8 of 2048, each moved by an eighth, 3-bit scales of 16."""

    name, grid, bits = "iq1_m", "iq1", 1
    summary = "8 elements an entry of a grid of 2048, 3-bit scales of 16; decoded only"
    fields = (Field("qs", "uint8", 32), Field("qh", "uint8", 16), Field("scales", "uint8", 8))
    struct, ggml_type = "IQ1_M", 29

    def coordinates(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        more, words = _nibbles(blocks[:, 32:48]), _field(blocks, 48, "<u2", 4)
        c = _moved(self.entries(blocks[:, :32] | (more & 7).astype(np.uint16) << 8), more >> 3)
        d = np.bitwise_or.reduce(words >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
        return d.view(np.float16).astype(np.float32)[:, None], _fields(words, 3, 4), c


for _type in (IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S):
    register(_type.name, _type)
