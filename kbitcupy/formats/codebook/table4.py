"""Blockwise tables as bitsandbytes has them: ``nf4``, ``fp4``, ``table4`` (4 bits) and ``dynamic8`` (8 bits).

The flattened array is cut into blocks of 16 to 4096 elements, the last one as long as it comes. With
r = fl(1 / absmax), an element is stored as the code of the table value that the thresholds give for y = fl(x * r); two
elements share a byte, the first in its high nibble. An element decodes to fl(table[code] * absmax).

==============  ======================  ======================================================================
plane           dtype, entries          contents
==============  ======================  ======================================================================
packed          uint8, (n + 1) // 2     two codes a byte (`dynamic8`: ``codes``, uint8, n)
absmax          float32, blocks         max|x| of the block, NaN ignored; with double quantization uint8 codes
                                        of absmax - offset, blocks of 256, by the dynamic map
nested_absmax   float32, blocks / 256   max|absmax - offset| of each such block (rounded up)
nested_offset   float32, 1              the mean of all absmax
table           float32, 16             only for tables of one's own
==============  ======================  ======================================================================

Thresholds are the float32 midpoints of neighbours; for NF4 they are bitsandbytes' own numbers, four of which are the
next float32 to the midpoint. A number on a threshold stays below it; in the dynamic map it goes to the even code. FP4
compares magnitudes with bitsandbytes' own seven numbers, and numbers below zero get the sign bit.

Special values: NaN gets code 0; every code of a block without a number other than zero is 0, and its absmax 0;
the spare nibble of an odd array holds the code of 0. Where the absmax is infinite, finite numbers get the code of 0
and infinities code 0. Magnitudes under 2^-126, of input or output, are zero. A block with an absmax over 2^126, whose
reciprocal would be such a number, is searched 2^64 times smaller.

Source: bitsandbytes 0.50, ``csrc/kernels.cu`` (NF4, FP4, dynamic map, nested statistics). Equal to these CUDA kernels,
to the bit, are absmax and what given planes decode to. Codes are equal but for three cases: there r is the GPU's
approximate reciprocal, so that a number on a threshold may get the neighbouring code; with an absmax over 2^126 it is
zero; and the mean of the absmax is added up in another order. Of a block of NaN alone they store the lowest float32 as
absmax. bitsandbytes' CPU backend has rules of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import tables
from ...backend.compile import CXX_TYPES, Template
from ...backend.launch import Kernel, by_value
from ...backend.xp import is_cupy, namespace
from ...errors import FormatError
from ...tables import SMALLEST_NORMAL, flush, flushed_product
from ..base import Format, Fragments, Magnitude, Plane, host_numbers, named, register, remade
from ..chunks import CHUNK, Buckets, Buffers, block_absmax, chunk_absmax, chunks, flush_chunk, flush_products
from ..decoders import Decoder, templates

#: Elements that may share an absmax.
BLOCKS = tuple(1 << i for i in range(4, 13))
#: Blocks whose absmax are quantized together in double quantization.
NESTED_BLOCK = 256

_FILE = "float4.cu"
_TYPES = tuple(CXX_TYPES[name] for name in ("float16", "bfloat16", "float32"))
_QUANTIZE4 = Template(_FILE, "quantize_table4", (_TYPES, ("ORDERED", "FP4")))
_QUANTIZE4_ANY = Template(_FILE, "quantize_table4", (_TYPES, ("ANY",)), hot=False)
_DEQUANTIZE4 = Template(_FILE, "dequantize_table4", (_TYPES, ("false", "true")))
_QUANTIZE8 = Template(_FILE, "quantize_dynamic8", (_TYPES,))
_DEQUANTIZE8 = Template(_FILE, "dequantize_dynamic8", (_TYPES,))
_NESTED = tuple(Template("nested.cu", name, hot=False) for name in ("absmax_sums", "absmax_mean", "quantize_absmax"))

# All elements, and products of 4-bit codes, have kernels of their own, which are faster.
_HEADER4, _HEADER8, _USED = "formats/table4.cuh", "formats/dynamic8.cuh", ("take_blocks", "linear_blocks")
_BLOCKS4 = templates(_HEADER4, "Table4<false>", "Table4<true>", kernels=_USED)
_BLOCKS8 = templates(_HEADER8, "Dynamic8", kernels=_USED)

# An absmax over this has no normal reciprocal; it and its block are scaled down first.
_LARGE = np.float32(2.0**126)
_DOWN = np.float32(2.0**-64)
# With an absmax from here on, the quotients of subnormal numbers are on the same side of every threshold as 0.
_SAFE_ABSMAX = np.float32(2.0**-80)
_LARGEST_SUBNORMAL = np.uint32(0x007FFFFF).view(np.float32)


class Table:
    """Values by code, with the thresholds that the search uses.

    Parameters
    ----------
    values : numpy.ndarray
        float32, by code.
    thresholds : numpy.ndarray
        float32, ascending: the level of y is the count of thresholds below it.
    codes : numpy.ndarray
        uint8, the code of each level: one more than thresholds.

    Attributes
    ----------
    flushes : bool
        Whether a threshold lies so close to zero that subnormal numbers must have been flushed.
    """

    def __init__(self, values: np.ndarray, thresholds: np.ndarray, codes: np.ndarray):
        self.values, self.thresholds, self.codes = values, thresholds, codes
        self.flushes = bool((np.abs(thresholds) < 2.0**-40).any())
        # The GPU flushes y: above a threshold of zero is what is normal.
        compared = np.where(np.abs(thresholds) < SMALLEST_NORMAL, _LARGEST_SUBNORMAL, thresholds)
        self.search = Buckets(compared, codes).search

    @property
    def edge(self) -> float:
        """Largest distance of a point of [-1, 1] to the value that stands for it, but for rounding."""
        value = self.values[self.codes].astype(np.float64)
        ends = np.concatenate(([-1.0], np.clip(self.thresholds.astype(np.float64), -1, 1), [1.0]))
        return float(np.maximum(np.abs(ends[:-1] - value), np.abs(ends[1:] - value))[ends[1:] > ends[:-1]].max())


def _table_of(values: np.ndarray) -> Table:
    """Any values: thresholds are the midpoints of the distinct ones, in order."""
    values = flush(np.array(values, np.float32))
    values.setflags(write=False)
    levels, first = np.unique(values, return_index=True)
    return Table(values, flush(tables.midpoints(levels)), first.astype(np.uint8))


@functools.cache
def _nf4() -> Table:
    return Table(tables.NF4, tables.NF4_THRESHOLDS, np.arange(16, dtype=np.uint8))


@functools.cache
def _fp4() -> Table:
    magnitude_codes = np.argsort(np.abs(tables.FP4[:8]), kind="stable").astype(np.uint8)
    # Below zero `magnitude > t` is `not y >= -t`, and y is flushed: so 0 is the next number over -2^-126.
    negative = np.nextafter(-tables.FP4_THRESHOLDS[::-1], np.float32(-np.inf))
    thresholds = np.concatenate((negative, [-SMALLEST_NORMAL], tables.FP4_THRESHOLDS)).astype(np.float32)
    codes = np.concatenate((magnitude_codes[::-1] + 8, magnitude_codes)).astype(np.uint8)
    return Table(tables.FP4, thresholds, codes)


@functools.cache
def dynamic_table() -> Table:
    """The dynamic map; a number halfway between two values goes to the even code."""
    values = tables.dynamic_map()
    thresholds = tables.midpoints(values)
    thresholds[1::2] = np.nextafter(thresholds[1::2], np.float32(-np.inf))
    return Table(values, thresholds, np.arange(256, dtype=np.uint8))


@functools.lru_cache(maxsize=64)
def _custom_table(values: bytes) -> Table:
    return _table_of(np.frombuffer(values, np.float32))


def check_block(block: Any) -> int:
    """The block size as an int.

    Raises
    ------
    FormatError
        When it is none of `BLOCKS`.
    """
    if isinstance(block, bool) or not isinstance(block, (int, np.integer)) or block not in BLOCKS:
        raise FormatError(f"block is {block!r}; allowed are the powers of two from {BLOCKS[0]} to {BLOCKS[-1]}")
    return int(block)


def check_table(values: Any) -> np.ndarray:
    """A table of one's own as float32[16].

    Raises
    ------
    FormatError
        When it is not 16 finite numbers in host memory.
    """
    if is_cupy(values):
        raise FormatError("table is a CuPy array, whose values are not read back: pass table=values.get()")
    return host_numbers(values, 16, "table")


@functools.lru_cache(maxsize=256)
def _fragments(block: int, double_quant: bool, known: tuple[float, ...] = ()) -> Fragments:
    """What product kernels need of a table; `known` are its values, empty where they are in a plane."""
    granule = min(block, 64)
    return Fragments(
        small_batch=f"Table4<{{T}}, {granule}>",
        hopper=f"TileTable4<{{T}}, {str(double_quant).lower()}>" if block >= 32 else "",
        bits=4,
        block=block,
        granule=granule,
        scale_bytes=4,
        entries=256,
        gaps=True,
        hopper_entries=256,
        owned=False,
        copied=block == granule and not double_quant,
        swizzled=True,
        items=4 if granule == 64 else 2,
        grouped_items=2,
        wide=granule == 64,
        targeted=not double_quant,
        codes="packed",
        scales="absmax",
        nested_scales="nested_absmax" if double_quant else None,
        offset="nested_offset" if double_quant else None,
        values="table",
        known_values=known,
        scale_values=tuple(tables.dynamic_map().tolist()) if double_quant else (),
    )


class Table4(Format):
    """4-bit codes into a table of 16 values, one absmax for a block.

    Parameters
    ----------
    kind : {"nf4", "fp4", "table4"}
        The name of the format.
    block : int, default 64
        Elements that share an absmax: a power of two from 16 to 4096.
    double_quant : bool, default False
        Store the absmax themselves in 8 bits (QLoRA's double quantization).
    table : {"bnf", "nf", "custom"} or array_like of 16 float
        The values of ``table4``: a standard codebook of `kbitcupy.create_normal_float_codebook`'s kind (``"bnf"``,
        ``"nf"``), or any 16 numbers, in any order; `kbitcupy.fit_table` makes them from data.

    Examples
    --------
    >>> from kbitcupy.formats.codebook.table4 import Table4
    >>> Table4("nf4", block=32)
    get_format('nf4:block=32')
    """

    bits = 4
    kernels = (_QUANTIZE4, _QUANTIZE4_ANY, _DEQUANTIZE4, *_BLOCKS4, *_NESTED)
    all_fragments = tuple(_fragments(block, double_quant) for block in (16, 32, 64) for double_quant in (False, True))

    def __init__(self, kind: str, *, block: int = 64, double_quant: bool = False, table: Any = "bnf"):
        self.name = kind
        self.block = check_block(block)
        if not isinstance(double_quant, (bool, np.bool_)):
            raise FormatError(f"double_quant is {double_quant!r}; allowed are True and False")
        self.double_quant = bool(double_quant)
        self.origin = _ORIGINS[kind]
        self.summary = _SUMMARIES[kind]
        self.table_name = kind
        self._table: Table | None
        if kind == "nf4":
            self._table = _nf4()
        elif kind == "fp4":
            self._table = _fp4()
        elif isinstance(table, str):
            if table not in (*tables.STANDARD, "custom"):
                raise FormatError(f"table is {table!r}; allowed are 'bnf', 'nf' or an array of 16 numbers")
            self.table_name = table
            self._table = None if table == "custom" else _table_of(tables.standard_codebook(table, 4).values)
        else:
            self.table_name = "custom"
            self._table = _custom_table(check_table(table).tobytes())

    def options(self) -> dict[str, Any]:
        options = {"block": self.block, "double_quant": self.double_quant}
        return {**options, "table": self.table_name} if self.name == "table4" else options

    def given(self) -> dict[str, Any]:
        return {} if self._table is None or self.table_name != "custom" else {"table": self._table.values}

    def __reduce__(self) -> Any:
        given = self.given()
        return (remade, (Table4, (self.name,), {**self.options(), **given})) if given else (named, (self.config(),))

    def stored(self) -> Format:
        return self if self.table_name != "custom" else _stored_custom(self.block, self.double_quant)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        n = math.prod(shape)
        blocks = -(-n // self.block)
        planes = {"packed": Plane("uint8", (-(-n // 2),), per=self.block // 2)}
        if self.double_quant:
            planes["absmax"] = Plane("uint8", (blocks,))
            planes["nested_absmax"] = Plane("float32", (-(-blocks // NESTED_BLOCK),), every=NESTED_BLOCK)
            planes["nested_offset"] = Plane("float32", (1,), "tensor")
        else:
            planes["absmax"] = Plane("float32", (blocks,))
        if self.table_name == "custom":
            planes["table"] = Plane("float32", (16,), "constant")
        return planes

    def values(self, planes: Mapping[str, Any]) -> np.ndarray:
        """The table that NumPy planes are decoded with, float32[16]."""
        return planes["table"] if self.table_name == "custom" else self._known_table().values

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        _encode4_cuda(self, self._known_table(), x, planes)

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        table = self._known_table()
        flat = x.reshape(-1)
        absmax = planes["absmax"]
        if self.double_quant:
            absmax = np.empty(absmax.shape, np.float32)
        packed = planes["packed"]
        for first, index in _encode_chunks(flat, self.block, table, absmax):
            # As little-endian pairs the first code of a byte is the low one.
            pair = index.reshape(-1).view("<u2")
            size = min(pair.size, packed.size - first // 2)
            packed[first // 2 : first // 2 + size] = (pair << 4 | pair >> 8)[:size].astype(np.uint8)
        if self.double_quant:
            _nest(absmax, planes)
        if "table" in planes:
            planes["table"][:] = table.values

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        _decode4_cuda(self, self._table, planes, out)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        values = self.values(planes)
        if self._table is None:
            values = flush(values.astype(np.float32))
        byte = np.arange(256)
        pairs = np.stack((values[byte >> 4], values[byte & 15]), axis=1).view(np.uint64).reshape(-1)
        _decode_chunks(planes["packed"], pairs, values, host_absmax(planes), self.block, out)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return _decoder4(self.block, self.double_quant, self._table)

    def decode_rows(self, planes: Mapping[str, Any], shape: tuple[int, ...], ids: Any, out: Any, lead: int = 0) -> bool:
        if isinstance(out, np.ndarray):
            if not self.double_quant or lead:
                return False
            # 256 blocks share what their absmax are decoded with, wherever rows end: those of all rows are decoded.
            single = Table4(self.name, block=self.block, table=self.table_name)
            kept = {name: planes[name] for name in single.planes(shape)}
            rows = single.select({**kept, "absmax": host_absmax(planes)}, shape, ids.reshape(-1))
            single.decode(rows, out)
            return True
        return super().decode_rows(planes, shape, ids, out, lead)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        return _error_bound(x, self.block, self._table or _table_of(self.values(planes)), planes)

    def magnitude(self) -> Magnitude:
        scales, offset = ("nested_absmax", "nested_offset") if self.double_quant else ("absmax", None)
        if self.table_name == "custom":
            return Magnitude(scales, offset, "table")
        return Magnitude(scales, offset, largest=float(np.abs(self._known_table().values).max()))

    def fragments(self) -> Fragments | None:
        known = () if self.table_name == "custom" else tuple(self._known_table().values.tolist())
        return _fragments(self.block, self.double_quant, known)

    def _known_table(self) -> Table:
        if self._table is None:
            raise FormatError("table='custom' names no values: pass the array itself as table=")
        return self._table


_ORIGINS = {
    "nf4": "QLoRA (arXiv 2305.14314), bitsandbytes 0.50",
    "fp4": "bitsandbytes 0.50",
    "table4": "bitsandbytes' layout, any table",
}
_SUMMARIES = {
    "nf4": "4-bit normal float, one float32 scale for a block",
    "fp4": "4-bit float (2 exponent bits), one float32 scale for a block",
    "table4": "4-bit codes into 16 values of one's own",
}


class Dynamic8(Format):
    """8-bit codes into bitsandbytes' dynamic map, one absmax for a block.

    Parameters
    ----------
    block : int, default 256
        Elements that share an absmax: a power of two from 16 to 4096.

    Examples
    --------
    >>> from kbitcupy.formats.codebook.table4 import Dynamic8
    >>> Dynamic8()
    get_format('dynamic8')
    """

    name = "dynamic8"
    bits = 8
    origin = "8-bit optimizers (arXiv 2110.02861), bitsandbytes 0.50"
    summary = "8-bit dynamic map: seven decades, one float32 scale for a block"
    kernels = (_QUANTIZE8, _DEQUANTIZE8, *_BLOCKS8)

    def __init__(self, *, block: int = 256):
        self.block = check_block(block)

    def __reduce__(self) -> Any:
        return named, (self.config(),)

    def magnitude(self) -> Magnitude:
        return Magnitude("absmax")

    @functools.cached_property
    def decoder(self) -> Decoder:
        return _decoder8(self.block)

    def options(self) -> dict[str, Any]:
        return {"block": self.block}

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        n = math.prod(shape)
        return {
            "codes": Plane("uint8", (n,), per=self.block),
            "absmax": Plane("float32", (-(-n // self.block),)),
        }

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        _encode8_cuda(self.block, x, planes)

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        codes = planes["codes"]
        for first, index in _encode_chunks(x.reshape(-1), self.block, dynamic_table(), planes["absmax"]):
            size = min(index.size, codes.size - first)
            codes[first : first + size] = index.reshape(-1)[:size]

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        _decode8_cuda(self.block, planes, out)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        values = tables.dynamic_map()
        _decode_chunks(planes["codes"], values, values, planes["absmax"], self.block, out)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        return _error_bound(x, self.block, dynamic_table(), planes)


# ---- NumPy ---------------------------------------------------------------------------------------------------------


def _encode_chunks(x: np.ndarray, block: int, table: Table, out: np.ndarray) -> Any:
    """(first element, codes of whole blocks) chunk by chunk; max|x| of each block goes to `out`."""
    buffers = Buffers(x.size, block)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for first, rows in chunks(x, buffers):
            absmax = chunk_absmax(rows, buffers)
            out[first : first + absmax.size] = absmax
            y = buffers.y[: rows.size].reshape(rows.shape)
            x_rows = rows
            if table.flushes or absmax.min() < _SAFE_ABSMAX:
                np.copyto(y, rows)
                rows = flush_chunk(y)
            down = np.where((absmax > _LARGE) & (absmax < np.inf), _DOWN, np.float32(1))
            if absmax.max() > _LARGE:
                rows = np.multiply(rows, down[:, None], out=y)
            reciprocal = np.float32(1) / (absmax * down)
            np.multiply(rows, reciprocal[:, None], out=y)
            if table.flushes:
                # The GPU rounds to 24 bits before it looks whether that is subnormal; here 23 bits have become 2^-126.
                rare = np.flatnonzero(
                    np.abs(y, out=buffers.position.view(np.float32)[: y.size].reshape(y.shape)) == SMALLEST_NORMAL
                )
                exact = (
                    x_rows.reshape(-1)[rare].astype(np.float64) * (down * reciprocal.astype(np.float64))[rare // block]
                )
                y.reshape(-1)[rare[np.abs(exact) < float(SMALLEST_NORMAL) * (1 - 2.0**-25)]] = 0
            yield first * block, table.search(y, buffers)


def _decode_chunks(
    codes: np.ndarray, items: np.ndarray, values: np.ndarray, absmax: np.ndarray, block: int, out: np.ndarray
) -> None:
    """Write items[code] * absmax to `out`; an item is one float32 or two."""
    flat = out.reshape(-1)
    each = items.itemsize // 4  # elements of a code
    smallest_value = np.abs(values).min(initial=np.inf, where=values != 0)
    work = np.empty(min(flat.size + -flat.size % block, CHUNK), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, flat.size, CHUNK):
            part = codes[start // each : (start + CHUNK) // each]
            factor = absmax[start // block : (start + CHUNK) // block]
            rows = work[: factor.size * block].reshape(-1, block)
            decoded = work[: part.size * each]
            np.take(items, part, out=decoded.view(items.dtype), mode="wrap")
            work[decoded.size : rows.size] = 0  # the end of a short last block
            normal = np.abs(factor).min() * smallest_value >= SMALLEST_NORMAL
            if not normal:
                factor = flush(factor.copy())
            np.multiply(rows, factor[:, None], out=rows)
            if not normal:
                flush_products(decoded, items, part, factor, block)
            target = flat[start : start + CHUNK]
            target[:] = decoded[: target.size]


def host_absmax(planes: Mapping[str, Any]) -> np.ndarray:
    """max|x| of each block as float32, decoded where it was quantized itself."""
    absmax = planes["absmax"]
    if "nested_offset" not in planes:
        return np.asarray(absmax)
    factor = np.repeat(planes["nested_absmax"], NESTED_BLOCK)[: absmax.size]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return flush(flushed_product(tables.dynamic_map()[absmax], factor) + flush(planes["nested_offset"].copy()))


def _nest(absmax: np.ndarray, planes: Mapping[str, Any]) -> None:
    """Double quantization: offset, then codes and absmax of the differences."""
    offset = _mean(absmax)
    planes["nested_offset"][:] = offset
    with np.errstate(over="ignore", invalid="ignore"):
        difference = flush(absmax - offset)
    for first, index in _encode_chunks(difference, NESTED_BLOCK, dynamic_table(), planes["nested_absmax"]):
        size = min(index.size, absmax.size - first)
        planes["absmax"][first : first + size] = index.reshape(-1)[:size]


def _mean(x: np.ndarray) -> np.float32:
    """The mean by a fixed order of additions in float64, which the GPU keeps, too."""
    if x.size == 0:
        return np.float32(0)
    rows = np.zeros((-(-x.size // NESTED_BLOCK), NESTED_BLOCK))
    rows.reshape(-1)[: x.size] = x
    with np.errstate(invalid="ignore"):
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        lanes = np.zeros((-(-len(rows) // _MEAN_LANES), _MEAN_LANES))
        lanes.reshape(-1)[: len(rows)] = rows[:, 0]
        total = np.zeros(_MEAN_LANES)
        for line in lanes:
            total += line
        while total.size > 1:
            total = total[: total.size // 2] + total[total.size // 2 :]
        with np.errstate(over="ignore"):
            return np.float32(total[0] / x.size)


# Accumulators of the mean: threads of the kernel `absmax_mean`.
_MEAN_LANES = 1024


def _error_bound(x: Any, block: int, table: Table, planes: Mapping[str, Any]) -> Any:
    absmax = block_absmax(x.reshape(-1), block)
    wide = absmax.astype(np.float64)
    scale_error = 2.0**-22 * wide
    if "nested_offset" in planes:  # the decoded absmax is off by as much as this
        nested = np.repeat(planes["nested_absmax"].astype(np.float64), NESTED_BLOCK)[: absmax.size]
        scale_error = scale_error + (dynamic_table().edge + 2.0**-22) * nested + 2.0**-22 * (wide + nested)
    return table.edge * wide + tables.reach(table.values) * scale_error


# ---- CUDA ----------------------------------------------------------------------------------------------------------

_THREADS = 256
_STRUCT4 = np.dtype(
    [
        ("value", "f4", 16),
        ("threshold", "f4", 64),
        ("ordered", "f4", 16),
        ("level", "u1", 64),
        ("code", "u1", 16),
    ],
    align=True,
)
# Buckets of the search in the dynamic map, the factor of a quarter of the float bits, read as a float, and what is
# added to a magnitude.
_DYNAMIC_BUCKETS, _DYNAMIC_SCALE, _DYNAMIC_OFFSET = 293, 167.0 * 2.0**96, np.float32(2.0**-23)
_STRUCT8 = np.dtype([("entry", "u4", _DYNAMIC_BUCKETS)])


@functools.cache
def _stored_custom(block: int, double_quant: bool) -> Table4:
    """The format of planes that hold their own table."""
    return Table4("table4", block=block, double_quant=double_quant, table="custom")


def _bucket_ends() -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest float32, subnormals left out, of the 32 buckets of [-1, 1) and of the one of 1."""
    least = (np.arange(33) / 16 - 1).astype(np.float32)
    largest = np.nextafter(np.append(least[1:], np.float32(17 / 16)), np.float32(-np.inf))
    largest[15] = -SMALLEST_NORMAL
    return least, largest


