"""Activations as BitNet b1.58 quantizes them: for each token, or for all, a scale from the largest magnitude.

    a = max(max|x|, eps),  s = fl(127 / a),  q = clamp(rint(fl(x * s)), -128, 127),  x is about q * fl(a / 127)

All of it is float32, subnormal numbers kept: 16-bit activations are widened, float64 is rounded first. 127 stands for
the largest code, ``2^(bits - 1) - 1``. NaN becomes 0, also where 0 meets an infinite s (with an eps of 0); an infinity
counts as the largest finite float32. That differs from W8A8 (`kbitcupy.products.int8`), which divides by ``a / 127``:
now and then a code is another, and below eps tokens keep less than 8 bits.

RMSNorm may come first. With r = ``fl(1 / sqrt(mean(x^2) + norm_eps))``, from float64, the number that is quantized is
``fl(fl(x * r) * g)``, or ``fl(x * r)`` without weights g. In the mean NaN counts as 0 and an infinity as above. The
squares of a token are added up in float64 in 256 lanes: lane i has elements i, i + 256, ... in their order, and the
lanes are added as (i) + (i + half) until one is left.

The sums, being of another order, are those of no other library to the last bit; everything else is.

Sources: "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits" (arXiv 2402.17764) and its code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend import xp as _xp
from ..backend.compile import CXX_BOOLS, CXX_TYPES, Template
from ..backend.launch import Kernel, Planned, capability, packed
from ..backend.structs import Constants
from ..errors import FormatError
from ..formats.base import register_templates
from ..ops import source, widen
from .int8 import BIAS_KINDS

#: What the kernels take; float64 goes through float32.
FLOATS = ("float16", "bfloat16", "float32")
GRANULARITIES, ROUNDINGS, LOWEST = ("token", "tensor"), ("even", "away"), (-128, -127)
LARGEST = np.finfo(np.float32).max
_HALF, _MOST_EPS = np.float32(0.5), float(LARGEST)
# 127 over this is finite.
_DIVIDES = 1e-36
# Elements of a slab of NumPy's: what is computed in between stays in the cache.
_SLAB = 1 << 17


@dataclass(frozen=True)
class Rule:
    """How activations are quantized.

    Parameters
    ----------
    bits : int, default 8
        Of a code, 2 to 8.
    granularity : {"token", "tensor"}, default "token"
        Who shares a scale.
    rounding : {"even", "away"}, default "even"
        Where halves go: to the even neighbour, or away from zero.
    qmin : {-128, -127}, default -128
        Whether there is a lowest code below the negative of the highest one, by what it is with 8 bits.
    eps : float, default 1e-5
        The least magnitude that a scale is made from.
    """

    bits: int = 8
    granularity: str = "token"
    rounding: str = "even"
    qmin: int = -128
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 8:
            raise FormatError(f"bits is {self.bits!r}; allowed are 2 to 8")
        for name, allowed in (("granularity", GRANULARITIES), ("rounding", ROUNDINGS), ("qmin", LOWEST)):
            value = getattr(self, name)
            if type(value) not in (str, int) or value not in allowed:
                raise FormatError(f"{name} is {value!r}; allowed are {' and '.join(map(repr, allowed))}")
        object.__setattr__(self, "eps", check_eps(self.eps, "eps"))

    @functools.cached_property
    def highest(self) -> int:
        """The highest code."""
        return int((1 << (self.bits - 1)) - 1)

    @functools.cached_property
    def lowest(self) -> int:
        """The lowest code."""
        return -self.highest - (self.qmin == -128)

    @functools.cached_property
    def numbers(self) -> tuple[float, int, int, int]:
        """What the kernel is told."""
        return self.single_eps, self.lowest, self.highest, int(self.rounding == "away")

    @functools.cached_property
    def single_eps(self) -> float:
        """`eps` in float32."""
        return float(np.float32(self.eps))


def check_eps(eps: Any, argument: str) -> float:
    """A number that is not negative and finite in float32.

    Raises
    ------
    FormatError
        When it is none.
    """
    if type(eps) is float and 0 <= eps <= _MOST_EPS:
        return eps
    number = isinstance(eps, (int, float, np.integer, np.floating)) and not isinstance(eps, bool)
    if not number or not 0 <= float(eps) <= float(LARGEST):
        raise FormatError(f"{argument} is {eps!r}; it must be a number, 0 or more and finite in float32, such as 1e-5")
    return float(eps)


@functools.lru_cache(maxsize=256)
def rule_of(bits: Any, granularity: Any, rounding: Any, qmin: Any, eps: Any) -> Rule:
    """The `Rule` of these options, made once for each set of them."""
    return Rule(bits, granularity, rounding, qmin, eps)


class Norm(NamedTuple):
    """An RMSNorm ahead of the quantization.

    Parameters
    ----------
    weight : array or None
        float32 [K], contiguous; None multiplies by nothing.
    eps : float
        What is added to the mean.
    """

    weight: Any
    eps: float


def quantize(x: Any, rule: Rule, norm: Norm | None = None, pitch: int = 0) -> tuple[Any, Any]:
    """int8 codes [M, K] and float32 scales, [M] or of all tokens [1], of a matrix of floats.

    The device of `x` is the current one. On a GPU rows of codes are `pitch` bytes long, where that is given, and end in
    zeros.
    """
    x = source(x, FLOATS)
    if isinstance(x, np.ndarray):
        codes = np.empty(x.shape, np.int8)
        with np.errstate(all="ignore"):
            return codes, _quantize_host(x, rule, norm, codes)
    return _quantize_cuda(x, rule, norm, pitch)


def quantize_to_floats(x: np.ndarray, rule: Rule, norm: Norm | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What `quantize` gives of host memory, its codes as the float32 numbers that BLAS multiplies.

    Of numbers that are not finite NumPy may warn, where the caller does not silence it.
    """
    codes = np.empty(x.shape, np.float32)
    return codes, _quantize_host(source(x, FLOATS), rule, norm, codes)


