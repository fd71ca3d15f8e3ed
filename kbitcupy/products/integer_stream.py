"""Products of few tokens with integer codes that are read in place, on a GPU: kernels/linear/integer_stream.cu.

From Hopper on very few tokens are quantized by each thread block of the product for itself, while its first codes are
on their way. Otherwise there are two launches: the first one quantizes the tokens
(`kbitcupy.products.integer_activations`) into the order in which the second one takes them. What it gives is the
contract of `kbitcupy.products.integers`: to the bit where a row and a token have one scale each, otherwise with the
terms of units added in another order, which is the same every time, and multiplied by the scale of a token after that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma, xp as _xp
from ..backend.compile import CXX_TYPES, Template, cxx_type
from ..backend.launch import Kernel, Planned, capability, multiprocessors, packed, shared_memory
from ..backend.structs import Constants, Struct
from ..backend.xp import named_dtype
from ..formats.base import Format, IntegerCodes, register_templates
from ..formats.integer_codes import FP4, INNER, IQ4, NOTHING, OFFSETS, ZERO_POINTS
from ..ops import source, widen
from . import int8, integer_activations as tokens_of
from .activations import FLOATS, OCTET
from .int8 import BIAS_KINDS, token_planes
from .integer_activations import NUMBERS, Q8_BLOCK, Quantizing
from .integers import PRODUCT, WEIGHT, Chosen, MultiplyExperts, codes_of, stored_codes, weight_argument, why_not
from .routes import MOST_ALIGNED, Device, Problem, Product, Route

#: How ``stream_integers`` cuts its work: warps of a team, teams of a thread block; phases, in which all warps of a team
#: go through their shares of K; slots of the ring of a warp; where in shared memory scales, what is known of units of
#: tokens, sums of warps, sums of phases, barriers and quantized tokens begin, and tiles of a team of which sums are
#: kept; whether scales of a share begin at multiples of 16 bytes; bytes from row to row of scales, and of what stands
#: beside them; units that share a scale, and 2^32 over that; shares of a group that is not inside one.
CUT = Struct(
    "Cut",
    warps="i4",
    teams="i4",
    phases="i4",
    ring="i4",
    scales_at="i4",
    records_at="i4",
    sums_at="i4",
    kept_at="i4",
    barriers_at="i4",
    tokens_at="i4",
    kept="i4",
    whole="i4",
    group="i4",
    per_group="u4",
    shares="i4",
    row_bytes="i8",
    beside_bytes="i8",
)
# Units that share a scale, where those of a row do: more than a row has.
_ALL_UNITS = 1 << 20


def pairs_of(values: Sequence[int]) -> tuple[int, ...]:
    """Two bytes for each of 16 values, which add up to it, as words of a constant: those of the lower eight, then of
    the upper ones.

    A kernel permutes bytes by codes. Where the highest bit of a code is set it gets, in place of a lower byte, eight
    times the highest bit of that: 0 or -1; where it is not set, the same of the upper byte. So each byte is what makes
    up for that, and has a sign that agrees with it.
    """
    both = []
    for low, high in zip(values[:8], values[8:], strict=True):
        of_low, of_high = -int(low < 0), -int(high < 0)
        both.append((low - of_high, high - of_low))
    halves = np.array(both, np.int8).T
    assert ((halves < 0) == (np.reshape(values, (2, 8)) < 0)).all()
    return tuple(int(word) for half in halves for word in np.ascontiguousarray(half).view("<i4"))


_SIZES = Constants(
    NEIGHBOURS4=0,
    HALVES4=1,
    PAIRS4=2,
    BYTES8=3,
    MINIMA4=4,
    TABLE4=5,
    TABLE_HALVES4=6,
    FP4_PAIRS=pairs_of(FP4),
    IQ4_PAIRS=pairs_of(IQ4),
    STREAM_THREADS=512,
    SHARE_OF_EIGHT=512,
    SHARE_OF_SIXTEEN=1024,
    SUMS_RING=4,
    SUMS_LATER=2,
    LONG_UNIT=256,
    SHARES=512,
    MINIMA_STEP=24,
    MINIMA_OF_BLOCK=208,
    FEW_THREADS=128,
    FEW_REGISTERS=4096,
    ROW_THREADS=128,
    ROW_REGISTERS=4096,
)
#: Thread blocks of a cluster that share K.
_NO_SPLIT, _TWO = Constants(SPLIT=1), Constants(SPLIT=2)
# Codes that only blocks of GGUF have. Units of instances, and those whose sums stay integers to the end.
_GGUF = "HALVES4", "PAIRS4", "MINIMA4", "TABLE4", "TABLE_HALVES4"
# ... whose scales are read by blocks of 256.
_BLOCKS, _BLOCK = _GGUF[2:], 256
_WHOLE = 0, _SIZES.SHARES
_UNITS = *_WHOLE, 32, 64, 128, _SIZES.LONG_UNIT
MOST_TOKENS, _ROWS, _WARPS = 16, 16, _SIZES.STREAM_THREADS // 32
_OLDEST, _BULK = 80, 90  # with mma of 32 bytes; with TMA
# Thread blocks that have a token, where all of one shares a scale.
_CLUSTERS = Constants(CLUSTER=8)
# K up to which 16 times the sum of a row stays below 2^31, and 2^32 over a number of units divides by it.
_MOST_DEPTH = (1 << 31) // (16 * 15 * 128) // 1024 * 1024
# Bytes of shared memory: of a slot of the ring, of a warp's sums of eight tokens, and what it takes to begin at a
# multiple of 1024. Slots of a ring: 16 warps have 64 KB under way with two, and more make all of it later.
_SLOT, _SUMS, _ALIGNING, _RING = 2048, 512, 1024, 2
# Elements of a weight up to which blocks share K, where there is a kernel for it, and K from which on they do.
_MOST_SPLIT, _LEAST_SPLIT = 1 << 26, 4096
# Tokens that each block quantizes for itself.
_MOST_OWN = 3
# Tokens that a launch of small blocks quantizes, where 32 share a scale, and elements of a thread.
_MOST_FEW, _FOUR = 16, 4
# ... and a cluster of them, where all of one share a scale; products of more leave it no room.
_MOST_ROWS, _ROW_DEPTH = 8, OCTET * _CLUSTERS.CLUSTER * _SIZES.ROW_THREADS


@dataclass(frozen=True)
class Flavour:
    """An instance of the kernel, but for the number of tokens.

    Parameters
    ----------
    codes : str
        How codes lie, as the kernel names it.
    unit : int
        Elements of a row that share all scales, or what divides them; 0 for a row, `_SIZES.SHARES` for groups that are
        a multiple of that.
    added : str
        What stands beside scales, in C++.
    blocked : bool
        Whether activations have scales of 32.
    signed : bool
        Whether codes are multiplied as signed ones.
    """

    codes: str
    unit: int
    added: str
    blocked: bool
    signed: bool

    @property
    def eights(self) -> tuple[int, ...]:
        """Tokens of instances, in eights; 0 for one token."""
        return (*((0,) if self.alone else ()), 1, 2)

    @property
    def splits(self) -> bool:
        """Whether two thread blocks may share K of small weights, with more than 8 tokens."""
        return self.blocked and self.codes == "PAIRS4"

    @property
    def alone(self) -> bool:
        """Whether one token has an instance of its own."""
        return self.blocked and self.codes in _GGUF

    @property
    def layout(self) -> int:
        """Where codes of tokens lie."""
        if self.unit != 32 and self.codes == "BYTES8":
            return int(NUMBERS.OWN_BYTES)
        if self.codes == "NEIGHBOURS4":
            return int(NUMBERS.NIBBLES if self.unit in (32, 64) else NUMBERS.OWN_NIBBLES)
        if self.codes == "TABLE_HALVES4":
            return int(NUMBERS.HALVES_IN_TURN)
        return int(NUMBERS.HALVES if self.codes in ("HALVES4", "MINIMA4") else NUMBERS.IN_TURN)

    def text(self, eights: int) -> str:
        """The arguments of the template."""
        blocked, signed = (str(flag).lower() for flag in (self.blocked, self.signed))
        return f"{self.codes}, {self.unit}, {self.added}, {blocked}, {signed}, {eights}"

    @property
    def layout_name(self) -> str:
        """`layout` by its name."""
        names = "IN_TURN", "NIBBLES", "HALVES", "OWN_BYTES", "OWN_NIBBLES", "HALVES_IN_TURN"
        return next(name for name in names if getattr(NUMBERS, name) == self.layout)

    def warp_bytes(self, eights: int, split: int = 1) -> tuple[int, int]:
        """Of shared memory of a warp: its scales, and what it knows of units of tokens."""
        if self.unit in _WHOLE:
            return 0, 0
        # Of powers of two beside sixteen tokens, what stands beside them takes as much room.
        words = 2 if self.codes == "TABLE4" and eights == 2 else 1
        share, eights = share_of(self, eights, split), max(eights, 1)
        units = share // self.unit
        if self.codes == "PAIRS4":  # minima stand apart, and the sums of tokens that they are multiplied by
            blocks = share // 256
            minima, sums = blocks * (_ROWS + int(_SIZES.MINIMA_OF_BLOCK)), blocks * eights * 128
            return 4 * (units * _ROWS + minima), 4 * (units * 8 * eights * self.blocked + sums)
        if self.codes in _BLOCKS:
            blocks = share // _BLOCK if self.codes == "MINIMA4" else 0
            minima, sums = blocks * int(_SIZES.MINIMA_OF_BLOCK), blocks * eights * 128
            return 4 * (units * _ROWS * words + minima), 4 * (units * 8 * eights + sums)
        beside = self.added != "NOTHING"
        return units * _ROWS * (8 if beside else 4), units * 8 * eights * 4 * (self.blocked + beside)

    @property
    def sums(self) -> int:
        """Elements of a token whose codes have a sum; 0 for all of them."""
        return int(_SIZES.LONG_UNIT) if self.unit == _SIZES.SHARES else self.unit

    @property
    def by_rows(self) -> bool:
        """Whether `quantize_few_rows` has a kernel, beside whose blocks products of up to eight tokens leave room."""
        return self.codes == "NEIGHBOURS4" and not self.blocked and self.unit >= 128

    def token_bytes(self, depth: int) -> int:
        """Of shared memory of a token that the block quantizes: codes, scales, sums."""
        units = -(-depth // self.sums) if self.sums else 1
        return tokens_of.pitch_of(depth) + 4 * (units if self.blocked else 1) + 4 * units


def share_of(flavour: Flavour, eights: int, split: int = 1) -> int:
    """k of a warp, whose tokens stay in its registers."""
    if split > 1:
        return int(_SIZES.SHARE_OF_EIGHT)
    if flavour.unit == _SIZES.SHARES:
        return int(_SIZES.SHARES) // max(eights, 1)
    fewer = eights <= 1 or flavour.added == "INNER" or flavour.codes == "TABLE4"
    return int(_SIZES.SHARE_OF_EIGHT if fewer else _SIZES.SHARE_OF_SIXTEEN)


def most_warps(flavour: Flavour, eights: int) -> int:
    """Of a block."""
    return _WARPS // 2 if share_of(flavour, eights) > _SIZES.SHARES else _WARPS


def _flavours() -> tuple[Flavour, ...]:
    added = "NOTHING", "ZERO_POINTS", "OFFSETS"
    found = [
        Flavour(codes, unit, beside, blocked, signed)
        for codes in ("NEIGHBOURS4", "BYTES8")
        for unit, blocked in (
            (0, False),
            (512, False),
            (32, False),
            (64, False),
            (128, False),
            (256, False),
            (32, True),
        )
        for beside in (added if unit % 512 else added[:1])
        for signed in ((True, False) if beside == "OFFSETS" else (True,))
    ]
    for codes, beside in (("HALVES4", "NOTHING"), ("PAIRS4", "OFFSETS")):
        found += [Flavour(codes, 32, beside, blocked, beside == "NOTHING") for blocked in (False, True)]
    found.append(Flavour("MINIMA4", 32, "OFFSETS", True, False))
    for codes, beside in (("TABLE4", "NOTHING"), ("TABLE_HALVES4", "NOTHING"), ("TABLE_HALVES4", "INNER")):
        found.append(Flavour(codes, 32, beside, True, True))
    return tuple(found)


_STRUCTS = BIAS_KINDS, NUMBERS, PRODUCT, _SIZES, WEIGHT, CUT


def _template(hot: bool) -> Template:
    """Instances that must not spill; and those for short groups, but GGUF's with activations as short, which may."""
    found = (
        f
        for f in _flavours()
        if hot == (f.unit not in (32, 64) or (f.blocked and (f.codes in _GGUF or f.added == "NOTHING")))
    )
    texts = tuple(flavour.text(eights) for flavour in found for eights in flavour.eights)
    structs = (*_STRUCTS, _NO_SPLIT)
    return Template("linear/integer_stream.cu", "stream_integers", (texts,), hot=hot, structs=structs, least=_OLDEST)


