"""Products of int8 activations and integer codes of any format that has some, in exact integers.

With the terms of `kbitcupy.formats.integer_codes` and `kbitcupy.products.integer_activations`, a unit is what shares
all scales: the elements of a row in one group of the weight and, for ``"q8_1"``, in one of the 32 elements of a token
that share a scale. Of each unit

    D = sum_k (c - z) q,  S = sum_k q    exact, in int32,
    term = fl(fl(fl(D) * e) * A)         and where numbers are added,  fl(term + fl(fl(fl(S) * e) * B)),

and y is the sum of the terms from the first to the last, plus the bias: float32, every operation rounded once and
subnormal numbers kept, then one cast to the dtype of the activations. Scales of tokens that are not positive and finite
count as 0. That is what NumPy and the plain kernel compute, to the bit; where all of a row is one unit, W8A8's contract
is a part of this one. Kernels that are made for speed take the same integers, and add up float32 terms in another order
that is the same every time: they are within 2^-20 of the sum of the terms' magnitudes; where a term is not finite,
neither is the result, infinite or NaN. One route rounds more, and says so: many tokens with units of 32 elements, of
which both sides are decoded (`kbitcupy.products.integer_decoded`); two have less room at the ends of float32
(`kbitcupy.products.integer_batch`, `kbitcupy.products.integer_units`).

Sums of a unit stay in int32: of codes of 8 bits units have up to 131071 elements (65793 with zero points), of fewer
bits more than a row can have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Planned, grid_of, packed
from ..backend.structs import Constants, Struct
from ..errors import FormatError
from ..formats.base import Format, IntegerCodes, register_templates
from ..formats.integer_codes import INNER, NOTHING, OFFSETS, ZERO_POINTS
from ..ops import source, widen
from . import int8, integer_activations as tokens_of
from .activations import FLOATS
from .int8 import BIAS_KINDS, token_planes
from .integer_activations import NUMBERS, Q8_BLOCK, Tokens
from .routes import Problem, Product, Route

#: The presets whose products these are.
PRESETS = ("int8", "q8_1")
WANTED = (
    "it must be [N, K] in int8, uint8, int4 or uint4 with scales of rows, groups of a row or all, or in q8_0, q4_0, "
    "q4_k or ternary: quantize(w, 'int4', block=128); of a stack take one member, or pass it to linear_grouped"
)
# Sums of products of int8 stay below this in magnitude, and float32 holds every integer up to that.
_INT32, _EXACT = 1 << 31, 1 << 24
# Weights that NumPy decodes at a time.
_SLAB = 1 << 20


@functools.lru_cache(maxsize=1024)
def codes_of(format: Format, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
    """How an array of a format is integer codes."""
    return format.integer_codes(shape, lead)


@functools.lru_cache(maxsize=1024)
def stored_codes(format: Format, shape: tuple[int, ...], lead: int = 0) -> IntegerCodes | None:
    """The same, or how its codes lie that are no plain integers (`kbitcupy.formats.base.Format.staged_codes`)."""
    return codes_of(format, shape, lead) or format.staged_codes(shape, lead)


def why_not(preset: str | None, format: Format, shape: tuple[int, ...], lead: int) -> str | None:
    """What stands against products of such activations with such a weight."""
    if preset not in PRESETS:
        return 'it multiplies activations that are int8: ask for activations="int8" or "q8_1"'
    part = codes_of(format, shape, lead)
    if part is None:
        return f"the weight is {format!r}; {WANTED}"
    unit = min(part.group or shape[-1], Q8_BLOCK if preset == "q8_1" else shape[-1])
    most = (_INT32 - 1) // (128 * part.reach)
    if unit > most:
        return f"sums of {unit} elements that share a scale may leave int32; up to {most} are exact: split K"
    return None


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def units_of(depth: int, group: int, blocked: bool) -> list[tuple[int, int]]:
    """Where units begin and end."""
    ends = set(range(group or depth, depth, group or depth)) | {depth}
    if blocked:
        ends |= set(range(Q8_BLOCK, depth, Q8_BLOCK))
    marks = [0, *sorted(ends)]
    return list(zip(marks[:-1], marks[1:], strict=True))


def _sums(a: np.ndarray, w: np.ndarray, reach: int) -> np.ndarray:
    """float32 [tokens, rows]: exact sums, each rounded once, of int8 and codes of that reach."""
    working = np.float32 if a.shape[1] * 128 * reach <= _EXACT else np.float64
    return (a.astype(working) @ w.T.astype(working)).astype(np.float32)


def multiply_host(tokens: Tokens, q: QuantizedArray, bias: Any, out: np.ndarray, first: int = 0) -> None:
    """Fill `out` [tokens, N] from a weight, or from N rows of a stack of weights from row `first` on."""
    part = codes_of(q.format, q.shape, q.lead)
    assert part is not None
    a, scales = tokens.codes, int8.factors(tokens.scales)
    rows, depth = out.shape[1], q.shape[-1]
    if not depth:
        out[...] = 0 if bias is None else bias
        return
    units = units_of(depth, part.group, scales.shape[1] > 1)
    step = max(1, _SLAB // depth)
    with np.errstate(all="ignore"):
        for begin in range(0, rows, step):
            end = min(rows, begin + step)
            some = part.rows(q.planes, depth, first + begin, first + end)
            y: np.ndarray | None = None
            for k0, k1 in units:
                here = slice(k0, k1)
                of_tokens = scales[:, k0 // Q8_BLOCK if scales.shape[1] > 1 else 0][:, None]
                group = k0 // part.group if part.group else 0
                term = _sums(a[:, here], some.codes[:, here], part.reach)
                term *= of_tokens
                term *= some.scale[:, group]
                if some.offset is not None:
                    of_codes = a[:, here].sum(axis=1, dtype=np.int64).astype(np.float32)[:, None]
                    term += of_codes * of_tokens * some.offset[:, group]
                y = term if y is None else np.add(y, term, out=y)
            assert y is not None
            if bias is not None:
                y += bias[begin:end].astype(np.float32)
            out[:, begin:end] = y


# ---- CUDA ------------------------------------------------------------------------------------------------------------

#: How a weight of integer codes lies in memory: `IntegerCodes`, with addresses of planes and numbers of dtypes.
WEIGHT = Struct(
    "IntegerWeight",
    codes="u8",
    scales="u8",
    beside="u8",
    outer="i8",
    per="i8",
    run="i8",
    group="i8",
    bits="i4",
    width="i4",
    is_signed="i4",
    zero="i4",
    added="i4",
    positive="i4",
    scale_dtype="i4",
    beside_dtype="i4",
    high="u8",
)
#: Numbers of kernels: what stands beside scales, and dtypes of zero points.
PRODUCT = Constants(
    NOTHING=0, ZERO_POINTS=1, OFFSETS=2, INNER=3, INT32_ENTRIES=0, INT8_ENTRIES=1, UINT8_ENTRIES=2, PRODUCT_THREADS=256
)
_ADDED = {NOTHING: 0, ZERO_POINTS: 1, OFFSETS: 2, INNER: 3}
_ENTRIES = {"int32": 0, "int8": 1, "uint8": 2}
_FLOAT_KINDS = {"float32": 1, "float16": 2, "bfloat16": 3}
_TYPES, _TOGETHER = tuple(CXX_TYPES[name] for name in FLOATS), ("1", "8")
_TEMPLATE = Template(
    "linear/integers.cu",
    "multiply_integers",
    (_TYPES, _TOGETHER),
    hot=False,
    structs=(BIAS_KINDS, NUMBERS, PRODUCT, WEIGHT),
)
register_templates(_TEMPLATE)
_WARPS, _ROUNDS = PRODUCT.PRODUCT_THREADS // 32, 4
_NUMBERS = *("i8",) * 6, *("i4",) * 5
_SIGNATURE = ("p", "p", WEIGHT, "p", "p", "p", _NUMBERS)


@functools.cache
def _kernel(dtype: np.dtype, together: str) -> Kernel:
    values = CXX_TYPES[dtype.name], together
    return Kernel(_TEMPLATE, values, PRODUCT.PRODUCT_THREADS, signature=_SIGNATURE)


def weight_argument(q: QuantizedArray) -> bytes:
    """`WEIGHT` of a compressed array on a GPU, made once for each."""
    packed: bytes | None = q._launches.get(WEIGHT)
    if packed is not None:
        return packed
    part = stored_codes(q.format, q.shape, q.lead)
    assert part is not None
    beside, high = (None if name is None else q.planes[name] for name in (part.beside, part.high))
    packed = q._launches[WEIGHT] = WEIGHT.pack(
        codes=q.planes[part.codes].data.ptr,
        scales=q.planes[part.scales].data.ptr,
        beside=0 if beside is None else beside.data.ptr,
        outer=part.scale_of.outer,
        per=part.scale_of.per,
        run=part.scale_of.run,
        group=part.group,
        bits=part.bits,
        width=part.width,
        is_signed=int(part.signed),
        zero=part.zero,
        added=_ADDED[part.added],
        positive=int(part.positive),
        scale_dtype=_FLOAT_KINDS.get(part.scale_dtype, 0),
        beside_dtype=_ENTRIES.get(part.beside_dtype, 0),
        high=0 if high is None else high.data.ptr,
    )
    return packed


@dataclass(frozen=True, eq=False)
class _Plan(Planned):
    """The second launch of a product of one shape, and what goes ahead.

    Parameters
    ----------
    size, scales_at : int
        Bytes of quantized tokens, and where in them, behind codes, scales begin.
    numbers : bytes
        The kernel's arguments behind addresses.
    quantize : callable or None
        The first launch, see `quantizing_rows`; None where tokens are int8 already.
    """

    size: int
    scales_at: int
    numbers: bytes
    quantize: Callable[[int, int, int], None] | None


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: np.dtype,
    out_dtype: np.dtype,
    shape: tuple[int, ...],
    tokens: int,
    slots: int,
    preset: str | None,
    shared: bool,
    kind: int,
    vector: bool,
    device: int,
    id_bytes: int = 0,
) -> _Plan:
    """How a product is computed, its kernels compiled.

    Parameters
    ----------
    dtype, out_dtype : numpy.dtype
        Of tokens and of the result.
    shape : tuple of int
        Of the weight, or of experts.
    tokens, slots : int
        How many, and products of each.
    preset : str or None
        How tokens are quantized; None where they are int8 already.
    shared : bool
        Whether all tokens have one scale.
    kind : int
        Of the bias.
    vector : bool
        Whether tokens start at a multiple of 16 bytes.
    device : int
        Its number.
    id_bytes : int
        Of each of the ids of experts.
    """
    *experts, rows, depth = shape
    products, padded, pitch = tokens * slots, tokens_of.padded_of(tokens), tokens_of.pitch_of(depth)
    blocked = preset == "q8_1"
    together = 1 if experts or products == 1 else 8
    ready = _kernel(out_dtype, str(together)).ready(device)
    grid = grid_of(-(-(-(-products // together) * rows) // _WARPS), ready.resident, _ROUNDS), 1, 1
    lengths = products, rows, depth, pitch, padded, math.prod(experts)
    numbers = packed(_NUMBERS, *lengths, slots, int(blocked), int(shared), kind, id_bytes)
    quantize = None
    if preset is not None:
        quantize = tokens_of.quantizing_rows(dtype, tokens, depth, preset, vector, device)
    scales_at = tokens * pitch
    size = scales_at + 4 * (-(-depth // Q8_BLOCK) if blocked else 1) * padded
    return _Plan(ready.launch, grid, size, scales_at, numbers, quantize)


def multiply_cuda(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, of a dtype of the kernels, from floats or from a compressed array of int8, by the plain kernel."""
    added, kind = int8.bias_of(bias)
    given: Any = None
    by, tokens, device = preset or None, out.size // q.shape[0], out.data.device_id
    if isinstance(x, QuantizedArray):
        x, given = token_planes(x)
        x, by = _xp.contiguous(x), None
    else:
        x = tokens_of.floats_of(x)
    shared = given is not None and given.size == 1
    about = tokens, 1, by, shared, kind, x.data.ptr % 16 == 0, device
    plan = _plan(x.dtype, out.dtype, q.shape, *about)
    scratch = _xp.allocate(plan.size)
    codes, scales = scratch.ptr, scratch.ptr + plan.scales_at
    if plan.quantize is None:
        tokens_of.quantize_into(x, tokens, None, codes, 0, 0, NUMBERS.ROWS, 0)
        scales = given.data.ptr
    else:
        plan.quantize(x.data.ptr, codes, scales)
    plan.launch(plan.grid, (codes, scales, weight_argument(q), 0, added, out.data.ptr, plan.numbers))