def normalize(x: Any, norm: Norm, out: Any) -> None:
    """Fill `out` with a matrix of floats behind an RMSNorm, rounded once more where it has fewer bits."""
    x = source(x, FLOATS)
    if isinstance(x, np.ndarray):
        with np.errstate(all="ignore"):
            for part in _slabs(x):
                out[part] = _normalized(x[part].astype(np.float32), norm)
        return
    single = out if out.dtype == np.float32 else _xp.namespace(x).empty(out.shape, np.float32)
    _kernel("normalize_tokens", x.dtype).launch(
        x, (min(len(x), _MOST_BLOCKS),), (x, _weight(norm), single, *x.shape, norm.eps)
    )
    if single is not out:
        widen(single, out)


# ---- NumPy -----------------------------------------------------------------------------------------------------------

#: Lanes of the sum of a token's squares; a thread each.
LANES = 256


def _slabs(x: np.ndarray) -> list[slice]:
    """Rows of a matrix, some at a time."""
    step = max(1, _SLAB // max(1, x.shape[1]))
    return [slice(first, first + step) for first in range(0, len(x), step)]


def mean_squares(x: np.ndarray) -> np.ndarray:
    """The mean of the squares of each row of a float32 matrix, float64."""
    lanes = _lane_squares(x.astype(np.float64))
    if not np.isfinite(lanes).all():
        part = np.clip(x.astype(np.float64), -np.float64(LARGEST), np.float64(LARGEST))
        part[np.isnan(part)] = 0
        lanes = _lane_squares(part)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0] / max(1, x.shape[1])