_TEMPLATE = _template(True)
_SPLIT = Template(
    "linear/integer_stream_split.cu",
    "stream_integers",
    (tuple(flavour.text(2) for flavour in _flavours() if flavour.splits),),
    structs=(*_STRUCTS, _TWO),
    least=_BULK,
)
_FEW = Template(
    "linear/integer_tokens.cu",
    "quantize_few_integers",
    (
        tuple(CXX_TYPES[name] for name in FLOATS),
        (*dict.fromkeys(flavour.layout_name for flavour in _flavours() if flavour.blocked), "HALF_ROWS"),
    ),
    structs=(NUMBERS, _SIZES, _CLUSTERS),
    least=_OLDEST,
)
_FEW_ROWS = Template(
    "linear/integer_tokens.cu",
    "quantize_few_rows",
    (
        tuple(CXX_TYPES[name] for name in FLOATS),
        tuple(dict.fromkeys(f"{flavour.layout_name}, {flavour.sums}" for flavour in _flavours() if flavour.by_rows)),
    ),
    structs=(NUMBERS, _SIZES, _CLUSTERS),
    least=_BULK,
)
register_templates(_TEMPLATE, _template(False), _SPLIT, _FEW, _FEW_ROWS)
_NUMBERS, _FEW_NUMBERS = (*("i4",) * 7, "u4", *("i4",) * 5), ("i4", "i4")
_SIGNATURE = (WEIGHT, CUT, tma.MAP_BYTES, *("p",) * 7, _NUMBERS)
_FEW_SIGNATURE = "p", "p", "p", "p", _FEW_NUMBERS
_CODES = {(4, 1): "NEIGHBOURS4", (4, 16): "HALVES4", (4, 32): "PAIRS4", (8, 1): "BYTES8"}
_TABLES = {1: "TABLE4", 16: "TABLE_HALVES4"}
_ADDED = {NOTHING: "NOTHING", ZERO_POINTS: "ZERO_POINTS", OFFSETS: "OFFSETS", INNER: "OFFSETS"}


