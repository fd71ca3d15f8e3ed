"""What the NumPy sides of the families share: work in chunks that stay in the cache, block maxima, bucket search."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..tables import LEAST_PRODUCT, SMALLEST_NORMAL

#: NumPy works on this many elements at a time: the buffers stay in the cache.
CHUNK = 1 << 17
#: By what that is multiplied: in threads calls have to be longer, since each ends with a wait for the interpreter.
AT_ONCE: ContextVar[int] = ContextVar("kbitcupy_at_once", default=1)
#: What `room` has given to a thread that quantizes, by its names; None elsewhere.
KEPT: ContextVar[dict[str, np.ndarray] | None] = ContextVar("kbitcupy_kept", default=None)

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_NORMAL = np.uint32(0x00800000)
# See `widen`.
_SIGN_AND_HALF, _HALF_BIAS = np.int32(-0x70000001), np.float32(2.0**112)
# See `narrow`: numbers at a time, and fewer than are worth it; what takes the bias away, and the bits, less the bias,
# from where float16 is infinite.
_NARROWED, _FEW = 1 << 15, 1 << 10
_LESS_BIAS = np.float32(2.0**-112)
_TOO_LARGE = (np.float32(65520) * _LESS_BIAS).view(np.uint32)
# Buckets whose indices are looked up at a time, since NumPy wants their numbers in 8 bytes each.
_LOOKED_UP = 1 << 17
# Bytes of a line of the cache.
_LINE = 64
# Bytes of a block from which on it is reduced as it is: for shorter ones that is slow.
_LONG = 128
_LAST_BUCKET = np.uint32(0xFFFF)
# Marks a bucket with a threshold inside. With 256 levels it is an index as well, one that is rare.
_AMBIGUOUS = np.uint8(254)


def room(name: str, size: int, dtype: Any) -> np.ndarray:
    """A flat array, with anything in it; that of a name may be the same one each time, so only one is in use at once.

    What is given back between parts, or chunks, threads would wait for: page faults of one hold up the others. It
    begins with a line of the cache: where vectors lie across two, some calls take twice as long.
    """
    kept, nbytes = KEPT.get(), size * np.dtype(dtype).itemsize
    memory = None if kept is None else kept.get(name)
    if memory is None or memory.size < nbytes:
        memory = np.empty(nbytes + _LINE, np.uint8)
        first = -memory.ctypes.data % _LINE
        memory = memory[first : first + nbytes]
        if kept is not None:
            kept[name] = memory
    return memory[:nbytes].view(dtype)


class Buffers:
    """Arrays that every chunk uses again: the page faults of fresh ones would cost more than the arithmetic.

    Parameters
    ----------
    size : int
        Elements of the whole array.
    block : int
        Elements of a block.
    """

    def __init__(self, size: int, block: int):
        self.block, self.chunk = block, CHUNK * AT_ONCE.get()
        size = min(size + -size % block, self.chunk)
        memory = room("buffers", 17 * size, np.uint8)  # one call of `room`, which small arrays would feel
        self.position = memory[: 8 * size].view(np.intp)
        self.x = memory[8 * size : 12 * size].view(np.float32)
        self.y = memory[12 * size : 16 * size].view(np.float32)
        self.index = memory[16 * size :]
        # Where others are, which are in the cache already: `x`; and `x` and `y`, when there are indices.
        self.flag = memory[8 * size : 9 * size].view(np.bool_)
        self.planes = memory[8 * size : 16 * size]
        self._parts: Parts | None = None
        self.starts = row_starts(2 * size, block)  # see `_half_absmax`

    def parts(self, size: int) -> Parts:
        """Those of a chunk of so many elements, the same for all that have as many."""
        if self._parts is None or self._parts.size != size:
            self._parts = Parts(self, size)
        return self._parts


class Parts:
    """Buffers of chunks of one size, as calls want to see them, made once: beside another thread, which waits for what
    Python does between two calls, and makes that slower by all that both look at, this counts.

    Parameters
    ----------
    buffers : Buffers
        The buffers.
    size : int
        Elements of a chunk, whole blocks.
    """

    def __init__(self, buffers: Buffers, size: int):
        # Not the buffers themselves: in a circle they would be kept until somebody looks for such.
        self.size, self._block, self._y, self._planes = size, buffers.block, buffers.y, buffers.planes
        self.x, self.index, self.flag = buffers.x[:size], buffers.index[:size], buffers.flag[:size]
        self.bits = self.x.view(np.uint32)
        if size <= _LOOKED_UP:
            self.looked_up = [(buffers.position[:size], self.bits, self.index)]
        else:
            self.looked_up = [
                (buffers.position[: end - first], self.bits[first:end], self.index[first:end])
                for first, end in itertools.pairwise((*range(0, size, _LOOKED_UP), size))
            ]

    @functools.cached_property
    def x_rows(self) -> np.ndarray:
        """`x`, a block in each row."""
        return self.x.reshape(-1, self._block)

    @functools.cached_property
    def y(self) -> np.ndarray:
        """The other numbers, flat."""
        return self._y[: self.size]

    @functools.cached_property
    def y_rows(self) -> np.ndarray:
        """`y`, a block in each row."""
        return self.y.reshape(-1, self._block)

    @functools.cached_property
    def planes(self) -> np.ndarray:
        """Where `x` and `y` are, eight bytes for each element: uint8[8, size]."""
        return self._planes[: 8 * self.size].reshape(8, self.size)


@functools.lru_cache(maxsize=16)
def row_starts(size: int, row: int) -> np.ndarray:
    """Where the rows of a flat array begin, for ``reduceat``; the same read-only array each time."""
    starts = np.arange(0, size, row)
    starts.flags.writeable = False
    return starts


def chunks(x: np.ndarray, buffers: Buffers, finite: bool = False) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first block, float32[blocks, block]) of a flat array, not to be written: zeros beyond its end.

    `finite`: whether it is known that all numbers are.
    """
    block = buffers.block
    for start in range(0, x.size, buffers.chunk):
        part = x[start : start + buffers.chunk]
        if x.dtype == np.float32 and not part.size % block:
            yield start // block, part.reshape(-1, block)
            continue
        parts = buffers.parts(part.size + -part.size % block)
        if parts.size == part.size:
            widen(part, parts.x, finite)
        else:
            widen(part, parts.x[: part.size], finite)
            parts.x[part.size :] = 0
        yield start // block, parts.x_rows


