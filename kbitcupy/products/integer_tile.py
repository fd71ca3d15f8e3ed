"""Many int8 tokens times weights of integer codes on Hopper: kernels/linear/integers_sm90a.cu.

Codes of 8, 4 or 2 bits become bytes in registers, and integer tensor cores multiply them by tokens that lie in shared
memory. Here stands what the kernel can take, how its work is cut, and how it is launched; and the route of the formats
of `kbitcupy.formats.integer_codes`, in two launches: tokens are quantized, then multiplied. Sums are exact where all
of a row is one unit, and so is the result; otherwise terms ``fl(fl(D) * e) * A``, or ``fl(D) * A`` where a token has
one scale, are added by fma in the order of k, parts of k in an order that the shape and the GPU decide, and the scale
of the token comes last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Planned
from ..backend.structs import Constants
from ..formats.base import Format, IntegerCodes, register_templates
from ..formats.integer_codes import NOTHING, ZERO_POINTS
from ..ops import source, widen
from . import int8, integer_activations as tokens_of, integers
from .activations import FLOATS
from .int8 import BIAS_KINDS, PITCH, bias_of, token_planes
from .integer_activations import NUMBERS, Launches
from .routes import BYTES_PER_US, MOST_ALIGNED, Device, Problem, Product, Route, Stored, device as device_of

#: Numbers of the kernel: elements of k of a stage, and of those that share a scale of a token that has several; scales
#: of a row that are copied together, and tables of them; tokens of a buffer of results; how scales and zero points of
#: weights are stored.
SIZES = Constants(
    STAGE_K=PITCH,
    EACH_K=32,
    TABLE_UNITS=8,
    TABLES=3,
    PART_FLAGS=1024,
    CHUNK_TOKENS=32,
    FLOAT32_SCALES=0,
    FLOAT16_SCALES=1,
    BFLOAT16_SCALES=2,
    ANY_FLOAT16_SCALES=3,
    NO_POINTS=0,
    INT32_POINTS=1,
    INT8_POINTS=2,
    UINT8_POINTS=3,
)
STAGE_K, FLAGS = SIZES.STAGE_K, 4 * SIZES.PART_FLAGS
#: Its decoders, by the bits of a code; of 4 bits where a row has one zero point, and a token one scale.
DECODERS, ROW_NIBBLES = {8: "Bytes", 4: "Nibbles", 2: "Trits"}, "RowNibbles"
#: Elements that share a scale: those of a row, whole stages, or parts of one.
UNITS = (0, STAGE_K, 64, 32)
# Bytes of shared memory of a thread block; where the ring starts at most behind the beginning of its memory.
_ROOM, _ALIGNED, _MOST_STAGES = 227 << 10, 1024, 16
# Bytes of a row of a buffer of results, those of the rows of a warpgroup.
_LINE = 128


@dataclass(frozen=True)
class Codes:
    """How a weight lies in memory.

    Parameters
    ----------
    bits : {8, 4, 2}
        Of a code: int8, integers of 4 bits, trits.
    group : int, default 0
        Elements along a row that share a scale; 0 where those of a row do, or all.
    scale_kind, zero_kind : int
        How scales and zero points are stored, numbers of `SIZES`.
    lowest, middle : int
        The lowest code, as it is stored, and what stands for 0 where there are no zero points.
    each : bool
        Whether tokens have a scale for every 32 elements, not one.
    """

    bits: int
    group: int = 0
    scale_kind: int = SIZES.FLOAT32_SCALES
    zero_kind: int = SIZES.NO_POINTS
    lowest: int = 0
    middle: int = 0
    each: bool = False

    @property
    def unit(self) -> int:
        """The template parameter: a group of several stages counts as one of a stage."""
        return min(self.group, STAGE_K)

    @property
    def whole(self) -> bool:
        """Whether sums along a row are scaled as a whole, so that codes of a few bits have nothing taken off."""
        return self.bits < 8 and not self.group and not self.each

    @property
    def decoder(self) -> str:
        """What decodes them."""
        return ROW_NIBBLES if self.bits == 4 and self.whole else DECODERS[self.bits]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a stage."""
        return STAGE_K * self.bits // 8


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Parameters
    ----------
    tokens : int
        Of a thread block.
    row_groups, k_groups : int
        Warpgroups of a thread block: those with other rows, 64 each, and those that share k.
    share : int
        Thread blocks of a cluster, which share tokens.
    """

    tokens: int
    row_groups: int
    k_groups: int
    share: int

    @property
    def pairs(self) -> bool:
        """Whether a warpgroup has two tiles of 64 rows, whose sums come in turns."""
        return self.tokens == 64 and self.row_groups * self.k_groups == 2

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return 64 * self.row_groups * (1 + self.pairs)

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply, and one that fetches."""
        return 128 * (self.row_groups * self.k_groups + 1)

    def boxes(self, bits: int) -> int:
        """Times `STAGE_K` of a stage: memory likes to be asked for 128 bytes of a row of codes at a time."""
        return 1 if bits == 8 or self.tokens > 128 else 4 if bits == 2 and self.rows == 256 else 2

    def stage_bytes(self, bits: int, each: bool) -> int:
        """Tokens and weights of a stage, and scales of tokens."""
        scales = 4 * self.tokens * STAGE_K // SIZES.EACH_K if each else 0
        size = self.boxes(bits) * (STAGE_K * (self.tokens + self.rows * bits // 8) + scales)
        return -(-size // _ALIGNED) * _ALIGNED

    def buffers(self, unit: int) -> int:
        """Of a warpgroup, for lines of 16-bit results: as many as there is memory for beside the ring, or none."""
        return 0 if self.tokens < 256 else 4 if unit else 2

    def table_bytes(self, unit: int) -> int:
        """Scales and zero points of weights."""
        return SIZES.TABLES * SIZES.TABLE_UNITS * 8 * (self.rows + 4) if unit else 0

    def stages(self, bits: int, unit: int, each: bool) -> int:
        """Of the ring, beside what the kernel declares by name."""
        # Barriers, factors and sums of tokens, and what turns results.
        of_tokens = self.tokens * (8 if Codes(bits, unit, each=each).whole else 4)
        turned = max(self.buffers(unit), 1) * int(SIZES.CHUNK_TOKENS) * _LINE
        named = 16 * _MOST_STAGES + self.row_groups * (of_tokens + turned)
        room = _ROOM - _ALIGNED - named - self.table_bytes(unit)
        fitting = min(room // self.stage_bytes(bits, each), _MOST_STAGES)
        return fitting // self.k_groups * self.k_groups

    def shared(self, bits: int, unit: int, each: bool) -> int:
        """Dynamic shared memory of a thread block."""
        stages = self.stages(bits, unit, each) * self.stage_bytes(bits, each)
        return stages + self.table_bytes(unit) + _ALIGNED

    def text(self, bits: int, unit: int, each: bool) -> str:
        """The template parameters after the dtype, with the sizes that the kernel compares."""
        kind = bits, unit, each
        layout = f"Layout<{self.threads}, {self.rows}, {self.stage_bytes(bits, each)}, {self.table_bytes(unit)}>"
        numbers = self.tokens, self.row_groups, self.k_groups, self.share, self.stages(*kind), self.boxes(bits), unit
        return f"{Codes(bits, unit, each=each).decoder}, {', '.join(map(str, numbers))}, {str(each).lower()}, {layout}"

    def tiles(self, tokens: int, rows: int) -> int:
        """Thread blocks that have work."""
        return -(-tokens // self.tokens) * -(-rows // (self.rows * self.share)) * self.share

    def halves(self, codes: Codes) -> bool:
        """Whether sums come for a part of the tokens at a time, and the last tiles are halves."""
        return self.tokens == _CHUNKED and bool(codes.group) and not codes.each

    def part_stages(self, tokens: int, rows: int, depth: int, codes: Codes, blocks: int) -> int:
        """Stages of a cluster of the last tiles, where `blocks` multiply those together; else 0."""
        if self.tokens != _CHUNKED or codes.each or codes.unit not in (0, STAGE_K):
            return 0
        clusters, stages = blocks // self.share, -(-depth // STAGE_K)
        rest = self.tiles(tokens, rows) // self.share % clusters
        alone = stages * (_HALF if self.halves(codes) and 2 * rest <= clusters else 1.0)
        part = max(-(-rest * stages // clusters), _LEAST_PART)
        return part if rest and blocks * self.row_groups <= SIZES.PART_FLAGS and part + _ADDING < alone else 0

    def part_bytes(self, blocks: int) -> int:
        """Memory for sums of parts: a block leaves one, behind flags."""
        return FLAGS + 4 * blocks * 64 * self.row_groups * self.tokens

    def keeps(self, codes: Codes) -> bool:
        """Whether what shares a scale of a row is added up in one integer: parts of k have stages in turns."""
        at_once = self.halves(codes) or self.pairs
        together = STAGE_K if at_once else STAGE_K * self.boxes(codes.bits)
        return codes.group <= together or (self.k_groups == 1 and not at_once)

    def waves(self, tokens: int, rows: int, codes: Codes, processors: int) -> float:
        """Tiles of a multiprocessor, one after the other."""
        whole, rest = divmod(self.tiles(tokens, rows), processors)
        return whole + (0.5 if self.halves(codes) and 2 * rest <= processors else 1.0) * (rest > 0)

    def microseconds(self, tokens: int, rows: int, depth: int, codes: Codes, processors: int) -> float:
        """What a product takes, as measured on an H200."""
        # Sums of parts of a stage become float32, for which scales have to come from memory.
        sums = STAGE_K / (SIZES.EACH_K if codes.each else codes.group) if codes.group or codes.each else 0.0
        stage, adding = _STAGE[codes.bits][self], _SUMS
        if self.halves(codes):
            sums, stage, adding = max(sums, 1.0), _CHUNKED_STAGE, _CHUNKED_SUMS
        stage += adding * self.rows * self.tokens * sums
        reading = rows * depth * codes.bits / 8 / (_FRACTION * BYTES_PER_US)
        waves = self.waves(tokens, rows, codes, processors)
        return _START + max(waves * -(-depth // STAGE_K) * stage, reading)


#: Those of few tokens, of which the second shares out k where there are few rows; those of many.
CUTS = (Cut(64, 4, 1, 1), Cut(64, 1, 4, 1), Cut(128, 2, 1, 2), Cut(256, 2, 1, 2))
#: That of few tokens and codes of 4 bits whose groups are a stage's.
PAIRS = Cut(64, 2, 1, 1)
# Microseconds of a stage, by the bits of a code; more for a sum that becomes float32 once in a stage; of two launches;
# the fraction of bandwidth at which codes come.
_NIBBLES, _TRITS = (0.57, 0.2, 0.405, 0.78), (0.47, 0.19, 0.37, 0.78)
_STAGE = {bits: dict(zip(CUTS, of, strict=True)) for bits, of in ((8, _NIBBLES), (4, _NIBBLES), (2, _TRITS))}
_SUMS, _START, _FRACTION = 2.2e-5, 7.0, 0.85
_STAGE[4][PAIRS] = 0.45
# The tokens of a cut whose sums come for some of them at a time, and the first two of these numbers there.
_CHUNKED, _CHUNKED_STAGE, _CHUNKED_SUMS = 256, 0.72, 1.25e-5
# The last tiles: what halves of their tokens take; the least stages of a part, and those in the time of which parts are
# added.
_HALF, _LEAST_PART, _ADDING = 0.62, 8, 6
# Microseconds to quantize an element of many tokens.
_QUANTIZED = 3e-6


def cuts(bits: int, unit: int, each: bool) -> tuple[Cut, ...]:
    """Those that there are: scales of so many tokens do not come in one box."""
    if each:
        return CUTS[:-1]
    return (*CUTS, PAIRS) if (bits, unit) == (4, STAGE_K) else CUTS


def fitting(depth: int, codes: Codes) -> list[Cut]:
    """Cuts of which each part of k has at least a stage, and that keep a group in one sum."""
    stages = -(-depth // STAGE_K)
    some = [cut for cut in cuts(codes.bits, codes.unit, codes.each) if cut.k_groups * cut.boxes(codes.bits) <= stages]
    return [cut for cut in some if codes.each or cut.keeps(codes)]


@functools.lru_cache(maxsize=4096)
def choose(tokens: int, rows: int, depth: int, codes: Codes, processors: int) -> Cut:
    """The cut that should take the least time."""
    return min(fitting(depth, codes), key=lambda cut: cut.microseconds(tokens, rows, depth, codes, processors))


def refusal(depth: int, codes: Codes, lies: Stored, gpu: Device) -> str | None:
    """What stands against the kernel."""
    if gpu.capability != 90 or not gpu.tensor_maps:
        return "it is for compute capability 9.0"
    if codes.bits == 2 and depth % STAGE_K:
        return f"K must be a multiple of {STAGE_K}"
    if codes.whole and depth > int8.MAX_DEPTH:
        return f"sums along a row are exact in int32 up to K = {int8.MAX_DEPTH}"
    if not depth or depth * codes.bits // 8 % MOST_ALIGNED:
        return f"rows of {depth} elements do not start at multiples of {MOST_ALIGNED} bytes"
    if not fitting(depth, codes):
        return f"rows of {depth} elements are shorter than a stage"
    return None if lies.codes >= MOST_ALIGNED else f"codes do not start at a multiple of {MOST_ALIGNED} bytes"


_TYPES = tuple(CXX_TYPES[name] for name in FLOATS)


def _template(instances: tuple[str, ...] = (), hot: bool = True) -> Template:
    axes = (_TYPES, instances) if instances else ()
    return Template("linear/integers_sm90a.cu", "wgmma_integers", axes, hot=hot, structs=(BIAS_KINDS, SIZES))


# Who shares scales of weights, and whether tokens have several, by the bits of a code.
_EACH = tuple((unit, True) for unit in UNITS)
_KINDS = {
    8: (*((unit, False) for unit in UNITS[1:]), *_EACH),
    4: (*((unit, False) for unit in UNITS), *_EACH),
    2: ((0, False),),
}


def _templates() -> Iterator[Template]:
    every = [
        (cut, (bits, unit, each))
        for bits, kinds in _KINDS.items()
        for unit, each in kinds
        for cut in cuts(bits, unit, each)
    ]
    # Some of those with scales of groups are one or two registers short.
    whole = [(cut, kind) for cut, kind in every if not (kind[1] or kind[2])]
    for hot, some in ((True, whole), (False, [each for each in every if each not in whole])):
        yield _template(tuple(cut.text(*kind) for cut, kind in some), hot)


register_templates(_templates)
_MAP = _tma.MAP_BYTES
_SIGNATURE = (*(_MAP,) * 4, *("p",) * 6, *("i8",) * 4, "p", *("i4",) * 8)


@functools.cache
def _kernel(dtype: str, cut: Cut, bits: int, unit: int, each: bool, early: bool) -> Kernel:
    values = CXX_TYPES[dtype], cut.text(bits, unit, each)
    shared, cluster = cut.shared(bits, unit, each), cut.share
    return Kernel(_template(), values, cut.threads, shared, signature=_SIGNATURE, early=early, cluster=cluster)


@dataclass(frozen=True, eq=False)
class Plan(Planned):
    """The launch of a product of one shape.

    Parameters
    ----------
    codes : Codes
        Of the weight.
    boxes : tuple of int
        Tokens of a box; rows and bytes of one of weights; times `STAGE_K` of a stage.
    lines : int
        Tokens of boxes in which results are stored, where they are aligned, or 0.
    part_stages, part_bytes : int
        Stages of each cluster of tiles that are multiplied together, and memory for their sums, or 0.
    """

    codes: Codes
    boxes: tuple[int, int, int, int]
    lines: int
    part_stages: int
    part_bytes: int


@functools.lru_cache(maxsize=4096)
def plan(dtype: np.dtype, tokens: int, rows: int, depth: int, codes: Codes, device: int, cut: Cut, early: bool) -> Plan:
    """How a product is computed, its kernel compiled. `early`: what is ahead writes nothing but tokens."""
    ready = _kernel(dtype.name, cut, codes.bits, codes.unit, codes.each, early).ready(device)
    part = cut.part_stages(tokens, rows, depth, codes, ready.resident)
    blocks = ready.resident if part else cut.tiles(tokens, rows) * (2 if cut.halves(codes) else 1)
    if cut.k_groups == 1:
        blocks = min(blocks, ready.resident)
    together = cut.boxes(codes.bits)
    boxes = cut.tokens // cut.share, cut.rows, together * codes.row_bytes, together
    lines = cut.buffers(codes.unit) // 2 * int(SIZES.CHUNK_TOKENS) if dtype.itemsize == 2 else 0
    return Plan(ready.launch, (blocks, 1, 1), codes, boxes, lines, part, cut.part_bytes(blocks) if part else 0)


_NO_MAP = bytes(_MAP)


def _scales_map(address: int, pitch: int, depth: int, boxes: int, part: int) -> bytes:
    """That of scales of tokens [ceil(K / 32), pitch], of a stage and a part of tokens."""
    rows, together = -(-depth // SIZES.EACH_K), boxes * STAGE_K // SIZES.EACH_K
    return _tma.byte_matrix(address, rows, 4 * pitch, 4 * pitch, together, 4 * part, False)


def _results_map(address: int, tokens: int, rows: int, together: int) -> bytes:
    """That of 16-bit results [tokens, rows], none where their rows do not start at multiples of 16 bytes."""
    if address % MOST_ALIGNED or 2 * rows % MOST_ALIGNED:
        return _NO_MAP
    return _tma.byte_matrix(address, tokens, 2 * rows, 2 * rows, together, _LINE)


def launch(
    plan: Plan,
    a: int,
    token_sum: int,
    token_scale: int,
    token_step: int,
    weight: int,
    scale: int,
    per_row: int,
    zero: int,
    bias: Any | None,
    out: Any,
    depth: int,
    parts: int,
) -> None:
    """Fill `out` from what lies at these addresses, of which `a` and `weight` are multiples of 16.

    Parameters
    ----------
    plan : Plan
        Of this shape.
    a : int
        int8 tokens, rows of K rounded up to a multiple of `PITCH`, which end in zeros; for codes of 4 bits that lie in
        pairs the 16 even elements of every 32 come first.
    token_sum : int
        int32 sums of the codes of each token, which trits need, and zero points of rows; else 0.
    token_scale, token_step : int
        float32 scales, one for each token, or one where the step is 0; of `each` [ceil(K / 32), step], at a multiple of
        16, and the step one of 4.
    weight, scale, zero : int
        Codes, scales and zero points, 0 where there are none.
    per_row : int
        Scales of a row; 0 where all rows share one.
    bias : array or None
        Float [N], contiguous.
    out : array
        Of a type of the kernels.
    depth : int
        K.
    parts : int
        `Plan.part_bytes` at a multiple of 16, of which the first `FLAGS` are zeros; 0 where there are none.
    """
    rows = out.shape[-1]
    tokens, pitch = out.size // rows, -(-depth // PITCH) * PITCH
    codes, (of_tokens, of_rows, of_bytes, boxes) = plan.codes, plan.boxes
    row_bytes = depth * codes.bits // 8
    added = bias_of(bias)
    scales = _NO_MAP
    if codes.each:
        scales = _scales_map(token_scale, token_step, depth, boxes, of_tokens)
    plan.launch(
        plan.grid,
        (
            _tma.byte_matrix(a, tokens, pitch, pitch, of_tokens),
            _tma.byte_matrix(weight, rows, row_bytes, row_bytes, of_rows, of_bytes),
            scales,
            _results_map(out.data.ptr, tokens, rows, plan.lines) if plan.lines else _NO_MAP,
            out.data.ptr,
            token_sum,
            token_scale,
            scale,
            zero,
            added[0],
            tokens,
            rows,
            depth,
            per_row,
            parts,
            plan.part_stages,
            max(codes.group // STAGE_K, 1),
            token_step,
            codes.scale_kind,
            codes.zero_kind,
            added[1],
            codes.lowest,
            codes.middle,
        ),
    )


# ---- the route -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What the kernel is told of a weight of integer codes.

    Parameters
    ----------
    codes : Codes
        How they lie.
    layout : int
        Of tokens, a number of `kbitcupy.products.integer_activations`.
    per_row : int
        Scales of a row; 0 where all rows share one.
    """

    codes: Codes
    layout: int
    per_row: int


_SCALE_KINDS = {
    ("float32", True): SIZES.FLOAT32_SCALES,
    ("float16", True): SIZES.FLOAT16_SCALES,
    ("bfloat16", True): SIZES.BFLOAT16_SCALES,
    ("float16", False): SIZES.ANY_FLOAT16_SCALES,
}
_ZERO_KINDS = {"int32": SIZES.INT32_POINTS, "int8": SIZES.INT8_POINTS, "uint8": SIZES.UINT8_POINTS}
# The tokens' layout, by the bits of a code and bytes of a run.
_LAYOUTS = {(8, 1): NUMBERS.ROWS, (4, 1): NUMBERS.ROWS_SPLIT, (4, 16): NUMBERS.ROWS, (2, 32): NUMBERS.ROWS}
_MOST_SCALES = 1 << 31


@functools.lru_cache(maxsize=1024)
def told(part: IntegerCodes, rows: int, depth: int, each: bool) -> Told | str:
    """What the kernel is told, or what stands against it."""
    layout = _LAYOUTS.get((part.bits, part.width))
    if layout is None or part.added not in (NOTHING, ZERO_POINTS) or (part.bits != 4 and part.added != NOTHING):
        return "it takes codes with scales, and zero points of 4 bits, which are subtracted"
    if part.bits == 2:
        return "ternary weights are multiplied so by tokens with one scale, by a route of their own"
    group = part.group if part.group < depth else 0
    if group % STAGE_K and group not in UNITS:
        return f"groups are of {group} elements; it is for 32, 64 and multiples of {STAGE_K}"
    if (min(group, STAGE_K), each) not in _KINDS[part.bits]:
        return "it has no such kernel for codes of so many bits"
    of = part.scale_of
    one_each = of.outer == 1 or (of.outer >= rows and of.run == 1)
    if not one_each and (of.outer < rows or of.run < rows):
        return "neither has each row scales of its own, nor do all share one"
    per_row = (of.per if of.outer == 1 else 1) if one_each else 0
    if rows * per_row >= _MOST_SCALES:
        return "numbers of 31 bits do not reach through the scales"
    kind = _SCALE_KINDS[part.scale_dtype, part.positive]
    zero_kind = _ZERO_KINDS[part.beside_dtype] if part.added == ZERO_POINTS else SIZES.NO_POINTS
    return Told(Codes(part.bits, group, kind, zero_kind, part.lowest, part.zero, each), layout, per_row)


@functools.lru_cache(maxsize=4096)
def _launches(
    format: Format,
    shape: tuple[int, int],
    lead: int,
    activations: str,
    preset: str | None,
    given: np.dtype,
    dtype: np.dtype,
    tokens: int,
    aligned: bool,
    device: int,
) -> tuple[Launches[Plan], int]:
    """How `multiply` goes about a product, its kernels compiled, and scales of a row, 0 where all rows share one.

    With no preset tokens of the dtype `given` are int8 already; `aligned`: they start at a multiple of 16 bytes.
    """
    rows, depth = shape
    part, gpu = integers.codes_of(format, shape, lead), device_of(device)
    assert part is not None and gpu is not None
    known = told(part, rows, depth, activations == "q8_1")
    assert isinstance(known, Told)
    codes, padded = known.codes, tokens_of.padded_of(tokens)
    cut = choose(tokens, rows, depth, codes, gpu.multiprocessors)
    blocks = -(-depth // SIZES.EACH_K) if codes.each else 1
    summed = codes.whole and part.added == ZERO_POINTS
    scales_at = tokens * tokens_of.pitch_of(depth)
    parts_at = scales_at + 4 * blocks * padded
    product, step = plan(dtype, tokens, rows, depth, codes, device, cut, True), padded if codes.each else 1
    behind = parts_at + product.part_bytes
    # Flags are zeros, which what writes the scales ahead of them writes, too, where it can.
    flags = FLAGS if product.part_bytes else 0
    by_rows = flags > 0 and tokens_of.by_rows(depth, preset, known.layout, summed, aligned)
    zeros = padded - tokens + flags // 4 if by_rows else 0
    quantize = tokens_of.quantizing(given, tokens, depth, preset, known.layout, 0, summed, aligned, device, zeros)
    size, sums_at = behind + 4 * summed * padded, behind if summed else 0
    left = 0 if by_rows else flags
    return Launches(quantize, product, part, size, scales_at, sums_at, step, parts_at, left), known.per_row


def multiply(x: Any, preset: str, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill `out`, which is not empty and whose device is the current one, from floats or int8."""
    if out.dtype not in _xp.dtype_set(FLOATS):
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        multiply(x, preset, q, bias, single)
        widen(single, out)
        return
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    tokens, device = out.size // rows, out.data.device_id
    quantized = isinstance(x, QuantizedArray)
    taken = _xp.contiguous(token_planes(x)[0]) if quantized else tokens_of.floats_of(x)
    address, by = taken.data.ptr, None if quantized else preset
    about = by, taken.dtype, out.dtype, tokens, address % 16 == 0, device
    made, per_row = _launches(q.format, q.shape, q.lead, preset, *about)
    part = made.part
    scratch, scales, sums, step = made.start(x, address, tokens)
    weight, scale = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    zero = 0 if part.beside is None else q.planes[part.beside].data.ptr
    parts = scratch.ptr + made.zeros_at if made.product.part_bytes else 0
    launch(made.product, scratch.ptr, sums, scales, step, weight, scale, per_row, zero, bias, out, depth, parts)


class IntegerTile(Route):
    """Quantize tokens, and multiply them on integer tensor cores by codes that are decoded in registers."""

    name = "integer_tile"

    def accepts(self, problem: Problem) -> str | None:
        if problem.device is None:
            return "the arrays are in host memory"
        if problem.experts:
            return "it is for one weight"
        preset, shape, lead = problem.activations, problem.shape, problem.stored.lead
        found: Told | str | None = integers.why_not(preset, problem.format, shape, lead) or self._told(problem)
        if isinstance(found, str):
            return found
        assert found is not None
        return refusal(shape[1], found.codes, problem.stored, problem.device)

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        codes = self._known(problem).codes
        cut = choose(problem.tokens, *problem.shape, codes, problem.device.multiprocessors)
        quantizing = problem.tokens * problem.shape[1] * _QUANTIZED
        return quantizing + cut.microseconds(problem.tokens, *problem.shape, codes, problem.device.multiprocessors)

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, q, bias, out: multiply(x, preset, q, bias, out)

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        codes = self._known(problem).codes
        cut = choose(problem.tokens, *problem.shape, codes, problem.device.multiprocessors)
        unit = 32 if codes.each else codes.group
        often = f", sums of {unit} become float32"
        often = often if codes.group or codes.each else ""
        tile = f"{cut.tokens} tokens x {cut.rows} rows a thread block{often}"
        return f"tokens quantized by {problem.activations!r}, codes decoded in registers: wgmma_integers, {tile}"

    def _told(self, problem: Problem) -> Told | str:
        part = integers.codes_of(problem.format, problem.shape, problem.stored.lead)
        assert part is not None
        return told(part, *problem.shape, problem.activations == "q8_1")

    def _known(self, problem: Problem) -> Told:
        found = self._told(problem)
        assert isinstance(found, Told)
        return found
