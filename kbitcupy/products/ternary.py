"""BitLinear: products of int8 activations and ternary weights, the route of ``activations="bitnet"``.

    y[m, n] = fl(fl(float(sum_k q[m, k] * t[n, k]) * sa[m]) * gamma[n]) + bias[n]

in float32, subnormal numbers kept, then one cast to the dtype of the activations. Sums are exact in int32, for K up to
131071, so that NumPy and CUDA give the same bits in any order over K. Where groups along K have scales of their own,
sums are exact within a group, and the terms ``fl(fl(float(sum) * sa) * gamma)`` of the groups are added in float32,
from the first to the last. Activations are quantized by `kbitcupy.products.activations`, or by W8A8's rule for
``activations="int8"``, or are int8 already. A scale that is not positive and finite counts as 0.

On NumPy a float32 product by BLAS is exact where all sums stay below 2^24. Bytes of four codes become floats together,
which lose one of their fields after the other; what they are multiplied by makes up for the fields that are still
there, and what they are too large by is known from the sums of the activations. A weight that is kept
(`kbitcupy.DecodedCache`) has the trits of three rows in a float64, whose sums come out of 53 bits exactly.

On a GPU there are two launches where K is a multiple of 128, up to 32 tokens or any number of them with groups of 32,
64 or 128: tokens are quantized, and codes are read in place by what multiplies, which from Hopper on fetches them while
the first launch is at work; one token, of floats or int8 already, and a weight that is not small there take one
launch. On Hopper there are two for more tokens, too, without groups: codes become bytes in registers
(`kbitcupy.products.integer_tile`). Otherwise the trits are written as int8, once for each call, for the kernels of
`kbitcupy.products.int8`; other groups go through a plain kernel, whose time grows with the tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel, multiprocessors
from ..backend.structs import Constants
from ..errors import FormatError
from ..formats.base import Trits, register_templates
from ..formats.ternary import BLOCK, RUN, unpack
from ..ops import source, widen
from . import activations as tokens_of, int8, integer_tile
from .activations import Norm, Rule
from .int8 import MAX_DEPTH, Int8, quantize_tokens, token_planes
from .integer_activations import NUMBERS, floats_of, padded_of, quantize_into as tokens_in_order
from .kept import kept
from .routes import BYTES_PER_US, Device, Problem, Product, Route, Stored, device as device_of, stored
from .ternary_rows import early, in_one_launch, named, takes_bytes
from .ternary_stream import multiply_streamed, why_not_streamed

WANTED = (
    "it must be [N, K] in ternary: quantize(w, 'ternary'), or kb.bitnet.from_trits(trits, scale) for trits; of a stack "
    "take one member"
)
#: The rule of ``activations="bitnet"``.
BITNET = Rule()


def trits_of(q: QuantizedArray, argument: str = "q") -> Trits:
    """How a weight is ternary.

    Raises
    ------
    FormatError
        When it is not, or no matrix.
    ValueError
        When it has too many columns.
    """
    found = _trits(q.format, q.shape, q.lead)
    if found is None or not found.shares:
        raise FormatError(f"{argument} is {q.format!r} of shape {q.shape}; {WANTED}")
    if q.shape[1] > MAX_DEPTH:
        raise ValueError(f"{argument} has K = {q.shape[1]}; {_TOO_DEEP}")
    return found


@functools.lru_cache(maxsize=4096)
def _way(tokens: int, depth: int, part: Trits, lies: Stored, device: int) -> Callable[..., None] | None:
    """What multiplies by codes as they lie, on a GPU; None where they have to be decoded first."""
    gpu = device_of(device)
    assert gpu is not None
    if why_not_streamed(tokens, depth, part, lies, gpu) is None:
        return multiply_streamed
    return _multiply_tiled if _why_not_tiled(depth, part, lies, gpu) is None else None


_TOO_DEEP = f"sums are exact in int32 and float32 up to K = {MAX_DEPTH}: split K"


@functools.lru_cache(maxsize=1024)
def _trits(format: Any, shape: tuple[int, ...], lead: int) -> Trits | None:
    found: Trits | None = format.trits(shape, lead)
    return found


def multiply(
    x: Any,
    q: QuantizedArray,
    bias: Any,
    out: Any,
    rule: Rule | None,
    norm: Norm | None = None,
    part: Trits | None = None,
) -> None:
    """Fill `out`, which is not empty; its device is the current one. `part` is that of `trits_of`, where it is known.

    `x` is a float array, quantized by `rule` (None: by that of W8A8), or a compressed one in int8.
    """
    part = part or trits_of(q)
    rows, depth = q.shape
    tokens = out.size // rows
    if not depth:  # sums of nothing; groups have no scales then
        out[...] = 0 if bias is None else bias
        return
    bias = None if bias is None else source(bias, tokens_of.FLOATS)
    if isinstance(out, np.ndarray):
        with np.errstate(all="ignore"):
            _multiply_host(*_quantized_host(x, tokens, rule, norm), q, part, bias, out.reshape(tokens, rows))
        return
    way = _way(tokens, depth, part, stored(q), out.data.device_id)
    if way is not None:
        way(x, q, part, bias, out, rule, norm)
        return
    quantized = isinstance(x, QuantizedArray)
    if not (quantized or rule is None or rule.granularity != "token" or part.shares == "group"):
        _multiply_decoded(x, q, part, bias, out, rule, norm)
        return
    codes: Any = x
    scales: Any = None
    if quantized:
        codes, scales = token_planes(x)
        codes = codes.reshape(tokens, depth)
    elif rule is not None:
        codes, scales = tokens_of.quantize(x.reshape(tokens, depth), rule, norm, -(-depth // _PITCH) * _PITCH)
    if part.shares == "group":
        if scales is None:
            codes, scales = int8.quantize_on_gpu(x.reshape(tokens, depth))
        _multiply_groups(codes, scales, q, part, bias, out)
    else:
        trits, factors = _decoded(q, part)
        int8.multiply(codes, scales, trits, factors, bias, out)


# ---- NumPy -----------------------------------------------------------------------------------------------------------

# Columns whose products with codes up to 3 stay below 2^24: float32 holds all sums.
_EXACT = 1 << 15
# Weights that are made ready at a time, which the cache holds; with more than a few tokens more of them. Up to so many
# tokens are multiplied one by one: BLAS copies a matrix ahead of its product with another, but not for a vector. And
# results that are scaled at a time.
_SLAB, _FEW, _WIDER, _ONE_BY_ONE, _RESULTS = 1 << 18, 32, 4, 6, 1 << 20
# A byte of codes above 256 has the highest bits of a float32's mantissa. Bits of its fields from 1, 2 and 3 on; what it
# is at most; and what sums of products stay below, with room for the rounding of what
# tells so.
_ABOVE = np.array(256, np.float32)
_FROM = tuple(np.array(_ABOVE.view(np.uint32) | (255 & 255 << 2 * field) << 15, np.uint32) for field in (1, 2, 3))
_LARGEST_BYTE = 256 + 255
_LARGEST_SUM = (1 << 24) - (1 << 15)
# What a field counts, and by how much products with codes above 256 are too large for those with trits, in sums of the
# factors of each field: 256, and what a code of 1 counts in this field and those behind it.
_COUNTS = 4 ** np.arange(4)
_SHARES = (1 / _COUNTS).astype(np.float32)[:, None, None, None]
_TOO_MUCH = 256 + _COUNTS[::-1].cumsum()[::-1].astype(np.float64)
# Floats of bytes at a time, which the cache holds, the bytes that processors like them to begin at, and the rows that
# BLAS multiplies by a vector at a time.
_FLOATS, _ALIGNMENT, _ROWS = 1 << 17, 64, 4


def _quantized_host(x: Any, tokens: int, rule: Rule | None, norm: Norm | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes of tokens [tokens, K], int8 or float32, and their scales, which count as they are."""
    if isinstance(x, QuantizedArray):
        codes, scales = token_planes(x)
        return codes.reshape(tokens, -1), int8.factors(scales)
    x = x.reshape(tokens, -1)
    if rule is not None:
        return tokens_of.quantize_to_floats(x, rule, norm)
    return quantize_tokens(source(x, tokens_of.FLOATS), None, None)


