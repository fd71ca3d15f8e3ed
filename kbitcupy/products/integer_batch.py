"""Up to 64 int8 tokens times weights of 4-bit integer codes in short groups, on Hopper.

Two launches: tokens are quantized, then multiplied by kernels/linear/integer_batch_sm90a.cu. A thread block has some
rows and all tokens; what it gives is the contract of `kbitcupy.products.integers`, terms of units being added in the
order of k, parts of k in theirs, which is the same every time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel
from ..backend.structs import Constants, Struct
from ..formats.base import IntegerCodes, register_templates
from ..ops import source, widen
from . import integer_activations as tokens_of, integer_tile, integers
from .activations import FLOATS
from .int8 import BIAS_KINDS, bias_kind, token_planes
from .integer_activations import Q8_BLOCK
from .integer_tile import SIZES as STORED
from .routes import MOST_ALIGNED, Problem, Product, Route

#: Numbers of the kernel: tokens; elements of k of a stage, and most stages of a ring; how codes lie; what is taken off
#: them.
SIZES = Constants(
    BATCH_TOKENS=64,
    BATCH_K=256,
    BATCH_STAGES=16,
    HALVES4=0,
    PAIRS4=1,
    CONSTANT=0,
    POINTS=1,
    MINIMA=2,
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
# Warps of a thread block that multiply, and its threads; bytes of its shared memory beside barriers.
_WARPS, _THREADS, _ROOM = 8, 384, 226 << 10


@dataclass(frozen=True)
class Flavour:
    """An instance of the kernel, but for tokens and tiles.

    Parameters
    ----------
    order : {"HALVES4", "PAIRS4"}
        How codes lie.
    unit : {32, 64}
        Elements whose sum is scaled.
    added : {"CONSTANT", "POINTS", "MINIMA"}
        What is taken off codes, or added.
    blocked : bool
        Whether tokens have a scale for 32 elements.
    exact : bool
        Whether scales are those of GGUF's types.
    """

    order: str
    unit: int
    added: str
    blocked: bool
    exact: bool

    def text(self, tiles: int) -> str:
        """The arguments of the template."""
        flags = ", ".join(str(flag).lower() for flag in (self.blocked, self.exact))
        return f"{self.order}, {self.unit}, {self.added}, {flags}, {tiles}"


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Parameters
    ----------
    tiles : int
        Of 16 rows, of a thread block.
    """

    tiles: int

    @property
    def most(self) -> int:
        """Tiles of a warp; some have one less."""
        return 4 if self.tiles > 4 else 2

    @property
    def row_groups(self) -> int:
        """Groups of warps with rows of their own; the others share k."""
        return 4 if self.tiles > 8 else 2

    def packed(self, flavour: Flavour) -> tuple[bytes, int]:
        """The kernel's argument, and bytes of shared memory."""
        rows, units, tokens = 16 * self.tiles, SIZES.BATCH_K // flavour.unit, MOST_TOKENS
        minima = flavour.added == "MINIMA"
        entry = 8 if flavour.added == "POINTS" else 4
        entries = units * entry * (1 + minima)
        numbers = 4 * units * tokens * (flavour.blocked + minima)
        codes_at = -(-(SIZES.BATCH_K * tokens + numbers) // 1024) * 1024
        table_at = codes_at + rows * SIZES.BATCH_K // 2
        table = rows * (entries + (entry if entries % 32 == 0 else 0))
        stage = -(-(table_at + table) // 1024) * 1024
        stages = min(SIZES.BATCH_STAGES, (_ROOM - 1024) // stage)
        k_groups = _WARPS // self.row_groups
        size = max(stages * stage, k_groups * tokens * (rows + 4) * 4) + 1024
        packed = CUT.pack(
            tiles=self.tiles, row_groups=self.row_groups, stages=stages, stage_bytes=stage, table_at=table_at
        )
        return packed, size


#: By tiles of a thread block, which warps share evenly.
CUTS = {tiles: Cut(tiles) for tiles in (2, 3, 4, 6, 7, 8, 12, 13, 14, 15, 16)}


def flavours() -> tuple[Flavour, ...]:
    """All that there are."""
    return tuple(Flavour("HALVES4", Q8_BLOCK, "CONSTANT", blocked, True) for blocked in (False, True))


def _template(hot: bool) -> Template:
    """Those of GGUF's types; and others, some of which are a few registers short."""
    texts = tuple(flavour.text(tiles) for flavour in flavours() if flavour.exact == hot for tiles in (4, 2))
    structs = BIAS_KINDS, STORED, SIZES, CUT
    return Template("linear/integer_batch_sm90a.cu", "batch_integers", (texts,), hot=hot, structs=structs)


_TEMPLATE = _template(True)
register_templates(_TEMPLATE)
_SIGNATURE = (*(_tma.MAP_BYTES,) * 4, CUT, *("p",) * 5, *("i4",) * 12, "u4")
_NO_MAP = bytes(_tma.MAP_BYTES)


@functools.cache
def _kernel(flavour: Flavour, tiles: int, shared: int) -> Kernel:
    return Kernel(_TEMPLATE, (flavour.text(tiles),), _THREADS, shared, signature=_SIGNATURE, early=True)


@dataclass(frozen=True)
class Told:
    """What the kernel is told of a weight of integer codes.

    Parameters
    ----------
    flavour : Flavour
        The instance.
    layout : int
        Of tokens, a number of `kbitcupy.products.integer_activations`.
    per_row, share : int
        Scales of a row, or blocks of them, and units that share one.
    scale_kind, zero_kind, lowest, middle : int
        As those of `kbitcupy.products.integer_tile.Codes`.
    """

    flavour: Flavour
    layout: int
    per_row: int
    share: int
    scale_kind: int
    zero_kind: int
    lowest: int
    middle: int


@functools.lru_cache(maxsize=1024)
def told(part: IntegerCodes, rows: int, depth: int, blocked: bool) -> Told | str:
    """What the kernel is told, or what stands against it."""
    if part.bits != 4:
        return "it is for codes of 4 bits"
    if part.width != 16:
        return "it is for q4_0"
    found = integer_tile.told(part, rows, depth, blocked)
    if isinstance(found, str):
        return found
    codes = found.codes
    if not found.per_row or not (blocked or codes.group in (Q8_BLOCK, 64)):
        return f"groups are of {codes.group or depth} elements: it is for 32 and 64"
    if part.width == 16:
        flavour = Flavour("HALVES4", Q8_BLOCK, "CONSTANT", blocked, True)
        if depth % SIZES.BATCH_K:
            return f"K must be a multiple of {SIZES.BATCH_K}"
    else:
        flavour = Flavour("HALVES4", Q8_BLOCK if blocked else codes.group, "POINTS", blocked, False)
    numbers = codes.scale_kind, codes.zero_kind, codes.lowest, codes.middle
    share = (codes.group or depth) // flavour.unit
    return Told(flavour, found.layout, found.per_row, share, *numbers)


@functools.lru_cache(maxsize=4096)
def choose(rows: int, processors: int) -> Cut:
    """The cut with the least work for the busiest multiprocessor."""

    def work(cut: Cut) -> tuple[float, int]:
        return -(-rows // (16 * cut.tiles * processors)) * (cut.tiles + 0.5), -cut.tiles

    return min(CUTS.values(), key=work)


def _numbers_map(address: int, units: int, padded: int, flavour: Flavour) -> bytes:
    """That of numbers of tokens [units, padded], of a stage."""
    many = SIZES.BATCH_K // flavour.unit
    return _tma.byte_matrix(address, units, 4 * padded, 4 * padded, many, 4 * MOST_TOKENS, False)


@dataclass(frozen=True, eq=False)
class Plan:
    """The second launch of a product of one shape.

    Parameters
    ----------
    launch : callable
        The kernel, loaded.
    grid : tuple of int
        Thread blocks.
    cut : bytes
        `CUT`.
    rows : int
        Of a thread block.
    known : Told
        Of the weight.
    """

    launch: Any
    grid: tuple[int, ...]
    cut: bytes
    rows: int
    known: Told


@functools.lru_cache(maxsize=4096)
def plan(known: Told, rows: int, cut: Cut, device: int) -> Plan:
    """How a product is computed, its kernel compiled."""
    packed, shared = cut.packed(known.flavour)
    ready = _kernel(known.flavour, cut.most, shared).ready(device)
    return Plan(ready.launch, (-(-rows // (16 * cut.tiles)),), packed, 16 * cut.tiles, known)


def launch(made: Plan, addresses: tuple[int, ...], bias: Any, out: Any, depth: int) -> None:
    """Fill `out` from tokens, their sums and scales, and how far apart these are, and a weight's planes."""
    a, sums, scales, step, padded, weight, scale, zero = addresses
    known = made.known
    rows, flavour = out.shape[-1], known.flavour
    tokens, pitch, units = out.size // rows, tokens_of.pitch_of(depth), depth // Q8_BLOCK
    added = (0, 0) if bias is None else (bias.data.ptr, bias_kind(bias.dtype))
    maps = (
        _tma.byte_matrix(a, tokens, pitch, pitch, MOST_TOKENS),
        _tma.byte_matrix(weight, rows, depth // 2, depth // 2, made.rows),
        _numbers_map(scales, units, padded, flavour) if flavour.blocked else _NO_MAP,
        _numbers_map(sums, units, padded, flavour) if flavour.added == "MINIMA" else _NO_MAP,
    )
    pointers = out.data.ptr, scales, scale, zero, added[0]
    kinds = known.scale_kind, known.zero_kind, known.lowest, known.middle, added[1], bias_kind(out.dtype)
    numbers = tokens, rows, depth, known.per_row, known.share, step, *kinds
    made.launch(made.grid, (*maps, made.cut, *pointers, *numbers, 0))


def multiply(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any, known: Told, processors: int) -> None:
    """Fill `out`, which is not empty and whose device is the current one, from floats or int8."""
    part = integers.codes_of(q.format, q.shape, q.lead)
    assert part is not None
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    tokens = out.size // rows
    single = out if out.dtype.name in FLOATS else _xp.namespace(out).empty(out.shape, np.float32)
    pitch, padded, flavour = tokens_of.pitch_of(depth), tokens_of.padded_of(tokens), known.flavour
    blocks = depth // Q8_BLOCK
    of_scales, of_sums = blocks if flavour.blocked else 1, blocks if flavour.added == "MINIMA" else 0
    scratch = _xp.namespace(out).cuda.alloc(tokens * pitch + 4 * (of_scales + of_sums) * padded)
    a, scales, step = scratch.ptr, scratch.ptr + tokens * pitch, 1
    sums = scales + 4 * of_scales * padded if of_sums else 0
    if isinstance(x, QuantizedArray):
        given, found = token_planes(x)
        tokens_of.quantize_into(_xp.contiguous(given), tokens, None, a, 0, sums, known.layout, Q8_BLOCK)
        scales, step = found.data.ptr, int(found.size == tokens)
    else:
        tokens_of.quantize_into(tokens_of.floats_of(x), tokens, preset, a, scales, sums, known.layout, Q8_BLOCK)
    cut = choose(rows, processors)
    weight, scale = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    zero = 0 if part.beside is None else q.planes[part.beside].data.ptr
    addresses = a, sums, scales, step, padded, weight, scale, zero
    launch(plan(known, rows, cut, out.data.device_id), addresses, bias, single, depth)
    if single is not out:
        widen(single, out)


# ---- the route -----------------------------------------------------------------------------------------------------


# Microseconds of the launches; the fraction of the bandwidth at which codes come; of a tile of 16 rows and 32 k, of
# which a thread block has some, and what minima and scales that are not halves add.
_START, _FRACTION = 8.0, 0.8
_OF_UNIT, _OF_MINIMA, _OF_SCALES = {64: 0.02, 32: 0.0235}, 0.005, 0.004


class IntegerBatch(Route):
    """Quantize up to 64 tokens, and multiply them on integer tensor cores by codes of 4 bits in short groups."""

    name = "integer_batch"

    def accepts(self, problem: Problem) -> str | None:
        gpu = problem.device
        if gpu is None:
            return "the arrays are in host memory"
        if problem.experts:
            return "it is for one weight"
        preset, (rows, depth), lead = problem.activations, problem.shape, problem.stored.lead
        refused = integers.why_not(preset, problem.format, problem.shape, lead)
        found: Told | str = refused or self._told(problem)
        if isinstance(found, str):
            return found
        if gpu.capability != 90 or not gpu.tensor_maps:
            return "it is for compute capability 9.0"
        if problem.tokens > MOST_TOKENS:
            return f"it is for up to {MOST_TOKENS} tokens"
        if not depth or depth % Q8_BLOCK or min(problem.stored.codes, problem.stored.scales) < MOST_ALIGNED:
            return f"K must be a multiple of {Q8_BLOCK}, and the planes start at multiples of {MOST_ALIGNED} bytes"
        if rows * found.per_row >= 1 << 29 or depth >= 1 << 24:
            return "numbers of 32 bits do not reach through the rows"
        return None

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        flavour, processors = self._known(problem).flavour, problem.device.multiprocessors
        rows, depth = problem.shape
        cut = choose(rows, processors)
        waves = -(-rows // (16 * cut.tiles * processors))
        of_tile = _OF_UNIT[flavour.unit] + _OF_MINIMA * (flavour.added == "MINIMA")
        of_tile += _OF_SCALES * (flavour.blocked and not flavour.exact)
        return _START + max(waves * cut.tiles * depth / Q8_BLOCK * of_tile, problem.reading / _FRACTION)

    def prepare(self, problem: Problem) -> Product:
        assert problem.device is not None
        known, preset, processors = self._known(problem), problem.activations or "", problem.device.multiprocessors
        return lambda x, q, bias, out: multiply(x, preset, q, bias, out, known, processors)

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        unit = self._known(problem).flavour.unit
        rows = 16 * choose(problem.shape[0], problem.device.multiprocessors).tiles
        tile = f"all tokens x {rows} rows a thread block, sums of {unit} become float32"
        return f"tokens quantized by {problem.activations!r}, codes decoded in registers: batch_integers, {tile}"

    def _told(self, problem: Problem) -> Told | str:
        part = integers.codes_of(problem.format, problem.shape, problem.stored.lead)
        assert part is not None
        return told(part, *problem.shape, problem.activations == "q8_1")

    def _known(self, problem: Problem) -> Told:
        found = self._told(problem)
        assert isinstance(found, Told)
        return found
