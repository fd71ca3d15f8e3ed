"""33 to 64 tokens in "q8_1" times weights of q4_0 or q4_k on Hopper, whose sums of 32 elements come from wgmma.

Two launches: tokens are quantized, then multiplied by kernels/linear/integer_units_sm90a.cu. Two thread blocks share
rows, each with all tokens and half of k, so there have to be as many rows as keep all multiprocessors busy once; with
q4_k, of which a thread block fetches the scales of 1024 elements at a time, K is a multiple of 2048. Other shapes are
for `kbitcupy.products.integer_batch`, which wants more cycles for each sum, and fewer to begin and to end. What it
gives is the contract of `kbitcupy.products.integers`, terms of units being added in the order of k, parts of k in
theirs, which is the same every time; minima of q4_k as there.

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
from .integer_batch import LEAST_INNER, MOST_TOKENS, has_inner, refusal, why_not_few
from .routes import MOST_ALIGNED, Problem, Product, Route

#: Numbers of the kernels: tokens; elements of k of a stage; rows of a thread block, and how many of these share rows;
#: stages of a ring, and bytes of one, also with q4_k; threads of a block that quantizes.
SIZES = Constants(
    UNITS_TOKENS=MOST_TOKENS,
    UNITS_K=256,
    UNITS_ROWS=128,
    UNITS_SHARE=2,
    UNITS_STAGES=5,
    UNITS_STAGE=40960,
    UNITS_INNER_STAGE=45056,
    QUANTIZE_THREADS=128,
)
# By whether weights are q4_k's: bytes of a stage; those that stand beside the tokens' codes of one.
_STAGE = {False: int(SIZES.UNITS_STAGE), True: int(SIZES.UNITS_INNER_STAGE)}
_RECORD = {False: 2048, True: 5120}
# Threads of a thread block; elements of a thread that quantizes.
_THREADS, _SIXTEEN = 384, 16

_TEMPLATE = Template("linear/integer_units_sm90a.cu", "multiply_units", (CXX_BOOLS,), structs=(BIAS_KINDS, SIZES))
_TYPES = tuple(CXX_TYPES[name] for name in FLOATS)
_TOKENS = Template("linear/unit_tokens.cu", "quantize_unit_tokens", (_TYPES, CXX_BOOLS), structs=(SIZES,))
register_templates(_TEMPLATE, _TOKENS)
_SIGNATURE = (*(_tma.MAP_BYTES,) * 2, *("p",) * 5, *("i4",) * 5, "u4")
_DEPTH = ("i4",)


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
def _quantizer(cxx: str, inner: bool) -> Kernel:
    threads = SIZES.QUANTIZE_THREADS
    return Kernel(_TOKENS, (cxx, CXX_BOOLS[inner]), threads, signature=("p", "p", "p", _DEPTH), early=True)


@dataclass(frozen=True, eq=False)
class Plan(Planned):
    """The launches of a product of one shape, the second in its fields of `Planned`.

    Parameters
    ----------
    quantize : callable
        The first launch.
    quantizing : tuple of int
        Its grid.
    depth : bytes
        Its last argument.
    part : IntegerCodes
        Where the codes of the weight are.
    inner : bool
        Whether the weight is q4_k's.
    """

    quantize: Any
    quantizing: tuple[int, int, int]
    depth: bytes
    part: IntegerCodes
    inner: bool


def blocks_of(rows: int) -> int:
    """Thread blocks of a product."""
    return -(-rows // SIZES.UNITS_ROWS) * SIZES.UNITS_SHARE


@functools.lru_cache(maxsize=4096)
def _plan(format: Format, shape: tuple[int, int], lead: int, given: np.dtype, tokens: int, device: int) -> Plan:
    rows, depth = shape
    part = integers.codes_of(format, shape, lead)
    assert part is not None
    inner = part.added == INNER
    quantize = _quantizer(cxx_type(given), inner).ready(device).launch
    quantizing = tokens, -(-depth // (SIZES.QUANTIZE_THREADS * _SIXTEEN)), 1
    launch = _kernel(inner).ready(device).launch
    return Plan(launch, (blocks_of(rows), 1, 1), quantize, quantizing, packed(_DEPTH, depth), part, inner)


def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty and whose device is the current one, from floats."""
    if out.dtype not in _xp.dtype_set(FLOATS):
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        multiply(x, q, bias, single)
        widen(single, out)
        return
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    tokens, device = out.size // rows, out.data.device_id
    x = tokens_of.floats_of(x)
    if x.data.ptr % MOST_ALIGNED:
        x = x.copy()
    made = _plan(q.format, q.shape, q.lead, x.dtype, tokens, device)
    stages, of_codes = depth // SIZES.UNITS_K, tokens * depth
    scratch = _xp.allocate(of_codes + stages * _RECORD[made.inner])
    records = scratch.ptr + of_codes
    made.quantize(made.quantizing, (x.data.ptr, scratch.ptr, records, made.depth))
    part = made.part
    maps = (
        _tma.byte_matrix(scratch.ptr, tokens, depth, depth, SIZES.UNITS_TOKENS),
        _tma.byte_matrix(q.planes[part.codes].data.ptr, rows, depth // 2, depth // 2, SIZES.UNITS_ROWS),
    )
    beside = 0 if part.beside is None else q.planes[part.beside].data.ptr
    added = bias_of(bias)
    pointers = out.data.ptr, records, q.planes[part.scales].data.ptr, beside, added[0]
    made.launch(made.grid, (*maps, *pointers, tokens, rows, stages, added[1], bias_kind(out.dtype), 0))


# ---- the route -----------------------------------------------------------------------------------------------------

# By whether the weight is q4_k's, in the measure of `integer_batch`, whose costs stand beside these: microseconds of
# the launches, of the first stage and of sums that two thread blocks exchange; of a stage. What they say is within a
# tenth of what was measured of K from 1024, with q4_k from 2048, to 28672, everywhere less than `integer_batch` took.
_START = {False: 5.7, True: 5.1}
_OF_STAGE = {False: 0.685, True: 0.8}
# K of q4_k: tables of four stages are fetched at once, by each of the thread blocks that share rows.
_INNER_K = int(SIZES.UNITS_K) * 4 * int(SIZES.UNITS_SHARE)


class IntegerUnits(Route):
    """Quantize up to 64 tokens, and multiply them by q4_0's or q4_k's codes with wgmma, 32 elements at a time."""

    name = "integer_units"

    def accepts(self, problem: Problem) -> str | None:
        if problem.activations != "q8_1":
            return 'it is for activations="q8_1"'
        refused = why_not_few(problem, refusal, range(LEAST_INNER, MOST_TOKENS + 1))
        if refused is not None:
            return refused
        assert problem.device is not None
        blocks, processors = blocks_of(problem.shape[0]), problem.device.multiprocessors
        if not 3 * processors <= 4 * blocks <= 4 * processors:
            return f"{blocks} thread blocks do not keep {processors} multiprocessors busy once"
        if has_inner(problem) and problem.shape[1] % _INNER_K:
            return f"with q4_k K must be a multiple of {_INNER_K}"
        if problem.shape[1] >= 1 << 24:
            return "numbers of 32 bits do not reach through the scales"
        return None

    def cost(self, problem: Problem) -> float:
        inner = has_inner(problem)
        return _START[inner] + problem.shape[1] / SIZES.UNITS_K * _OF_STAGE[inner]

    def prepare(self, problem: Problem) -> Product:
        return multiply

    def describe(self, problem: Problem) -> str:
        tile = f"all tokens x {SIZES.UNITS_ROWS} rows x half of k a thread block, sums of 32 become float32"
        return f"tokens quantized by {problem.activations!r}, codes decoded in registers: multiply_units, {tile}"