@functools.lru_cache(maxsize=64)
def _search4(table: Table) -> tuple[str, np.ndarray]:
    """The kernel's kind of search, and ``struct Table4`` of kernels/float4.cuh."""
    struct = np.zeros((), _STRUCT4)
    struct["value"] = table.values
    struct["ordered"] = np.inf
    struct["ordered"][: table.thresholds.size] = table.thresholds
    struct["code"][: table.codes.size] = table.codes
    first, last = (np.searchsorted(table.thresholds, ends) for ends in _bucket_ends())
    known = table is _fp4() or np.array_equal(table.codes, np.arange(16))
    if not known or (last - first).max() > 1:
        return "ANY", struct
    struct["threshold"] = np.inf
    struct["threshold"][:33][last > first] = table.thresholds[first[last > first]]
    struct["level"][:33] = first
    struct["level"][-1] = np.flatnonzero(table.codes == 0)[0]  # NaN, whose bits are all ones
    return "FP4" if table is _fp4() else "ORDERED", struct


def _dynamic_bucket(searched: np.ndarray) -> np.ndarray:
    """The bucket of a float32 |y| + 2^-23, as ``kernels/float4.cuh`` finds it."""
    quarter = (searched.view(np.uint32) >> 2).view(np.float32).astype(np.float64)
    return (quarter * _DYNAMIC_SCALE + 2.0**23).astype(np.float32).view(np.uint32) & 511