def flavour_of(part: IntegerCodes, blocked: bool) -> Flavour | None:
    """The instance for codes and activations; None where there is none."""
    if part.table:
        return Flavour(_TABLES[part.width], part.group, part.added.upper(), True, True) if blocked else None
    codes = _CODES.get((part.bits, part.width))
    group = part.group
    if codes == "HALVES4" and part.added == OFFSETS:
        return Flavour("MINIMA4", group, "OFFSETS", True, False) if blocked else None
    unit = Q8_BLOCK if blocked else _SIZES.SHARES if group and group % _SIZES.SHARES == 0 else group
    if codes is None or unit not in _UNITS or (blocked and group % Q8_BLOCK):
        return None
    added = "NOTHING" if unit in _WHOLE else _ADDED[part.added]
    return Flavour(codes, unit, added, blocked, part.signed or added != "OFFSETS")


def shares_of(part: IntegerCodes, flavour: Flavour, eights: int) -> int:
    """Shares of a group that is not inside one."""
    return part.group // share_of(flavour, eights) if flavour.unit == _SIZES.SHARES else 1


def turned_over(part: IntegerCodes, flavour: Flavour) -> tuple[int, int]:
    """What turns over the highest bit of codes, in all bytes of a word, and what they are lower by after that."""
    if part.signed or not flavour.signed:
        return 0, 0
    return 0x80808080, 1 << part.bits - 1