def _lane_squares(x: np.ndarray) -> np.ndarray:
    """The sums of the squares of every `LANES`-th number of a row, one after the other; x is overwritten."""
    x *= x
    whole = x.shape[1] - x.shape[1] % LANES
    # Along an axis that is not the last numbers are added in their order.
    lanes: np.ndarray = x[:, :whole].reshape(len(x), whole // LANES, LANES).sum(axis=1)
    lanes[:, : x.shape[1] - whole] += x[:, whole:]
    return lanes


def _normalized(x: np.ndarray, norm: Norm) -> np.ndarray:
    """float32 rows behind an RMSNorm, in the place of `x`."""
    x *= (1 / np.sqrt(mean_squares(x) + norm.eps)).astype(np.float32)[:, None]
    if norm.weight is not None:
        x *= norm.weight
    return x


def _numbers(x: np.ndarray, norm: Norm | None, eps: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """What is quantized of some tokens, finite, as float32, which may be `x` itself; of each the largest magnitude or
    `eps`, [tokens, 1].
    """
    numbers = x.astype(np.float32, copy=False) if norm is None else _normalized(x.astype(np.float32), norm)
    largest = _largest(numbers, eps)
    if not largest.max(initial=0) <= LARGEST:
        numbers = np.nan_to_num(numbers, posinf=float(LARGEST), neginf=-float(LARGEST))
        largest = _largest(numbers, eps)
    return numbers, largest


def _largest(numbers: np.ndarray, eps: np.float32) -> np.ndarray:
    """The largest magnitude of each row, or `eps`, and NaN where there is one: read twice, for want of magnitudes."""
    high, low = (find(axis=1, initial=0, keepdims=True) for find in (numbers.max, numbers.min))
    found: np.ndarray = np.maximum(np.maximum(high, -low), eps)
    return found if eps else np.abs(found)  # of zeros of either sign


def _quantize_host(x: np.ndarray, rule: Rule, norm: Norm | None, codes: np.ndarray) -> np.ndarray:
    """The scales; fills int8 or float32 `codes`."""
    slabs, eps, found = _slabs(x), np.float32(rule.eps), []
    numbers = None
    for part in slabs:
        numbers, a = _numbers(x[part], norm, eps)
        found.append(a)
        if rule.granularity == "token":
            _codes_of(numbers, a, rule, codes[part])
    a = found[0] if len(found) == 1 else np.concatenate(found or [np.empty((0, 1), np.float32)])
    if rule.granularity == "tensor":
        a = a.max(initial=eps, keepdims=True)
        for part in slabs:
            some = numbers if numbers is not None and len(slabs) == 1 else _numbers(x[part], norm, eps)[0]
            _codes_of(some, a, rule, codes[part])
    scales: np.ndarray = a[:, 0] / np.float32(rule.highest)
    return scales


def _codes_of(numbers: np.ndarray, a: np.ndarray, rule: Rule, codes: np.ndarray) -> None:
    """Fill `codes` from finite numbers and the magnitudes that their scales are made from, none of which is larger."""
    factor = np.float32(rule.highest) / a
    room = codes if codes.dtype == np.float32 else np.empty(codes.shape, np.float32)
    np.multiply(numbers, factor, out=room)
    if rule.rounding == "even":
        np.rint(room, out=room)
    else:
        whole = np.trunc(room)
        np.add(whole, np.copysign(np.abs(room - whole) >= _HALF, room), out=room)
    # A finite factor is off by 2^-22 of itself at most, and nothing is rounded to more than the highest code.
    if rule.eps < _DIVIDES and not np.isfinite(factor).all():
        room[np.isnan(room)] = 0  # 0 times an infinite one
        np.clip(room, rule.lowest, rule.highest, out=room)
    if room is not codes:
        codes[...] = room


# ---- CUDA ------------------------------------------------------------------------------------------------------------

_MOST_BLOCKS = 1 << 30
#: The most tokens of which each has thread blocks enough to be quantized before those of the product are there.
MOST_FEW = 32
# Neighbours that a thread has together.
OCTET = 8
#: Numbers of the kernels; STEP is that of kernels/linear/fragments.cuh.
SIZES = Constants(LANES=LANES, ROOM=1 << 13, STEP=256, MOST_THREADS=1024)
_TYPES = tuple(CXX_TYPES[name] for name in FLOATS)
_FILE = "linear/activations.cu"
_NUMBERS = *("i8",) * 3, *("i4",) * 3, "f8", "f8", "f4", *("i4",) * 3
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "largest_of_tokens": ("p", "p", "p", "i8", "i8", "i4", "f8"),
    "quantize_activations": (*("p",) * 6, _NUMBERS),
    "normalize_tokens": ("p", "p", "p", "i8", "i8", "f8"),
}
_TEMPLATES = {
    name: Template(_FILE, name, (_TYPES, *((CXX_BOOLS,) if name == "quantize_activations" else ())), structs=(SIZES,))
    for name in _SIGNATURES
}
# Of few tokens, each by a cluster of thread blocks that find room beside those of the product.
_FEW_SIZES = Constants(STEP=SIZES.STEP, ROW_THREADS=128, LANES=LANES, CLUSTER=8)
_MOST_OCTETS = 2  # a thread keeps at the most; with more it has no room for them
_FEW = Template(
    "linear/cluster_tokens.cu",
    "quantize_in_clusters",
    (_TYPES, tuple(str(1 << i) for i in range(_MOST_OCTETS.bit_length()))),
    structs=(BIAS_KINDS, _FEW_SIZES),
    least=90,
)
_FEW_NUMBERS = *("i4",) * 4, "f8", "f8", "f4", *("i4",) * 4
_FEW_SIGNATURE = (*("p",) * 5, _FEW_NUMBERS)
# Percent of a multiprocessor's memory that is to be shared memory: with less the product would have to wait.
_FEW_CARVEOUT = 100
# Of more tokens, to rows, each by a thread block: how long they are at least, that its threads have something to do.
_BLOCK_SIZES = Constants(STEP=SIZES.STEP, ROW_THREADS=512, LANES=LANES)
_LEAST_DEPTH, _MOST_BLOCK_OCTETS = 2048, 4
_BLOCK = Template(
    "linear/block_tokens.cu",
    "quantize_in_blocks",
    (_TYPES, tuple(str(1 << i) for i in range(_MOST_BLOCK_OCTETS.bit_length()))),
    structs=(BIAS_KINDS, _BLOCK_SIZES),
    least=80,
)
_BLOCK_NUMBERS = *("i4",) * 3, "f8", "f8", "f4", *("i4",) * 3
_BLOCK_SIGNATURE = (*("p",) * 5, _BLOCK_NUMBERS)
register_templates(*_TEMPLATES.values(), _FEW, _BLOCK)


@functools.cache
def _kernel(name: str, dtype: np.dtype) -> Kernel:
    return Kernel(_TEMPLATES[name], (CXX_TYPES[dtype.name],), LANES, signature=_SIGNATURES[name])


@functools.cache
def _quantizer(dtype: np.dtype, vector: bool, threads: int) -> Kernel:
    name = "quantize_activations"
    values = CXX_TYPES[dtype.name], CXX_BOOLS[vector]
    return Kernel(_TEMPLATES[name], values, threads, signature=_SIGNATURES[name], early=True)


@functools.lru_cache(maxsize=1024)
def _few_quantizer(dtype: np.dtype, depth: int, device: int) -> Kernel | None:
    """The kernel of few tokens so long; None where there is none."""
    blocks, threads = _FEW_SIZES.CLUSTER, _FEW_SIZES.ROW_THREADS
    octets = max(1, -(-depth // (OCTET * blocks * threads)))
    if capability(device) < _FEW.least or depth % OCTET or octets > _MOST_OCTETS:
        return None
    # Whole warps, as few of them as there have to be.
    warps = -(-depth // (OCTET * blocks * octets * 32))
    values = CXX_TYPES[dtype.name], str(1 << (octets - 1).bit_length())
    return Kernel(
        _FEW, values, 32 * warps, signature=_FEW_SIGNATURE, early=True, cluster=blocks, carveout=_FEW_CARVEOUT
    )


@functools.lru_cache(maxsize=1024)
def _block_quantizer(dtype: np.dtype, depth: int, device: int) -> Kernel | None:
    """The kernel of tokens so long, each of which a thread block quantizes to a row; None where there is none."""
    octets = -(-depth // (OCTET * _BLOCK_SIZES.ROW_THREADS))
    if capability(device) < _BLOCK.least or depth < _LEAST_DEPTH or octets > _MOST_BLOCK_OCTETS:
        return None
    values = CXX_TYPES[dtype.name], str(1 << (octets - 1).bit_length())
    return Kernel(_BLOCK, values, _BLOCK_SIZES.ROW_THREADS, signature=_BLOCK_SIGNATURE, early=True)


@functools.lru_cache(maxsize=1024)
def _threads(depth: int) -> int:
    """Threads of a block that quantizes tokens so long: one for eight elements, as far as they go."""
    return min(max(1 << (-(-depth // 8) - 1).bit_length(), LANES), SIZES.MOST_THREADS)


def _weight(norm: Norm | None) -> Any:
    return 0 if norm is None or norm.weight is None else norm.weight


@dataclass(frozen=True, eq=False)
class Quantizing(Planned):
    """The launch that quantizes tokens of one shape by one rule.

    Parameters
    ----------
    kept : bool
        Whether numbers stay in registers: then no magnitude is shared.
    numbers : bytes
        Its arguments behind addresses.
    """

    kept: bool
    numbers: bytes

    def start(self, x: Any, weight: Any, codes: Any, scales: Any, sums: Any, largest: Any = 0) -> None:
        """Launch it with these arrays or addresses; `largest` is the magnitude that all tokens share, if they do."""
        if self.kept:
            self.launch(self.grid, (x, weight, codes, scales, sums, self.numbers))
        else:
            self.launch(self.grid, (x, weight, largest, codes, scales, sums, self.numbers))


@functools.lru_cache(maxsize=4096)
def quantizing(
    dtype: np.dtype,
    tokens: int,
    depth: int,
    rule: Rule,
    norm_eps: float | None,
    vector: bool,
    pitch: int,
    groups: int,
    group: int,
    early: bool,
    device: int,
) -> Quantizing:
    """How `quantize_into` quantizes, its kernel compiled.

    `norm_eps` is None without an RMSNorm; with `vector` x and the weights of that start at multiples of 16 bytes.
    """
    normalizes, eps = (0, 0.0) if norm_eps is None else (1, norm_eps)
    vector = vector and not (depth % OCTET or pitch % OCTET)
    if groups and vector and rule.granularity == "token" and tokens <= MOST_FEW:
        few = _few_quantizer(dtype, depth, device)
        if few is not None:
            shares = groups, group, normalizes, 1 / depth, eps
            grid = _FEW_SIZES.CLUSTER * tokens, 1, 1
            numbers = packed(_FEW_NUMBERS, depth, *shares, *rule.numbers, int(early))
            return Quantizing(few.ready(device).launch, grid, True, numbers)
    if not groups and vector and rule.granularity == "token" and tokens <= _MOST_BLOCKS:
        each = _block_quantizer(dtype, depth, device)
        if each is not None:
            numbers = packed(_BLOCK_NUMBERS, depth, pitch, normalizes, 1 / depth, eps, *rule.numbers)
            return Quantizing(each.ready(device).launch, (tokens, 1, 1), True, numbers)
    kernel = _quantizer(dtype, vector, _threads(depth))
    lengths = tokens, depth, pitch, groups, group
    numbers = packed(_NUMBERS, *lengths, normalizes, 1 / max(depth, 1), eps, *rule.numbers)
    return Quantizing(kernel.ready(device).launch, (min(tokens, _MOST_BLOCKS), 1, 1), False, numbers)


def _quantize_cuda(x: Any, rule: Rule, norm: Norm | None, pitch: int) -> tuple[Any, Any]:
    cupy = _xp.namespace(x)
    tokens, depth = x.shape
    codes = cupy.empty((tokens, pitch or depth), np.int8)
    scales = cupy.empty(tokens if rule.granularity == "token" else 1, np.float32)
    if tokens:
        quantize_into(x, tokens, rule, norm, codes, scales, 0, codes.shape[1])
    elif rule.granularity != "token":
        scales[...] = np.float32(rule.single_eps) / np.float32(rule.highest)
    return codes, scales


def quantize_into(
    x: Any,
    tokens: int,
    rule: Rule,
    norm: Norm | None,
    codes: Any,
    scales: Any,
    sums: Any,
    pitch: int,
    groups: int = 0,
    group: int = 0,
    early: bool = False,
) -> None:
    """Fill codes, scales and sums of codes, by their arrays or addresses, of so many tokens of floats, one or more.

    `x`, of any shape, has a type of the kernels, and its device is the current one. Codes are rows of `pitch` bytes
    that end in zeros; or, with `groups`, fragments of so many times 8 tokens (kernels/linear/fragments.cuh), with sums
    of a `group` of codes where they are in octets. There are no sums where their address is 0. With `early` the kernel
    behind this one, which must wait for it, may start as soon as there is room.
    """
    depth, weight, device = x.shape[-1], _weight(norm), x.data.device_id
    address = x.data.ptr | (0 if weight.__class__ is int else weight.data.ptr)
    eps = None if norm is None else norm.eps
    plan = quantizing(x.dtype, tokens, depth, rule, eps, not address % 16, pitch, groups, group, early, device)
    largest: Any = 0
    if rule.granularity != "token":
        of_tokens = _xp.namespace(x).empty(tokens, np.float32)
        numbers = tokens, depth, int(eps is not None), eps or 0.0
        _kernel("largest_of_tokens", x.dtype).launch(x, plan.grid, (x, weight, of_tokens, *numbers))
        # As integers, which have the order of magnitudes: comparisons of floats flush.
        largest = of_tokens.view(np.int32).max(keepdims=True)
    plan.start(x, weight, codes, scales, sums, largest)