@functools.cache
def _search8() -> np.ndarray:
    """``struct Dynamic`` of kernels/float4.cuh: levels of |y|, counted from zero."""
    thresholds = tables.midpoints(tables.dynamic_map()[127:])
    # A tie goes to the even code, which is the odd level: up from an even one.
    thresholds[::2] = np.nextafter(thresholds[::2], np.float32(0))
    first = np.nextafter(thresholds, np.float32(1)) + _DYNAMIC_OFFSET  # the first above each
    assert (first > thresholds + _DYNAMIC_OFFSET).all()
    bucket = _dynamic_bucket(first)
    assert np.unique(bucket).size == bucket.size
    field = np.arange(_DYNAMIC_BUCKETS)
    level = np.searchsorted(bucket, field)  # what a bucket begins with
    # Entry and bits carry into the highest byte from `limit` on: over the bucket's threshold, else nowhere in it.
    limit = ((field / _DYNAMIC_SCALE).astype(np.float32).view(np.uint32).astype(np.int64) << 2) + (1 << 23)
    limit[bucket] = first.view(np.uint32)
    struct = np.zeros((), _STRUCT8)
    struct["entry"] = ((1 + level << 24) - limit) % 2**32
    return struct


class _Launch:
    """A kernel with the table it is given."""

    __slots__ = ("_kernel", "_struct", "_unit", "table")

    def __init__(
        self,
        template: Template,
        values: tuple[str, ...],
        threads: int,
        unit: int,
        shared: int,
        rounds: int,
        struct: np.ndarray,
    ):
        self._kernel = Kernel(template, values, threads, shared, rounds)
        self._unit, self._struct = unit, struct
        self.table = by_value(struct)

    def __call__(self, array: Any, size: int, arguments: tuple[Any, ...]) -> None:
        self._kernel(array, -(-size // self._unit), (*arguments, self.table))


# Rounds of a thread block, by the bytes of an element: more spread the cost of its table, fewer keep what is under way
# close together in memory.
_QUANTIZE_ROUNDS = {2: 4, 4: 2}
_DYNAMIC_ROUNDS = {2: 8, 4: 2}


@functools.lru_cache(maxsize=256)
def _quantize_launch(dtype: np.dtype, table: Table | None) -> _Launch:
    """Quantization by a table of 16, or by the dynamic map where it is None."""
    if table is None:
        template, struct, rounds = _QUANTIZE8, _search8(), _DYNAMIC_ROUNDS
        axes: tuple[str, ...] = ()
    else:
        search, struct = _search4(table)
        template, axes, rounds = _QUANTIZE4, (search,), _QUANTIZE_ROUNDS
    unit = 32 * _THREADS
    return _Launch(
        template, (CXX_TYPES[dtype.name], *axes), _THREADS, unit, unit * dtype.itemsize, rounds[dtype.itemsize], struct
    )


@functools.lru_cache(maxsize=256)
def _dequantize_launch(dtype: np.dtype, table: Table | None, nested: bool) -> _Launch:
    """Decoding by a table of 16; where it is None the values are on the device."""
    struct = np.zeros(16, np.float32) if table is None else table.values
    if nested:
        struct = np.concatenate((struct, tables.dynamic_map()))
    axes = CXX_TYPES[dtype.name], str(nested).lower()
    each = 32 if nested and dtype.itemsize == 2 else 16  # elements of a thread
    return _Launch(_DEQUANTIZE4, axes, _THREADS, _THREADS * each, 0, 1, struct)


@functools.cache
def _dynamic_dequantize_launch(dtype: np.dtype) -> _Launch:
    axes, threads = (CXX_TYPES[dtype.name],), 1024
    return _Launch(_DEQUANTIZE8, axes, threads, threads * 16, 0, 4, tables.dynamic_map())


@functools.cache
def _nested_launches() -> tuple[Kernel, Kernel, _Launch]:
    sums, mean, encode = _NESTED
    return (
        Kernel(sums, (), _THREADS),
        Kernel(mean, (), _MEAN_LANES),
        _Launch(encode, (), _THREADS, 8 * _THREADS, 0, 1, _search8()),
    )


def _log2(block: int) -> int:
    return block.bit_length() - 1


def _encode4_cuda(format: Table4, table: Table, x: Any, planes: Mapping[str, Any]) -> None:
    values_out = planes.get("table", 0)
    absmax = planes["absmax"]
    if x.size == 0:
        if format.double_quant:
            planes["nested_offset"].fill(0)
        if "table" in planes:
            planes["table"].set(table.values)
        return
    if format.double_quant:
        absmax = namespace(x).empty(absmax.size, np.float32)
    launch = _quantize_launch(x.dtype, table)
    launch(x, x.size, (x, x.size, planes["packed"], absmax, values_out, _log2(format.block)))
    if not format.double_quant:
        return
    count, offset = absmax.size, planes["nested_offset"]
    sums = namespace(x).empty(-(-count // NESTED_BLOCK), np.float64)
    add, mean, encode = _nested_launches()
    add(absmax, -(-sums.size // 8), (absmax, count, sums))  # a warp for each
    mean(absmax, 1, (sums, count, offset))
    encode(absmax, count, (absmax, count, offset, planes["absmax"], planes["nested_absmax"]))


@functools.lru_cache(maxsize=256)
def _decoder4(block: int, nested: bool, table: Table | None) -> Decoder:
    values = np.zeros(16, np.float32) if table is None else table.values
    if nested:
        values = np.concatenate((values, tables.dynamic_map()))
    planes = ("packed", "absmax", "nested_absmax", "nested_offset")
    log2 = _log2(block)
    return Decoder(_HEADER4, f"Table4<{str(nested).lower()}>", planes, lambda shape: (log2,), values, "table")


@functools.cache
def _decoder8(block: int) -> Decoder:
    log2 = _log2(block)
    return Decoder(_HEADER8, "Dynamic8", ("codes", "absmax"), lambda shape: (log2,), tables.dynamic_map())


def _decode4_cuda(format: Table4, table: Table | None, planes: Mapping[str, Any], out: Any) -> None:
    if out.size == 0:
        return
    launch = _dequantize_launch(out.dtype, table, format.double_quant)
    nested = (planes.get("nested_absmax", 0), planes.get("nested_offset", 0), planes.get("table", 0))
    launch(out, out.size, (planes["packed"], planes["absmax"], *nested, out, out.size, _log2(format.block)))


def _encode8_cuda(block: int, x: Any, planes: Mapping[str, Any]) -> None:
    if x.size:
        launch = _quantize_launch(x.dtype, None)
        launch(x, x.size, (x, x.size, planes["codes"], planes["absmax"], _log2(block)))


def _decode8_cuda(block: int, planes: Mapping[str, Any], out: Any) -> None:
    if out.size:
        launch = _dynamic_dequantize_launch(out.dtype)
        launch(out, out.size, (planes["codes"], planes["absmax"], out, out.size, _log2(block)))


def _nf4_format(*, block: int = 64, double_quant: bool = False) -> Table4:
    return Table4("nf4", block=block, double_quant=double_quant)


def _fp4_format(*, block: int = 64, double_quant: bool = False) -> Table4:
    return Table4("fp4", block=block, double_quant=double_quant)


def _table4_format(*, table: Any = "bnf", block: int = 64, double_quant: bool = False) -> Table4:
    return Table4("table4", block=block, double_quant=double_quant, table=table)


register("nf4", _nf4_format)
register("fp4", _fp4_format)
register("table4", _table4_format)
register("dynamic8", Dynamic8)