def widen(x: np.ndarray, out: np.ndarray, finite: bool = False) -> None:
    """Fill a float32 array with floats, of which it may be known that they are finite: NumPy's own cast of float16
    takes four times as long.
    """
    if x.dtype == np.float16 and x.size and (finite or not has_special(x)):
        # Exponent and mantissa where those of float32 are, at a bias that is less by 112; the sign came along up to
        # bit 28.
        bits = out.view(np.int32)
        np.left_shift(x.view(np.int16), np.int32(13), out=bits)
        np.bitwise_and(bits, _SIGN_AND_HALF, out=bits)
        np.multiply(out, _HALF_BIAS, out=out)
    else:
        np.copyto(out, x)


def narrow(x: np.ndarray, out: np.ndarray) -> None:
    """Fill an array of any dtype with numbers: NumPy's own cast of float32 to float16 takes five times as long."""
    contiguous = x.flags.c_contiguous and out.flags.c_contiguous and x.shape == out.shape
    if x.dtype != np.float32 or out.dtype != np.float16 or x.size < _FEW or not contiguous:
        out[...] = x
        return
    x, out = x.reshape(-1), out.reshape(-1)
    for first in range(0, x.size, _NARROWED):
        _narrow_some(x[first : first + _NARROWED], out[first : first + _NARROWED])