class Chosen(NamedTuple):
    """Products with experts that tokens have chosen, as a launch is planned for them.

    Parameters
    ----------
    format, shape, lead : Format, tuple of int, int
        Of the weights.
    dtype : numpy.dtype
        Of tokens.
    preset : str
        How they are quantized, `BITNET` among the ways.
    tokens, slots : int
        How many, and products of each.
    vector : bool
        Whether tokens start at a multiple of 16 bytes.
    id_bytes : int
        Of each of their numbers of experts: 4, int32, or 8, int64.
    device : int
        Its number.
    """

    format: Format
    shape: tuple[int, int, int]
    lead: int
    dtype: np.dtype
    preset: str
    tokens: int
    slots: int
    vector: bool
    id_bytes: int
    device: int


#: Products with experts: called with the address of floats, the weights, and the addresses of ids [tokens, slots] and
#: of float32 products [tokens, slots, N].
MultiplyExperts: TypeAlias = Callable[[int, QuantizedArray, int, int], None]


def experts_multiplied(of: Chosen) -> MultiplyExperts:
    """The launches, their kernels compiled; products of no expert are zero."""
    many = of.tokens, of.slots
    plan = _plan(of.dtype, _xp.SINGLE, of.shape, *many, of.preset, False, 0, of.vector, of.device, of.id_bytes)

    def multiply(x: int, qs: QuantizedArray, ids: int, products: int) -> None:
        assert plan.quantize is not None
        scratch = _xp.allocate(plan.size)
        codes, scales = scratch.ptr, scratch.ptr + plan.scales_at
        plan.quantize(x, codes, scales)
        plan.launch(plan.grid, (codes, scales, weight_argument(qs), ids, 0, products, plan.numbers))

    return multiply


