"""k-bit blockwise quantization with a codebook: formats ``kbit1`` .. ``kbit8``.

The flattened array is cut into blocks of 32. An element is stored as the index of the codebook value nearest to
x / scale, an index as one bit in each of K bit planes, the scale of a block in one byte (E4M4), two or four.

=========  ==================  =============================================================================
plane      dtype, entries      contents
=========  ==================  =============================================================================
packed     uint32, blocks * K  bit e of word b * K + p: bit p of the index of element 32 * b + e
absmax     uint8 (E4M4),       max|x| of the block over the tensor scale, NaN ignored, encoded
           float16 or float32
scale      float32, 1          tensor scale, a power of two; 1 unless the largest finite absmax lies outside the
                               range where `absmax` is accurate
codebook   float32, 2^K        only for custom codebooks
=========  ==================  =============================================================================

Special values: NaN gets index 0; infinities the extreme value of the codebook (index 0 when the block scale itself is
infinite); magnitudes under 2^-126, of input or output, are zero; a block whose decoded scale is 0 stores the index
nearest to 0; elements beyond the end of the array count as 0.

The two rules of the index search: the format searches with the scale that will be decoded, the flat functions of
`kbitcupy.functional` with the float32 absmax (bitsandbytes' rule). Layout and decoder are the same.

Source: bitsandbytes pull request 1858 (layout, E4M4, nf and bnf codebooks).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _cuda, tables
from .._cuda import CXX_TYPES, Template
from .._xp import is_cupy, namespace, on_device_of
from ..errors import FormatError
from ..tables import Codebook, flush
from . import scales
from .base import Format, Plane, register

BLOCK = 32

#: NumPy works on this many elements at a time: temporaries stay under 64 MB.
_CHUNK = 1 << 20

# Largest bucket table of the kernels' search, and the shared memory it may take (see kernels/kbit.cuh).
_MAX_BUCKETS = 2048
_BUCKET_BYTES = 16384


@dataclass(frozen=True)
class AbsmaxFormat:
    """How block scales are stored.

    Parameters
    ----------
    dtype : str
        NumPy dtype of the plane.
    kernel : str
        Name of the enumerator in ``kernels/kbit.cuh``.
    relative_error : float
        Bound of the stored scale's own relative error in its normal range (rounding of the decoder included).
    absolute_error : float
        The same below the normal range, as a multiple of the tensor scale.
    """

    dtype: str
    kernel: str
    relative_error: float
    absolute_error: float


ABSMAX = {
    "e4m4": AbsmaxFormat("uint8", "E4M4", 2.0**-4, 2.0**-15),
    "float16": AbsmaxFormat("float16", "FLOAT16", 2.0**-11 + 2.0**-22, 2.0**-25),
    "float32": AbsmaxFormat("float32", "FLOAT32", 2.0**-22, 0.0),
}

QUANTIZE = Template(
    "kbit.cu",
    "quantize_kbit",
    (
        tuple(CXX_TYPES.values()),
        tuple("12345678"),
        tuple(a.kernel for a in ABSMAX.values()),
        ("ORDERED", "MAPPED", "FULL"),
    ),
)
DEQUANTIZE = Template(
    "kbit.cu",
    "dequantize_kbit",
    (tuple(CXX_TYPES.values()), tuple("12345678"), tuple(a.kernel for a in ABSMAX.values())),
)
CODES = tuple(
    Template("codes.cu", name, hot=False)
    for name in ("pack_kbit", "unpack_kbit", "encode_absmax_e4m4", "decode_absmax_e4m4")
)


class KBit(Format):
    """K-bit codebook indices in bit planes, one scale for 32 elements.

    Parameters
    ----------
    k : int
        Bits of an index, 1 to 8.
    codebook : {"bnf", "nf"} or array_like of 2^k float
        The values an index stands for: Lloyd-Max levels of normal blocks (``"bnf"``), normal quantiles (``"nf"``,
        bitsandbytes' default), or any 2^k numbers, in any order. A NumPy array or a sequence is checked to be finite;
        a CuPy array is never read back and takes the general search.
    absmax : {"e4m4", "float16", "float32"}, optional
        Storage of the block scales; ``"e4m4"`` for k up to 7, ``"float16"`` for k = 8.

    Examples
    --------
    >>> from kbitcupy.formats.kbit import KBit
    >>> KBit(3, absmax="float16")
    get_format('kbit3', codebook='bnf', absmax='float16')
    """

    block = BLOCK
    origin = "bitsandbytes pull request 1858"
    summary = "codebook indices in bit planes, one scale for 32 elements"
    kernels = (QUANTIZE, DEQUANTIZE, *CODES)

    def __init__(self, k: int, *, codebook: Any = "bnf", absmax: str | None = None):
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= 8:
            raise FormatError(f"k is {k!r}; allowed are the integers 1 to 8")
        self.bits = int(k)
        self.name = f"kbit{self.bits}"
        if absmax is None:
            absmax = "e4m4" if self.bits < 8 else "float16"
        if not isinstance(absmax, str) or absmax not in ABSMAX:
            raise FormatError(f"absmax is {absmax!r}; allowed are {', '.join(map(repr, ABSMAX))}")
        self.absmax = absmax
        self._table: Codebook | None = None
        self._device_values: Any = None
        if isinstance(codebook, str):
            if codebook not in (*tables.STANDARD, "custom"):
                raise FormatError(f"codebook is {codebook!r}; allowed are 'bnf', 'nf' or an array of {2**k} numbers")
            self.codebook = codebook
            if codebook != "custom":
                self._table = tables.standard_codebook(codebook, self.bits)
        else:
            self.codebook = "custom"
            if is_cupy(codebook):
                self._device_values = check_device_codebook(codebook, self.bits)
            else:
                self._table = custom_codebook(codebook, self.bits)
        self._launches: dict[Any, _Launch] = {}

    def options(self) -> dict[str, Any]:
        return {"codebook": self.codebook, "absmax": self.absmax}

    def stored(self) -> Format:
        return self if self.codebook != "custom" else custom_format(self.bits, self.absmax)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks = -(-math.prod(shape) // BLOCK)
        planes = {
            "packed": Plane("uint32", (blocks * self.bits,), self.bits),
            "absmax": Plane(ABSMAX[self.absmax].dtype, (blocks,), 1),
            "scale": Plane("float32", (1,)),
        }
        if self.codebook == "custom":
            planes["codebook"] = Plane("float32", (1 << self.bits,))
        return planes

    def encode(self, x: Any, planes: Mapping[str, Any]) -> None:
        if self._table is None and self._device_values is None:
            raise FormatError("codebook='custom' names no values: pass the array itself as codebook=")
        if is_cupy(x):
            self._encode_cuda(x, planes)
            return
        table = self._host_table()
        flattened = x.reshape(-1)
        absmax = block_absmax(flattened)
        scale = np.float32(1)
        if self.absmax != "float32":
            finite = absmax[np.isfinite(absmax)]
            scale = tensor_scale(finite.max() if finite.size else np.float32(0), self.absmax)
        planes["scale"][:] = scale
        with np.errstate(over="ignore", under="ignore"):  # what leaves the range of float32 is infinite or zero
            codes = encode_absmax(absmax / scale, self.absmax)
            divisor = flush(decode_absmax(codes) * scale)
        planes["absmax"][:] = codes
        _search_blocks(flattened, divisor, table, planes["packed"], self.bits, clamp=True)
        if "codebook" in planes:
            planes["codebook"][:] = table.values

    def encode_flat(self, x: Any, planes: Mapping[str, Any]) -> None:
        """bitsandbytes' rule: search with the float32 absmax; buffers with the padding of bitsandbytes."""
        if is_cupy(x):
            self._encode_cuda(x, planes, flat=True)
            return
        absmax = block_absmax(x.reshape(-1))
        planes["absmax"][:-1] = encode_absmax(absmax, self.absmax)
        divisor = np.maximum(absmax, np.float32(1e-8))
        packed = planes["packed"][: absmax.size * self.bits]
        _search_blocks(x.reshape(-1), divisor, self._host_table(), packed, self.bits, clamp=False)

    def decode(self, planes: Mapping[str, Any], out: Any) -> None:
        if is_cupy(out):
            self._decode_cuda(planes, out)
            return
        values = planes["codebook"] if self.codebook == "custom" else self._host_table().values
        scale = decode_absmax(planes["absmax"])
        if "scale" in planes:
            with np.errstate(over="ignore", under="ignore"):
                scale = flush(scale * planes["scale"])
        decode_blocks(planes["packed"], scale, values, self.bits, out)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        absmax = block_absmax(x.reshape(-1)).astype(np.float64)
        values = planes["codebook"] if self.codebook == "custom" else self._host_table().values
        stored = ABSMAX[self.absmax]
        scale_error = np.maximum(stored.relative_error * absmax, stored.absolute_error * float(planes["scale"][0]))
        return Codebook(values).edge * absmax + np.minimum(scale_error, absmax)

    def _host_table(self) -> Codebook:
        if self._table is None:
            raise FormatError("the codebook is a CuPy array but x is not: pass it as codebook=array.get()")
        return self._table

    # ---- CUDA --------------------------------------------------------------------------------------------------

    def _encode_cuda(self, x: Any, planes: Mapping[str, Any], flat: bool = False) -> None:
        """Quantize on the GPU; `flat` is what `encode_flat` does."""
        if x.size == 0:
            if not flat:
                self._fill_shared_planes(planes)
            return
        launch = self._launch("quantize", x.dtype)
        values = 0 if self._device_values is None else self._device_values
        scale = 0 if flat else planes["scale"]
        arguments = (x, x.size, planes["packed"], planes["absmax"], scale, values, planes.get("codebook", 0))
        if flat or self.absmax == "float32":
            launch(x, (*arguments, _FLAT if flat else _FIXED, launch.codebook))
        else:
            scale.data.memset_async(0, 4)
            launch(x, (*arguments, _NOTE, launch.codebook))
            launch(x, (*arguments, _REPEAT, launch.codebook))

    def _decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        if out.size == 0:
            return
        launch = self._launch("dequantize", out.dtype)
        arguments = (planes["packed"], planes["absmax"], planes.get("scale", 0), planes.get("codebook", 0))
        launch(out, (*arguments, out, out.size, launch.codebook))

    def _fill_shared_planes(self, planes: Mapping[str, Any]) -> None:
        """What the kernel would write if there were a block to write."""
        planes["scale"].fill(1)
        if "codebook" in planes and self._device_values is not None:
            values = self._device_values
            planes["codebook"][...] = namespace(values).where(abs(values) < tables.SMALLEST_NORMAL, 0, values)
        elif "codebook" in planes:
            planes["codebook"].set(self._host_table().values)

    def _launch(self, kind: str, dtype: np.dtype) -> _Launch:
        key = (kind, dtype)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._make_launch(kind, dtype)
        return found

    def _make_launch(self, kind: str, dtype: np.dtype) -> _Launch:
        expression = f"{kind}_kbit<{CXX_TYPES[dtype.name]}, {self.bits}, {ABSMAX[self.absmax].kernel}"
        if kind == "quantize":
            search = bucket_search(self.bits, self._table, _MANTISSA_BITS.get(dtype.name))
            shared = 2 * _THREADS * BLOCK * dtype.itemsize + search.shared_bytes
            return _Launch(f"{expression}, {search.kernel}>", shared, search.argument)
        # A few compressed tiles for each warp, one unpacked, and the table of values (see dequantize_kbit).
        stage = 4 * self.bits + np.dtype(ABSMAX[self.absmax].dtype).itemsize
        groups = 4 * (1, 2, 4, 4, 8, 8, 8, 8)[self.bits - 1]
        shared = _THREADS * ((4 if self.bits <= 4 else 3) * stage + groups) + (1 << min(self.bits + 8, 14))
        return _Launch(f"{expression}>", shared, bucket_search(self.bits, self._table, None).argument)


# Threads of a block in kernels/kbit.cu, elements of the tiles of its warps, and significant bits of the dtypes whose quotients need no division.
_THREADS = 128
_TILES = 1024 * _THREADS // 32
_MANTISSA_BITS = {"float16": 11, "bfloat16": 8}

_FLAT, _FIXED, _NOTE, _REPEAT = (np.int32(i) for i in range(4))


class _Launch:
    """A kernel of the family with the codebook it is given: each warp takes tiles of 1024 elements."""

    __slots__ = ("_kernel", "codebook")

    def __init__(self, expression: str, shared: int, codebook: np.ndarray):
        self._kernel = _cuda.Kernel(QUANTIZE.file, expression, _THREADS, shared)
        self.codebook = codebook

    def __call__(self, array: Any, arguments: tuple[Any, ...]) -> None:
        self._kernel(array, -(-array.size // _TILES), arguments)


class BucketSearch:
    """The kernel's view of a codebook: thresholds, and buckets that hold at most one of them each.

    The bucket of y is the integer part of ``clamp(fma(y, slope, 0.5), 0, 1) * buckets``; it must come out here as it
    does in ``kernels/kbit.cuh``, and does: the product by a power of two is exact, so float64 rounds the sum as a
    fused float32 operation would.

    Parameters
    ----------
    k : int
        Bits of an index.
    table : Codebook or None
        None for a codebook that only the device knows.
    mantissa_bits : int or None
        Significant bits of inputs whose quotients are compared as products (see `tables.direct_thresholds`).

    Attributes
    ----------
    kernel : str
        The enumerator of ``enum Search`` in ``kernels/kbit.cuh``.
    argument : numpy.ndarray
        ``struct Codebook<K>``, passed by value.
    shared_bytes : int
        Bytes of the bucket table.
    """

    def __init__(self, k: int, table: Codebook | None, mantissa_bits: int | None):
        self.kernel = "FULL"
        self.argument = np.zeros((), _codebook_struct(k))
        self.shared_bytes = 0
        if table is None:
            return
        self.argument["value"] = table.values
        thresholds, kernel = table.thresholds, "ORDERED" if table.ordered else "MAPPED"
        if thresholds is not None and table.ordered and mantissa_bits is not None:
            direct = tables.direct_thresholds(thresholds, mantissa_bits)
            thresholds, kernel = (thresholds, "MAPPED") if direct is None else (direct, kernel)
        if thresholds is None:
            return
        # slope = 2^-p with every threshold inside (-2^(p-1), 2^(p-1)).
        reach = max(float(np.abs(thresholds).max(initial=0)), 0.5)
        slope = 2.0 ** -(int(np.floor(np.log2(reach))) + 2)
        position = (thresholds.astype(np.float64) * slope + 0.5).astype(np.float32).astype(np.float64)
        buckets = 1
        while buckets <= _MAX_BUCKETS and (np.diff(np.floor(position * buckets)) < 1).any():
            buckets *= 2
        if buckets > _MAX_BUCKETS:
            return
        copies = max(1, min(16, _BUCKET_BYTES // (8 * buckets)))
        self.argument["threshold"] = np.inf
        self.argument["threshold"][: thresholds.size] = thresholds
        self.argument["index"][: table.index.size] = table.index
        self.argument["slope"], self.argument["buckets"], self.argument["copies"] = slope, buckets, copies
        self.kernel = kernel
        if kernel == "MAPPED" or k > 2:  # one or two bits are found without a table
            self.shared_bytes = (buckets + 1) * copies * 8


bucket_search = functools.lru_cache(maxsize=64)(BucketSearch)


@functools.cache
def _codebook_struct(k: int) -> np.dtype:
    """``struct Codebook<K>`` of kernels/kbit.cuh."""
    size = 1 << k
    fields = [("value", "f4", size), ("threshold", "f4", size), ("index", "u1", size)]
    return np.dtype([*fields, ("slope", "f4"), ("buckets", "i4"), ("copies", "i4")], align=True)


@functools.cache
def custom_format(k: int, absmax: str) -> KBit:
    """The format of planes that hold their own codebook."""
    return KBit(k, codebook="custom", absmax=absmax)


def custom_codebook(values: Any, k: int) -> Codebook:
    """Check a host codebook.

    Raises
    ------
    FormatError
        When it is not 2^k finite numbers.
    """
    try:
        array = np.asarray(values)
        with np.errstate(over="ignore"):
            array = array.astype(np.float32) if array.dtype.kind in "fiu" or array.dtype.name == "bfloat16" else None
    except (TypeError, ValueError):
        array = None
    if array is None or array.shape != (1 << k,):
        got = "not numeric" if array is None else f"of shape {array.shape}"
        raise FormatError(f"codebook is {got}; k = {k} needs a one-dimensional sequence of {1 << k} numbers")
    if not np.isfinite(array).all():
        raise FormatError("codebook holds values that are not finite in float32; remove NaN and infinities")
    return _codebook_of(array.tobytes())


@functools.lru_cache(maxsize=64)
def _codebook_of(values: bytes) -> Codebook:
    return Codebook(np.frombuffer(values, np.float32))


def check_device_codebook(values: Any, k: int) -> Any:
    """A CuPy codebook as contiguous float32; its values are not looked at."""
    if values.shape != (1 << k,) or values.dtype.kind not in "fiu" and values.dtype.name != "bfloat16":
        raise FormatError(
            f"codebook is {values.dtype} of shape {values.shape}; k = {k} needs {1 << k} numbers in one dimension"
        )
    if values.dtype == np.float32 and values.flags.c_contiguous:
        return values
    with on_device_of(values):
        return values.astype(np.float32, order="C")


# ---- NumPy ---------------------------------------------------------------------------------------------------------


def _chunks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first block, float32[blocks, 32]) of a flat array: zeros beyond its end, subnormals flushed."""
    for start in range(0, x.size, _CHUNK):
        part = x[start : start + _CHUNK]
        tail = -part.size % BLOCK
        block = np.zeros(part.size + tail, np.float32)
        block[: part.size] = part
        yield start // BLOCK, (flush(block) if x.dtype != np.float16 else block).reshape(-1, BLOCK)


def block_absmax(x: np.ndarray) -> np.ndarray:
    """max|x| of each block of 32 of a flat array, float32; NaN is ignored."""
    absmax = np.empty(-(-x.size // BLOCK), np.float32)
    for first, block in _chunks(x):
        absmax[first : first + len(block)] = np.fmax.reduce(np.abs(block), axis=1, initial=0)
    return absmax


def tensor_scale(largest: np.float32, absmax: str) -> np.float32:
    """The power of two that brings the largest finite absmax of a tensor to where `absmax` is accurate."""
    low, high = {"e4m4": (2.0**-4, 31.0), "float16": (2.0**-4, 65504.0), "float32": (0.0, np.inf)}[absmax]
    if largest == 0 or low <= largest <= high:
        return np.float32(1)
    fraction, exponent = np.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    if absmax == "e4m4":
        shift = 5 if fraction <= 31 / 32 else 4  # into (15.5, 31]
    else:
        shift = 16 if fraction == 0.5 else 15  # into (2^14, 2^15]
    return np.ldexp(np.float32(1), max(int(exponent) - shift, -126))


def encode_absmax(absmax: np.ndarray, kind: str) -> np.ndarray:
    """Block scales as they are stored."""
    if kind == "e4m4":
        return scales.encode_e4m4(absmax)
    with np.errstate(over="ignore"):
        return absmax.astype(ABSMAX[kind].dtype)


def decode_absmax(codes: np.ndarray) -> np.ndarray:
    """Stored block scales as float32, by the dtype they are stored in."""
    return scales.decode_e4m4(codes) if codes.dtype == np.uint8 else codes.astype(np.float32)


def _search_blocks(
    x: np.ndarray, divisor: np.ndarray, table: Codebook, packed: np.ndarray, k: int, clamp: bool
) -> None:
    """Index search of every element with the divisor of its block (0 divides to 0), written as bit planes."""
    for first, block in _chunks(x):
        d = divisor[first : first + len(block), None]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            y = np.where(d == 0, block * np.float32(0), block / d)
        pack_words(nearest(y, table, clamp), k, packed[first * k : (first + len(block)) * k])


def nearest(y: np.ndarray, table: Codebook, clamp: bool) -> np.ndarray:
    """uint8 indices of the nearest codebook values: ties to the lower index, NaN to index 0."""
    if table.thresholds is not None:
        level = np.searchsorted(table.thresholds, y.reshape(-1), side="left")
        index = table.index[np.minimum(level, table.index.size - 1)].reshape(y.shape)
        index[np.isnan(y)] = 0
        return index
    flush(y)
    if clamp:
        np.clip(y, table.lowest, table.highest, out=y)
    best = np.full(y.shape, np.inf, np.float32)
    index = np.zeros(y.shape, np.uint8)
    for i, value in enumerate(table.values):
        with np.errstate(invalid="ignore", over="ignore"):
            distance = flush(np.abs(y - value))
        closer = distance < best
        index[closer] = i
        best[closer] = distance[closer]
    return index


def pack_words(index: np.ndarray, k: int, out: np.ndarray) -> None:
    """uint8[blocks, 32] indices to uint32[blocks * k] bit planes."""
    planes = out.reshape(-1, k)
    for bit in range(k):
        planes[:, bit] = np.packbits(index >> bit & 1, axis=1, bitorder="little").view("<u4")[:, 0]


def unpack_words(packed: np.ndarray, k: int) -> np.ndarray:
    """uint32[blocks * k] bit planes to uint8[blocks, 32] indices."""
    index = np.zeros((packed.size // k, BLOCK), np.uint8)
    words = packed.reshape(-1, k)
    for bit in range(k):
        plane = np.ascontiguousarray(words[:, bit], "<u4").view(np.uint8).reshape(-1, 4)
        index |= np.unpackbits(plane, axis=1, bitorder="little") << np.uint8(bit)
    return index


def decode_blocks(packed: np.ndarray, scale: np.ndarray, values: np.ndarray, k: int, out: np.ndarray) -> None:
    """``values[index] * scale`` in float32, then one rounding to out's dtype."""
    flat_out = out.reshape(-1)
    values = flush(values.astype(np.float32))
    step = _CHUNK // BLOCK
    for first in range(0, scale.size, step):
        part = scale[first : first + step]
        index = unpack_words(packed[first * k : (first + part.size) * k], k)
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = flush(values[index] * part[:, None]).reshape(-1)
            target = flat_out[first * BLOCK : first * BLOCK + decoded.size]
            target[:] = decoded[: target.size].astype(target.dtype)


for _k in range(1, 9):
    register(f"kbit{_k}", functools.partial(KBit, _k))