def _scales_of_row(part: IntegerCodes) -> int:
    """Of its own; 0 where rows share one."""
    return part.scale_of.per if part.scale_of.outer == 1 else 0


def _in_pieces(part: IntegerCodes) -> bool:
    """Whether rows have scales in pieces of 16 bytes, where they are halves."""
    return _scales_of_row(part) % 8 == 0


@dataclass(frozen=True, eq=False)
class _Plan(Planned):
    """The second launch of a product of one shape.

    Parameters
    ----------
    cut : bytes
        `CUT`.
    quantize : Quantizing or None
        The first launch; None where blocks quantize the tokens.
    size, sums_at, scales_at : int
        Bytes that it writes, and where in them, behind codes, sums and scales begin.
    part : IntegerCodes
        How the weight lies.
    numbers : bytes
        Arguments of the second one behind addresses.
    """

    cut: bytes
    quantize: Quantizing | None
    size: int
    sums_at: int
    scales_at: int
    part: IntegerCodes
    numbers: bytes


@dataclass(frozen=True)
class _Cut:
    """`CUT` before it is packed, and what it takes.

    Parameters
    ----------
    warps, teams, phases, ring, kept : int
        See `CUT`.
    blocks : int
        Thread blocks.
    places : tuple of int
        Where parts of the shared memory begin.
    shared : int
        Bytes of it.
    work : float
        What it costs, in shares of a multiprocessor.
    """

    warps: int
    teams: int
    phases: int
    ring: int
    kept: int
    blocks: int
    places: tuple[int, ...]
    shared: int
    work: float


