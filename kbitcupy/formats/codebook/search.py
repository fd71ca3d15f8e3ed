"""How values are searched for: tables with their thresholds, and what kernels are told of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ... import tables
from ...backend.structs import Constants, Struct
from ...backend.xp import as_array, is_cupy, on_device_of
from ...errors import FormatError
from ...tables import SMALLEST_NORMAL, Codebook, flush
from ..chunks import Buckets

#: Elements that may share an absmax.
BLOCKS = tuple(1 << i for i in range(4, 13))
#: Blocks whose absmax are quantized together in double quantization.
NESTED_BLOCK = 256
_LARGEST_SUBNORMAL = np.uint32(0x007FFFFF).view(np.float32)


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


# ---- tables with thresholds ----------------------------------------------------------------------------------------


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


def table_of(values: np.ndarray) -> Table:
    """Any values: thresholds are the midpoints of the distinct ones, in order."""
    values = flush(np.array(values, np.float32))
    values.setflags(write=False)
    levels, first = np.unique(values, return_index=True)
    return Table(values, flush(tables.midpoints(levels)), first.astype(np.uint8))


@functools.cache
def nf4_table() -> Table:
    """NF4 with bitsandbytes' thresholds."""
    return Table(tables.NF4, tables.NF4_THRESHOLDS, np.arange(16, dtype=np.uint8))


@functools.cache
def fp4_table() -> Table:
    """FP4, whose magnitudes are compared with bitsandbytes' thresholds."""
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
def _table_by_bytes(values: bytes) -> Table:
    return table_of(np.frombuffer(values, np.float32))


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


def check_codebook_name(codebook: Any, own: str) -> str:
    """The option ``codebook`` of a format.

    Raises
    ------
    FormatError
        When it is no name.
    """
    if isinstance(codebook, str) and codebook in (*tables.STANDARD, "custom"):
        return codebook
    if isinstance(codebook, str):
        raise FormatError(f"codebook is {codebook!r}; allowed are 'bnf', 'nf' or {own}, which goes to quantize")
    raise FormatError(
        f"codebook is {type(codebook).__name__}; a format holds names, 'bnf', 'nf' or 'custom'. Numbers of one's own "
        "go with each call: quantize(x, name, codebook=values)"
    )


def host_numbers(values: Any, size: int, argument: str) -> np.ndarray:
    """A table that the user gave, as float32[size] in host memory.

    Raises
    ------
    FormatError
        When it is not `size` finite numbers in one dimension.
    """
    array: Any
    try:
        array = np.asarray(values)
        with np.errstate(over="ignore"):
            array = array.astype(np.float32) if array.dtype.kind in "fiu" or array.dtype.name == "bfloat16" else None
    except (TypeError, ValueError):
        array = None
    if array is None or array.shape != (size,):
        got = "not numeric" if array is None else f"of shape {array.shape}"
        raise FormatError(f"{argument} is {got}; it must be a one-dimensional sequence of {size} numbers")
    if not np.isfinite(array).all():
        raise FormatError(f"{argument} holds values that are not finite in float32; remove NaN and infinities")
    return np.asarray(array)


def check_host_codebook(values: Any, size: int) -> None:
    """Check a codebook that no device holds.

    Raises
    ------
    FormatError
        When it is not `size` finite numbers.
    """
    if values is not None and not hasattr(values, "__cuda_array_interface__") and not hasattr(values, "__dlpack__"):
        host_numbers(values, size, "codebook")


def given_codebook(values: Any, k: int, x: Any) -> tuple[Codebook | None, Any]:
    """The codebook of one call beside the data `x`: one that the host knows, or float32[2^k] on the device (else 0).

    Raises
    ------
    FormatError
        When it is missing, or not 2^k numbers, or on a device and `x` is not.
    """
    if values is None:
        raise FormatError("codebook='custom' names no values: pass the array itself as codebook=")
    if hasattr(values, "__dlpack__"):
        values = as_array(values, "codebook")
    if not is_cupy(values):
        return custom_codebook(values, k), 0
    if isinstance(x, np.ndarray):
        raise FormatError("the codebook is a CuPy array but x is not: pass it as codebook=array.get()")
    return None, check_device_codebook(values, k)


def given_table(values: Any) -> Table:
    """The table of one call, of 16 numbers.

    Raises
    ------
    FormatError
        When it is missing, or not 16 finite numbers in host memory.
    """
    if values is None:
        raise FormatError("codebook='custom' names no values: pass the array itself as codebook=")
    if hasattr(values, "__dlpack__"):
        values = as_array(values, "codebook")
    if is_cupy(values):
        raise FormatError("codebook is a CuPy array, whose values are not read back: pass codebook=values.get()")
    return _table_by_bytes(host_numbers(values, 16, "codebook").tobytes())


# ---- what kernels search in ----------------------------------------------------------------------------------------