def decoded_rows(codes: np.ndarray, depth: int, first: int, last: int) -> np.ndarray:
    """The int8 trits [last - first, depth] of some rows, from the plane of all codes."""
    begin, end = first * depth, last * depth
    block = begin // BLOCK
    trits = unpack(codes[block * RUN : -(-end // BLOCK) * RUN])
    return trits[begin - block * BLOCK : end - block * BLOCK].reshape(last - first, depth)


class _Whole:
    """Activations beside which rows of whole blocks of codes are multiplied as they lie.

    With u[f] for 256 and what the fields of a byte from f on count in it, field f is ``(u[f] - u[f + 1]) / 4^f``, so
    that its product with a[f] is in those of u[f] with ``a[f] / 4^f - a[f - 1] / 4^(f - 1)``: integers, as all of them
    are. One mask makes u[f + 1] of u[f], in its place.
    """

    def __init__(self, a: np.ndarray):
        tokens, depth = a.shape
        # By the field of the bytes that their codes have.
        fields = np.empty((4, tokens, depth // 4), np.float32)
        of_fields = a.reshape(tokens, -1, 4, RUN).transpose(2, 0, 1, 3)
        np.multiply(of_fields, _SHARES, out=fields.reshape(4, tokens, -1, RUN))
        for f in (3, 2, 1):
            fields[f] -= fields[f - 1]
        self.parts: list[np.ndarray] = []
        self.above = np.zeros(tokens)
        self._add_parts(fields)
        # Halves of columns may have been halved again, so that parts are of different widths.
        widest = max(part.shape[2] for part in self.parts)
        self.floats = _aligned_floats(max(_FLOATS * (1 if tokens <= _FEW else _WIDER), _ROWS * widest))

    def _add_parts(self, fields: np.ndarray) -> None:
        """Columns of factors, in parts whose products are added exactly in float32, in any order."""
        width, sums = fields.shape[2], fields.sum(axis=2)
        # What is added up lies between the sums of all that is negative and of all that is positive. Those of the
        # magnitudes are at most what the squares say, which need no array.
        magnitudes = math.sqrt(float(np.vecdot(fields, fields).max()) * width)
        if (magnitudes + float(np.abs(sums).max())) * _LARGEST_BYTE < 2 * _LARGEST_SUM:
            self.parts.append(np.ascontiguousarray(fields))
            self.above += _TOO_MUCH @ sums
            return
        half = -(-width // 2)
        self._add_parts(fields[:, :, :half])
        self._add_parts(fields[:, :, half:])

    def product(self, codes: np.ndarray) -> np.ndarray:
        """float32 [tokens, rows] with the codes [rows, depth / 4] of some rows: sums, each rounded once."""
        tokens, rows = len(self.above), len(codes)
        total = -self.above[:, None]
        found = np.empty((4, tokens, rows), np.float32)
        left = 0
        for part in self.parts:
            width = part.shape[2]
            step = self.floats.size // width // _ROWS * _ROWS
            floats = self.floats[: step * width].reshape(step, width)
            for first in range(0, rows, step):
                some = codes[first : first + step, left : left + width]
                self._multiply(some, floats[: len(some)], part, found[:, :, first : first + step])
            total = total + found.sum(axis=0, dtype=np.float64)
            left += width
        return total.astype(np.float32)

    def _multiply(self, codes: np.ndarray, floats: np.ndarray, part: np.ndarray, found: np.ndarray) -> None:
        """Fill float32 [4, tokens, rows] with products of some bytes of rows, made floats in `floats`, and factors."""
        bits = floats.view(np.uint32)
        np.copyto(floats, codes)
        np.add(floats, _ABOVE, out=floats)  # apart from the cast, which the two together would do in small pieces
        if len(self.above) <= _ONE_BY_ONE:
            part, found = part[..., None], found[..., None]
            for f in range(4):
                if f:
                    np.bitwise_and(bits, _FROM[f - 1], out=bits)
                np.matmul(floats, part[f], out=found[f])
        else:
            for f in range(4):
                if f:
                    np.bitwise_and(bits, _FROM[f - 1], out=bits)
                np.matmul(part[f], floats.T, out=found[f])


def _aligned_floats(size: int) -> np.ndarray:
    """float32 [size], not set."""
    room = np.empty(4 * size + _ALIGNMENT, np.uint8)
    first = -room.ctypes.data % _ALIGNMENT
    return room[first : first + 4 * size].view(np.float32)


# Three trits in a float64: bits of each in a sum, and what two sums of the same 53 bits stay below.
_LANE = 18
_LANE_BASE, _LARGEST_LANE = 2.0**_LANE, 1 << (_LANE - 1)
# Columns whose |a| are added up to see how many fit, the fewest that always do; rows that are multiplied at a time.
_LANE_COLUMNS, _LANE_ROWS = 256, 16


def _third(rows: int) -> int:
    return -(-rows // (3 * _LANE_ROWS)) * _LANE_ROWS


def _in_threes(codes: np.ndarray, rows: int, depth: int) -> np.ndarray:
    """float64 [third, depth]: the trits of rows r, r + third and r + 2 third count 2^36, 2^18 and 1."""
    third = _third(rows)
    packed = np.zeros((third, depth))
    step = max(1, _SLAB // max(1, depth))
    for lane in range(3):
        first = lane * third
        for some in _some(max(0, min(third, rows - first)), step):
            packed[some] += decoded_rows(codes, depth, first + some.start, first + some.stop) * _LANE_BASE ** (2 - lane)
    return packed


def _sums_of_threes(a: np.ndarray, packed: np.ndarray, rows: int) -> np.ndarray:
    """float32 [tokens, rows]: the sums of three rows come from one product, exact in 53 bits, each rounded once."""
    tokens, depth = a.shape
    wide = a.astype(np.float64)
    # A sum of trits up to 2 stays below the base of its lane, on both sides of 0.
    starts = np.arange(0, depth, _LANE_COLUMNS)
    magnitudes = 2 * np.add.reduceat(np.abs(wide), starts, axis=1)
    runs = len(starts)
    while np.add.reduceat(magnitudes, np.arange(0, len(starts), runs), axis=1).max() >= _LARGEST_LANE:
        runs = -(-runs // 2)
    total = np.zeros((tokens, 3, len(packed)))
    for some in _some(depth, runs * _LANE_COLUMNS):
        if tokens <= _ONE_BY_ONE:  # some rows by all tokens, while the cache holds them
            few = packed.reshape(-1, 1, _LANE_ROWS, depth)[..., some]
            sums = np.matmul(few, wide[:, some, None]).transpose(1, 0, 2, 3).reshape(tokens, -1)
        else:
            sums = wide[:, some] @ packed[:, some].T
        for lane in range(2):
            high = np.rint(sums / _LANE_BASE ** (2 - lane))
            total[:, lane] += high
            sums -= high * _LANE_BASE ** (2 - lane)
        total[:, 2] += sums
    return total.reshape(tokens, -1)[:, :rows].astype(np.float32)


class _Groups:
    """Activations beside which rows are multiplied group by group."""

    def __init__(self, a: np.ndarray, group: int):
        tokens, depth = a.shape
        self.group, self.groups = group, -(-depth // group)
        wide = np.zeros((tokens, self.groups * group), np.float32)
        wide[:, :depth] = a
        self.parts = np.ascontiguousarray(wide.reshape(tokens, self.groups, group).transpose(1, 0, 2))

    def product(self, trits: np.ndarray) -> np.ndarray:
        """float32 [groups, tokens, rows] with the int8 trits [rows, depth] of a few rows: sums, each rounded once."""
        rows, depth = trits.shape
        wide = np.zeros((rows, self.groups * self.group), np.float32)
        wide[:, :depth] = trits
        weights = wide.reshape(rows, self.groups, self.group).transpose(1, 2, 0)
        if self.group <= _EXACT:
            return self.parts @ weights
        total = np.zeros((self.groups, self.parts.shape[1], rows), np.int32)
        for k in range(0, self.group, _EXACT):
            part = slice(k, k + _EXACT)
            total += (self.parts[:, :, part] @ weights[:, part]).astype(np.int32)
        return total.astype(np.float32)


class _WholeGroups:
    """The same of groups that have fields of the bytes of a block of codes for themselves, or whole blocks, which are
    multiplied as they lie (see `_Whole`).
    """

    def __init__(self, a: np.ndarray, group: int):
        tokens, depth = a.shape
        self.tokens, self.blocks = tokens, depth // BLOCK
        self.of_block, self.each = max(BLOCK // group, 1), max(group // BLOCK, 1)
        fields = a.astype(np.float32, copy=False).reshape(tokens, self.blocks, 4, RUN).transpose(1, 2, 0, 3)
        shares = fields * _SHARES[:, 0]
        # What u[f] is multiplied by, [blocks, groups and tokens, RUN]: for the groups of field f and of that before it.
        self.factors: list[tuple[int, int, np.ndarray]] = []
        for f in range(4):
            first, last = (field * self.of_block // 4 for field in (max(f - 1, 0), f))
            factors = np.zeros((self.blocks, last + 1 - first, tokens, RUN), np.float32)
            factors[:, last - first] += shares[:, f]
            if f:
                factors[:, 0] -= shares[:, f - 1]
            self.factors.append((first, last + 1, factors.reshape(self.blocks, -1, RUN)))
        # How much these products are too large: a trit is a code less 1, and what is behind the last field is 256.
        self.above = fields.sum(axis=3).reshape(self.blocks, self.of_block, -1, tokens).sum(axis=2)
        self.above[:, -1] += _ABOVE * shares[:, 3].sum(axis=2)
        self.floats = _aligned_floats(max(_FLOATS, depth // 4))

    def product(self, codes: np.ndarray) -> np.ndarray:
        """float32 [groups, tokens, rows] with the codes [rows, depth / 4] of some rows: sums, all of them exact."""
        rows, width = codes.shape
        total = np.empty((self.blocks, self.of_block, self.tokens, rows), np.float32)
        total[...] = -self.above[..., None]
        step = self.floats.size // width
        for some in _some(rows, step):
            floats = self.floats[: (some.stop - some.start) * width].reshape(-1, width)
            bits = floats.view(np.uint32)
            np.copyto(floats, codes[some])
            np.add(floats, _ABOVE, out=floats)
            by_blocks = floats.reshape(-1, self.blocks, RUN).transpose(1, 2, 0)
            for f, (first, last, factors) in enumerate(self.factors):
                if f:
                    np.bitwise_and(bits, _FROM[f - 1], out=bits)
                found = np.matmul(factors, by_blocks)
                total[:, first:last, :, some] += found.reshape(self.blocks, last - first, self.tokens, -1)
        total = total.reshape(-1, self.each, self.tokens, rows)
        return total[:, 0] if self.each == 1 else total.sum(axis=1)


def _multiply_groups_host(
    a: np.ndarray, tokens: np.ndarray, codes: np.ndarray, scales: np.ndarray, group: int, out: np.ndarray
) -> None:
    """Fill float32 `out` [tokens, N]; scales [N, groups]."""
    rows, groups = scales.shape
    depth = a.shape[1]
    of_fields = BLOCK % group == 0 and group >= RUN
    if depth % BLOCK == 0 and (of_fields or (group % BLOCK == 0 and depth % group == 0)) and group <= _EXACT:
        whole, step = _WholeGroups(a, group), max(_ROWS, _RESULTS // (groups * len(a)))
        for some in _some(rows, step):
            sums = whole.product(codes.reshape(rows, depth // 4)[some])
            out[:, some] = _add_groups(sums, tokens, scales[some])
        return
    plain = _Groups(a, group)
    for some in _some(rows, _step(len(a), rows, depth)):
        sums = plain.product(decoded_rows(codes, depth, some.start, some.stop))
        out[:, some] = _add_groups(sums, tokens, scales[some])


def _step(tokens: int, rows: int, depth: int) -> int:
    """Rows that are made ready at a time: many tokens take longer than that, and BLAS likes them wide."""
    return min(rows, max(1, _SLAB * (1 if tokens <= _FEW else _WIDER) // max(1, depth)))


def _multiply_host(
    a: np.ndarray,
    tokens: np.ndarray,
    q: QuantizedArray,
    part: Trits,
    bias: np.ndarray | None,
    out: np.ndarray,
) -> None:
    """Fill `out` [tokens, N] from codes of tokens, int8 or float32, and from scales that count as they are."""
    rows, depth = q.shape
    codes, scales = q.planes[part.codes], int8.factors(q.planes[part.scales])
    if part.shares == "group":
        y = out if out.dtype == np.float32 and bias is None else np.empty(out.shape, np.float32)
        _multiply_groups_host(a, tokens, codes, scales.reshape(rows, -1), part.group, y)
        if bias is not None:
            y += bias.astype(np.float32)
        if y is not out:
            out[...] = y
        return
    if (threes := _kept_threes(q, part)) is not None:
        for few in _some(len(a), max(1, _RESULTS // rows)):
            y = _sums_of_threes(a[few], threes, rows)
            out[few] = _scaled(y, tokens[few] if tokens.size > 1 else tokens, scales, bias)
        return
    step = _step(len(a), rows, depth)
    whole = _Whole(a) if depth % BLOCK == 0 else None
    # What few tokens give is scaled together: calls would cost more than the arithmetic.
    many = step if whole is None else max(step, _RESULTS // len(a))
    for some in _some(rows, many):
        if whole is not None:
            y = whole.product(codes.reshape(rows, depth // 4)[some])
        else:
            y = int8.integer_product(a, decoded_rows(codes, depth, some.start, some.stop)).astype(np.float32)
        y = _scaled(y, tokens, scales if part.shares == "tensor" else scales[some], None)
        if bias is not None:
            y += bias[some].astype(np.float32)
        out[:, some] = y


def _scaled(y: np.ndarray, tokens: np.ndarray, scales: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The results of sums, in their place."""
    y *= tokens[:, None]
    y *= scales
    if bias is not None:
        y += bias.astype(np.float32)
    return y


def _kept_threes(q: QuantizedArray, part: Trits) -> np.ndarray | None:
    rows, depth = q.shape
    return kept(q, "threes", 8 * _third(rows) * depth, lambda: _in_threes(q.planes[part.codes], rows, depth))


def _some(rows: int, step: int) -> Iterator[slice]:
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _add_groups(sums: np.ndarray, tokens: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [tokens, rows] of sums [groups, tokens, rows], which are overwritten, and scales [rows, groups]."""
    sums *= tokens[:, None]
    sums *= scales.T[:, None]
    total = sums[0]
    for term in sums[1:]:
        total += term
    return total


# ---- CUDA ------------------------------------------------------------------------------------------------------------

_PITCH = int8.PITCH
_SIZES = Constants(DECODE_THREADS=256, GROUP_THREADS=256, FLOAT32_BIAS=1, FLOAT16_BIAS=2, BFLOAT16_BIAS=3)
_TEMPLATES = tuple(
    Template("linear/ternary.cu", name, structs=(_SIZES,)) for name in ("decode_trits", "multiply_groups")
)
_DECODE = Kernel(_TEMPLATES[0], (), _SIZES.DECODE_THREADS, signature=("p", "p", "p", "p", "i8", "i8", "i4"))
_GROUPS = Kernel(_TEMPLATES[1], (), _SIZES.GROUP_THREADS, signature=(*("p",) * 6, *("i8",) * 5, "i4", "i4"))
register_templates(*_TEMPLATES)
# Bytes of codes of a thread at a time; about so many thread blocks for each that the device holds.
_PIECE, _ROUNDS = 16, 4
_WARPS = _SIZES.GROUP_THREADS // 32


def decode_on_gpu(codes: Any, size: int) -> Any:
    """The int8 trits [size] of a plane of codes; the device is the current one."""
    trits = _xp.namespace(codes).empty(size, np.int8)
    if size:
        _DECODE(codes, _units(size), (codes, 0, trits, 0, size, 0, 0), waves=_ROUNDS)
    return trits


def _units(size: int) -> int:
    """Thread blocks of a round of ``decode_trits``."""
    return -(-size // (4 * _PIECE * _SIZES.DECODE_THREADS))


def _decode_into(q: QuantizedArray, part: Trits, trits: Any, scales: Any) -> None:
    """Fill int8 trits [N, K] and a scale for each row, by their arrays or addresses."""
    codes, scale = q.planes[part.codes], q.planes[part.scales]
    rows, _ = q.shape
    shared = int(part.shares == "tensor")
    units = max(_units(q.size), -(-rows // (4 * _SIZES.DECODE_THREADS)))
    _DECODE(codes, units, (codes, scale, trits, scales, q.size, rows, shared), waves=_ROUNDS)


def _decoded(q: QuantizedArray, part: Trits) -> tuple[Any, Any]:
    """The int8 trits of a weight, and a scale for each row."""
    empty = _xp.namespace(q.planes[part.codes]).empty
    trits, scales = empty(q.size, np.int8), empty(q.shape[0], np.float32)
    _decode_into(q, part, trits, scales)
    return trits, scales


def _multiply_decoded(
    x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any, rule: Rule, norm: Norm | None
) -> None:
    """Floats that are quantized on the way, each token by itself, times decoded trits: in one piece of memory."""
    rows, depth = q.shape
    tokens = out.size // rows
    single = _xp.namespace(out).empty(out.shape, np.float32) if out.dtype == np.float64 else out
    pitch = -(-depth // _PITCH) * _PITCH
    trit_bytes = -(-q.size // _PITCH) * _PITCH
    scratch = _xp.namespace(out).cuda.alloc(trit_bytes + tokens * (pitch + 4) + 4 * rows)
    codes = scratch.ptr + trit_bytes
    scales = codes + tokens * pitch
    of_rows = scales + 4 * tokens
    _decode_into(q, part, scratch.ptr, of_rows)
    x = source(x, tokens_of.FLOATS)
    tokens_of.quantize_into(x, tokens, rule, norm, codes, scales, 0, pitch)
    int8.multiply_in_place(codes, scales, scratch.ptr, of_rows, depth, bias, single)
    if single is not out:
        widen(single, out)


# How trits lie, as what decodes them in registers is told.
_CODES = integer_tile.Codes(2)


def _why_not_tiled(depth: int, part: Trits, lies: Stored, gpu: Device) -> str | None:
    """What stands against codes that become bytes in registers, for many tokens."""
    if part.shares == "group":
        return "groups have scales of their own"
    return integer_tile.refusal(depth, _CODES, lies, gpu)


def _multiply_tiled(
    x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any, rule: Rule | None, norm: Norm | None
) -> None:
    """Tokens that are quantized on the way, or are int8 already, times codes that are decoded in registers."""
    if out.dtype == _xp.DOUBLE:
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        _multiply_tiled(x, q, part, bias, single, rule, norm)
        widen(single, out)
        return
    rows, depth = q.shape
    tokens, device = out.size // rows, out.data.device_id
    scratch = _xp.allocate(tokens * (depth + 4) + 4 * padded_of(tokens))
    a = scratch.ptr
    sums, scales, each = a + tokens * depth, a + tokens * depth + 4 * padded_of(tokens), 1
    if isinstance(x, QuantizedArray):
        codes, found = token_planes(x)
        tokens_in_order(_xp.contiguous(codes), tokens, None, a, 0, sums, NUMBERS.ROWS, 0)
        scales, each = found.data.ptr, int(found.size == tokens)
    elif rule is None:
        tokens_in_order(floats_of(x), tokens, "int8", a, scales, sums, NUMBERS.ROWS, 0)
    else:
        tokens_of.quantize_into(source(x, tokens_of.FLOATS), tokens, rule, norm, a, scales, sums, depth)
        each = int(rule.granularity == "token")
    plan = _tile(out.dtype, tokens, rows, depth, device)
    weight, scale = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    of_rows = int(part.shares == "row")
    integer_tile.launch(plan, a, sums, scales, each, weight, scale, of_rows, 0, bias, out, depth, 0)


@functools.lru_cache(maxsize=4096)
def _tile(dtype: np.dtype, tokens: int, rows: int, depth: int, device: int) -> integer_tile.Plan:
    """The second launch of `_multiply_tiled`, its kernel compiled."""
    cut = integer_tile.choose(tokens, rows, depth, _CODES, multiprocessors(device))
    return integer_tile.plan(dtype, tokens, rows, 0, _CODES, device, cut, True)


def _multiply_groups(codes: Any, scales: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any) -> None:
    rows, depth = q.shape
    tokens = out.size // rows
    single = out if out.dtype == np.float32 else _xp.namespace(out).empty(out.shape, np.float32)
    kind = 0 if bias is None else int8.bias_kind(bias.dtype)
    lengths = tokens, rows, depth, codes.shape[-1], part.group
    arrays = codes, q.planes[part.codes], scales, q.planes[part.scales], 0 if bias is None else bias, single
    shared = int(scales.size != tokens)
    _GROUPS(codes, -(-out.size // _WARPS), (*arrays, *lengths, shared, kind), waves=_ROUNDS)
    if single is not out:
        widen(single, out)


# ---- routes ----------------------------------------------------------------------------------------------------------

_RULES = {"bitnet": BITNET, "int8": None}
# Microseconds of the launches, beside those of W8A8; to quantize a token. Operations of a core of the host, and
# microseconds to make a weight ready for them.
_START, _HOST_RATE, _HOST_WEIGHT = 6.0, 2e4, 1.2e-4
# Operations in a microsecond where groups have scales.
_GROUP_RATE = 2e5
# Microseconds of the launches where codes are read in place; times of reading them, and more of them for each token; or
# times for each 8 tokens, where groups have scales.
_STREAM_START, _STREAM_READS, _STREAM_TOKEN, _GROUP_READS = 3.0, 1.2, 0.02, 1.6


def _refusal(problem: Problem) -> str | None:
    """What stands against ternary products of integers, on a GPU or not."""
    if problem.activations not in _RULES:
        return 'it multiplies activations that are int8: ask for activations="bitnet"'
    if problem.experts:
        return "it is for one weight"
    found = problem.format.trits(problem.shape, problem.stored.lead)
    if found is None or not found.shares:
        return f"the weight is {problem.format!r}; {WANTED}"
    return f"K is {problem.shape[1]}; {_TOO_DEEP}" if problem.shape[1] > MAX_DEPTH else None


def _in_groups(problem: Problem) -> bool:
    found = problem.format.trits(problem.shape, problem.stored.lead)
    return found is not None and found.shares == "group"


def _product(problem: Problem) -> Product:
    rule, part = _RULES[problem.activations or ""], _trits(problem.format, problem.shape, problem.stored.lead)
    return lambda x, q, bias, out: multiply(x, q, bias, out, rule, None, part)


class Ternary(Route):
    """Quantize tokens, decode trits to int8, and multiply on integer tensor cores."""

    name = "ternary"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are in host memory" if problem.device is None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        if _in_groups(problem):
            return _START + n * k * problem.tokens / _GROUP_RATE
        # Trits are written as bytes, and read again.
        return _START + problem.reading + n * k / BYTES_PER_US + Int8().cost(problem)

    def prepare(self, problem: Problem) -> Product:
        return _product(problem)

    def describe(self, problem: Problem) -> str:
        if _in_groups(problem):
            return "tokens quantized to int8, then exact sums of each group: multiply_groups"
        return "tokens quantized to int8 and trits decoded to it, then the integer tensor cores of W8A8"


class TernaryStream(Route):
    """Quantize tokens, and multiply them on integer tensor cores by codes that are read in place."""

    name = "ternary_stream"

    def accepts(self, problem: Problem) -> str | None:
        refusal = "the arrays are in host memory" if problem.device is None else _refusal(problem)
        part = problem.format.trits(problem.shape, problem.stored.lead)
        if refusal is not None or part is None or problem.device is None:
            return refusal
        return why_not_streamed(problem.tokens, problem.shape[1], part, problem.stored, problem.device)

    def cost(self, problem: Problem) -> float:
        reading = problem.reading * (_STREAM_READS + problem.tokens * _STREAM_TOKEN)
        if _in_groups(problem):
            reading = problem.reading * _GROUP_READS * -(-problem.tokens // 8)
        return _STREAM_START + reading

    def prepare(self, problem: Problem) -> Product:
        return _product(problem)

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        grouped = _in_groups(problem)
        one = problem.tokens == 1 and not grouped and in_one_launch(*problem.shape, problem.device)
        if one and problem.activations == "bitnet":
            return (
                "one launch quantizes the token to int8 and reads codes in place for integer tensor cores: "
                "rows_ternary_quantized"
            )
        if one:
            return "token quantized to int8, codes read in place for integer tensor cores: rows_ternary_int8"
        about = problem.tokens, *problem.shape, problem.device
        if not grouped and problem.activations != "bitnet" and takes_bytes(*about):
            return "tokens quantized to int8, then one launch for integer tensor cores: rows_ternary_bytes"
        name = "stream_ternary_groups" if grouped else "stream_ternary"
        name = named(name, problem.tokens, problem.shape[0], problem.device)
        if not grouped and early(*about):
            name = "rows_ternary_early"
        return f"tokens quantized to int8, codes read in place for integer tensor cores: {name}"


class TernaryTile(Route):
    """Quantize tokens, and multiply them on integer tensor cores by codes that are decoded in registers."""

    name = "ternary_tile"

    def accepts(self, problem: Problem) -> str | None:
        refusal = "the arrays are in host memory" if problem.device is None else _refusal(problem)
        part = problem.format.trits(problem.shape, problem.stored.lead)
        if refusal is not None or part is None or problem.device is None:
            return refusal
        if why_not_streamed(problem.tokens, problem.shape[1], part, problem.stored, problem.device) is None:
            return "few tokens are multiplied by codes that are read in place"
        return _why_not_tiled(problem.shape[1], part, problem.stored, problem.device)

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        n, k = problem.shape
        return self._cut(problem).microseconds(problem.tokens, n, k, _CODES, problem.device.multiprocessors)

    def prepare(self, problem: Problem) -> Product:
        return _product(problem)

    def describe(self, problem: Problem) -> str:
        cut = self._cut(problem)
        how = f"{cut.tokens} tokens x {cut.rows} rows a thread block"
        return f"tokens quantized to int8, codes decoded in registers for integer tensor cores: wgmma_integers, {how}"

    def _cut(self, problem: Problem) -> integer_tile.Cut:
        assert problem.device is not None
        return integer_tile.choose(problem.tokens, *problem.shape, _CODES, problem.device.multiprocessors)


class TernaryHost(Route):
    """Quantize tokens, and multiply exactly by NumPy's BLAS."""

    name = "ternary_numpy"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are on a GPU" if problem.device is not None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        return n * k * (_HOST_WEIGHT + problem.tokens / _HOST_RATE)

    def prepare(self, problem: Problem) -> Product:
        return _product(problem)

    def describe(self, problem: Problem) -> str:
        return "NumPy: tokens quantized to int8, trits multiplied exactly in float32"
