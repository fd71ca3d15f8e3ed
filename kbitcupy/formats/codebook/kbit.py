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
`kbitcupy.bitsandbytes` with the float32 absmax (the pull request's rule). Layout and decoder are the same.

Source: bitsandbytes pull request 1858 (layout, E4M4, nf and bnf codebooks, for K = 2 to 5), which is open: no release
of bitsandbytes reads or writes these planes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import tables
from ...backend.compile import CXX_TYPES, Template
from ...backend.launch import Kernel, by_value, shared_memory
from ...backend.xp import as_array, is_cupy, namespace, on_device_of
from ...errors import FormatError
from ...tables import SMALLEST_NORMAL, Codebook, flush, flushed_product
from ..base import Format, Fragments, Magnitude, Plane, host_numbers, named, register, remade
from ..chunks import CHUNK, Buckets, Buffers, block_absmax, chunk_absmax, chunks, flush_chunk, flush_products
from ..decoders import Decoder, templates
from . import scales

BLOCK = 32

# Largest bucket table of the kernels' search, and the shared memory that copies of a smaller one may take; as
# kernels/kbit.cuh has them.
_MAX_BUCKETS = 2048
_BUCKET_BYTES = 16384
_MAX_COPIES = 16
# Fewer than eight copies mean bank conflicts, which 16-bit elements wait for. Where a thread block can have this much
# shared memory, more than one such block fits a multiprocessor even with a larger table.
_ROOMY = 160 << 10
_ROOMY_BUCKET_BYTES = 65536


@dataclass(frozen=True)
class AbsmaxFormat:
    """How block scales are stored.

    Parameters
    ----------
    dtype : str
        NumPy dtype of the plane.
    kernel : str
        Name of the enumerator in ``kernels/formats/scales.cuh``.
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

_AXES = (tuple(CXX_TYPES.values()), tuple("12345678"), tuple(a.kernel for a in ABSMAX.values()))
QUANTIZE = Template("kbit.cu", "quantize_kbit", (*_AXES, ("ORDERED",)))
# Codebooks that are not in order are the exception: a few bytes of spilled registers do not matter to them.
QUANTIZE_UNORDERED = Template("kbit.cu", "quantize_kbit", (*_AXES, ("MAPPED", "ANY")), hot=False)
DEQUANTIZE = Template("kbit.cu", "dequantize_kbit", _AXES)
_HEADER = "formats/kbit.cuh"
# All elements and products of float16 and bfloat16 have kernels of their own, which are faster.
BLOCKS = templates(_HEADER, *(f"Kbit<{a.kernel}>" for a in ABSMAX.values()), kernels=("take_blocks", "linear_blocks"))
CODES = tuple(
    Template("codes.cu", name, hot=False)
    for name in ("pack_kbit", "unpack_kbit", "encode_absmax_e4m4", "decode_absmax_e4m4")
)


@functools.lru_cache(maxsize=64)
def _fragments(k: int, absmax: str, codebook: str | None) -> Fragments:
    """What product kernels need of K = 2 to 5; `codebook` is a standard one, or None where it is in a plane."""
    known = () if codebook is None else tuple(tables.standard_codebook(codebook, k).values.tolist())
    few = 2 if k == 5 or absmax == "float32" else 4
    return Fragments(
        small_batch=f"Kbit<{{T}}, {k}, {ABSMAX[absmax].kernel}>",
        hopper=f"TileKbit<{{T}}, {k}, {ABSMAX[absmax].kernel}>",
        bits=k,
        block=BLOCK,
        granule=BLOCK,
        scale_bytes=np.dtype(ABSMAX[absmax].dtype).itemsize,
        entries=32 if k == 5 else 256,
        gaps=k in (3, 4),
        hopper_entries={3: 64, 5: 32}.get(k, 256),
        owned=True,
        copied=True,
        swizzled=False,
        items=few,
        grouped_items=few,
        wide=absmax != "float32",
        targeted=k == 4 and absmax == "e4m4",
        codes="packed",
        scales="absmax",
        tensor_scale="scale",
        values="codebook",
        known_values=known,
    )


class KBit(Format):
    """K-bit codebook indices in bit planes, one scale for 32 elements.

    Parameters
    ----------
    k : int
        Bits of an index, 1 to 8.
    codebook : {"bnf", "nf"} or array_like of 2^k float
        The values an index stands for: Lloyd-Max levels of normal blocks (``"bnf"``), normal quantiles (``"nf"``,
        default of the source), or any 2^k numbers, in any order. A NumPy array or a sequence is checked to be finite;
        a CuPy array is never read back: its values at the time of each call count, and what is not finite is never
        nearest.
    absmax : {"e4m4", "float16", "float32"}, optional
        Storage of the block scales; ``"e4m4"`` for k up to 7, ``"float16"`` for k = 8.

    Examples
    --------
    >>> from kbitcupy.formats.codebook.kbit import KBit
    >>> KBit(3, absmax="float16")
    get_format('kbit3:absmax=float16')
    """

    block = BLOCK
    origin = "bitsandbytes pull request 1858"
    summary = "codebook indices in bit planes, one scale for 32 elements"
    kernels = (QUANTIZE, QUANTIZE_UNORDERED, DEQUANTIZE, *BLOCKS, *CODES)
    all_fragments = tuple(_fragments(k, absmax, None) for k in (2, 3, 4, 5) for absmax in ABSMAX)
    tensor_scale = "scale"

    def __init__(self, k: int, *, codebook: Any = "bnf", absmax: str | None = None):
        self.bits = check_k(k)
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
            if hasattr(codebook, "__dlpack__"):
                codebook = as_array(codebook, "codebook")
            if is_cupy(codebook):
                self._device_values = check_device_codebook(codebook, self.bits)
            else:
                self._table = custom_codebook(codebook, self.bits)

    def options(self) -> dict[str, Any]:
        return {"codebook": self.codebook, "absmax": self.absmax}

    def given(self) -> dict[str, Any]:
        values = self._any_codebook() if self.codebook == "custom" else None
        return {} if values is None else {"codebook": values}

    def __reduce__(self) -> Any:
        given = self.given()
        return (remade, (KBit, (self.bits,), {**self.options(), **given})) if given else (named, (self.config(),))

    def stored(self) -> Format:
        return self if self.codebook != "custom" else custom_format(self.bits, self.absmax)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        blocks = -(-math.prod(shape) // BLOCK)
        planes = {
            "packed": Plane("uint32", (blocks * self.bits,), per=self.bits),
            "absmax": Plane(ABSMAX[self.absmax].dtype, (blocks,)),
            "scale": Plane("float32", (1,), "tensor"),
        }
        if self.codebook == "custom":
            planes["codebook"] = Plane("float32", (1 << self.bits,), "constant")
        return planes

    def encode_numpy(self, x: np.ndarray, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._check_values()
        table = self._host_table()
        scale = np.float32(1)
        waiting = None
        if self.absmax != "float32":
            # The tensor scale needs every absmax first: each waits in a word of its block that has yet to be written.
            waiting = planes["packed"][:: self.bits].view(np.float32)
            block_absmax(x.reshape(-1), BLOCK, waiting)
            scale = tensor_scale(waiting.max(initial=0, where=waiting < np.inf), self.absmax)
        planes["scale"][:] = scale
        _encode_blocks(x.reshape(-1), planes, self.bits, table, self.absmax, scale, waiting)
        if "codebook" in planes:
            planes["codebook"][:] = table.values

    def encode_flat(self, x: Any, planes: Mapping[str, Any]) -> None:
        """The pull request's rule: search with the float32 absmax; buffers with its padding."""
        if is_cupy(x):
            self._encode_cuda(x, planes, flat=True)
            return
        _encode_blocks(x.reshape(-1), planes, self.bits, self._host_table(), self.absmax, None, None)

    def encode_cuda(self, x: Any, planes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._check_values()
        self._encode_cuda(x, planes)

    def _check_values(self) -> None:
        if self._table is None and self._device_values is None:
            raise FormatError("codebook='custom' names no values: pass the array itself as codebook=")

    def decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        self._decode_cuda(planes, out)

    def decode_numpy(self, planes: Mapping[str, Any], out: np.ndarray) -> None:
        values = planes["codebook"] if self.codebook == "custom" else self._host_table().values
        decode_blocks(planes["packed"], planes["absmax"], planes.get("scale"), values, self.bits, out)

    @functools.cached_property
    def decoder(self) -> Decoder:
        return _decoder(self.bits, self.absmax, self._table)

    def error_bound(self, x: Any, planes: Mapping[str, Any]) -> Any:
        absmax = block_absmax(x.reshape(-1), BLOCK).astype(np.float64)
        values = planes["codebook"] if self.codebook == "custom" else self._host_table().values
        stored = ABSMAX[self.absmax]
        scale = planes["scale"].astype(np.float64)
        scale_error = np.maximum(stored.relative_error * absmax, stored.absolute_error * scale)
        return Codebook(values).edge * absmax + tables.reach(values) * np.minimum(scale_error, absmax)

    def magnitude(self) -> Magnitude | None:
        if self.absmax != "float32":  # the others have a tensor scale
            return None
        if self.codebook == "custom":
            return Magnitude("absmax", values="codebook")
        return Magnitude("absmax", largest=float(np.abs(self._host_table().values).max()))

    def fragments(self) -> Fragments | None:
        if not 2 <= self.bits <= 5:
            return None
        return _fragments(self.bits, self.absmax, None if self.codebook == "custom" else self.codebook)

    def _any_codebook(self) -> Any:
        """The codebook as the constructor takes it."""
        if self.codebook != "custom":
            return self.codebook
        return self._device_values if self._table is None else self._table.values

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
        roomy = x.dtype.itemsize == 2 and shared_memory(x.data.device_id) >= _ROOMY
        launch = _launch("quantize", self.bits, self.absmax, x.dtype, self._table, roomy)
        values = 0 if self._device_values is None else self._device_values
        scale: Any = 0 if flat else planes["scale"]
        arguments = (x, x.size, planes["packed"], planes["absmax"], scale, values, planes.get("codebook", 0))
        if flat or self.absmax == "float32":
            launch(x, (*arguments, _FLAT if flat else _FIXED, launch.codebook))
        else:
            scale.data.memset_async(0, 4)
            launch(x, (*arguments, _NOTE, launch.codebook))
            launch(x, (*arguments, _REPEAT, launch.codebook), _REPEAT_WAVES)

    def _decode_cuda(self, planes: Mapping[str, Any], out: Any) -> None:
        if out.size == 0:
            return
        launch = _launch("dequantize", self.bits, self.absmax, out.dtype, self._table)
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


@functools.lru_cache(maxsize=256)
def _decoder(k: int, absmax: str, table: Codebook | None) -> Decoder:
    values = np.zeros(256, np.float32)
    if table is not None:
        values[: 1 << k] = table.values
    struct = f"Kbit<{ABSMAX[absmax].kernel}>"
    return Decoder(_HEADER, struct, ("packed", "absmax", "scale"), lambda shape: (k,), values, "codebook")


# Rounds of a thread block, by the bytes of an element and the bits of an index.
_QUANTIZE_ROUNDS = {2: (3, 4, 8, 8, 16, 32, 32, 32), 4: (2, 4, 5, 4, 8, 16, 12, 16)}
_ANY_ROUNDS = 32  # each thread block has looked at the codebook first
_DEQUANTIZE_ROUNDS = {2: (2, 2, 2, 2, 4, 4, 4, 8), 4: (1, 1, 1, 1, 1, 1, 2, 2)}
# Significant bits of the dtypes whose quotients need no division.
_MANTISSA_BITS = {"float16": 11, "bfloat16": 8}

# Thread blocks of the REPEAT pass, which mostly ends at once, in units of what the device holds.
_REPEAT_WAVES = 2

_FLAT, _FIXED, _NOTE, _REPEAT = (np.int32(i) for i in range(4))


class _Launch:
    """A kernel of the family with the codebook it is given: each warp takes tiles of 1024 elements."""

    __slots__ = ("_kernel", "_struct", "_unit", "codebook")

    def __init__(
        self, template: Template, values: tuple[str, ...], threads: int, shared: int, rounds: int, codebook: np.ndarray
    ):
        self._kernel = Kernel(template, values, threads, shared, rounds)
        self._unit = 1024 * threads // 32
        self._struct = codebook
        self.codebook = by_value(codebook)

    def __call__(self, array: Any, arguments: tuple[Any, ...], waves: int = 0) -> None:
        self._kernel(array, -(-array.size // self._unit), arguments, waves)


@functools.lru_cache(maxsize=1024)
def _launch(kind: str, k: int, absmax: str, dtype: np.dtype, table: Codebook | None, roomy: bool = False) -> _Launch:
    """The launch of ``quantize_kbit`` or ``dequantize_kbit``; without `table` only the device knows the values."""
    axes = CXX_TYPES[dtype.name], str(k), ABSMAX[absmax].kernel
    # Threads as kernels/kbit.cu has them. Rounds are measured: more of them spread the cost of the tables, fewer keep
    # what is under way close together in memory.
    if kind == "quantize":
        search = BucketSearch(k, table, _MANTISSA_BITS.get(dtype.name), roomy)
        threads = 128 if dtype.itemsize == 4 else 256
        rounds = _ANY_ROUNDS if search.kernel == "ANY" else _QUANTIZE_ROUNDS[dtype.itemsize][k - 1]
        shared = 2 * threads * BLOCK * dtype.itemsize + search.shared_bytes
        return _Launch(QUANTIZE, (*axes, search.kernel), threads, shared, rounds, search.argument)
    # For each warp two compressed tiles and one unpacked, and the table of values.
    threads = 128 if k <= 4 else 256
    rounds = _DEQUANTIZE_ROUNDS[dtype.itemsize][k - 1]
    stage = 4 * k + np.dtype(ABSMAX[absmax].dtype).itemsize
    groups = 4 * (1, 2, 4, 4, 8, 8, 8, 8)[k - 1]
    shared = threads * (2 * stage + groups) + (1 << min(k + 8, 14))
    return _Launch(DEQUANTIZE, axes, threads, shared, rounds, BucketSearch(k, table, None).argument)


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
    roomy : bool, default False
        Whether there is shared memory for a larger table.

    Attributes
    ----------
    kernel : str
        The enumerator of ``enum Search`` in ``kernels/kbit.cuh``.
    argument : numpy.ndarray
        ``struct Codebook<K>``, passed by value.
    shared_bytes : int
        Bytes of the bucket table.
    """

    def __init__(self, k: int, table: Codebook | None, mantissa_bits: int | None, roomy: bool = False):
        self.kernel = "ANY"
        self.argument = np.zeros((), _codebook_struct(k))
        self.shared_bytes = _BUCKET_BYTES + 8 * _MAX_COPIES  # of any table that the device may choose
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
        if buckets > _MAX_BUCKETS or slope < SMALLEST_NORMAL:
            return
        copies = max(1, min(_MAX_COPIES, _BUCKET_BYTES // (8 * buckets)))
        if roomy:
            copies = max(copies, min(8, _ROOMY_BUCKET_BYTES // (8 * buckets)))
        self.argument["threshold"] = np.inf
        self.argument["threshold"][: thresholds.size] = thresholds
        self.argument["index"][: table.index.size] = table.index
        self.argument["slope"], self.argument["buckets"], self.argument["copies"] = slope, buckets, copies
        self.kernel = kernel
        # One or two bits in order are found without a table.
        self.shared_bytes = (buckets + 1) * copies * 8 if kernel == "MAPPED" or k > 2 else 0


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


def check_k(k: Any) -> int:
    """k as an int.

    Raises
    ------
    FormatError
        When it is not an integer from 1 to 8.
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= 8:
        raise FormatError(f"k is {k!r}; allowed are the integers 1 to 8")
    return int(k)


def custom_codebook(values: Any, k: int) -> Codebook:
    """Check a host codebook.

    Raises
    ------
    FormatError
        When it is not 2^k finite numbers.
    """
    return _codebook_of(host_numbers(values, 1 << k, "codebook").tobytes())


@functools.lru_cache(maxsize=64)
def _codebook_of(values: bytes) -> Codebook:
    return Codebook(np.frombuffer(values, np.float32))


def check_device_codebook(values: Any, k: int) -> Any:
    """A CuPy codebook as contiguous float32; its values are not looked at."""
    if values.shape != (1 << k,) or (values.dtype.kind not in "fiu" and values.dtype.name != "bfloat16"):
        raise FormatError(
            f"codebook is {values.dtype} of shape {values.shape}; k = {k} needs {1 << k} numbers in one dimension"
        )
    if values.dtype == np.float32 and values.flags.c_contiguous:
        return values
    with on_device_of(values):
        return values.astype(np.float32, order="C")


# ---- NumPy ---------------------------------------------------------------------------------------------------------

# With divisors from here on, a subnormal x and 0 have quotients on the same side of every threshold.
_SAFE_DIVISOR = np.float32(2.0**-80)
# Up to this many thresholds, counting those below y beats a table.
_COUNTED = 7
# Decoding looks up two neighbours at a time up to this k.
_PAIRED = 6


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


def _encode_blocks(
    x: np.ndarray,
    planes: Mapping[str, Any],
    k: int,
    table: Codebook,
    kind: str,
    scale: np.float32 | None,
    known: np.ndarray | None,
) -> None:
    """Scales and indices of a flat array: by the rule of the format, or where `scale` is None by the flat rule.

    `known` holds max|x| of each block where that has been found already, and may share memory with the planes.
    """
    buffers = Buffers(x.size, BLOCK)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for first, block in chunks(x, buffers):
            last = first + len(block)
            absmax = chunk_absmax(block, buffers) if known is None else known[first:last]
            codes = encode_absmax(absmax if scale is None else absmax / scale, kind)
            if scale is None:
                divisor = np.maximum(absmax, np.float32(1e-8))
            else:  # what leaves the range of float32 is infinite or zero
                divisor = flush(decode_absmax(codes) * scale)
                divisor[divisor == 0] = np.inf  # x / inf is x * 0
            planes["absmax"][first:last] = codes
            y = buffers.y[: block.size].reshape(block.shape)
            if table.thresholds is None or divisor.min() < _SAFE_DIVISOR:
                np.copyto(y, block)
                block = flush_chunk(y)
            np.divide(block, divisor[:, None], out=y)
            index = _search(y, table, scale is not None, buffers)
            _pack(index, k, planes["packed"][first * k : last * k], buffers.flag.view(np.uint8)[: index.size])


def nearest(y: np.ndarray, table: Codebook, clamp: bool) -> np.ndarray:
    """uint8 indices of the nearest codebook values: ties to the lower index, NaN to index 0."""
    index = np.empty(y.shape, np.uint8)
    buffers = Buffers(y.size, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, y.size, CHUNK):
            part = buffers.y[: min(CHUNK, y.size - start)]
            part[:] = y.reshape(-1)[start : start + CHUNK]
            index.reshape(-1)[start : start + CHUNK] = _search(part, table, clamp, buffers)
    return index


def _search(y: np.ndarray, table: Codebook, clamp: bool, buffers: Buffers) -> np.ndarray:
    """`nearest` of a chunk, which it may overwrite; the result lies in a buffer."""
    index, flag = buffers.index[: y.size].reshape(y.shape), buffers.flag[: y.size].reshape(y.shape)
    if table.thresholds is None:
        return _search_all(y, table, clamp, index)
    if table.ordered and table.thresholds.size <= _COUNTED:
        np.greater(y, table.thresholds[0], out=index.view(np.bool_))
        for threshold in table.thresholds[1:]:
            np.greater(y, threshold, out=flag)
            index += flag.view(np.uint8)
        return index
    return _buckets(table).search(y, buffers)


def _search_all(y: np.ndarray, table: Codebook, clamp: bool, index: np.ndarray) -> np.ndarray:
    """The distance to every codebook value, for codebooks without thresholds."""
    flush_chunk(y)
    if clamp:
        np.clip(y, table.lowest, table.highest, out=y)
    best = np.full(y.shape, np.inf, np.float32)
    index[...] = 0
    for i, value in enumerate(table.values):
        distance = flush_chunk(np.abs(y - value))
        closer = distance < best
        np.putmask(index, closer, np.uint8(i))
        np.putmask(best, closer, distance)
    return index


@functools.lru_cache(maxsize=64)
def _buckets(table: Codebook) -> Buckets:
    assert table.thresholds is not None
    return Buckets(table.thresholds, table.index)


def pack_words(index: np.ndarray, k: int, out: np.ndarray) -> None:
    """uint8[blocks, 32] indices to uint32[blocks * k] bit planes."""
    planes = out.reshape(-1, k)
    step = CHUNK // BLOCK
    work = np.empty(min(index.size, CHUNK), np.uint8)
    for first in range(0, len(index), step):
        _pack(index[first : first + step], k, planes[first : first + step], work)


def _pack(index: np.ndarray, k: int, out: np.ndarray, work: np.ndarray) -> None:
    """`pack_words` of a chunk, with a buffer of its size."""
    planes = out.reshape(-1, k)
    index = index.reshape(-1)
    work = work[: index.size]
    for bit in range(k):
        np.bitwise_and(index, np.uint8(1 << bit), out=work)  # packbits takes any other number than 0 for a one
        planes[:, bit] = np.packbits(work, bitorder="little").view("<u4")


def unpack_words(packed: np.ndarray, k: int) -> np.ndarray:
    """uint32[blocks * k] bit planes to uint8[blocks, 32] indices."""
    index = np.empty((packed.size // k, BLOCK), np.uint8)
    words = packed.reshape(-1, k)
    step = CHUNK // BLOCK
    for first in range(0, len(index), step):
        part = index[first : first + step]
        part[...] = _unpack(words[first : first + step]).reshape(part.shape)
    return index


def _unpack(words: np.ndarray) -> np.ndarray:
    """uint32[blocks, k] bit planes to uint8[blocks * 32] indices."""
    # The planes one by one, the highest first; eight indices are shifted at a time, as a uint64.
    planes = np.ascontiguousarray(words.T, "<u4").view(np.uint8)
    index = np.unpackbits(planes[-1], bitorder="little").view(np.uint64)
    for plane in planes[-2::-1]:
        index += index
        index |= np.unpackbits(plane, bitorder="little").view(np.uint64)
    return index.view(np.uint8)


def decode_blocks(
    packed: np.ndarray, absmax: np.ndarray, scale: np.ndarray | None, values: np.ndarray, k: int, out: np.ndarray
) -> None:
    """``values[index] * (decoded absmax * scale)`` in float32, then one rounding to out's dtype."""
    flat_out = out.reshape(-1)
    values = flush(values.astype(np.float32))
    smallest_value = np.abs(values).min(initial=np.inf, where=values != 0)
    # One look-up gives two neighbours, where the table of pairs is small beside the work.
    pairs = k <= _PAIRED and flat_out.size >= 1 << k + 8
    item, code = ("u8", "u2") if pairs else ("f4", "u1")
    items = _pairs(values, k) if pairs else values
    words = packed.reshape(-1, k)
    buffer = np.empty(min(flat_out.size + -flat_out.size % BLOCK, CHUNK), np.float32)
    step = CHUNK // BLOCK
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for first in range(0, absmax.size, step):
            factor = flushed_product(
                decode_absmax(absmax[first : first + step]), np.float32(1) if scale is None else scale
            )
            decoded = buffer[: factor.size * BLOCK]
            index = _unpack(words[first : first + factor.size]).view(code)
            np.take(items, index, out=decoded.view(item), mode="wrap")
            target = flat_out[first * BLOCK : first * BLOCK + decoded.size]
            rows = decoded.reshape(-1, BLOCK)
            # Products are zero, of a sign that flushing drops, or subnormal only below this.
            normal = factor.min() * smallest_value >= SMALLEST_NORMAL
            if normal and target.dtype == np.float32 and target.size == decoded.size:
                np.multiply(rows, factor[:, None], out=target.reshape(rows.shape))
                continue
            np.multiply(rows, factor[:, None], out=rows)
            if not normal:
                flush_products(decoded, items, index, factor, BLOCK)
            target[:] = decoded[: target.size]


def _pairs(values: np.ndarray, k: int) -> np.ndarray:
    """The values of two neighbours as one uint64, by their two uint8 indices as one uint16."""
    pair = np.arange(((1 << k) - 1) * 257 + 1, dtype=np.uint16).view(np.uint8)
    return values[np.minimum(pair, values.size - 1)].view(np.uint64)


for _k in range(1, 9):
    register(f"kbit{_k}", functools.partial(KBit, _k))