#: Of the search of k-bit kernels: the largest bucket table, the most copies of it, the shared memory that copies of a
#: smaller one may take, and the bytes of a bucket.
KBIT_SEARCH = Constants(MAX_BUCKETS=2048, MAX_COPIES=16, TABLE_BYTES=16384, BUCKET_BYTES=8)
_ROOMY_TABLE_BYTES = 65536


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
        One of `CODEBOOKS`, passed by value.
    shared_bytes : int
        Bytes of the bucket table.
    """

    def __init__(self, k: int, table: Codebook | None, mantissa_bits: int | None, roomy: bool = False):
        self.kernel = "ANY"
        sizes = KBIT_SEARCH
        self.argument = CODEBOOKS[k - 1].zeros()
        # Of any table that the device may choose.
        self.shared_bytes = sizes.TABLE_BYTES + sizes.BUCKET_BYTES * sizes.MAX_COPIES
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
        while buckets <= sizes.MAX_BUCKETS and (np.diff(np.floor(position * buckets)) < 1).any():
            buckets *= 2
        if buckets > sizes.MAX_BUCKETS or slope < SMALLEST_NORMAL:
            return
        bytes_of_copy = sizes.BUCKET_BYTES * buckets
        copies = max(1, min(sizes.MAX_COPIES, sizes.TABLE_BYTES // bytes_of_copy))
        if roomy:
            copies = max(copies, min(8, _ROOMY_TABLE_BYTES // bytes_of_copy))
        self.argument["threshold"] = np.inf
        self.argument["threshold"][: thresholds.size] = thresholds
        self.argument["index"][: table.index.size] = table.index
        self.argument["slope"], self.argument["buckets"], self.argument["copies"] = slope, buckets, copies
        self.kernel = kernel
        # One or two bits in order are found without a table.
        self.shared_bytes = (buckets + 1) * copies * sizes.BUCKET_BYTES if kernel == "MAPPED" or k > 2 else 0


def _codebook(k: int) -> Struct:
    size = 1 << k
    return Struct(
        f"Codebook<{k}>",
        value=("f4", size),
        threshold=("f4", size),
        index=("u1", size),
        slope="f4",
        buckets="i4",
        copies="i4",
    )


#: What k-bit kernels know of a codebook: values, thresholds in ascending order filled up with +inf, and the index of
#: each level, not for ORDERED; y * slope + 0.5, clamped to [0, 1], walks through the buckets, a power of two of them,
#: of which the table has so many copies. No buckets: there is no table.
CODEBOOKS = tuple(map(_codebook, range(1, 9)))
#: What kernels know of a table of 16: values by code; of each bucket the only threshold inside (or +inf) and the level
#: up to it; all thresholds in ascending order, filled up with +inf; codes by level.
TABLE4 = Struct(
    "Table4",
    value=("f4", 16),
    threshold=("f4", 64),
    ordered=("f4", 16),
    level=("u1", 64),
    code=("u1", 16),
)
#: Buckets of the search in the dynamic map, the factor of a quarter of the float bits, read as a float, and what is
#: added to a magnitude.
DYNAMIC_SEARCH = Constants(DYNAMIC_BUCKETS=293, DYNAMIC_SCALE=167.0 * 2.0**96, DYNAMIC_OFFSET=2.0**-23)
DYNAMIC_OFFSET = np.float32(DYNAMIC_SEARCH.DYNAMIC_OFFSET)
#: ... and what is added to the float bits of a number in a bucket, which leaves the level in the highest byte.
DYNAMIC = Struct("Dynamic", entry=("u4", DYNAMIC_SEARCH.DYNAMIC_BUCKETS))


def _bucket_ends() -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest float32, subnormals left out, of the 32 buckets of [-1, 1) and of the one of 1."""
    least = (np.arange(33) / 16 - 1).astype(np.float32)
    largest = np.nextafter(np.append(least[1:], np.float32(17 / 16)), np.float32(-np.inf))
    largest[15] = -SMALLEST_NORMAL
    return least, largest


@functools.lru_cache(maxsize=64)
def search4(table: Table) -> tuple[str, np.ndarray]:
    """The kernel's kind of search, and a `TABLE4`."""
    struct = TABLE4.zeros()
    struct["value"] = table.values
    struct["ordered"] = np.inf
    struct["ordered"][: table.thresholds.size] = table.thresholds
    struct["code"][: table.codes.size] = table.codes
    first, last = (np.searchsorted(table.thresholds, ends) for ends in _bucket_ends())
    known = table is fp4_table() or np.array_equal(table.codes, np.arange(16))
    if not known or (last - first).max() > 1:
        return "ANY", struct
    struct["threshold"] = np.inf
    struct["threshold"][:33][last > first] = table.thresholds[first[last > first]]
    struct["level"][:33] = first
    struct["level"][-1] = np.flatnonzero(table.codes == 0)[0]  # NaN, whose bits are all ones
    return "FP4" if table is fp4_table() else "ORDERED", struct


def dynamic_bucket(searched: np.ndarray) -> np.ndarray:
    """The bucket of a float32 |y| + 2^-23, as ``kernels/formats/dynamic_map.cuh`` finds it."""
    quarter = (searched.view(np.uint32) >> 2).view(np.float32).astype(np.float64)
    return (quarter * DYNAMIC_SEARCH.DYNAMIC_SCALE + 2.0**23).astype(np.float32).view(np.uint32) & 511


@functools.cache
def search8() -> np.ndarray:
    """A `DYNAMIC`: levels of |y|, counted from zero."""
    thresholds = tables.midpoints(tables.dynamic_map()[127:])
    # A tie goes to the even code, which is the odd level: up from an even one.
    thresholds[::2] = np.nextafter(thresholds[::2], np.float32(0))
    first = np.nextafter(thresholds, np.float32(1)) + DYNAMIC_OFFSET  # the first above each
    assert (first > thresholds + DYNAMIC_OFFSET).all()
    bucket = dynamic_bucket(first)
    assert np.unique(bucket).size == bucket.size
    field = np.arange(DYNAMIC_SEARCH.DYNAMIC_BUCKETS)
    level = np.searchsorted(bucket, field)  # what a bucket begins with
    # Entry and bits carry into the highest byte from `limit` on: over the bucket's threshold, else nowhere in it.
    limit = ((field / DYNAMIC_SEARCH.DYNAMIC_SCALE).astype(np.float32).view(np.uint32).astype(np.int64) << 2) + (
        1 << 23
    )
    limit[bucket] = first.view(np.uint32)
    struct = DYNAMIC.zeros()
    struct["entry"] = ((1 + level << 24) - limit) % 2**32
    return struct
