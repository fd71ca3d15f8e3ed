"""The codebook formats on CUDA: their kernels, and how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import tables
from ...backend.compile import CXX_BOOLS, CXX_TYPES, Template
from ...backend.launch import Kernel, Type, shared_memory
from ...backend.structs import Constants, Struct
from ...backend.xp import namespace
from ...tables import Codebook
from ..decoders import Decoder, templates
from .numpy import BLOCK, MEAN_LANES
from .scales import ABSMAX
from .search import (
    CODEBOOKS,
    DYNAMIC,
    DYNAMIC_SEARCH,
    KBIT_SEARCH,
    NESTED_BLOCK,
    TABLE4,
    BucketSearch,
    Table,
    search4,
    search8,
)

# Numbers of kernels/kbit.cu. Threads of a block, by the bytes of an element and by the bits of an index: more of them
# share the cost of a table, but each warp needs shared memory for its tiles, of which the smallest architecture has 64
# KiB for a block. Compressed tiles of a warp that are under way, with the one it works on. Log2 of the most bytes of a
# table of values, for which copies are given up. What a pass of quantization does about the tensor scale.
_KBIT = Constants(
    FLOAT_THREADS=128,
    HALF_THREADS=256,
    FEW_BITS=4,
    FEW_BITS_THREADS=128,
    MANY_BITS_THREADS=256,
    STAGES=2,
    VALUES_LOG2=14,
    FLAT=0,
    UNIT_SCALE=1,
    FIND_SCALE=2,
    RESCALE=3,
)


def _dequantize_threads(k: int) -> int:
    return int(_KBIT.FEW_BITS_THREADS if k <= _KBIT.FEW_BITS else _KBIT.MANY_BITS_THREADS)


def _dequantize_shared(k: int, absmax: str) -> int:
    """Shared memory of ``dequantize_kbit``: for each warp compressed tiles and an unpacked one; the table of values."""
    stage = 4 * k + np.dtype(ABSMAX[absmax].dtype).itemsize
    groups = 4 * (1, 2, 4, 4, 8, 8, 8, 8)[k - 1]
    return int(_dequantize_threads(k) * (_KBIT.STAGES * stage + groups) + (1 << min(k + 8, _KBIT.VALUES_LOG2)))


_BITS = range(1, 9)
# ... which the kernel compares, by format of absmax and bits.
_SHARED = Constants(DEQUANTIZE_SHARED=tuple(_dequantize_shared(k, absmax) for absmax in ABSMAX for k in _BITS))
_KBIT_AHEAD: tuple[Struct | Constants, ...] = (_KBIT, _SHARED, KBIT_SEARCH, *CODEBOOKS)

_AXES = (tuple(CXX_TYPES.values()), tuple(map(str, _BITS)), tuple(a.kernel for a in ABSMAX.values()))
QUANTIZE = Template("kbit.cu", "quantize_kbit", (*_AXES, ("ORDERED",)), structs=_KBIT_AHEAD)
# Codebooks that are not in order are the exception: a few bytes of spilled registers do not matter to them.
QUANTIZE_UNORDERED = Template("kbit.cu", "quantize_kbit", (*_AXES, ("MAPPED", "ANY")), hot=False, structs=_KBIT_AHEAD)
DEQUANTIZE = Template("kbit.cu", "dequantize_kbit", _AXES, structs=_KBIT_AHEAD)
_HEADER = "formats/kbit.cuh"
# All elements and products of float16 and bfloat16 have kernels of their own, which are faster.
KBIT_BLOCKS = templates(
    _HEADER, *(f"Kbit<{a.kernel}>" for a in ABSMAX.values()), kernels=("take_blocks", "linear_blocks")
)
CODES = tuple(
    Template("codes.cu", name, hot=False)
    for name in ("pack_kbit", "unpack_kbit", "encode_absmax_e4m4", "decode_absmax_e4m4")
)

_FILE = "table4.cu"
_TYPES = tuple(CXX_TYPES[name] for name in ("float16", "bfloat16", "float32"))
# Numbers of kernels/table4.cu and nested.cu: threads of a block, and of the one that decodes the dynamic map; octets of
# a thread that are decoded from 4 bits, more where it has a second table to make and the writes do not take longest;
# elements of a thread in a round, where the dynamic map is decoded. Blocks whose absmax are quantized together, and
# threads of the block that finds their mean.
_TABLES = Constants(
    THREADS=256,
    DYNAMIC_THREADS=1024,
    OCTETS=2,
    NESTED_HALF_OCTETS=4,
    DYNAMIC_ELEMENTS=16,
    NESTED_BLOCK=NESTED_BLOCK,
    MEAN_THREADS=MEAN_LANES,
)
# The values of codes, and those of 8-bit codes of absmax.
_VALUES4, _VALUES8 = Struct("Values4", value=("f4", 16)), Struct("Values8", value=("f4", 256))
_VALUES4_NESTED = Struct("Values4Nested", value=("f4", 16), map=("f4", 256))
_TABLES_AHEAD = (_TABLES, DYNAMIC_SEARCH, TABLE4, DYNAMIC, _VALUES4, _VALUES8, _VALUES4_NESTED)

QUANTIZE4 = Template(_FILE, "quantize_table4", (_TYPES, ("ORDERED", "FP4")), structs=_TABLES_AHEAD)
QUANTIZE4_ANY = Template(_FILE, "quantize_table4", (_TYPES, ("ANY",)), hot=False, structs=_TABLES_AHEAD)
DEQUANTIZE4 = Template(_FILE, "dequantize_table4", (_TYPES, CXX_BOOLS), structs=_TABLES_AHEAD)
QUANTIZE8 = Template(_FILE, "quantize_dynamic8", (_TYPES,), structs=_TABLES_AHEAD)
DEQUANTIZE8 = Template(_FILE, "dequantize_dynamic8", (_TYPES,), structs=_TABLES_AHEAD)
NESTED = tuple(
    Template("nested.cu", name, hot=False, structs=_TABLES_AHEAD)
    for name in ("absmax_sums", "absmax_mean", "quantize_absmax")
)
# All elements, and products of 4-bit codes, have kernels of their own, which are faster.
_HEADER4, _HEADER8, _USED = "formats/table4.cuh", "formats/dynamic8.cuh", ("take_blocks", "linear_blocks")
BLOCKS4 = templates(_HEADER4, "Table4<false>", "Table4<true>", kernels=_USED)
BLOCKS8 = templates(_HEADER8, "Dynamic8", kernels=_USED)


class Launch:
    """A kernel of the family with the table that it is passed by value, behind its other arguments.

    Parameters
    ----------
    template, values, threads, shared, rounds
        As of a `Kernel`.
    unit : int
        Elements that a thread block takes in a round.
    table : numpy.ndarray
        What kernels search or decode with, ...
    struct : Struct
        ... as they know it.
    *signature : str
        Types of the arguments ahead of it.
    """

    __slots__ = ("_kernel", "_table", "_unit")

    def __init__(
        self,
        template: Template,
        values: tuple[str, ...],
        threads: int,
        unit: int,
        shared: int,
        rounds: int,
        table: np.ndarray,
        struct: Struct,
        *signature: Type,
    ):
        if table.nbytes != struct.dtype.itemsize:
            raise TypeError(f"{table.nbytes} bytes are not {struct}, which has {struct.dtype.itemsize}")
        self._kernel = Kernel(template, values, threads, shared, rounds, (*signature, struct))
        self._unit, self._table = unit, table.tobytes()

    def __call__(self, array: Any, size: int, arguments: tuple[Any, ...], waves: int = 0) -> None:
        self._kernel(array, -(-size // self._unit), (*arguments, self._table), waves)


# ---- k-bit indices ---------------------------------------------------------------------------------------------------

# Fewer than eight copies mean bank conflicts, which 16-bit elements wait for. Where a thread block can have this much
# shared memory, more than one such block fits a multiprocessor even with a larger table.
_ROOMY = 160 << 10
# Rounds of a thread block, by the bytes of an element and the bits of an index.
_QUANTIZE_ROUNDS = {2: (3, 4, 8, 8, 16, 32, 32, 32), 4: (2, 4, 5, 4, 8, 16, 12, 16)}
_ANY_ROUNDS = 32  # each thread block has looked at the codebook first
_DEQUANTIZE_ROUNDS = {2: (2, 2, 2, 2, 4, 4, 4, 8), 4: (1, 1, 1, 1, 1, 1, 2, 2)}
# Significant bits of the dtypes whose quotients need no division.
_MANTISSA_BITS = {"float16": 11, "bfloat16": 8}
_FLAT, _UNIT_SCALE, _FIND_SCALE, _RESCALE = _KBIT.FLAT, _KBIT.UNIT_SCALE, _KBIT.FIND_SCALE, _KBIT.RESCALE
# Thread blocks of the RESCALE pass, which mostly ends at once, in units of what the device holds.
_RESCALE_WAVES = 2


@functools.lru_cache(maxsize=1024)
def _kbit_launch(
    kind: str, k: int, absmax: str, dtype: np.dtype, table: Codebook | None, roomy: bool = False
) -> Launch:
    """The launch of ``quantize_kbit`` or ``dequantize_kbit``; without `table` only the device knows the values."""
    axes = CXX_TYPES[dtype.name], str(k), ABSMAX[absmax].kernel
    unit = 1024 // 32  # elements of a thread: each warp takes tiles of 1024
    # Rounds are measured: more of them spread the cost of the tables, fewer keep what is under way close together in
    # memory.
    if kind == "quantize":
        search = BucketSearch(k, table, _MANTISSA_BITS.get(dtype.name), roomy)
        threads = _KBIT.FLOAT_THREADS if dtype.itemsize == 4 else _KBIT.HALF_THREADS
        rounds = _ANY_ROUNDS if search.kernel == "ANY" else _QUANTIZE_ROUNDS[dtype.itemsize][k - 1]
        shared = 2 * threads * BLOCK * dtype.itemsize + search.shared_bytes
        template = QUANTIZE if search.kernel == "ORDERED" else QUANTIZE_UNORDERED
        read = ("p", "i8", "p", "p", "p", "p", "p", "i4")
        struct = CODEBOOKS[k - 1]
        values = (*axes, search.kernel)
        return Launch(template, values, threads, unit * threads, shared, rounds, search.argument, struct, *read)
    threads = _dequantize_threads(k)
    rounds = _DEQUANTIZE_ROUNDS[dtype.itemsize][k - 1]
    shared = _dequantize_shared(k, absmax)
    table_of = BucketSearch(k, table, None).argument
    types = ("p", "p", "p", "p", "p", "i8")
    return Launch(DEQUANTIZE, axes, threads, unit * threads, shared, rounds, table_of, CODEBOOKS[k - 1], *types)


@functools.lru_cache(maxsize=256)
def kbit_decoder(k: int, absmax: str, table: Codebook | None) -> Decoder:
    """The storey-1 decoder of k-bit indices; the plane ``codebook`` has the values where `table` is None."""
    values = np.zeros(256, np.float32)
    if table is not None:
        values[: 1 << k] = table.values
    struct = f"Kbit<{ABSMAX[absmax].kernel}>"
    return Decoder(
        _HEADER, struct, ("packed", "absmax", "scale"), lambda shape: (k,), values, "codebook", together=True
    )


@functools.lru_cache(maxsize=1024)
def _kbit_quantizer(k: int, absmax: str, dtype: np.dtype, table: Codebook | None, device: int) -> Launch:
    """The launch of ``quantize_kbit`` on a device."""
    return _kbit_launch("quantize", k, absmax, dtype, table, dtype.itemsize == 2 and shared_memory(device) >= _ROOMY)


def quantize_kbit(
    x: Any, planes: Mapping[str, Any], k: int, absmax: str, table: Codebook | None, values: Any, flat: bool = False
) -> None:
    """Quantize to k bits by `table`, or by `values` on the device where it is None; `flat` as the flat functions do."""
    if x.size == 0:
        if not flat:
            _fill_shared_planes(planes, table, values)
        return
    launch = _kbit_quantizer(k, absmax, x.dtype, table, x.data.device_id)
    size = x.size
    # Addresses, since most formats pass them twice.
    packed, scales, codebook = planes["packed"].data.ptr, planes["absmax"].data.ptr, planes.get("codebook", 0)
    if flat or absmax == "float32":
        scale = 0 if flat else planes["scale"]
        launch(x, size, (x, size, packed, scales, scale, values, codebook, _FLAT if flat else _UNIT_SCALE))
        return
    memory = planes["scale"].data
    memory.memset_async(0, 4)
    arguments = (x.data.ptr, size, packed, scales, memory.ptr, values, codebook)
    launch(x, size, (*arguments, _FIND_SCALE))
    launch(x, size, (*arguments, _RESCALE), _RESCALE_WAVES)


def dequantize_kbit(planes: Mapping[str, Any], out: Any, k: int, absmax: str, table: Codebook | None) -> None:
    """Decode k-bit indices by `table`, or by the plane ``codebook`` where it is None."""
    if out.size:
        launch = _kbit_launch("dequantize", k, absmax, out.dtype, table)
        read = (planes["packed"], planes["absmax"], planes.get("scale", 0), planes.get("codebook", 0))
        launch(out, out.size, (*read, out, out.size))


def _fill_shared_planes(planes: Mapping[str, Any], table: Codebook | None, values: Any) -> None:
    """What the kernel would write if there were a block to write."""
    planes["scale"].fill(1)
    if "codebook" not in planes:
        return
    if table is None:
        planes["codebook"][...] = namespace(values).where(abs(values) < tables.SMALLEST_NORMAL, 0, values)
    else:
        planes["codebook"].set(table.values)


# ---- blockwise tables ------------------------------------------------------------------------------------------------

# Rounds of a thread block, by the bytes of an element: more spread the cost of its table, fewer keep what is under way
# close together in memory.
_TABLE_ROUNDS = {2: 4, 4: 2}
_DYNAMIC_ROUNDS = {2: 8, 4: 2}


@functools.lru_cache(maxsize=256)
def _quantize_launch(dtype: np.dtype, table: Table | None) -> Launch:
    """Quantization by a table of 16, or by the dynamic map where it is None."""
    if table is None:
        template, struct, of, rounds = QUANTIZE8, search8(), DYNAMIC, _DYNAMIC_ROUNDS
        axes: tuple[str, ...] = ()
    else:
        search, struct = search4(table)
        template = QUANTIZE4_ANY if search == "ANY" else QUANTIZE4
        axes, of, rounds = (search,), TABLE4, _TABLE_ROUNDS
    unit = 32 * _TABLES.THREADS
    name, shared, most = CXX_TYPES[dtype.name], unit * dtype.itemsize, rounds[dtype.itemsize]
    types = ("p", "i8", "p", "p", *(() if table is None else ("p",)), "i8")
    return Launch(template, (name, *axes), _TABLES.THREADS, unit, shared, most, struct, of, *types)


@functools.lru_cache(maxsize=256)
def _dequantize_launch(dtype: np.dtype, table: Table | None, nested: bool) -> Launch:
    """Decoding by a table of 16; where it is None the values are on the device."""
    struct = np.zeros(16, np.float32) if table is None else table.values
    if nested:
        struct = np.concatenate((struct, tables.dynamic_map()))
    axes = CXX_TYPES[dtype.name], str(nested).lower()
    each = 8 * (_TABLES.NESTED_HALF_OCTETS if nested and dtype.itemsize == 2 else _TABLES.OCTETS)
    types = ("p", "p", "p", "p", "p", "p", "i8", "i8")
    of, threads = _VALUES4_NESTED if nested else _VALUES4, _TABLES.THREADS
    return Launch(DEQUANTIZE4, axes, threads, threads * each, 0, 1, struct, of, *types)


@functools.cache
def _dynamic_dequantize_launch(dtype: np.dtype) -> Launch:
    axes, threads, types = (CXX_TYPES[dtype.name],), _TABLES.DYNAMIC_THREADS, ("p", "p", "p", "i8", "i8")
    unit = threads * _TABLES.DYNAMIC_ELEMENTS
    return Launch(DEQUANTIZE8, axes, threads, unit, 0, 4, tables.dynamic_map(), _VALUES8, *types)


@functools.cache
def _nested_launches() -> tuple[Kernel, Kernel, Launch]:
    (sums, mean, encode), threads = NESTED, _TABLES.THREADS
    return (
        Kernel(sums, (), threads, signature=("p", "i8", "p")),
        Kernel(mean, (), MEAN_LANES, signature=("p", "i8", "p")),
        Launch(encode, (), threads, 8 * threads, 0, 1, search8(), DYNAMIC, "p", "i8", "p", "p", "p"),
    )


def _log2(block: int) -> int:
    return block.bit_length() - 1


def quantize_table4(x: Any, planes: Mapping[str, Any], table: Table, block: int) -> None:
    """Quantize to 4-bit codes, with double quantization where the planes ask for it."""
    values_out = planes.get("table", 0)
    absmax, nested = planes["absmax"], "nested_offset" in planes
    if x.size == 0:
        if nested:
            planes["nested_offset"].fill(0)
        if "table" in planes:
            planes["table"].set(table.values)
        return
    if nested:
        absmax = namespace(x).empty(absmax.size, np.float32)
    launch = _quantize_launch(x.dtype, table)
    launch(x, x.size, (x, x.size, planes["packed"], absmax, values_out, _log2(block)))
    if not nested:
        return
    count, offset = absmax.size, planes["nested_offset"]
    sums = namespace(x).empty(-(-count // NESTED_BLOCK), np.float64)
    add, mean, encode = _nested_launches()
    add(absmax, -(-sums.size // 8), (absmax, count, sums))  # a warp for each
    mean(absmax, 1, (sums, count, offset))
    encode(absmax, count, (absmax, count, offset, planes["absmax"], planes["nested_absmax"]))


@functools.lru_cache(maxsize=256)
def table4_decoder(block: int, nested: bool, table: Table | None) -> Decoder:
    """The storey-1 decoder of 4-bit codes; the plane ``table`` has the values where `table` is None."""
    values = np.zeros(16, np.float32) if table is None else table.values
    if nested:
        values = np.concatenate((values, tables.dynamic_map()))
    planes = ("packed", "absmax", "nested_absmax", "nested_offset")
    log2 = _log2(block)
    return Decoder(_HEADER4, f"Table4<{str(nested).lower()}>", planes, lambda shape: (log2,), values, "table")


@functools.cache
def dynamic8_decoder(block: int) -> Decoder:
    """The storey-1 decoder of the dynamic map."""
    log2 = _log2(block)
    return Decoder(_HEADER8, "Dynamic8", ("codes", "absmax"), lambda shape: (log2,), tables.dynamic_map())


def dequantize_table4(planes: Mapping[str, Any], out: Any, table: Table | None, block: int) -> None:
    """Decode 4-bit codes by `table`, or by the plane ``table`` where it is None."""
    if out.size == 0:
        return
    launch = _dequantize_launch(out.dtype, table, "nested_offset" in planes)
    nested = (planes.get("nested_absmax", 0), planes.get("nested_offset", 0), planes.get("table", 0))
    launch(out, out.size, (planes["packed"], planes["absmax"], *nested, out, out.size, _log2(block)))


def quantize_dynamic8(x: Any, planes: Mapping[str, Any], block: int) -> None:
    """Quantize to codes of the dynamic map."""
    if x.size:
        launch = _quantize_launch(x.dtype, None)
        launch(x, x.size, (x, x.size, planes["codes"], planes["absmax"], _log2(block)))


def dequantize_dynamic8(planes: Mapping[str, Any], out: Any, block: int) -> None:
    """Decode codes of the dynamic map."""
    if out.size:
        launch = _dynamic_dequantize_launch(out.dtype)
        launch(out, out.size, (planes["codes"], planes["absmax"], out, out.size, _log2(block)))
