"""Storey 1: what a format's decoder is, and the kernels of ``kernels/blocks.cu`` that work with any of them.

A format writes one C++ struct whose function ``decode8`` gives eight neighbouring elements as float32, the twin of its
NumPy reference (``kernels/formats/planes.cuh`` has the contract). From that follow, on the GPU, all elements, some rows
and a product; and a test that compiles the struct with the host's compiler.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Type, grid_of
from ..backend.structs import Constants, Declared, Struct

if TYPE_CHECKING:
    from pathlib import Path

#: The kernels of ``blocks.cu``.
KERNELS = ("dequantize_blocks", "take_blocks", "linear_blocks")
#: Planes and integers of a decoder at the most; threads of a block, octets that a thread has under way, the same of
#: decoders that give several together, tokens that share the decoding of a row.
SHARED = Constants(PLANES=6, NUMBERS=4, THREADS=256, UNITS=2, UNITS_TOGETHER=4, TOKENS=8)
_MOST_PLANES, _NUMBERS, _TOKENS, _THREADS = SHARED.PLANES, SHARED.NUMBERS, SHARED.TOKENS, SHARED.THREADS


def _no_numbers(shape: tuple[int, ...]) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class Decoder:
    """The storey-1 decoder of a format: a C++ struct, and where it finds what it reads.

    Two are equal only when they are one object: a format keeps its own.

    Parameters
    ----------
    header : str
        The file with the struct, such as ``"formats/kbit.cuh"``, below ``kernels/`` or `folder`.
    struct : str
        The C++ type, such as ``"Kbit<E4M4>"``.
    planes : tuple of str
        Names of planes in the order in which the struct counts them, up to six; one that an array does not have is
        null. Each member of a stack has its own.
    numbers : callable, optional
        Up to four integers that the struct counts, from the shape of an array (of a member, where it is a stack).
    table : numpy.ndarray, optional
        The table of the struct, float32, as long as its ``TABLE``: passed by value. Zeros where `values` stands for
        them.
    values : str, optional
        A float32 plane that holds the beginning of the table instead, one for all members of a stack.
    folder : Path, optional
        The kernels of another package.
    together : bool, default False
        Whether the struct has a ``decode_together``.
    declared : tuple of Struct, Constants and Table, default ()
        What stands ahead of the header.

    Examples
    --------
    >>> import kbitcupy as kb
    >>> decoder = kb.get_format("nf4").decoder
    >>> decoder.struct, decoder.planes[:2], decoder.numbers((4, 64))
    ('Table4<false>', ('packed', 'absmax'), (6,))
    """

    header: str
    struct: str
    planes: tuple[str, ...]
    numbers: Callable[[tuple[int, ...]], tuple[int, ...]] = _no_numbers
    table: np.ndarray | None = None
    values: str | None = None
    folder: Path | None = None
    together: bool = False
    declared: tuple[Declared, ...] = ()

    def argument(self, planes: Mapping[str, Any], shape: tuple[int, ...], members: int = 1) -> bytes:
        """``Argument<F>`` of ``kernels/formats/planes.cuh`` for an array of `shape`, or a stack of such arrays.

        Parameters
        ----------
        planes : mapping
            Names to NumPy or CuPy arrays, whose addresses it will hold.
        shape : tuple of int
            Of a member.
        members : int, default 1
            How many arrays the planes hold, one behind the other; `values` is one for all.
        """
        found = [planes.get(name) for name in self.planes]
        nothing = _NOTHING[len(found) : _MOST_PLANES]
        begin = _PLANES.pack(*map(_address, found), *nothing)
        values = None if self.values is None else planes.get(self.values)
        if members == 1 and values is None:
            return begin + _rest(self, shape)
        strides = [0 if plane is None or members == 1 else plane.nbytes // members for plane in found]
        behind = _STRIDES.pack(*strides, *nothing, _address(values), 0 if values is None else values.size)
        return begin + _fixed(self, shape) + behind + _table(self)


def templates(
    header: str,
    *structs: str,
    kernels: tuple[str, ...] = KERNELS,
    folder: Path | None = None,
    declared: tuple[Declared, ...] = (),
) -> Any:
    """The kernels of a family's decoders, for the compile check.

    Parameters
    ----------
    header, folder, declared
        As of a `Decoder`.
    *structs : str
        The C++ types.
    kernels : tuple of str
        Those of `KERNELS` that are used; a format with a kernel of its own that is faster needs no other.

    Returns
    -------
    tuple of Template
    """
    return tuple(_template(name, header, folder, structs, declared) for name in kernels)


def decodes(out: Any) -> bool:
    """Whether the kernels write arrays like `out`: CuPy arrays of a dtype that has a C++ name."""
    return not isinstance(out, np.ndarray) and _has_type(out.dtype)


@functools.lru_cache(maxsize=64)
def _has_type(dtype: np.dtype) -> bool:
    return dtype.name in CXX_TYPES  # to ask a dtype for its name takes a microsecond


def dequantize(decoder: Decoder, planes: Mapping[str, Any], shape: tuple[int, ...], out: Any, members: int = 1) -> None:
    """Fill the CuPy array `out` with all elements of an array of `shape`, or of a stack of such arrays."""
    if not out.size:
        return
    kernel = _kernel("dequantize_blocks", decoder, out.dtype)
    arguments = out.data.ptr, members, decoder.argument(planes, shape, members)
    octets = SHARED.UNITS_TOGETHER if decoder.together and out.itemsize == 2 else SHARED.UNITS
    spans, resident = -(-out.size // members // (8 * octets * _THREADS)), kernel.ready(out.data.device_id).resident
    width = grid_of(spans, max(resident // members, 1), kernel.rounds)
    kernel.launch(out, (width, min(members, _MOST_MEMBERS)), arguments)


def take(
    decoder: Decoder,
    planes: Mapping[str, Any],
    shape: tuple[int, ...],
    ids: Any,
    out: Any,
    lead: int = 0,
    kept: dict[Any, Any] | None = None,
) -> None:
    """Fill `out` with rows of a CuPy array of `shape` by their numbers along axis 0, which wrap.

    Parameters
    ----------
    ids : cupy.ndarray
        int32 or int64, contiguous.
    lead : int, default 0
        How many leading lengths count the members of a stack. Without, rows are whole blocks.
    kept : dict, optional
        Lives as long as the planes and keeps the `Decoder.argument`.
    """
    if not out.size:
        return
    rows, each = _rows(shape, lead)
    kernel = _kernel("take_blocks", decoder, out.dtype)
    runs = ids.size * rows[2]
    packed = _ROWS.pack(ids.size, *rows, ids.dtype.itemsize == 8)
    argument = None if kept is None else kept.get(decoder)
    if argument is None:
        argument = decoder.argument(planes, shape[lead:], math.prod(shape[:lead]))
        if kept is not None:
            kept[decoder] = argument
    kernel(out, -(-runs * each // _THREADS), (out.data.ptr, ids.data.ptr, packed, argument))


def multiply(
    decoder: Decoder, planes: Mapping[str, Any], shape: tuple[int, ...], x: Any, bias: Any | None, out: Any
) -> None:
    """Fill `out` with ``x @ q.T + bias``, `q` being a matrix of `shape`: the simple product, for any format.

    float32 throughout, added up in an order that depends on nothing but the number of columns, and rounded once. Eight
    tokens share the decoding of a row, so the time grows with every eight.

    Parameters
    ----------
    x : cupy.ndarray
        [tokens, columns], contiguous.
    bias : cupy.ndarray or None
        [rows], of x's dtype.
    out : cupy.ndarray
        [tokens, rows], of x's dtype, contiguous.
    """
    if not out.size:
        return
    tokens, (rows, columns) = len(x), shape
    kernel = _kernel("linear_blocks", decoder, out.dtype)
    numbers = (tokens, rows, columns, decoder.argument(planes, shape))
    units = -(-rows * -(-tokens // _TOKENS) // _WARPS)
    kernel(out, units, (x.data.ptr, _address(bias), out.data.ptr, *numbers))


# ---- packing -------------------------------------------------------------------------------------------------------

_PLANES = struct.Struct(f"={_MOST_PLANES}Q")
_FIXED = struct.Struct(f"={_NUMBERS}qqQq")  # numbers, elements, and what the kernel sets: the table and `whole`
_STRIDES = struct.Struct(f"={_MOST_PLANES}qQq")
_NOTHING = (0,) * max(_MOST_PLANES, _NUMBERS)
#: ``struct Rows`` of kernels/blocks.cu.
ROWS = Struct("Rows", count="i8", rows="i8", length="i8", runs="i8", stacked="i8", wide="i8")
_ROWS = struct.Struct("=6q")


def _address(array: Any) -> int:
    if array is None:
        return 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


@functools.lru_cache(maxsize=4096)
def _fixed(decoder: Decoder, shape: tuple[int, ...]) -> bytes:
    numbers = decoder.numbers(shape)
    return _FIXED.pack(*numbers, *_NOTHING[len(numbers) : _NUMBERS], math.prod(shape), 0, 0)


@functools.lru_cache(maxsize=4096)
def _rest(decoder: Decoder, shape: tuple[int, ...]) -> bytes:
    """All behind the planes of an array that is no stack, and whose table is known."""
    return _fixed(decoder, shape) + bytes(_STRIDES.size) + _table(decoder)


@functools.lru_cache(maxsize=1024)
def _table(decoder: Decoder) -> bytes:
    """The table and what fills it up to 8 bytes; one number where there is none."""
    table = np.zeros(1, np.float32) if decoder.table is None else decoder.table
    return np.pad(table, (0, table.size % 2)).astype(np.float32).tobytes()


@functools.lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], lead: int) -> tuple[tuple[int, int, int, int], int]:
    """`rows`, `length`, `runs` and `stacked` of `ROWS`, and the octets that a run may touch."""
    length = math.prod(shape[max(lead, 1) :])
    each = -(-length // 8) if length % 8 == 0 else length // 8 + 2
    return (shape[0], length, math.prod(shape[1 : max(lead, 1)]), lead > 0), each


# ---- kernels -------------------------------------------------------------------------------------------------------

_WARPS = _THREADS // 32
_MOST_MEMBERS = 1 << 15  # thread blocks beside each other along the second axis of a grid


@functools.cache
def _template(
    name: str, header: str, folder: Path | None, decoders: tuple[str, ...], declared: tuple[Declared, ...]
) -> Template:
    axes, structs = (tuple(CXX_TYPES.values()), decoders), (SHARED, ROWS, *declared)
    return Template("blocks.cu", name, axes, folder=folder, header=header, structs=structs)


@functools.lru_cache(maxsize=1024)
def _kernel(name: str, decoder: Decoder, dtype: np.dtype) -> Kernel:
    about = decoder.header, decoder.folder, (decoder.struct,), decoder.declared
    return _shared_kernel(name, about, dtype, len(_table(decoder)))


@functools.cache
def _shared_kernel(name: str, about: tuple[Any, ...], dtype: np.dtype, table_bytes: int) -> Kernel:
    argument = _PLANES.size + _FIXED.size + _STRIDES.size + table_bytes
    signatures: dict[str, tuple[Type, ...]] = {
        "dequantize_blocks": ("p", "i8", argument),
        "take_blocks": ("p", "p", ROWS, argument),
        "linear_blocks": ("p", "p", "p", "i8", "i8", "i8", argument),
    }
    # Each thread block makes a copy of the table first, so that it should have some work; a row of a product is enough.
    template = _template(name, *about)
    (struct,), declared = about[2:]
    alone = table_bytes == 8 and not declared
    rounds = 1 if alone or name == "linear_blocks" else 2 if table_bytes < 1024 else 4
    return Kernel(template, (CXX_TYPES[dtype.name], struct), _THREADS, 0, rounds, signatures[name])