def _narrow_some(x: np.ndarray, out: np.ndarray) -> None:
    # Exponent and mantissa of float16 where those of float32 are, 13 bits further up, which are rounded away.
    with np.errstate(under="ignore"):
        bits = (x * _LESS_BIAS).view(np.uint32)
    bits &= _MAGNITUDE
    if bits.max() >= _TOO_LARGE:
        out[...] = x
        return
    # Subnormal float32 numbers, as which those of float16 are here, have been rounded already.
    rare = np.flatnonzero(bits - np.uint32(1) < _NORMAL - np.uint32(1))
    half = bits >> np.uint32(13)
    half &= np.uint32(1)
    half += np.uint32(0xFFF)
    half += bits
    half >>= np.uint32(13)
    np.right_shift(x.view(np.uint32), np.uint32(16), out=bits)
    bits &= np.uint32(0x8000)
    half |= bits
    out.view(np.uint16)[...] = half
    out[rare] = x[rare]


def converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy of floats in another dtype, C-contiguous; one of float32 by `widen`."""
    if dtype != np.float32:
        return x.astype(dtype, order="C")
    out = np.empty(x.shape, np.float32)
    widen(x, out)
    return out


def has_special(x: np.ndarray) -> bool:
    """Whether float16 numbers, one or more, hold an infinity or NaN: the largest of their bits, with and without."""
    largest = np.maximum.reduce
    return bool(largest(x.view(np.int16), axis=None) >= 0x7C00 or largest(x.view(np.uint16), axis=None) >= 0xFC00)


def chunk_absmax(rows: np.ndarray, buffers: Buffers, out: np.ndarray) -> None:
    """Fill `out` with max|x| of each row of float32[blocks, block]; NaN is ignored, a subnormal maximum is 0.

    |x| stay in ``buffers.y``, and 0 for NaN.
    """
    magnitude, largest = _magnitudes(rows, buffers), out.view(np.uint32)
    _row_max(magnitude, buffers, largest)
    if np.maximum.reduce(largest) > _INFINITE:
        magnitude *= magnitude <= _INFINITE
        _row_max(magnitude, buffers, largest)
    if np.minimum.reduce(largest) < _NORMAL:
        flush_chunk(out)


def _magnitudes(rows: np.ndarray, buffers: Buffers) -> np.ndarray:
    """|x| in a buffer, as integers, which have the order of the numbers; fmax may lose a number to a signaling NaN."""
    magnitude = buffers.y[: rows.size].view(np.uint32)
    np.bitwise_and(rows.reshape(-1).view(np.uint32), _MAGNITUDE, out=magnitude)
    return magnitude


def block_absmax(x: np.ndarray, block: int, out: np.ndarray | None = None) -> np.ndarray:
    """max|x| of each block of a flat array, float32, as `chunk_absmax` has it; `out` receives it where it is given."""
    if out is None:
        out = np.empty(-(-x.size // block), np.float32)
    fill_absmax(x, block, out)
    return out


def fill_absmax(x: np.ndarray, block: int, out: np.ndarray) -> bool:
    """`block_absmax` into `out`; whether all numbers are finite."""
    buffers = Buffers(x.size, block)
    whole = x.size - x.size % block if x.dtype == np.float16 else 0
    finite = True
    for start in range(0, whole, 2 * buffers.chunk):
        part = x[start : min(start + 2 * buffers.chunk, whole)]
        finite &= _half_absmax(part, buffers, out[start // block :])
    rest, numbers = out[whole // block :], x[whole:]
    bits = rest.view(np.uint32)
    if not bits.size:
        return finite
    for first, rows in chunks(numbers, buffers):
        _row_max(_magnitudes(rows, buffers), buffers, bits[first : first + len(rows)])
    # One look at all chunks, since a call takes as long for some hundred numbers as for one.
    most = np.maximum.reduce(bits)
    if most > _INFINITE:
        for first, rows in chunks(numbers, buffers):
            chunk_absmax(rows, buffers, rest[first : first + len(rows)])
    elif np.minimum.reduce(bits) < _NORMAL:
        flush_chunk(rest)
    return bool(finite and most < _INFINITE)


def _half_absmax(x: np.ndarray, buffers: Buffers, out: np.ndarray) -> bool:
    """`fill_absmax` of whole blocks of float16, flat, which are not widened for it: two chunks fit in the buffers."""
    magnitude = buffers.x.view(np.uint16)[: x.size]
    np.bitwise_and(x.view(np.uint16), np.uint16(0x7FFF), out=magnitude)
    largest = np.empty(x.size // buffers.block, np.uint16)
    _row_max(magnitude, buffers, largest)
    most = np.maximum.reduce(largest)
    if most > 0x7C00:
        magnitude *= magnitude <= 0x7C00
        _row_max(magnitude, buffers, largest)
    out[: largest.size] = largest.view(np.float16)
    return bool(most < 0x7C00)


def _row_max(x: np.ndarray, buffers: Buffers, out: np.ndarray) -> None:
    """Fill `out` with the largest number of each block of a flat array of unsigned integers."""
    block = buffers.block
    if block * x.itemsize >= _LONG:
        out[...] = np.maximum.reduceat(x, buffers.starts[: out.size])  # with `out` it would keep other threads waiting
        return
    # Columns of 16 bytes (as complex128) become rows first: then it goes along them.
    each = 16 // x.itemsize
    columns = block // each
    turned = buffers.position.view(x.dtype)[: x.size]
    np.copyto(turned.view(np.complex128).reshape(columns, -1), x.view(np.complex128).reshape(-1, columns).T)
    lanes = np.maximum.reduce(turned.reshape(columns, -1), axis=0).reshape(-1, each)
    np.maximum.reduce(np.ascontiguousarray(lanes.T), axis=0, out=out)


def flush_chunk(x: np.ndarray) -> np.ndarray:
    """`tables.flush` for contiguous float32, faster."""
    bits = x.view(np.uint32)
    bits *= (bits & _MAGNITUDE) >= _NORMAL
    return x


def flush_products(products: np.ndarray, items: np.ndarray, codes: np.ndarray, factor: np.ndarray, block: int) -> None:
    """`flush_chunk` of ``items[codes] * factor`` as the GPU rounds it, see `tables.flushed_product`.

    An item is one float32 or more; a factor belongs to `block` products in a row.
    """
    flush_chunk(products)
    rare = np.flatnonzero(np.abs(products) == SMALLEST_NORMAL)
    if rare.size:
        each = items.itemsize // 4
        value = items.view(np.float32).reshape(-1, each)[codes.reshape(-1)[rare // each], rare % each]
        exact = value.astype(np.float64) * factor[rare // block]
        products[rare[np.abs(exact) < LEAST_PRODUCT]] = 0


class Buckets:
    """A table of 2^16 buckets of quotients: the index that all of a bucket share, or 254 where a threshold splits it.

    Adding `magic` leaves y as a multiple of reach / 2^15 in the low bits of the sum, which all have one exponent: a
    monotone function, so a bucket without a threshold has one index. With 256 levels the index 254 itself counts as
    split, too.

    Parameters
    ----------
    thresholds : numpy.ndarray
        float32, ascending.
    index : numpy.ndarray
        uint8, one more: that of the numbers below the first threshold, up to the second, and so on.

    Attributes
    ----------
    limit : numpy.float32
        Quotients are clamped to +-limit, which is beyond every threshold.
    """

    def __init__(self, thresholds: np.ndarray, index: np.ndarray):
        self.thresholds, self.levels = thresholds, index
        largest = float(np.abs(thresholds).max(initial=2.0**-40))
        reach = 2.0 ** (int(np.floor(np.log2(largest))) + 2)
        if reach > 2.0**100:  # magic would not be finite, or not accurate
            self.magic, self.limit, self._least = np.float32(0), np.float32(np.inf), np.uint32(0)
            self.index = np.full(1 << 16, _AMBIGUOUS, np.uint8)
            return
        self.magic, self.limit = np.float32(reach * (2.0**8 + 1)), np.float32(reach * 0.75)
        self._least = np.float32(reach * 2.0**8).view(np.uint32)  # of -reach
        work = np.empty_like(thresholds)
        bucket = self._position(thresholds, work, work.view(np.uint32)).astype(np.intp)
        ends = np.concatenate(([0], bucket + 1, [1 << 16]))
        self.index = np.repeat(index, np.diff(ends))
        self.index[bucket] = _AMBIGUOUS

    def _position(self, y: np.ndarray, work: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """The buckets of quotients, uint32, in the array `work` of float32, whose bits are `bits`: 2^16 or more without
        one, as NaN is.
        """
        np.add(y, self.magic, out=work)
        bits -= self._least
        return bits

    def search(self, y: np.ndarray, buffers: Buffers) -> np.ndarray:
        """The index of each number of a chunk, which it may overwrite; 0 for NaN. The result lies in a buffer."""
        flat = y.reshape(-1)
        parts = buffers.parts(flat.size)
        nan = None
        bucket = self._position(flat, parts.x, parts.bits)
        if flat.size and np.maximum.reduce(bucket) > _LAST_BUCKET:
            nan = np.isnan(flat)
            np.fmax(flat, -self.limit, out=flat)
            np.fmin(flat, self.limit, out=flat)
            self._position(flat, parts.x, parts.bits)
            bucket &= _LAST_BUCKET
        rare = self._look_up(parts)
        if rare.size:
            self.settle(parts, rare, flat[rare])
        if nan is not None:
            parts.index[nan] = 0
        return parts.index.reshape(y.shape)

    def search_in_place(self, parts: Parts) -> np.ndarray:
        """`search` of the numbers in ``parts.x``, which all lie between -limit and limit, but for some whose indices
        are up to `settle`: where these are. The numbers are lost: one buffer less has more room in the cache.
        """
        self._position(parts.x, parts.x, parts.bits)
        return self._look_up(parts)

    def settle(self, parts: Parts, rare: np.ndarray, y: np.ndarray) -> None:
        """The indices of the numbers `y`, which are those at `rare`."""
        parts.index[rare] = self.levels[self.thresholds.searchsorted(y)]

    def _look_up(self, parts: Parts) -> np.ndarray:
        """Fill the indices by buckets; where there are thresholds in those."""
        take = self.index.take
        for position, some, found in parts.looked_up:
            position[...] = some
            take(position, out=found, mode="wrap")
        np.equal(parts.index, _AMBIGUOUS, out=parts.flag)
        return parts.flag.nonzero()[0]


# ---- codes in the bits of bytes --------------------------------------------------------------------------------------


def pack_fields(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Codes of so many bits as bytes: byte i of a run holds the elements i, i + run, i + 2 * run, ..., the first
    in the lowest bits.

    `codes` is uint8[blocks, block], `run` a multiple of 8; the result uint8[blocks, block * bits / 8].
    """
    runs = np.ascontiguousarray(codes).reshape(-1, 8 // bits, run)
    fields = [runs.view(np.uint64)[:, i] for i in range(8 // bits)]
    if run == 16:  # copied as items they are faster than words of which two lie together
        fields = [np.ascontiguousarray(runs.view(np.complex128)[:, i, 0]).view(np.uint64) for i in range(8 // bits)]
    packed = fields[-1] << np.uint64(bits)  # codes fit: what leaves a byte is 0
    for field in fields[-2:0:-1]:
        packed |= field
        packed <<= np.uint64(bits)
    packed |= fields[0]
    return packed.view(np.uint8).reshape(len(codes), -1)


def unpack_fields(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The codes that `pack_fields` has packed, uint8[blocks, block]."""
    flat = np.ascontiguousarray(packed.view(_run(packed.shape[1]))).view(np.uint8).reshape(-1)
    codes = np.empty((flat.size // run, 8 // bits), _run(run))
    for i in range(8 // bits):
        part = flat >> np.uint8(bits * i)
        part &= np.uint8((1 << bits) - 1)
        codes[:, i] = part.view(codes.dtype)
    return codes.view(np.uint8).reshape(len(packed), -1)


def copy_bytes(source: np.ndarray, target: np.ndarray) -> None:
    """Copy bytes, uint8[rows, n], row by row."""
    item = _run(source.shape[1])
    target.view(item)[...] = source.view(item)


def _run(nbytes: int) -> np.dtype:
    """So many bytes as one item: copies of items are several times as fast as those of their bytes."""
    return np.dtype({4: np.uint32, 8: np.uint64, 16: np.complex128}.get(nbytes) or (np.void, nbytes))
