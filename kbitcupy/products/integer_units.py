"""Some tokens in "q8_1" times weights of q4_0 or q4_k on Hopper, whose sums of 32 elements come from wgmma.

Two launches: tokens are quantized, then multiplied, in stages of 256 elements of k times 128 rows and 64 tokens. Where
there are up to 64 tokens, and as many rows as keep all multiprocessors busy once, two thread blocks share rows, each
with half of k (kernels/linear/integer_units_sm90a.cu). Of other shapes each thread block has as many stages as the
others, of tiles that may begin in one and end in another (kernels/linear/spread_units_sm90a.cu); where that does not
pay `kbitcupy.products.integer_batch` is there, which wants more cycles for each sum, and fewer to begin and to end.
Such a thread block has an even number of stages, and with q4_k, of which it fetches the scales of 1024 elements at a
time, a multiple of four. What it gives is the contract of `kbitcupy.products.integers`, terms of units being added in
the order of k, parts of k in theirs, which is the same every time; minima of q4_k as there.

Numbers are added up as 2^-34 of what they are, with q4_k 2^-44: parts of what is below 2^-95, with q4_k 2^-85, may be
lost. A row with a scale that is not finite gives NaN, also where the sum of its terms would be infinite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_BOOLS, CXX_TYPES, Template, cxx_type
from ..backend.launch import Kernel, Planned, packed
from ..backend.structs import Constants
from ..formats.base import Format, IntegerCodes, register_templates
from ..formats.integer_codes import INNER
from ..ops import source, widen
from . import integer_activations as tokens_of, integers
from .activations import FLOATS
from .int8 import BIAS_KINDS, bias_kind, bias_of
from .integer_batch import MOST_TOKENS, has_inner, refusal, why_not_few
from .routes import MOST_ALIGNED, Problem, Product, Route, device as device_of

#: Numbers of the kernels: tokens; elements of k of a stage; rows of a thread block, and how many of these share rows;
#: words ahead of sums that thread blocks leave for others; stages of a ring, and bytes of one, also with q4_k; threads
#: of a block that quantizes.
SIZES = Constants(
    UNITS_TOKENS=MOST_TOKENS,
    UNITS_K=256,
    UNITS_ROWS=128,
    UNITS_SHARE=2,
    UNITS_FLAGS=1024,
    UNITS_STAGES=5,
    UNITS_STAGE=40960,
    UNITS_INNER_STAGE=45056,
    QUANTIZE_THREADS=128,
)
#: Fewer tokens are multiplied sooner by products of few, `LEAST_SPREAD` by whether weights are q4_k's; more than these
#: by cuBLAS.
LEAST_TOKENS, LEAST_SPREAD, MOST_SPREAD = 17, {False: 33, True: 17}, 1024
# By whether weights are q4_k's: bytes of a stage; those that stand beside the tokens' codes of one.
_STAGE = {False: int(SIZES.UNITS_STAGE), True: int(SIZES.UNITS_INNER_STAGE)}
_RECORD = {False: 2048, True: 5120}
# Stages that a thread block has together; bytes of the sums that it leaves.
_TOGETHER = {False: 2, True: 4}
_LEFT = 4 * int(SIZES.UNITS_TOKENS) * int(SIZES.UNITS_ROWS)
# Threads of a thread block; elements of a thread that quantizes.
_THREADS, _SIXTEEN = 384, 16

_STRUCTS = BIAS_KINDS, SIZES
_TEMPLATE = Template("linear/integer_units_sm90a.cu", "multiply_units", (CXX_BOOLS,), structs=_STRUCTS)
_SPREAD = Template("linear/spread_units_sm90a.cu", "spread_units", (CXX_BOOLS, CXX_BOOLS), structs=_STRUCTS)
_TYPES = tuple(CXX_TYPES[name] for name in FLOATS)
_TOKENS = Template("linear/unit_tokens.cu", "quantize_unit_tokens", (_TYPES, CXX_BOOLS), structs=(SIZES,))
register_templates(_TEMPLATE, _SPREAD, _TOKENS)
_SIGNATURE = (*(_tma.MAP_BYTES,) * 2, *("p",) * 5, *("i4",) * 5, "u4")
_SPREAD_SIGNATURE = (*(_tma.MAP_BYTES,) * 2, *("p",) * 6, *("i4",) * 7, "u4")
_NUMBERS = "i4", "i4"


def shared_bytes(inner: bool) -> int:
    """Of a thread block: its ring starts at a multiple of 1024."""
    return int(SIZES.UNITS_STAGES) * _STAGE[inner] + 1024


@functools.cache
def _kernel(inner: bool) -> Kernel:
    return Kernel(
        _TEMPLATE,
        (CXX_BOOLS[inner],),
        _THREADS,
        shared_bytes(inner),
        signature=_SIGNATURE,
        early=True,
        cluster=int(SIZES.UNITS_SHARE),
    )


@functools.cache
def _spread_kernel(inner: bool, grouped: bool) -> Kernel:
    which = CXX_BOOLS[inner], CXX_BOOLS[grouped]
    return Kernel(_SPREAD, which, _THREADS, shared_bytes(inner), signature=_SPREAD_SIGNATURE, early=True)


@functools.cache
def _quantizer(cxx: str, inner: bool) -> Kernel:
    threads = SIZES.QUANTIZE_THREADS
    return Kernel(_TOKENS, (cxx, CXX_BOOLS[inner]), threads, signature=(*("p",) * 4, _NUMBERS), early=True)


@dataclass(frozen=True, eq=False)
class Plan(Planned):
    """The launches of a product of one shape, the second in its fields of `Planned`.

    Parameters
    ----------
    quantize : callable
        The first launch.
    quantizing : tuple of int
        Its grid.
    numbers : bytes
        Its last argument.
    part : IntegerCodes
        Where the codes of the weight are.
    inner : bool
        Whether the weight is q4_k's.
    share : int
        Stages of a thread block, where all have as many; 0 where two share rows.
    """

    quantize: Any
    quantizing: tuple[int, int, int]
    numbers: bytes
    part: IntegerCodes
    inner: bool
    share: int


def blocks_of(rows: int) -> int:
    """Thread blocks of a product, two of which share rows."""
    return -(-rows // SIZES.UNITS_ROWS) * SIZES.UNITS_SHARE


def stages_of(shape: tuple[int, int], tokens: int) -> int:
    """Stages of all tiles."""
    rows, depth = shape
    return -(-rows // SIZES.UNITS_ROWS) * -(-tokens // SIZES.UNITS_TOKENS) * (depth // SIZES.UNITS_K)


def share_of(shape: tuple[int, int], tokens: int, inner: bool, processors: int) -> int:
    """How many of them each thread block has, at most one of which is on a multiprocessor."""
    together = _TOGETHER[inner]
    return -(-stages_of(shape, tokens) // (processors * together)) * together


@functools.lru_cache(maxsize=4096)
def _plan(
    format: Format, shape: tuple[int, int], lead: int, given: np.dtype, tokens: int, spread: bool, device: int
) -> Plan:
    rows, depth = shape
    part = integers.codes_of(format, shape, lead)
    assert part is not None
    inner = part.added == INNER
    quantize = _quantizer(cxx_type(given), inner).ready(device).launch
    quantizing = tokens, -(-depth // (SIZES.QUANTIZE_THREADS * _SIXTEEN)), 1
    kernel = _spread_kernel(inner, tokens > SIZES.UNITS_TOKENS) if spread else _kernel(inner)
    launch = kernel.ready(device).launch
    gpu = device_of(device)
    assert gpu is not None
    share = share_of(shape, tokens, inner, gpu.multiprocessors) if spread else 0
    blocks = -(-stages_of(shape, tokens) // share) if spread else blocks_of(rows)
    numbers = packed(_NUMBERS, depth, blocks if spread else 0)
    return Plan(launch, (blocks, 1, 1), quantize, quantizing, numbers, part, inner, share)


def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any, spread: bool = False) -> None:
    """Fill `out`, which is not empty and whose device is the current one, from floats; `spread`: all thread blocks have
    as many stages.
    """
    if out.dtype not in _xp.dtype_set(FLOATS):
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        multiply(x, q, bias, single, spread)
        widen(single, out)
        return
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    tokens, device = out.size // rows, out.data.device_id
    x = tokens_of.floats_of(x)
    if x.data.ptr % MOST_ALIGNED:
        x = x.copy()
    made = _plan(q.format, q.shape, q.lead, x.dtype, tokens, spread, device)
    stages, of_codes = depth // SIZES.UNITS_K, tokens * depth
    groups = -(-tokens // SIZES.UNITS_TOKENS)
    of_tokens = of_codes + groups * stages * _RECORD[made.inner]
    scratch = _xp.allocate(of_tokens + (4 * SIZES.UNITS_FLAGS + made.grid[0] * _LEFT if spread else 0))
    records, left = scratch.ptr + of_codes, scratch.ptr + of_tokens
    made.quantize(made.quantizing, (x.data.ptr, scratch.ptr, records, left, made.numbers))
    part = made.part
    maps = (
        _tma.byte_matrix(scratch.ptr, tokens, depth, depth, SIZES.UNITS_TOKENS),
        _tma.byte_matrix(q.planes[part.codes].data.ptr, rows, depth // 2, depth // 2, SIZES.UNITS_ROWS),
    )
    beside = 0 if part.beside is None else q.planes[part.beside].data.ptr
    added = bias_of(bias)
    pointers = out.data.ptr, records, q.planes[part.scales].data.ptr, beside, added[0]
    numbers = added[1], bias_kind(out.dtype), 0
    if spread:
        made.launch(made.grid, (*maps, *pointers, left, tokens, groups, rows, stages, made.share, *numbers))
    else:
        made.launch(made.grid, (*maps, *pointers, tokens, rows, stages, *numbers))


# ---- the route -----------------------------------------------------------------------------------------------------

# By whether the weight is q4_k's, in the measure of `integer_batch`, whose costs stand beside these: microseconds of
# the launches, of the first stage and of sums that two thread blocks exchange; of a stage. What they say is within a
# tenth of what was measured of K from 1024, with q4_k from 2048, to 28672, everywhere less than `integer_batch` took.
_START = {False: 5.9, True: 6.6}
_OF_STAGE = {False: 1.33, True: 1.42}
# The same where thread blocks have as many stages each, and of rows that a thread block ends or leaves, of sums that it
# adds, within a twentieth of what was measured of 13 shapes.
_SPREAD_START = {False: 7.7, True: 6.3}
_OF_SPREAD_STAGE = {False: 1.38, True: 1.47}
_OF_END = {False: 0.3, True: 1.1}
_OF_LEFT = {False: 0.5, True: 0.65}
# K of q4_k: tables of four stages are fetched at once, by each of the thread blocks that share rows.
_INNER_K = int(SIZES.UNITS_K) * 4 * int(SIZES.UNITS_SHARE)


def _refused(problem: Problem, least: int, most: int) -> str | None:
    """Why units of so many tokens are not multiplied by wgmma, however stages are shared out."""
    if problem.activations != "q8_1":
        return 'it is for activations="q8_1"'
    refused = why_not_few(problem, refusal, range(least, most + 1))
    if refused is not None:
        return refused
    if problem.shape[1] >= 1 << 24:
        return "numbers of 32 bits do not reach through the scales"
    return None


class IntegerUnits(Route):
    """Quantize some tokens, and multiply them by q4_0's or q4_k's codes with wgmma, 32 elements at a time."""

    name = "integer_units"

    def accepts(self, problem: Problem) -> str | None:
        refused = _refused(problem, LEAST_TOKENS, MOST_TOKENS)
        if refused is not None:
            return refused
        assert problem.device is not None
        blocks, processors = blocks_of(problem.shape[0]), problem.device.multiprocessors
        if not 3 * processors <= 4 * blocks <= 4 * processors:
            return f"{blocks} thread blocks do not keep {processors} multiprocessors busy once"
        if has_inner(problem) and problem.shape[1] % _INNER_K:
            return f"with q4_k K must be a multiple of {_INNER_K}"
        return None

    def cost(self, problem: Problem) -> float:
        inner = has_inner(problem)
        return _START[inner] + problem.shape[1] / SIZES.UNITS_K / SIZES.UNITS_SHARE * _OF_STAGE[inner]

    def prepare(self, problem: Problem) -> Product:
        return multiply

    def describe(self, problem: Problem) -> str:
        tile = f"all tokens x {SIZES.UNITS_ROWS} rows x half of k a thread block, sums of 32 become float32"
        return f"tokens quantized by {problem.activations!r}, codes decoded in registers: multiply_units, {tile}"


class SpreadUnits(Route):
    """The same, each thread block having as many stages as the others."""

    name = "spread_units"

    def accepts(self, problem: Problem) -> str | None:
        refused = _refused(problem, LEAST_SPREAD[has_inner(problem)], MOST_SPREAD)
        if refused is not None:
            return refused
        assert problem.device is not None
        together = _TOGETHER[has_inner(problem)] * int(SIZES.UNITS_K)
        if problem.shape[1] % together:
            return f"K must be a multiple of {together}"
        if problem.device.multiprocessors > SIZES.UNITS_FLAGS or stages_of(problem.shape, problem.tokens) >= 1 << 31:
            return "there are more thread blocks or stages than it can count"
        return None

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        inner, stages = has_inner(problem), problem.shape[1] // SIZES.UNITS_K
        share = share_of(problem.shape, problem.tokens, inner, problem.device.multiprocessors)
        if share % stages == 0:
            ends, left = share // stages, 0
        elif stages % share == 0:
            ends, left = 1, stages // share - 1
        else:
            ends, left = share // stages + 2, -(-stages // share)
        return _SPREAD_START[inner] + share * _OF_SPREAD_STAGE[inner] + ends * _OF_END[inner] + left * _OF_LEFT[inner]

    def prepare(self, problem: Problem) -> Product:
        return functools.partial(multiply, spread=True)

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        share = share_of(problem.shape, problem.tokens, has_inner(problem), problem.device.multiprocessors)
        size = f"{SIZES.UNITS_TOKENS} tokens x {SIZES.UNITS_ROWS} rows x {SIZES.UNITS_K} of k"
        tile = f"{share} stages of {size} a thread block, sums of 32 become float32"
        return f"tokens quantized by {problem.activations!r}, codes decoded in registers: spread_units, {tile}"
