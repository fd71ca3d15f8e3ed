"""Products of few tokens with integer codes that are read in place, on a GPU: kernels/linear/integer_stream.cu.

Two launches: the first one quantizes the tokens (`kbitcupy.products.integer_activations`) into the order in which the
second one takes them; from Hopper on that fetches codes meanwhile. What it gives is the contract of
`kbitcupy.products.integers`: to the bit where a row and a token have one scale each, otherwise with the terms of units
added in another order, which is the same every time, and multiplied by the scale of a token after that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel, multiprocessors, shared_memory
from ..backend.structs import Constants, Struct
from ..backend.xp import named_dtype
from ..formats.base import IntegerCodes, register_templates
from ..formats.integer_codes import INNER, NOTHING, OFFSETS, ZERO_POINTS
from ..ops import source
from . import int8, integer_activations as tokens_of
from .activations import FLOATS
from .int8 import BIAS_KINDS, token_planes
from .integer_activations import NUMBERS, Q8_BLOCK
from .integers import PRODUCT, WEIGHT, codes_of, weight_argument, why_not
from .routes import MOST_ALIGNED, Device, Problem, Product, Route

#: How ``stream_integers`` cuts its work: warps of a team, teams of a thread block; turns along K of a phase; where in
#: shared memory tokens, what is known of their units, sums of warps, and sums of phases begin, and tiles of a team of
#: which the last are kept; bytes from row to row of scales, and of what stands beside them; units that share a scale,
#: and 2^32 over that; buffers of sums of a team, 1 or 2; bytes of a row that are brought to the L2 cache beforehand.
CUT = Struct(
    "Cut",
    warps="i4",
    teams="i4",
    phase="i4",
    x_at="i4",
    records_at="i4",
    partials_at="i4",
    kept_at="i4",
    kept="i4",
    row_bytes="i8",
    beside_bytes="i8",
    group="i4",
    per_group="u4",
    buffers="i4",
    prefetched="i4",
)
# Bytes of a thread block that are brought to the L2 cache while tokens are quantized.
_PREFETCHED = 160 << 10
# Units that share a scale, where those of a row do: more than a row has.
_ALL_UNITS = 1 << 20
_SIZES = Constants(NEIGHBOURS4=0, HALVES4=1, PAIRS4=2, BYTES8=3, STREAM_THREADS=512)
_MOST_TOKENS, _ROWS, _WARPS = 16, 16, _SIZES.STREAM_THREADS // 32
_OLDEST = 80  # with mma of 32 bytes
# Bytes of shared memory: of a warp's ring, of a tile's sums of a token, and that the kernel has beside.
_RING, _PITCH, _BESIDE = 4096, 20 * 4, 1024


@dataclass(frozen=True)
class Flavour:
    """An instance of the kernel, but for the number of tokens.

    Parameters
    ----------
    codes : str
        How codes lie, as the kernel names it.
    unit : int
        Elements of a row that share all scales, or what divides them; 0 for a row.
    added : str
        What stands beside scales, in C++.
    blocked : bool
        Whether activations have scales of 32.
    """

    codes: str
    unit: int
    added: str
    blocked: bool

    @property
    def turn(self) -> int:
        """k of a turn."""
        return 256 if self.codes == "BYTES8" else 512

    @property
    def layout(self) -> int:
        """Where codes of tokens lie."""
        if self.unit != 32 and self.codes == "BYTES8":
            return int(NUMBERS.OWN_BYTES)
        if self.codes == "NEIGHBOURS4":
            return int(NUMBERS.NIBBLES if self.unit in (32, 64) else NUMBERS.OWN_NIBBLES)
        return int(NUMBERS.HALVES if self.codes == "HALVES4" else NUMBERS.IN_TURN)

    def text(self, eights: int) -> str:
        """The arguments of the template."""
        return f"{self.codes}, {self.unit}, {self.added}, {'true' if self.blocked else 'false'}, {eights}"

    def scale_bytes(self) -> int:
        """Of the scales of a warp in shared memory."""
        parts = 4 if self.unit == 32 and self.codes == "NEIGHBOURS4" and self.added != "NOTHING" else 1
        return self.turn // parts // self.unit * _ROWS * (4 if self.added == "NOTHING" else 8) if self.unit else 0

    def turn_bytes(self, eights: int) -> int:
        """Of a turn of the tokens in shared memory, and of their units."""
        return self.turn * 8 * eights + self.turn_records(eights)

    def turn_records(self, eights: int) -> int:
        """Of the units alone."""
        return self.turn // self.unit * 8 * eights * (8 if self.blocked else 4) if self.unit else 0


def _flavours() -> tuple[Flavour, ...]:
    added = "NOTHING", "ZERO_POINTS", "OFFSETS"
    found = [
        Flavour(codes, unit, beside, blocked)
        for codes in ("NEIGHBOURS4", "BYTES8")
        for unit, blocked in ((0, False), (32, False), (64, False), (128, False), (32, True))
        for beside in (added if unit else added[:1])
    ]
    for codes, beside in (("HALVES4", "NOTHING"), ("PAIRS4", "OFFSETS")):
        found += [Flavour(codes, 32, beside, blocked) for blocked in (False, True)]
    return tuple(found)


def _template(hot: bool) -> Template:
    """Instances that must not spill, and those for groups of 32 of 4 bits with something beside scales, which may."""
    found = (f for f in _flavours() if hot != (f.codes == "NEIGHBOURS4" and f.unit == 32 and f.added != "NOTHING"))
    texts = tuple(flavour.text(eights) for flavour in found for eights in (1, 2))
    structs = BIAS_KINDS, NUMBERS, PRODUCT, _SIZES, WEIGHT, CUT
    return Template("linear/integer_stream.cu", "stream_integers", (texts,), hot=hot, structs=structs, least=_OLDEST)


_TEMPLATE = _template(True)
register_templates(_TEMPLATE, _template(False))
_SIGNATURE = (WEIGHT, CUT, *("p",) * 5, *("i4",) * 4, "u4", *("i4",) * 3)
_CODES = {(4, 1): "NEIGHBOURS4", (4, 16): "HALVES4", (4, 32): "PAIRS4", (8, 1): "BYTES8"}
_ADDED = {NOTHING: "NOTHING", ZERO_POINTS: "ZERO_POINTS", OFFSETS: "OFFSETS", INNER: "OFFSETS"}


def flavour_of(part: IntegerCodes, blocked: bool) -> Flavour | None:
    """The instance for codes and activations; None where there is none."""
    codes = _CODES.get((part.bits, part.width))
    group = part.group
    if codes is None or (group % 128 and group not in (32, 64) and not (blocked and group % Q8_BLOCK == 0)):
        return None
    unit = Q8_BLOCK if blocked else min(group, 128)
    return Flavour(codes, unit, _ADDED[part.added] if unit else "NOTHING", blocked)


def turned_over(part: IntegerCodes) -> tuple[int, int]:
    """What turns over the highest bit of codes, in all bytes of a word, and what that adds to zero points."""
    if part.bits == 4 and part.signed:
        return 0x08080808, 8
    if part.bits == 8 and not part.signed:
        return 0x80808080, -128
    return 0, 0


@dataclass(frozen=True, eq=False)
class _Plan:
    """The second launch of a product of one shape.

    Parameters
    ----------
    launch : callable
        The kernel, loaded.
    grid : tuple of int
        Thread blocks.
    cut : bytes
        `CUT`.
    flavour : Flavour
        The instance.
    sums : int
        Elements whose codes have a sum; 0 for all of a token.
    flip, flipped : int
        What turns over the highest bit of codes, and what that adds to zero points.
    """

    launch: Any
    grid: tuple[int, ...]
    cut: bytes
    flavour: Flavour
    sums: int
    flip: int
    flipped: int


@dataclass(frozen=True)
class _Cut:
    """`CUT` before it is packed, and what it takes.

    Parameters
    ----------
    warps, teams, phase, kept : int
        See `CUT`.
    blocks : int
        Thread blocks.
    places : tuple of int
        Where parts of the shared memory begin.
    shared : int
        Bytes of it.
    work : float
        What it costs, in turns of all warps.
    """

    warps: int
    teams: int
    phase: int
    kept: int
    blocks: int
    places: tuple[int, ...]
    shared: int
    work: float


@functools.lru_cache(maxsize=4096)
def choose_cut(flavour: Flavour, eights: int, rows: int, depth: int, processors: int, room: int) -> _Cut | None:
    """The cut with the least work for the busiest multiprocessor; None where the shared memory has no room."""
    cuts = (
        cut_of(flavour, eights, rows, depth, processors, room, warps, teams)
        for warps in range(1, _WARPS + 1)
        for teams in range(1, _WARPS // warps + 1)
    )
    return min(filter(None, cuts), key=lambda cut: cut.work, default=None)


def cut_of(
    flavour: Flavour, eights: int, rows: int, depth: int, processors: int, room: int, warps: int, teams: int
) -> _Cut | None:
    """The cut for so many warps and teams; None where the shared memory has no room for it."""
    turns, tiles, tokens = -(-depth // flavour.turn), -(-rows // _ROWS), 8 * eights
    rounds, here, buffers = -(-tiles // (processors * teams)), warps * teams, 1 if warps == 1 else 2
    fixed = here * (_RING + flavour.scale_bytes() + buffers * tokens * _PITCH) + _BESIDE
    whole = (room - fixed) // flavour.turn_bytes(eights)
    if whole < turns:
        fixed += teams * rounds * tokens * _ROWS * 4
        whole = (room - fixed) // flavour.turn_bytes(eights)
    if whole < 1:
        return None
    phases = -(-turns // whole)
    phase = -(-turns // phases)
    last = turns - (phases - 1) * phase
    along = (phases - 1) * -(-phase // warps) + -(-last // warps)
    # Few warps have too little under way, and memory likes neighbouring ones to read on where one ends; each phase
    # waits for its tokens, each tile for its sums.
    apart = 1.25 if warps < 4 and eights == 1 else 1.0
    work = (rounds * (along + 0.4 * phases) * apart + 1.5 * (phases - 1)) * max(here, 14)
    x_at = here * (_RING + flavour.scale_bytes())
    records_at = x_at + phase * flavour.turn * tokens
    partials_at = records_at + phase * flavour.turn_records(eights)
    kept_at = partials_at + here * buffers * tokens * _PITCH
    kept = rounds if phases > 1 else 0
    shared = kept_at + teams * kept * tokens * _ROWS * 4
    places = x_at, records_at, partials_at, kept_at
    return _Cut(warps, teams, phase, kept, min(processors, tiles), places, shared, work)


@functools.cache
def _kernel(flavour: Flavour, eights: int, threads: int, shared: int) -> Kernel:
    return Kernel(_TEMPLATE, (flavour.text(eights),), threads, shared, signature=_SIGNATURE, early=True)


@functools.lru_cache(maxsize=4096)
def _plan(part: IntegerCodes, blocked: bool, tokens: int, rows: int, depth: int, device: int) -> _Plan:
    """How a product is computed, its kernel compiled."""
    flavour, eights = flavour_of(part, blocked), -(-tokens // 8)
    assert flavour is not None
    cut = choose_cut(flavour, eights, rows, depth, multiprocessors(device), shared_memory(device))
    assert cut is not None
    x_at, records_at, partials_at, kept_at = cut.places
    each = part.scale_of.per if part.scale_of.outer == 1 else 0
    together = part.group // flavour.unit if part.group and flavour.unit else _ALL_UNITS
    packed = CUT.pack(
        warps=cut.warps,
        teams=cut.teams,
        phase=cut.phase,
        x_at=x_at,
        records_at=records_at,
        partials_at=partials_at,
        kept_at=kept_at,
        kept=cut.kept,
        row_bytes=each * np.dtype(named_dtype(part.scale_dtype)).itemsize,
        beside_bytes=each * np.dtype(named_dtype(part.beside_dtype)).itemsize,
        group=together,
        per_group=0 if together == 1 else (1 << 32) // together + 1,
        buffers=1 if cut.warps == 1 else 2,
        prefetched=_PREFETCHED // (cut.teams * _ROWS) // 128 * 128,
    )
    flip, flipped = turned_over(part)
    ready = _kernel(flavour, eights, 32 * cut.warps * cut.teams, cut.shared).ready(device)
    return _Plan(ready.launch, (cut.blocks,), packed, flavour, flavour.unit, flip, flipped)


def multiply(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty and on the current device; nothing stands against it (`IntegerStream`)."""
    rows, depth = q.shape
    tokens = out.size // rows
    single = out
    if out.dtype == np.float64:
        single = _xp.namespace(out).empty(out.shape, np.float32)
    quantized = isinstance(x, QuantizedArray)
    blocked = preset == "q8_1" and not quantized
    part = codes_of(q.format, q.shape, q.lead)
    assert part is not None
    plan = _plan(part, blocked, tokens, rows, depth, out.data.device_id)
    padded, size = tokens_of.padded_of(tokens), tokens_of.pitch_of(depth)
    many = -(-depth // plan.sums) if plan.sums else 1
    scratch = _xp.namespace(out).cuda.alloc(padded * size + 4 * padded * many * (2 if blocked else 1) + 4 * padded)
    codes = scratch.ptr
    sums = codes + padded * size
    scales, step = sums + 4 * padded * many, 1
    if quantized:
        stored, given = token_planes(x)
        taken = _xp.contiguous(stored)
        tokens_of.quantize_into(taken, tokens, None, codes, 0, sums, plan.flavour.layout, plan.sums)
        scales, step = given.data.ptr, int(given.size == tokens)
    else:
        floats = tokens_of.floats_of(x)
        tokens_of.quantize_into(floats, tokens, preset, codes, scales, sums, plan.flavour.layout, plan.sums)
    bias = None if bias is None else source(bias, FLOATS)
    added, kind = (0, 0) if bias is None else (bias.data.ptr, int8.bias_kind(bias.dtype))
    pointers = codes, scales, sums, added, single.data.ptr
    numbers = rows, tokens, depth, step, plan.flip, plan.flipped, kind, int8.bias_kind(single.dtype)
    plan.launch(plan.grid, (weight_argument(q), plan.cut, *pointers, *numbers))
    if single is not out:
        int8.widened(single, out)


# ---- the route -------------------------------------------------------------------------------------------------------

# Microseconds of the launches; the fraction of the bandwidth at which codes pass, of 8 tokens and of more.
_START, _FRACTION, _MORE_FRACTION = 8.0, 0.85, 0.65


def why_not_streamed(preset: str, problem: Problem, part: IntegerCodes, gpu: Device) -> str | None:
    """What stands against reading codes in place."""
    depth = problem.shape[1]
    if problem.tokens > _MOST_TOKENS:
        return f"it is for up to {_MOST_TOKENS} tokens"
    flavour = flavour_of(part, preset == "q8_1")
    if part.scale_of.outer != 1 and part.scale_of.run < problem.shape[0]:
        return "members have scales of their own"
    if flavour is None:
        return f"it has no kernel for codes of {part.bits} bits in groups of {part.group}"
    if not flavour.blocked and part.group > 128:
        return f"sums of groups of {part.group} would be rounded in parts of 128"
    if flavour.unit and part.added == OFFSETS and turned_over(part)[1]:
        return "what turns signed codes over would be rounded with their offsets"
    if not depth or depth % 32 or problem.stored.codes < MOST_ALIGNED or problem.stored.scales < 4:
        return f"K must be a multiple of 32, and the planes start at multiples of {MOST_ALIGNED} and 4 bytes"
    if problem.shape[0] >= 1 << 30:
        return "numbers of 32 bits do not reach through the rows"
    if gpu.capability < _OLDEST:
        return "it needs a GPU of compute capability 8.0"
    cut = choose_cut(flavour, -(-problem.tokens // 8), problem.shape[0], depth, gpu.multiprocessors, gpu.shared_memory)
    return None if cut else "the device has too little shared memory"


class IntegerStream(Route):
    """Quantize tokens, and multiply them on integer tensor cores by codes that are read in place."""

    name = "integer_stream"

    def accepts(self, problem: Problem) -> str | None:
        if problem.device is None:
            return "the arrays are in host memory"
        if problem.experts:
            return "it is for one weight"
        refusal = why_not(problem.activations, problem.format, problem.shape, problem.stored.lead)
        part = codes_of(problem.format, problem.shape, problem.stored.lead)
        if refusal is not None or part is None:
            return refusal
        whole = problem.format.integers(problem.shape, problem.stored.lead)
        if problem.activations == "int8" and whole is not None and whole.shares == "row":
            return "W8A8 has kernels of its own"
        return why_not_streamed(problem.activations or "", problem, part, problem.device)

    def cost(self, problem: Problem) -> float:
        return _START + problem.reading / (_FRACTION if problem.tokens <= 8 else _MORE_FRACTION)

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, q, bias, out: multiply(x, preset, q, bias, out)

    def describe(self, problem: Problem) -> str:
        how = f"tokens quantized by {problem.activations!r}, codes read in place for integer tensor cores"
        return f"{how}: stream_integers"
