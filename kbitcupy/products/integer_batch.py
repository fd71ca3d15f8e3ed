"""Up to 64 int8 tokens times weights of q4_0, or 33 to 64 in "q8_1" times those of q4_k, on Hopper.

Two launches: tokens are quantized, then multiplied by kernels/linear/integer_batch_sm90a.cu. A thread block has some
rows and all tokens; what it gives is the contract of `kbitcupy.products.integers`, terms of units being added in the
order of k, parts of k in theirs, which is the same every time.

Of 256 elements of a row of q4_k that is ``-dmin * sum_u(mn_u * (e_u * S_u))``, which tensor cores add up, the second
factor in three parts, and then ``fl((d * sc_u) * D_u) * e_u`` of each of eight units u.

With "q8_1" numbers of q4_0 are added up as 16 times what they are: results from 2^124 on may become infinite, and those
below 2^-130 zero. A row with a scale that is not finite gives NaN, also where the sum of its terms would be infinite;
with q4_k parts of what is below 2^-100 may be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_TYPES, Template, cxx_type
from ..backend.launch import Kernel, Planned, packed
from ..backend.structs import Constants, Struct
from ..formats.base import Format, IntegerCodes, register_templates
from ..formats.integer_codes import INNER, NOTHING
from ..ops import source, widen
from . import integer_activations as tokens_of, integers
from .activations import FLOATS
from .int8 import BIAS_KINDS, bias_kind, bias_of, token_planes
from .integer_activations import NUMBERS, Q8_BLOCK, Launches, Quantizing
from .routes import MOST_ALIGNED, Problem, Product, Route, device as device_of

#: Numbers of the kernels: tokens; elements of k of a stage, most stages of a ring, and bytes beside the tokens' codes
#: of one for q4_k; threads of a block that quantizes for it.
SIZES = Constants(
    BATCH_TOKENS=64,
    BATCH_K=256,
    BATCH_STAGES=16,
    BATCH_RECORD=5120,
    QUANTIZE_THREADS=128,
)
#: How a thread block cuts its work: tiles of 16 rows, groups of warps with rows of their own, stages of the ring, bytes
#: of one, and where in it the table of scales begins.
CUT = Struct(
    "BatchCut",
    tiles="i4",
    row_groups="i4",
    stages="i4",
    stage_bytes="i4",
    table_at="i4",
)
MOST_TOKENS = SIZES.BATCH_TOKENS
#: Fewer are multiplied sooner with q4_k by two products of few tokens.
LEAST_INNER = 33
# Warps of a thread block that multiply, and those that bring what they need; bytes of its shared memory beside
# barriers; elements of a thread that quantizes.
_WARPS, _COPIERS, _ROOM, _SIXTEEN = 8, 4, 226 << 10, 16
# Bytes of a row in a table of q4_k.
_INNER_ROW = 32


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Parameters
    ----------
    tiles : int
        Of 16 rows, of a thread block.
    row_groups : int
        Groups of warps with rows of their own; the others share k.
    """

    tiles: int
    row_groups: int

    @property
    def most(self) -> int:
        """Tiles of a warp; some have one less."""
        return 4 if self.tiles > 2 * self.row_groups else 2

    def warps(self, inner: bool) -> int:
        """That multiply: with few tiles of q4_k twice as many, of which each has half of the tokens."""
        return 2 * _WARPS if inner and self.most == 2 else _WARPS

    def packed(self, blocked: bool, inner: bool = False) -> tuple[bytes, int]:
        """The kernel's argument, and bytes of shared memory.

        Parameters
        ----------
        blocked : bool
            Whether tokens have a scale for 32 elements.
        inner : bool, default False
            Whether weights are q4_k's.
        """
        rows, units, tokens = 16 * self.tiles, SIZES.BATCH_K // Q8_BLOCK, MOST_TOKENS
        beside = SIZES.BATCH_RECORD if inner else 4 * units * tokens * blocked
        codes_at = -(-(SIZES.BATCH_K * tokens + beside) // 1024) * 1024
        table_at = codes_at + rows * SIZES.BATCH_K // 2
        table = rows * (_INNER_ROW if inner else 4 * (units + 1))
        # Warps load codes of two tiles at a time, where they have one, too.
        loaded = codes_at + (rows + 16) * SIZES.BATCH_K // 2
        stage = -(-max(table_at + table, loaded) // 1024) * 1024
        stages, k_groups = min(SIZES.BATCH_STAGES, (_ROOM - 1024) // stage), _WARPS // self.row_groups
        size = max(stages * stage, k_groups * tokens * (rows + 4) * 4) + 1024
        packed = CUT.pack(
            tiles=self.tiles,
            row_groups=self.row_groups,
            stages=stages,
            stage_bytes=stage,
            table_at=table_at,
        )
        return packed, size


#: By tiles of a thread block: those that warps share evenly, and whose ring holds a multiple of the parts of k, or two
#: stages more than there are parts: a warp asks for no stage while the one before in its place is still to come. With
#: q4_k stages come in their order, and one more is enough.
CUTS = {tiles: Cut(tiles, 4 if tiles > 8 else 2) for tiles in (2, 4, 7, 13, 14)}


def _text(blocked: bool, tiles: int, inner: bool) -> str:
    """The arguments of the template."""
    return f"{str(blocked).lower()}, {tiles}, {str(inner).lower()}"


_KINDS = (False, False), (True, False), (True, True)
_TEMPLATE = Template(
    "linear/integer_batch_sm90a.cu",
    "batch_integers",
    (tuple(_text(blocked, tiles, inner) for blocked, inner in _KINDS for tiles in (4, 2)),),
    structs=(BIAS_KINDS, SIZES, CUT),
)
_TYPES = tuple(CXX_TYPES[name] for name in FLOATS)
_TOKENS = Template("linear/batch_tokens.cu", "quantize_batch_tokens", (_TYPES,), structs=(SIZES,))
register_templates(_TEMPLATE, _TOKENS)
_SIGNATURE = (*(_tma.MAP_BYTES,) * 3, CUT, *("p",) * 6, *("i4",) * 8, "u4")
_DEPTH = ("i4",)
_NO_MAP = bytes(_tma.MAP_BYTES)


@functools.cache
def _kernel(blocked: bool, cut: Cut, inner: bool, shared: int) -> Kernel:
    text = _text(blocked, cut.most, inner)
    threads = 32 * (cut.warps(inner) + _COPIERS)
    return Kernel(_TEMPLATE, (text,), threads, shared, signature=_SIGNATURE, early=True)


@functools.cache
def _quantizer(cxx: str) -> Kernel:
    """Of floats by "q8_1" for q4_k, to what kernels/linear/batch_tokens.cu says."""
    return Kernel(_TOKENS, (cxx,), SIZES.QUANTIZE_THREADS, signature=("p", "p", "p", _DEPTH), early=True)


def refusal(preset: str | None, part: IntegerCodes, depth: int) -> str | None:
    """What stands against the codes of a weight."""
    if part.added == INNER and preset != "q8_1":
        return 'with q4_k it is for activations="q8_1"'
    if part.added != INNER and (part.bits != 4 or part.width != 16 or part.added != NOTHING or part.group != Q8_BLOCK):
        return "it is for q4_0 and q4_k"
    return f"K must be a multiple of {SIZES.BATCH_K}" if not depth or depth % SIZES.BATCH_K else None


@functools.lru_cache(maxsize=4096)
def choose(rows: int, processors: int) -> Cut:
    """The cut with the least work for the busiest multiprocessor."""

    def work(cut: Cut) -> tuple[float, int]:
        return -(-rows // (16 * cut.tiles * processors)) * (cut.tiles + 0.5), -cut.tiles

    return min(CUTS.values(), key=work)


@dataclass(frozen=True, eq=False)
class Plan(Planned):
    """The second launch of a product of one shape.

    Parameters
    ----------
    cut : bytes
        `CUT`.
    rows : int
        Of a thread block.
    """

    cut: bytes
    rows: int


@functools.lru_cache(maxsize=4096)
def plan(blocked: bool, inner: bool, rows: int, cut: Cut, device: int) -> Plan:
    """How a product is computed, its kernel compiled."""
    packed, shared = cut.packed(blocked, inner)
    ready = _kernel(blocked, cut, inner, shared).ready(device)
    return Plan(ready.launch, (-(-rows // (16 * cut.tiles)), 1, 1), packed, 16 * cut.tiles)


@functools.lru_cache(maxsize=4096)
def _launches(
    format: Format,
    shape: tuple[int, int],
    lead: int,
    activations: str,
    preset: str | None,
    given: np.dtype,
    tokens: int,
    aligned: bool,
    device: int,
) -> Launches[Plan]:
    """How `multiply` goes about a product, its kernels compiled.

    With no preset tokens of the dtype `given` are int8 already; `aligned`: they start at a multiple of 16 bytes.
    """
    rows, depth = shape
    part, gpu = integers.codes_of(format, shape, lead), device_of(device)
    assert part is not None and gpu is not None
    inner, blocked, padded = part.added == INNER, activations == "q8_1", tokens_of.padded_of(tokens)
    if inner:
        ready = _quantizer(cxx_type(given)).ready(device)
        grid = tokens, -(-depth // (SIZES.QUANTIZE_THREADS * _SIXTEEN)), 1
        quantize = Quantizing(ready.launch, grid, False, packed(_DEPTH, depth))
        beside = depth // SIZES.BATCH_K * SIZES.BATCH_RECORD
    else:
        quantize = tokens_of.quantizing(given, tokens, depth, preset, NUMBERS.ROWS, Q8_BLOCK, False, aligned, device)
        beside = 4 * (depth // Q8_BLOCK if blocked else 1) * padded
    scales_at = tokens * tokens_of.pitch_of(depth)
    product = plan(blocked, inner, rows, choose(rows, gpu.multiprocessors), device)
    return Launches(quantize, product, part, scales_at + beside, scales_at)


def multiply(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty and whose device is the current one, from floats or int8."""
    if out.dtype not in _xp.dtype_set(FLOATS):
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        multiply(x, preset, q, bias, single)
        widen(single, out)
        return
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    tokens, device, quantized = out.size // rows, out.data.device_id, isinstance(x, QuantizedArray)
    taken = _xp.contiguous(token_planes(x)[0]) if quantized else tokens_of.floats_of(x)
    address, by = taken.data.ptr, None if quantized else preset
    made = _launches(q.format, q.shape, q.lead, preset, by, taken.dtype, tokens, address % MOST_ALIGNED == 0, device)
    part, product, units = made.part, made.product, depth // Q8_BLOCK
    inner = part.added == INNER
    if inner and address % MOST_ALIGNED:
        taken = taken.copy()
        address = taken.data.ptr
    scratch, scales, _, step = made.start(x, address, tokens)
    pitch, of_scales = tokens_of.pitch_of(depth), _NO_MAP
    if preset == "q8_1" and not inner:
        many, of_unit = SIZES.BATCH_K // Q8_BLOCK, 4 * tokens_of.padded_of(tokens)
        of_scales = _tma.byte_matrix(scales, units, of_unit, of_unit, many, 4 * MOST_TOKENS, False)
    weight, scale = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    maps = (
        _tma.byte_matrix(scratch.ptr, tokens, pitch, pitch, MOST_TOKENS),
        _tma.byte_matrix(weight, rows, depth // 2, depth // 2, product.rows),
        of_scales,
    )
    added = bias_of(bias)
    of_blocks = (0, 0) if part.beside is None else (q.planes[part.beside].data.ptr, scales)
    pointers = out.data.ptr, scales, scale, *of_blocks, added[0]
    kinds = 0, added[1], bias_kind(out.dtype)
    product.launch(product.grid, (*maps, product.cut, *pointers, tokens, rows, depth, units, step, *kinds, 0))


# ---- the route -----------------------------------------------------------------------------------------------------


def why_not_few(
    problem: Problem, refusal: Callable[[str | None, IntegerCodes, int], str | None], tokens: range
) -> str | None:
    """What stands against a kernel of Hopper for so many tokens; `refusal` says it of preset, codes and K."""
    gpu, lead = problem.device, problem.stored.lead
    if gpu is None:
        return "the arrays are in host memory"
    if problem.experts:
        return "it is for one weight"
    refused = integers.why_not(problem.activations, problem.format, problem.shape, lead)
    if refused is not None:
        return refused
    part = integers.codes_of(problem.format, problem.shape, lead)
    assert part is not None
    refused = refusal(problem.activations, part, problem.shape[1])
    if refused is not None:
        return refused
    if gpu.capability != 90 or not gpu.tensor_maps:
        return "it is for compute capability 9.0"
    if problem.tokens not in tokens:
        return f"it is for {f'{tokens[0]} to' if tokens[0] > 1 else 'up to'} {tokens[-1]} tokens"
    if min(problem.stored.codes, problem.stored.scales) < MOST_ALIGNED:
        return f"the planes do not start at multiples of {MOST_ALIGNED} bytes"
    return None


# Microseconds of the launches; the fraction of the bandwidth at which codes come; of a tile of 16 rows and 32 k, of
# which a thread block has some, and of one with q4_k.
_START, _FRACTION, _OF_TILE, _INNER_TILE = 8.0, 0.8, 0.0242, 0.0295
# With "q8_1" and few tiles: of the launches, and of 32 k of them all, also with q4_k.
_FEW_START, _FEW_TILES, _FEW_INNER = 4.8, 0.075, 0.0915


def has_inner(problem: Problem) -> bool:
    """Whether the weight is q4_k's."""
    part = integers.codes_of(problem.format, problem.shape, problem.stored.lead)
    return part is not None and part.added == INNER


class IntegerBatch(Route):
    """Quantize up to 64 tokens, and multiply them on integer tensor cores by q4_0's or q4_k's codes."""

    name = "integer_batch"

    def accepts(self, problem: Problem) -> str | None:
        rows, depth = problem.shape
        refused = why_not_few(problem, refusal, range(1, MOST_TOKENS + 1))
        if refused is None and (rows * depth >= 1 << 34 or depth >= 1 << 24):
            return "numbers of 32 bits do not reach through the scales"
        if refused is None and has_inner(problem) and problem.tokens < LEAST_INNER:
            return f"with q4_k it is for {LEAST_INNER} to {MOST_TOKENS} tokens"
        return refused

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        (rows, depth), processors = problem.shape, problem.device.multiprocessors
        tiles = choose(rows, processors).tiles
        waves = -(-rows // (16 * tiles * processors))
        of_tile, of_few = (_INNER_TILE, _FEW_INNER) if has_inner(problem) else (_OF_TILE, _FEW_TILES)
        cost = _START + max(waves * tiles * depth / Q8_BLOCK * of_tile, problem.reading / _FRACTION)
        return max(cost, _FEW_START + depth / Q8_BLOCK * of_few) if problem.activations == "q8_1" else cost

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, q, bias, out: multiply(x, preset, q, bias, out)

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        rows = 16 * choose(problem.shape[0], problem.device.multiprocessors).tiles
        tile = f"all tokens x {rows} rows a thread block, sums of {Q8_BLOCK} become float32"
        return f"tokens quantized by {problem.activations!r}, codes decoded in registers: batch_integers, {tile}"