@functools.lru_cache(maxsize=4096)
def choose_cut(
    flavour: Flavour,
    eights: int,
    rows: int,
    depth: int,
    processors: int,
    room: int,
    shares: int = 1,
    own: int = 0,
    split: int = 1,
) -> _Cut | None:
    """The cut with the least work for the busiest multiprocessor; None where the shared memory has no room, or a team
    no place for groups of so many shares. `own` tokens are quantized by blocks, `split` of which share K.
    """
    most = most_warps(flavour, eights)
    cuts = (
        cut_of(flavour, eights, rows, depth, processors, room, warps, teams, own, split)
        for warps in range(shares, most + 1, shares)
        for teams in range(1, most // warps + 1)
    )
    return min(filter(None, cuts), key=lambda cut: cut.work, default=None)


def cut_of(
    flavour: Flavour,
    eights: int,
    rows: int,
    depth: int,
    processors: int,
    room: int,
    warps: int,
    teams: int,
    own: int = 0,
    split: int = 1,
) -> _Cut | None:
    """The cut for so many warps and teams; None where the shared memory has no room for it."""
    tiles, shares, here = -(-rows // _ROWS), -(-depth // (split * share_of(flavour, eights, split))), warps * teams
    clusters = processors // split
    rounds, phases = -(-tiles // (clusters * teams)), -(-shares // warps)
    kept = rounds if phases > 1 or split > 1 else 0
    of_scales, of_records = flavour.warp_bytes(eights, split)
    eights = max(eights, 1)
    sums = int(_SIZES.SUMS_RING) * here * eights * _SUMS
    ring = _RING * _WARPS // most_warps(flavour, eights)
    # Few warps work through less than memory brings; each phase waits for its tokens.
    least = rounds * teams * max(shares, phases * warps * 0.75)
    most = most_warps(flavour, eights)
    enough = most * 3 // 4
    work = least * (1.0 if here >= enough else 1.0 + (enough - here) / enough) + 10.0 * (phases - 1) + 0.1 * warps
    scales_at = here * ring * _SLOT
    records_at = scales_at + here * of_scales
    sums_at = records_at + here * of_records
    kept_at = sums_at + sums
    barriers_at = kept_at + teams * kept * eights * _SUMS
    tokens_at = barriers_at + here * ring * 8 + 16 * int(_SIZES.SUMS_RING) * teams
    shared = tokens_at + (own | 1 if own else 0) * flavour.token_bytes(depth) + _ALIGNING
    if shared > room:
        return None
    places = scales_at, records_at, sums_at, kept_at, barriers_at, tokens_at
    return _Cut(warps, teams, phases, ring, kept, split * min(clusters, tiles), places, shared, work)


@functools.cache
def _kernel(flavour: Flavour, eights: int, split: int, threads: int, shared: int) -> Kernel:
    template = _SPLIT if split > 1 else _TEMPLATE
    return Kernel(template, (flavour.text(eights),), threads, shared, signature=_SIGNATURE, early=True, cluster=split)


@functools.lru_cache(maxsize=4096)
def _plan(
    format: Format,
    shape: tuple[int, ...],
    lead: int,
    dtype: np.dtype,
    out_dtype: np.dtype,
    preset: str | None,
    tokens: int,
    products: int,
    slots: int,
    step: int,
    kind: int,
    aligned: bool,
    device: int,
    id_bytes: int = 0,
) -> _Plan:
    """How a product is computed, its kernels compiled.

    Parameters
    ----------
    format, shape, lead : Format, tuple of int, int
        Of the weight.
    dtype, out_dtype : numpy.dtype
        Of tokens and of the result.
    preset : str or None
        How tokens are quantized; None where they are int8 already.
    tokens : int
        How many.
    products, slots : int
        Of experts, one beside the other, and of a token; no products with one weight.
    step : int
        From the scale of a token to the next one's.
    kind : int
        Of the bias.
    aligned : bool
        Whether tokens start at a multiple of 16 bytes.
    device : int
        Its number.
    id_bytes : int
        Of each of the ids of experts.
    """
    part, given, grouped = stored_codes(format, shape, lead), tokens, products > 0
    assert part is not None
    blocked, floats = preset == "q8_1", aligned and preset is not None
    flavour = flavour_of(part, blocked)
    assert flavour is not None
    rows, depth = shape[-2:]
    products, tokens = (products, 1) if grouped else (1, tokens)
    eights = 0 if tokens == 1 and flavour.alone else -(-tokens // 8)
    processors = max(1, multiprocessors(device) // products)
    shares = shares_of(part, flavour, eights)
    room = shared_memory(device)
    cut, own, split = choose_cut(flavour, eights, rows, depth, processors, room, shares), False, 1
    assert cut is not None
    small = rows * depth <= _MOST_SPLIT and depth >= _LEAST_SPLIT
    if small and flavour.splits and eights == 2 and products == 1 and capability(device) >= _BULK:
        halves = choose_cut(flavour, eights, rows, depth, processors, room, shares, split=_TWO.SPLIT)
        if halves is not None:
            cut, split = halves, _TWO.SPLIT
    if floats and tokens <= _MOST_OWN and capability(device) >= _BULK:
        of_own = choose_cut(flavour, eights, rows, depth, processors, room, shares, tokens)
        if of_own is not None and of_own.work <= cut.work:
            cut, own = of_own, True
    scales_at, records_at, sums_at, kept_at, barriers_at, tokens_at = cut.places
    each = _scales_of_row(part)
    together = part.group // flavour.unit if part.group and flavour.unit else _ALL_UNITS
    of_cut = CUT.pack(
        warps=cut.warps,
        teams=cut.teams,
        phases=cut.phases,
        ring=cut.ring,
        scales_at=scales_at,
        records_at=records_at,
        sums_at=sums_at,
        kept_at=kept_at,
        barriers_at=barriers_at,
        tokens_at=tokens_at,
        kept=cut.kept,
        whole=int(_in_pieces(part)),
        group=together,
        per_group=0 if together == 1 else (1 << 32) // together + 1,
        shares=shares,
        row_bytes=each * np.dtype(named_dtype(part.scale_dtype)).itemsize,
        beside_bytes=each * np.dtype(named_dtype(part.beside_dtype)).itemsize,
    )
    ready = _kernel(flavour, eights, split, 32 * cut.warps * cut.teams, cut.shared).ready(device)
    quantize = None
    if not own and floats and not grouped and _are_few(flavour, tokens, depth, device):
        quantize = _few(dtype, tokens, flavour, depth, device)
    elif not own:
        layout = flavour.layout, flavour.sums
        quantize = tokens_of.quantizing(dtype, given, depth, preset, *layout, True, aligned, device)
    grid, experts = (cut.blocks, products, 1), math.prod(shape[:-2]) if grouped else 1
    lengths = rows, tokens, tokens_of.padded_of(given), depth, experts, slots, step
    kinds = kind, int8.bias_kind(out_dtype), int8.bias_kind(dtype) if own else 0
    numbers = packed(_NUMBERS, *lengths, *turned_over(part, flavour), *kinds, id_bytes)
    return _Plan(ready.launch, grid, of_cut, quantize, *_room(flavour, given, depth), part, numbers)


def _room(flavour: Flavour, tokens: int, depth: int) -> tuple[int, int, int]:
    """Bytes of quantized tokens, and where in them, behind codes, sums and scales begin."""
    padded, every = tokens_of.padded_of(tokens), flavour.sums
    many = -(-depth // every) if every else 1
    sums_at = padded * tokens_of.pitch_of(depth)
    scales_at = sums_at + 4 * padded * many
    return scales_at + 4 * padded * (many * flavour.blocked + 1), sums_at, scales_at


@functools.lru_cache(maxsize=1024)
def _needs_alignment(format: Format, shape: tuple[int, ...], lead: int) -> bool:
    """Whether only launches for tokens that start at a multiple of 16 bytes quantize for a weight."""
    part = stored_codes(format, shape, lead)
    return part is not None and part.table


_MAP = Struct("TensorMap", bytes="u1")


def _map_argument(q: QuantizedArray, part: IntegerCodes, device: int) -> bytes:
    """The tensor map of a weight's codes, made once for each; zeros where the device has no TMA."""
    packed: bytes | None = q._launches.get(_MAP)
    if packed is None:
        rows, pitch = q.size // q.shape[-1], q.shape[-1] * part.bits // 8
        packed = bytes(tma.MAP_BYTES)
        if capability(device) >= _BULK and tma.available():
            address = q.planes[part.codes].data.ptr
            packed = tma.byte_matrix(address, rows, pitch, pitch, _ROWS, promotion=128)
        q._launches[_MAP] = packed
    return packed


@functools.lru_cache(maxsize=1024)
def _few_kernel(cxx: str, flavour: Flavour, depth: int) -> Kernel:
    signature = _FEW_SIGNATURE
    if flavour.blocked:
        return Kernel(_FEW, (cxx, flavour.layout_name), int(_SIZES.FEW_THREADS), signature=signature, early=True)
    values = cxx, f"{flavour.layout_name}, {flavour.sums}"
    blocks = int(_CLUSTERS.CLUSTER)
    threads = 32 * -(-depth // (32 * OCTET * blocks))
    return Kernel(_FEW_ROWS, values, threads, signature=signature, early=True, cluster=blocks)


def _are_few(flavour: Flavour, tokens: int, depth: int, device: int) -> bool:
    """Whether `_few` is for tokens."""
    if flavour.blocked:
        return tokens <= _MOST_FEW
    return flavour.by_rows and tokens <= _MOST_ROWS and depth <= _ROW_DEPTH and capability(device) >= _FEW_ROWS.least


def _few(dtype: np.dtype, tokens: int, flavour: Flavour, depth: int, device: int) -> Quantizing:
    """The launch that quantizes few tokens of floats that start at a multiple of 16 bytes."""
    kernel = _few_kernel(cxx_type(dtype), flavour, depth)
    if flavour.blocked:
        return _few_blocked(kernel, tokens, depth, device)
    grid, numbers = (tokens * _CLUSTERS.CLUSTER, 1, 1), packed(_FEW_NUMBERS, depth, tokens_of.padded_of(tokens))
    return Quantizing(kernel.ready(device).launch, grid, True, numbers)


def _few_blocked(kernel: Kernel, tokens: int, depth: int, device: int) -> Quantizing:
    grid = tokens, -(-depth // (_FOUR * kernel.threads)), 1
    numbers = packed(_FEW_NUMBERS, depth, tokens_of.padded_of(tokens))
    return Quantizing(kernel.ready(device).launch, grid, True, numbers)


def quantize_to_halves(x: Any, tokens: int, codes: int, scales: int) -> None:
    """Quantize tokens by "q8_1" on the current device to float16 [tokens, K] and float32 [K / 32, padded]."""
    address, device = x.data.ptr, x.data.device_id
    _to_halves(x.dtype, tokens, x.shape[-1], address % 16 == 0, device).start(address, codes, scales, 0)


@functools.lru_cache(maxsize=1024)
def _to_halves(dtype: np.dtype, tokens: int, depth: int, vector: bool, device: int) -> Quantizing:
    if not vector or tokens > _MOST_FEW:
        return tokens_of.quantizing(dtype, tokens, depth, "q8_1", NUMBERS.HALF_ROWS, 0, False, vector, device)
    kernel = Kernel(_FEW, (cxx_type(dtype), "HALF_ROWS"), int(_SIZES.FEW_THREADS), signature=_FEW_SIGNATURE, early=True)
    return _few_blocked(kernel, tokens, depth, device)


def multiply(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty and on the current device; nothing stands against it (`IntegerStream`)."""
    if out.dtype == _xp.DOUBLE:
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        multiply(x, preset, q, bias, single)
        widen(single, out)
        return
    tokens, device = out.size // q.shape[-2], out.data.device_id
    bias = None if bias is None else source(bias, FLOATS)
    added, kind = int8.bias_of(bias)
    given: Any = None
    step, by = 1, preset or None
    if isinstance(x, QuantizedArray):
        x, given = token_planes(x)
        x, step, by = _xp.contiguous(x), int(given.size == tokens), None
    else:
        x = tokens_of.floats_of(x)
        if x.data.ptr % 16 and _needs_alignment(q.format, q.shape, q.lead):
            x = x.copy()
    address = x.data.ptr
    plan = _plan(q.format, q.shape, q.lead, x.dtype, out.dtype, by, tokens, 0, 1, step, kind, address % 16 == 0, device)
    _start(plan, q, address, 0 if given is None else given.data.ptr, 0, added, out.data.ptr, device)


def experts_multiplied(of: Chosen) -> MultiplyExperts:
    """As `kbitcupy.products.integers.experts_multiplied`; products of no expert are not written."""
    many = of.tokens, of.tokens * of.slots, of.slots
    plan = _plan(*of[:3], of.dtype, _xp.SINGLE, of.preset, *many, 1, 0, of.vector, of.device, of.id_bytes)
    return lambda x, qs, ids, products: _start(plan, qs, x, 0, ids, 0, products, of.device)


def _start(plan: _Plan, q: QuantizedArray, x: int, given: int, ids: int, bias: int, out: int, device: int) -> None:
    """The launches, with these addresses; `given`: scales of tokens that are int8 already, else 0."""
    own, codes, sums, scales = x, 0, 0, given
    if plan.quantize is not None:
        scratch = _xp.allocate(plan.size)
        codes = scratch.ptr
        own, sums, scales = 0, codes + plan.sums_at, given or codes + plan.scales_at
        plan.quantize.start(x, codes, 0 if given else scales, sums)
    weight = weight_argument(q), plan.cut, _map_argument(q, plan.part, device)
    plan.launch(plan.grid, (*weight, own, codes, scales, sums, ids, bias, out, plan.numbers))


# ---- the route -------------------------------------------------------------------------------------------------------

# Microseconds of the launches; the fraction of the bandwidth at which codes pass, of 8 tokens and of more, and what of
# it is left where one warp looks up the scales of what others have summed.
_START, _FRACTION, _MORE_FRACTION, _OF_SHARES = 4.0, 0.93, 0.75, 0.3


def why_not_streamed(problem: Problem, part: IntegerCodes, gpu: Device) -> str | None:
    """What stands against reading codes in place, but for the number of tokens."""
    rows, depth = problem.shape
    flavour = flavour_of(part, problem.activations == "q8_1")
    if part.scale_of.outer != 1 and (problem.experts or part.scale_of.run < rows):
        return "members have scales of their own"
    if flavour is None:
        return f"it has no kernel for codes of {part.bits} bits in groups of {part.group}"
    if not depth or depth % 32 or problem.stored.codes < MOST_ALIGNED or problem.stored.scales < 4:
        return f"K must be a multiple of 32, and the planes start at multiples of {MOST_ALIGNED} and 4 bytes"
    eights = 1 if problem.experts else -(-problem.tokens // 8)
    whole = 0 if flavour.codes not in _BLOCKS else 2 * _BLOCK if flavour.added == "INNER" else _BLOCK
    if whole and depth % whole:
        return f"rows of {depth} elements are not whole blocks of {whole}"
    pieces = flavour.codes in _BLOCKS or (flavour.codes == "HALVES4" and _in_pieces(part))
    if pieces and problem.stored.scales < MOST_ALIGNED:
        return f"scales are read in pieces, and do not start at a multiple of {MOST_ALIGNED} bytes"
    if rows * max(problem.experts, 1) >= 1 << 30 or depth > _MOST_DEPTH:
        return "numbers of 32 bits do not reach through the rows"
    if gpu.capability < _OLDEST:
        return "it needs a GPU of compute capability 8.0"
    if not gpu.copies_tiles:
        return "the driver makes no tensor maps"
    shares = shares_of(part, flavour, eights)
    cut = choose_cut(flavour, eights, rows, depth, gpu.multiprocessors, gpu.shared_memory, shares)
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
        if problem.tokens > MOST_TOKENS:
            return f"it is for up to {MOST_TOKENS} tokens"
        return why_not_streamed(problem, part, problem.device)

    def cost(self, problem: Problem) -> float:
        part = codes_of(problem.format, problem.shape, problem.stored.lead)
        flavour = None if part is None else flavour_of(part, problem.activations == "q8_1")
        fraction = _FRACTION if problem.tokens <= 8 else _MORE_FRACTION
        if flavour is not None and flavour.unit == _SIZES.SHARES:
            fraction *= _OF_SHARES
        return _START + problem.reading / fraction

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, q, bias, out: multiply(x, preset, q, bias, out)

    def describe(self, problem: Problem) -> str:
        how = f"tokens quantized by {problem.activations!r}, codes read in place for integer tensor cores"
        return f"{how}: stream_integers"