def multiply(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty and whose device is the current one."""
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    if not depth:  # sums of nothing
        out[...] = 0 if bias is None else bias
        return
    tokens = out.size // rows
    if isinstance(out, np.ndarray):
        multiply_host(_host_tokens(x, preset, tokens), q, bias, out.reshape(tokens, rows))
        return
    single = out
    if out.dtype.name not in FLOATS:
        single = _xp.namespace(out).empty(out.shape, np.float32)
    multiply_cuda(x, preset, q, bias, single)
    if single is not out:
        widen(single, out)


def _host_tokens(x: Any, preset: str, tokens: int) -> Tokens:
    if isinstance(x, QuantizedArray):
        codes, scales = token_planes(x)
        return Tokens(codes.reshape(tokens, -1), np.broadcast_to(scales.reshape(-1, 1), (tokens, 1)))
    return tokens_of.quantize_host(x.reshape(tokens, x.shape[-1]), preset)


# ---- routes ----------------------------------------------------------------------------------------------------------

# Microseconds of the two launches, and products and additions in one of them; the same of a core of the host, and
# microseconds to decode an element there.
_START, _RATE, _HOST_RATE, _HOST_DECODING = 8.0, 2e5, 1e4, 5e-3


def _refusal(problem: Problem) -> str | None:
    if problem.experts:
        return "it is for one weight"
    trits = problem.format.trits(problem.shape, problem.stored.lead)
    if problem.activations == "int8" and trits is not None and trits.shares and problem.shape[1] <= int8.MAX_DEPTH:
        # One contract for a weight of any size: sums of groups are added in another order here.
        return "ternary weights have kernels of their own"
    return why_not(problem.activations, problem.format, problem.shape, problem.stored.lead)


def _product(problem: Problem) -> Product:
    preset = problem.activations or ""
    return lambda x, q, bias, out: multiply(x, preset, q, bias, out)


class Integers(Route):
    """Quantize tokens, and multiply them by codes as they are stored."""

    name = "integers"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are in host memory" if problem.device is None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        return _START + n * k * (1 + problem.tokens) / _RATE

    def prepare(self, problem: Problem) -> Product:
        return _product(problem)

    def describe(self, problem: Problem) -> str:
        return f"tokens quantized by {problem.activations!r}, exact sums of what shares scales: multiply_integers"


class IntegersHost(Route):
    """Quantize tokens, and multiply exactly by NumPy's BLAS."""

    name = "integers_numpy"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are on a GPU" if problem.device is not None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        return n * k * (_HOST_DECODING + problem.tokens / _HOST_RATE)

    def prepare(self, problem: Problem) -> Product:
        return _product(problem)

    def describe(self, problem: Problem) -> str:
        return f"NumPy: tokens quantized by {problem.activations!r}, sums of what shares scales exact"


def refused(preset: str, problem: Problem) -> FormatError:
    """The error of a weight, or of experts, that no route multiplies by such activations."""
    shape = (problem.experts, *problem.shape) if problem.experts else problem.shape
    why = why_not(preset, problem.format, shape, problem.stored.lead)
    name = "qs" if problem.experts else "q"
    return FormatError(f"{name} cannot be multiplied by activations in {preset}: {why}")
