"""Blocks of bytes and the planes of their fields, one to the other: nothing is rounded on the way.

Blocks lie side by side as their origin has them, uint8[blocks, bytes], and may begin at any byte. On NumPy each field
is copied by itself, a quarter of a megabyte of blocks at a time; on a GPU a kernel of ``kernels/fields.cu`` moves all
fields of some blocks through shared memory, so that both sides are read and written in whole vectors.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend.compile import Template
from ..backend.launch import Kernel
from ..backend.structs import Constants, Struct
from ..backend.xp import Piece, empty_arrays, namespace, on_device_of, pieces
from ..errors import FormatError
from .base import register_templates

#: Fields that a block may have, as kernels take them.
MAX_FIELDS = 5


class Field(NamedTuple):
    """A field of a block.

    Parameters
    ----------
    name : str
        Name of its plane.
    dtype : str
        NumPy dtype name of its entries.
    entries : int
        Entries of a block.
    split : int, default 0
        Where codes of 4 bits are in another order in the origin's bytes than in the plane: of so many, 16 or 32, the
        origin has number i in the low half of byte i and i + split / 2 in the high one, the plane neighbours in a byte.
    """

    name: str
    dtype: str
    entries: int
    split: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return np.dtype(self.dtype).itemsize * self.entries


def split_blocks(fields: tuple[Field, ...], blocks: Any) -> dict[str, Any]:
    """The planes of blocks, by the names of the fields, on the device of `blocks`.

    `blocks` is uint8 and C-contiguous, of any shape whose size is whole blocks; it may begin anywhere.
    """
    count = blocks.size // block_bytes(fields)
    with on_device_of(blocks):
        planes = empty_arrays(blocks, *_allocation(fields, count))
        if isinstance(blocks, np.ndarray):
            split_into(fields, blocks, planes)
        elif count:
            _launch("split_fields", fields, blocks, count, planes)
    return planes


def join_blocks(fields: tuple[Field, ...], planes: Mapping[str, Any]) -> Any:
    """The blocks of planes, uint8[blocks, bytes], on their device: the inverse of `split_blocks`."""
    first = planes[fields[0].name]
    count = first.size // fields[0].entries
    with on_device_of(first):
        blocks = namespace(first).empty((count, block_bytes(fields)), np.uint8)
        if isinstance(first, np.ndarray):
            _join_numpy(fields, planes, blocks.reshape(-1))
        elif count:
            _launch("join_fields", fields, blocks, count, planes)
    return blocks


@functools.cache
def block_bytes(fields: tuple[Field, ...]) -> int:
    """Bytes of a block of these fields."""
    return sum(field.nbytes for field in fields)


@functools.lru_cache(maxsize=512)
def _allocation(fields: tuple[Field, ...], count: int) -> tuple[int, tuple[Piece, ...]]:
    return pieces({field.name: ((count * field.entries,), field.dtype) for field in fields})


# ---- NumPy ---------------------------------------------------------------------------------------------------------

# Bytes of blocks that are copied at a time, field after field: they stay in the cache.
_BYTES = 1 << 18


def _columns(fields: tuple[Field, ...], raw: np.ndarray, planes: Mapping[str, Any]) -> Any:
    """For every field of some blocks at a time: the field, where it lies in `raw`, and its part of the plane.

    An item of either is all of the field: copies of void items are several times as fast as those of their bytes.
    """
    nbytes = block_bytes(fields)
    count, step = raw.size // nbytes, max(1, _BYTES // nbytes)
    for first in range(0, count, step):
        some, start = min(step, count - first), first * nbytes
        for field in fields:
            item = np.dtype((np.void, field.nbytes))
            part = planes[field.name][first * field.entries : (first + some) * field.entries]
            yield field, np.ndarray((some,), item, raw, start, (nbytes,)), part.view(item)
            start += field.nbytes


def store_fields(fields: tuple[Field, ...], found: tuple[np.ndarray, ...], planes: Mapping[str, Any]) -> None:
    """Fill NumPy planes from the bytes of each field, in the order of the origin, uint8[blocks, bytes]."""
    for field, own in zip(fields, found, strict=True):
        part = planes[field.name].view(np.uint8)
        part[...] = own.reshape(-1)
        if field.split:
            _to_neighbours(part, field.split)


def split_into(fields: tuple[Field, ...], blocks: np.ndarray, planes: Mapping[str, Any]) -> None:
    """Fill NumPy planes from blocks, uint8[blocks, bytes]."""
    for field, column, part in _columns(fields, blocks.reshape(-1), planes):
        part[...] = column
        if field.split:
            _to_neighbours(part.view(np.uint8), field.split)


def _join_numpy(fields: tuple[Field, ...], planes: Mapping[str, Any], raw: np.ndarray) -> None:
    for field, column, part in _columns(fields, raw, planes):
        if field.split:
            column[...] = _to_split(part.view(np.uint8), field.split).view(column.dtype)
        else:
            column[...] = part


def _to_neighbours(codes: np.ndarray, split: int) -> None:
    """Reorder flat bytes of codes of 4 bits in place: those with half a run between them become neighbours."""
    pairs = codes.view("<u2").reshape(-1, split // 4)
    low = pairs & 0x0F | pairs >> 4 & 0xF0
    high = pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
    runs = codes.reshape(-1, 2, split // 4)
    runs[:, 0], runs[:, 1] = low, high


def _to_split(codes: np.ndarray, split: int) -> np.ndarray:
    """The inverse of `_to_neighbours`, as an array of its own."""
    runs = codes.reshape(-1, 2, split // 4).astype("<u2")
    low, high = runs[:, 0], runs[:, 1]
    pairs = low & 0x0F | (high & 0x0F) << 4 | (low & 0xF0) << 4 | (high & 0xF0) << 8
    return pairs.reshape(-1).view(np.uint8)


# ---- CUDA ----------------------------------------------------------------------------------------------------------

_SIZES = Constants(THREADS=128, BLOCKS=14, TILE_BYTES=1 << 12, MAX_FIELDS=MAX_FIELDS)
#: Planes; where their fields begin in a block, how many bytes they have, the bits of both and of a block's size, runs
#: of split codes; the first of the tile's vectors that is of the plane (where there is no plane none is), 2^24 / size,
#: rounded up; bytes of a block, blocks of a tile, and its vectors.
FIELDS = Struct(
    "BlockFields",
    plane=("u8", MAX_FIELDS),
    offset=("i4", MAX_FIELDS),
    size=("i4", MAX_FIELDS),
    bits=("i4", MAX_FIELDS),
    split=("i4", MAX_FIELDS),
    start=("i4", MAX_FIELDS),
    reciprocal=("u4", MAX_FIELDS),
    block="i4",
    tile="i4",
    vectors="i4",
)
_POINTERS = struct.Struct(f"={MAX_FIELDS}Q")


@functools.cache
def _kernel(name: str) -> Kernel:
    return Kernel(_TEMPLATES[name], (), _SIZES.THREADS, signature=("p", "i8", FIELDS))


@functools.cache
def _tile(fields: tuple[Field, ...]) -> int:
    """Blocks of a tile: it is whole vectors of every plane, and so begins at the same byte of a vector as the first."""
    step = 16 // math.gcd(16, *(field.nbytes for field in fields))
    most, nbytes = int(_SIZES.TILE_BYTES) // step, block_bytes(fields)
    if nbytes > most or len(fields) > MAX_FIELDS:
        raise FormatError(
            f"blocks have {nbytes} bytes in {len(fields)} fields; on a GPU such ones become planes up to {most} bytes "
            f"and {MAX_FIELDS} fields: call .get() first"
        )
    return most // nbytes * step


@functools.cache
def _described(fields: tuple[Field, ...]) -> bytes:
    """`FIELDS` without its pointers."""
    sizes, tile = [field.nbytes for field in fields], _tile(fields)
    described, used = FIELDS.zeros(), slice(len(fields))
    described["offset"][used] = [sum(sizes[:i]) for i in range(len(fields))]
    described["size"][used] = sizes
    described["bits"][used] = [sum(sizes[:i]) | size | sum(sizes) for i, size in enumerate(sizes)]
    described["split"][used] = [field.split for field in fields]
    described["start"] = np.iinfo(np.int32).max
    described["start"][used] = [tile * sum(sizes[:i]) // 16 for i in range(len(fields))]
    described["reciprocal"][used] = [-(-(1 << 24) // size) for size in sizes]
    described["block"], described["tile"] = sum(sizes), tile
    described["vectors"] = tile * sum(sizes) // 16
    return described.tobytes()[_POINTERS.size :]


def _launch(name: str, fields: tuple[Field, ...], blocks: Any, count: int, planes: Mapping[str, Any]) -> None:
    addresses = [planes[field.name].data.ptr for field in fields]
    packed = _POINTERS.pack(*addresses, *(0,) * (MAX_FIELDS - len(fields))) + _described(fields)
    _kernel(name)(blocks, -(-count // _tile(fields)), (blocks.data.ptr, count, packed))


_TEMPLATES = {name: Template("fields.cu", name, structs=(_SIZES, FIELDS)) for name in ("split_fields", "join_fields")}
register_templates(*_TEMPLATES.values())
