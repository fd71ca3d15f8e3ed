"""Affine integers on CUDA: their kernels, and how they are launched."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np

from ...backend import xp as _xp
from ...backend.compile import CXX_TYPES, Template
from ...backend.launch import Kernel, Type, shared_memory
from ...backend.structs import Constants, Struct
from ..decoders import Decoder, templates
from ..granularity import Blocks, Granularity, blocks_of
from .levels import ENDS, INT32, SINGLE, Levels, compute_dtype, reach_of
from .stored import FLOAT32, Stored, stored

_TYPES = {**CXX_TYPES, "float64": "double"}
_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_FILE, _RANGE_FILE = "affine.cu", "affine_range.cu"
# Numbers of the kernels. Threads of a block: of searches for ranges, and where blocks are held 32 elements a lane; of
# what goes from element to element, in many small blocks, done soon and in the order of memory; of teams of lanes that
# hold blocks in registers; the most where a block of elements is in shared memory. Elements of a unit. Searches for
# ranges: units of a thread under way, by log2 of the bytes of an element; rows of a tile of columns; bytes of a thread
# under way where there is one block.
_NUMBERS = Constants(
    AFFINE_THREADS=256,
    EACH_THREADS=128,
    TEAM_THREADS=128,
    ROW_THREADS=512,
    UNIT=8,
    FIND_DEPTH=(4, 2, 1),
    FIND_ROWS=64,
    WHOLE_BYTES=128,
)
_THREADS, _EACH_THREADS, _UNIT = _NUMBERS.AFFINE_THREADS, _NUMBERS.EACH_THREADS, _NUMBERS.UNIT
_DIVISION = Struct("Division", magic="u4", shift="i4")
#: How elements share scales: its members are explained in kernels/affine.cuh.
GEOMETRY = Struct(
    "Geometry",
    n="i8",
    row="i8",
    run="i8",
    per_row="i8",
    count="i8",
    columns="i8",
    rows="i8",
    inverse="f8",
    long_by_row="u8",
    by_row=_DIVISION,
    by_run=_DIVISION,
    wide="i4",
    qmin="i4",
    qmax="i4",
    margin="i4",
    zero="i4",
    divisor="i4",
    symmetric="i4",
    reach="i4",
    largest="u8",
    limit="u8",
    surely="u8",
)
_AHEAD = (_NUMBERS, GEOMETRY)
_LAYOUTS = ("RUNS", "COLUMNS")
# The walks of kernels/affine.cuh by operation and bytes of an element: elements of a unit, and units of a thread, which
# has the loads of all under way.
_RUNS_WALKS = {
    "quantize8": {2: (16, 1), 4: (8, 1), 8: (4, 2)},
    "quantize4": {2: (16, 2), 4: (8, 1), 8: (4, 2)},
    "dequantize8": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
    "dequantize4": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
    "fake_quantize": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
    "quantize_backward": {2: (8, 2), 4: (4, 1), 8: (4, 1)},
    "fake_quantize_backward": {2: (8, 2), 4: (4, 1), 8: (4, 1)},
    "dequantize_backward": {2: (8, 2), 4: (4, 2), 8: (4, 1)},
}
# Others for blocks that are no multiple of these units.
_NARROW_WALKS = {"quantize8": (8, 2), "quantize4": (8, 4)}
# The same where scales repeat with a short period: elements of a unit, units under way, all units.
_COLUMNS_WALKS = {
    "quantize8": {2: (8, 4, 8), 4: (4, 4, 4), 8: (4, 1, 8)},
    "quantize4": {2: (8, 4, 16), 4: (4, 4, 8), 8: (4, 1, 8)},
    "dequantize8": {2: (8, 4, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "dequantize4": {2: (8, 4, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "fake_quantize": {2: (8, 4, 4), 4: (4, 4, 4), 8: (4, 1, 8)},
    "quantize_backward": {2: (8, 2, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "fake_quantize_backward": {2: (8, 2, 4), 4: (4, 2, 4), 8: (4, 1, 8)},
    "dequantize_backward": {2: (8, 2, 4), 4: (4, 4, 4), 8: (4, 1, 8)},
}
# Tiles that a thread block takes one after the other where it gathers ranges: each run ends in an atomic operation.
_FIND_ROUNDS = 16
# Of teams of lanes that hold blocks in registers: units of a lane, few or many; the most units of a block that few are
# for, and for all blocks of float64.
_SLOTS, _MANY_SLOTS, _OF_FEW_SLOTS = 4, 8, 32
# Of thread blocks that hold a block in shared memory: about how many units each thread has; the most units.
_ROW_UNITS = 8
_ON_CHIP = {2: 8192, 4: 4096, 8: 1024}
_STATIC_BYTES = 2048  # at most, of shared memory
# Blocks of so many elements are held 32 elements a lane.
_LANE_BLOCKS = tuple(32 << j for j in range(6))
_LANE_ROUNDS = 4
# The enum Storage of kernels/affine.cuh, and what AffineStored of kernels/formats/affine.cuh counts.
_STORAGES = {"float32": 0, "float16": 1, "bfloat16": 2}
# Rows from this length on, and below the length of a unit, are divided by in 64 bits.
_WIDE_ROW = 1 << 30
_WIDEST_PERIOD = 1 << 28

_EVERY = tuple(_TYPES.values())
# The last template argument where blocks have offsets.
_FLOATING = {False: (), True: ("true",)}
# The last two where scales have 16 bits: without and with offsets.
_STORED = ("false, true", "true, true")


def _walk_of(operation: str, dtype: str, layout: str, narrow: bool = False) -> tuple[int, int, int]:
    """SIZE, DEPTH and UNITS of a kernel (see kernels/affine.cu)."""
    itemsize = _ITEMSIZES[dtype]
    if layout == "COLUMNS":
        return _COLUMNS_WALKS[operation][itemsize]
    size, units = _RUNS_WALKS[operation][itemsize]
    if narrow and itemsize == 2:
        size, units = _NARROW_WALKS.get(operation, (size, units))
    return size, units, units


def _arguments(operation: str, dtype: str, layout: str, narrow: bool = False, floating: bool = False) -> str:
    """The template arguments of a kernel that goes from element to element."""
    bits = [operation[-1]] if operation[-1] in "84" else []
    walk = map(str, _walk_of(operation, dtype, layout, narrow))
    return ", ".join([_TYPES[dtype], *bits, layout, *walk, *_FLOATING[floating]])


def _each_template(name: str, operations: tuple[str, ...], zeros: tuple[bool, ...] = (False,)) -> Template:
    every = itertools.product(operations, _TYPES, _LAYOUTS, (False, True), zeros)
    return _template(_FILE, f"{name}_affine", (tuple(dict.fromkeys(_arguments(*each) for each in every)),))


def _template(file: str, name: str, axes: tuple[tuple[str, ...], ...]) -> Template:
    return Template(file, name, axes, structs=_AHEAD)


_CHOSEN = (_EVERY[:3], ("8", "4"))
_DYNAMIC = (f"{_SLOTS}, 1", f"{_SLOTS}, {_SLOTS}", f"{_MANY_SLOTS}, 1")
KERNELS = (
    _each_template("quantize", ("quantize8", "quantize4"), (False, True)),
    _each_template("dequantize", ("dequantize8", "dequantize4"), (False, True)),
    *(_each_template(name, (name,)) for name in _RUNS_WALKS if name[-1] not in "84"),
    _template(_FILE, "convert_scales_affine", (("float",), ("double",))),
    _template(_FILE, "convert_scales_affine", (("double", *_EVERY[:2]), ("float",))),
    _template(_FILE, "convert_scales_affine", (("float",), _EVERY[:2])),
    _template(_FILE, "round_scales_affine", (("float",),)),
    _template(_RANGE_FILE, "find_range_affine", (_EVERY, _LAYOUTS)),
    _template(_RANGE_FILE, "find_range_affine", (_EVERY, _LAYOUTS, ("true",))),
    _template(_RANGE_FILE, "find_whole_affine", (_EVERY,)),
    _template(_RANGE_FILE, "find_whole_affine", (_EVERY, ("true",))),
    _template(_RANGE_FILE, "finish_range_affine", (("float", "double"),)),
    _template(_RANGE_FILE, "finish_range_affine", (("float", "double"), ("true",))),
    _template(_RANGE_FILE, "finish_range_affine", (("float", "double"), _STORED)),
    _template(_RANGE_FILE, "quantize_dynamic_affine", (_EVERY, ("8", "4"), _DYNAMIC[:2])),
    _template(_RANGE_FILE, "quantize_dynamic_affine", (*_CHOSEN, _DYNAMIC[2:])),
    _template(_RANGE_FILE, "quantize_dynamic_affine", (*_CHOSEN, _DYNAMIC, ("true", *_STORED))),
    _template(_RANGE_FILE, "quantize_rows_affine", (_EVERY, ("8", "4"))),
    _template(_RANGE_FILE, "quantize_rows_affine", (*_CHOSEN, ("true", *_STORED))),
    _template(_RANGE_FILE, "quantize_lanes_affine", _CHOSEN),
    _template(_RANGE_FILE, "quantize_lanes_affine", (*_CHOSEN, ("true", *_STORED))),
    _template(_RANGE_FILE, "percentile_affine", (_EVERY,)),
    _template(_RANGE_FILE, "percentile_affine", (_EVERY, ("true",))),
    _template(_RANGE_FILE, "percentile_affine", (_EVERY, _STORED)),
)
_HEADER = "formats/affine.cuh"
BLOCKS = templates(
    _HEADER,
    *(
        f"{struct}<{bits}, {signed}>"
        for struct in ("Affine", "AffineStored")
        for bits in (8, 4)
        for signed in ("true", "false")
    ),
    kernels=("take_blocks", "linear_blocks"),
)

_GEOMETRY = np.dtype(
    [
        *((name, "i8") for name in ("n", "row", "run", "per_row", "count", "columns", "rows")),
        ("inverse", "f8"),
        ("long_by_row", "u8"),
        *((name, [("magic", "u4"), ("shift", "i4")]) for name in ("by_row", "by_run")),
        *((name, "i4") for name in ("wide", "qmin", "qmax", "margin", "zero", "divisor", "symmetric", "reach")),
        *((name, "u8") for name in ("largest", "limit", "surely")),
    ],
    align=True,
)


class Geometry:
    """A `GEOMETRY`, and the grid that goes with it.

    Parameters
    ----------
    blocks : Blocks
        The block shape.
    levels : Levels
        The range.
    margin : int, default 0
        How far from the ends of the range a mask begins.
    whole : bool, default False
        Whether a block that is the whole array counts as one run, however long.
    of : dtype, optional
        dtype of the array whose ranges are found.
    reach : int, default 0
        See `reach_of`.
    kind : Stored, default float32
        In what scales will be stored.
    """

    __slots__ = ("_struct", "argument", "columns", "layout", "narrow", "rows", "size")

    def __init__(
        self,
        blocks: Blocks,
        levels: Levels,
        margin: int = 0,
        whole: bool = False,
        of: np.dtype | None = None,
        reach: int = 0,
        kind: Stored = FLOAT32,
    ):
        row, run, per_row = blocks.row, blocks.run, blocks.per_row
        if blocks.count == 1:
            row = run = blocks.size if whole else 1 << 20  # any multiple of a unit: all have scale number 0
            per_row = 1 if whole else 0
        self.size = blocks.size
        self.layout = "COLUMNS" if per_row == 0 and run < min(row, _UNIT) and row <= _WIDEST_PERIOD else "RUNS"
        self.narrow = row % (2 * _UNIT) != 0 or run % (2 * _UNIT) != 0
        self.columns = _columns(row, self.size) if self.layout == "COLUMNS" else self.size
        self.rows = -(-self.size // self.columns)
        struct = GEOMETRY.zeros()
        struct["n"], struct["row"], struct["run"], struct["per_row"] = self.size, row, run, per_row
        struct["count"], struct["columns"], struct["rows"] = blocks.count, self.columns, self.rows
        struct["wide"] = not _UNIT <= row < _WIDE_ROW or run < 2
        for name, divisor in (("by_row", row), ("by_run", run)):
            if not struct["wide"]:
                bits = (divisor - 1).bit_length()
                struct[name]["magic"], struct[name]["shift"] = -(-(1 << 31 + bits) // divisor), bits - 1
        if not struct["wide"]:
            struct["long_by_row"] = -(-(1 << 63 + (row - 1).bit_length()) // row)
        struct["qmin"], struct["qmax"], struct["margin"] = levels.qmin, levels.qmax, margin
        struct["inverse"] = 1 / levels.divisor if levels.divisor else 0
        struct["zero"], struct["divisor"], struct["symmetric"] = levels.zero, levels.divisor, levels.symmetric
        struct["reach"] = reach
        if of is not None:
            # The largest number of steps is below qmax - qmin + 1, so no product with a scale up to `surely` is larger
            # than the limit.
            ends, dtype = ENDS[of.name], compute_dtype(of)
            surely, largest = ends.limit / (levels.qmax - levels.qmin + 1), ends.largest
            if levels.floating:  # the end of ranges, and the largest scale there is
                largest, surely = kind.range_end(of.name), kind.most(levels)
            for name, end in (("largest", largest), ("limit", ends.limit), ("surely", surely)):
                struct[name] = np.array(end, dtype).view(f"u{dtype.itemsize}")
        self._struct = struct
        self.argument = struct.tobytes()

    def units(self, depth: int, rows: int, width: int = _THREADS * _UNIT) -> int:
        """Thread blocks that have work, when a thread takes `depth` units, or `rows` rows of the columns of a unit.

        `width` is the number of elements in the units of a thread block.
        """
        if self.layout == "RUNS":
            return -(-self.size // (width * depth))
        return -(-self.rows // rows) * -(-self.columns // width)


def _columns(period: int, size: int) -> int:
    """Columns of a matrix whose rows are whole periods and whole units, with few idle threads at its right edge."""
    least = math.lcm(period, _UNIT)
    best, best_use = least, 0.0
    for times in range(1, 65):
        columns = least * times
        width = _EACH_THREADS * _UNIT
        use = columns / (-(-columns // width) * width)
        if use > best_use + 0.02 and (times == 1 or columns <= size):
            best, best_use = columns, use
    return best


_geometry = functools.lru_cache(maxsize=1024)(Geometry)


# Types of the arguments of kernels; "C" is what scales have, float64 beside float64 arrays. Those that go from element
# to element have their arrays ahead of these, two or three.
_EACH = ("p", "C", "p", "i4", GEOMETRY)
_SIGNATURES: dict[str, tuple[Type, ...]] = {
    "quantize_affine": ("p", "p", *_EACH, "p", "p", "u4", "u4"),
    "dequantize_affine": ("p", "p", *_EACH),
    "fake_quantize_affine": ("p", "p", *_EACH),
    "quantize_backward_affine": ("p", "p", "p", *_EACH),
    "fake_quantize_backward_affine": ("p", "p", "p", *_EACH),
    "dequantize_backward_affine": ("p", "p", *_EACH),
    "convert_scales_affine": ("p", "p", "i8"),
    "round_scales_affine": ("p", "p", "i8", "i4", "i4"),
    "find_range_affine": ("p", "p", "p", GEOMETRY),
    "find_whole_affine": ("p", "p", "p", GEOMETRY),
    "finish_range_affine": ("p", "p", "p", "p", GEOMETRY),
    "quantize_dynamic_affine": ("p", "p", "p", "p", "i4", GEOMETRY),
    "quantize_rows_affine": ("p", "p", "p", "p", GEOMETRY),
    "quantize_lanes_affine": ("p", "p", "p", "p", "i4", GEOMETRY),
    "percentile_affine": ("p", "p", "p", "f8", "i8", GEOMETRY),
}


@functools.cache
def _kernel(name: str, axes: tuple[str, ...], threads: int = _THREADS, rounds: int = 1, shared: int = 0) -> Kernel:
    """A kernel of the family by the name of its template and the template's arguments."""
    template = next(template for template in KERNELS if template.name == name)
    number = "f8" if axes[0].startswith("double") else "f4"
    signature = tuple(number if type == "C" else type for type in _SIGNATURES[name])
    return Kernel(template, axes, threads, shared, rounds, signature)


@functools.lru_cache(maxsize=1024)
def _launch(
    kind: str, dtype: np.dtype, bits: int | None, blocks: Blocks, levels: Levels, margin: int
) -> tuple[Kernel, Geometry, int, tuple[Any, Any]]:
    """Kernel, geometry and grid of an operation that goes from element to element, and who writes scales."""
    geometry = _geometry(blocks, levels, margin)
    operation = kind if bits is None else f"{kind}{bits}"
    walk = operation, dtype.name, geometry.layout, geometry.narrow
    size, _, units = _walk_of(*walk)
    kernel = _kernel(f"{kind}_affine", (_arguments(*walk, levels.floating),), _EACH_THREADS)
    grid = geometry.units(units, units, _EACH_THREADS * size)
    # A scale for each thread of those thread blocks that write some, unless there are more.
    every = max(1, min(grid, grid * _EACH_THREADS // blocks.count))
    share = -(-blocks.count // -(-grid // every))
    return kernel, geometry, grid, (every, share)


def converted(values: Any, dtype: np.dtype) -> Any:
    """Numbers on a device as a contiguous array of another dtype, subnormal ones kept.

    Scales, offsets or zero points, or with float32 and float64 any numbers: those of 16 bits have to be finite.
    """
    if values.dtype.kind in "iu" or dtype.kind in "iu" or values.dtype == dtype:
        return values.astype(dtype, order="C")
    if SINGLE not in (values.dtype, dtype):
        return converted(converted(values, SINGLE), dtype)
    result = _xp.namespace(values).empty(values.shape, dtype)
    convert(values, result)
    return result


def convert(values: Any, out: Any) -> None:
    """Fill a C-contiguous array on a device from one of another dtype, one of them float32, as `converted` does."""
    values = _xp.contiguous(values)
    if out.size:
        kernel = _kernel("convert_scales_affine", (_TYPES[values.dtype.name], _TYPES[out.dtype.name]))
        kernel(values, -(-out.size // _THREADS), (values, out, out.size))


def rounded(values: Any, kind: Stored, positive: bool) -> Any:
    """float32 scales or offsets on a device as the numbers of 16 bits as which they are stored.

    `positive`: those above 0 stay above 0.
    """
    result = _xp.namespace(values).empty_like(values)
    if values.size:
        kernel = _kernel("round_scales_affine", ("float",))
        kernel(values, -(-values.size // _THREADS), (values, result, values.size, _STORAGES[kind.name], positive))
    return result


def store(values: Any, plane: Any) -> None:
    """Fill a plane with numbers of its own dtype that another holds."""
    if values.dtype != plane.dtype:
        values = converted(values, plane.dtype)
    plane[...] = values.reshape(-1)


def each(
    kind: str,
    dtype: np.dtype,
    bits: int | None,
    blocks: Blocks,
    levels: Levels,
    arrays: tuple[Any, ...],
    scale: Any,
    zero_point: Any,
    margin: int = 0,
    planes: tuple[Any, ...] = (),
) -> None:
    """Launch an operation that goes from element to element, on `arrays`."""
    kernel, geometry, units, shares = _launch(kind, dtype, bits, blocks, levels, margin)
    computed = compute_dtype(dtype)
    value, point = 0.0, 0
    if isinstance(scale, float):
        scale, value = 0, scale
    else:
        if scale.dtype != computed:  # a plane beside float64
            scale = converted(scale, computed)
        if scale.size < blocks.count:  # one for all
            scale = scale.repeat(blocks.count)
    if isinstance(zero_point, float):  # an offset, as its bits
        zero_point, point = 0, int(np.float32(zero_point).view(np.int32))
    elif isinstance(zero_point, int):
        zero_point, point = 0, zero_point
    else:
        if zero_point.itemsize < 4:
            zero_point = converted(zero_point, INT32 if zero_point.dtype.kind in "iu" else SINGLE)
        if zero_point.size < blocks.count:
            zero_point = zero_point.repeat(blocks.count)
    last = (*(0 if plane is None else plane for plane in planes), *shares) if planes else ()
    kernel(arrays[-1], units, (*arrays, scale, value, zero_point, point, geometry.argument, *last))


@functools.lru_cache(maxsize=1024)
def _find_launch(
    dtype: np.dtype, blocks: Blocks, levels: Levels, kind: Stored
) -> tuple[Kernel, int, Kernel, int, Geometry]:
    """The kernel that finds ranges, the one that makes scales of them, their grids and geometry."""
    geometry, name = _finding(dtype, blocks, levels, None, kind, False), _TYPES[dtype.name]
    last = _FLOATING[levels.floating]
    if blocks.count == 1:
        find_range = _kernel("find_whole_affine", (name, *last), rounds=_FIND_ROUNDS)
        units = -(-blocks.size * dtype.itemsize // (_THREADS * _NUMBERS.WHOLE_BYTES))
    else:
        rounds = 1 if geometry.layout == "COLUMNS" else _FIND_ROUNDS
        find_range = _kernel("find_range_affine", (name, geometry.layout, *last), rounds=rounds)
        units = geometry.units(_NUMBERS.FIND_DEPTH[dtype.itemsize // 4], _NUMBERS.FIND_ROWS)
    finish = _kernel("finish_range_affine", (_TYPES[compute_dtype(dtype).name], *_finishing(levels, kind)))
    return find_range, units, finish, -(-blocks.count // _THREADS), geometry


def _finding(
    dtype: np.dtype, blocks: Blocks, levels: Levels, fraction: float | None, kind: Stored, whole: bool
) -> Geometry:
    """The geometry of a search for ranges, which says in what scales will be stored in place of a margin."""
    reach = reach_of(levels, fraction, kind is not FLOAT32)
    return _geometry(blocks, levels, _STORAGES[kind.name], whole, dtype, reach, kind)


def _finishing(levels: Levels, kind: Stored) -> tuple[str, ...]:
    """The last template arguments of what makes scales of ranges."""
    return _FLOATING[levels.floating] if kind is FLOAT32 else (_STORED[levels.floating],)


def find(x: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, fraction: float | None) -> None:
    """Fill `scale` and `zero_point` (offsets if `levels` say so, or None) with what is found.

    `fraction` is a percentile / 100.
    """
    computed = compute_dtype(x.dtype)
    kind = FLOAT32 if scale.itemsize > 2 else stored(scale.dtype.name)
    empty = _xp.namespace(x).empty
    exact = scale if scale.dtype == computed else empty(blocks.count, computed)
    wide: Any = zero_point
    if zero_point is not None and zero_point.itemsize < 4:
        wide = empty(blocks.count, SINGLE if levels.floating else INT32)
    point = 0 if wide is None else wide
    if fraction is not None:
        geometry = _finding(x.dtype, blocks, levels, fraction, kind, True)
        period = blocks.row if blocks.per_row == 0 and blocks.count > 1 else 0
        kernel = _kernel("percentile_affine", (_TYPES[x.dtype.name], *_finishing(levels, kind)), 2 * _THREADS)
        kernel(x, blocks.count, (x, exact, point, fraction, period, geometry.argument))
    else:
        find_range, units, finish, groups, geometry = _find_launch(x.dtype, blocks, levels, kind)
        low: Any = 0
        if not levels.symmetric:
            low = empty(blocks.count, computed)
            low.data.memset_async(0, low.nbytes)
        exact.data.memset_async(0, exact.nbytes)
        find_range(x, units, (x, exact, low, geometry.argument))
        finish(x, groups, (exact, low, exact, point, geometry.argument))
    if exact is not scale:
        if kind is FLOAT32:
            exact = _xp.namespace(x).minimum(exact, float(np.finfo(scale.dtype).max))
        store(exact, scale)
    if wide is not zero_point:
        store(wide, zero_point)


def _run_on_chip(blocks: Blocks) -> int:
    """Elements of a block where all blocks are runs, else 0; blocks must begin and end with a unit."""
    if blocks.count == 1:
        return 0 if blocks.size % _UNIT else blocks.size
    return 0 if blocks.per_row == 0 or blocks.row % _UNIT or blocks.run % _UNIT else blocks.run


@functools.lru_cache(maxsize=1024)
def _dynamic_launch(
    dtype: np.dtype, bits: int, blocks: Blocks, levels: Levels, memory: int, kind: Stored
) -> tuple[Kernel, int, tuple[Any, ...], Geometry] | None:
    """Kernel, grid and last arguments of a search for ranges that quantizes at once, and what they point to.

    None where blocks do not fit on chip. `memory` is the shared memory of a thread block.
    """
    run, size = _run_on_chip(blocks), dtype.itemsize
    units, whole = run // _UNIT, blocks.row == run
    if not 0 < units <= _ON_CHIP[size]:
        return None
    geometry = _finding(dtype, blocks, levels, None, kind, True)
    axes, last = (_TYPES[dtype.name], str(bits)), _finishing(levels, kind)
    if last and size == 8:
        return None
    if size < 8 and run in _LANE_BLOCKS and whole:
        kernel = _kernel("quantize_lanes_affine", (*axes, *last), _THREADS, _LANE_ROUNDS, 2 * 32 * _THREADS * size)
        return kernel, -(-blocks.size // (32 * _THREADS)), (run // 32, geometry.argument), geometry
    if units <= 32 * _SLOTS:
        each = _SLOTS if units <= _SLOTS else 1
        slots = _MANY_SLOTS if units > _OF_FEW_SLOTS and size < 8 else _SLOTS
        team = 1 << (-(-units * each // slots) - 1).bit_length()
        kernel = _kernel("quantize_dynamic_affine", (*axes, f"{slots}, {each}", *last), _NUMBERS.TEAM_THREADS)
        units = -(-blocks.count // (_NUMBERS.TEAM_THREADS // team * each))
        return kernel, units, (team, geometry.argument), geometry
    if not whole or run * size + _STATIC_BYTES > memory:
        return None
    kernel = _kernel("quantize_rows_affine", (*axes, *last), _row_threads(units), 1, run * size)
    return kernel, blocks.count, (geometry.argument,), geometry


def _row_threads(units: int) -> int:
    """Threads for a block of so many units: whole warps, of which few are idle in the last round."""
    most = min(_NUMBERS.ROW_THREADS, -(-units // (32 * _ROW_UNITS)) * 64)
    return min(
        range(max(32, most // 128 * 32), most + 1, 32),
        key=lambda threads: (-(-units // threads) * threads, abs(_ROW_UNITS * threads - units)),
    )


def quantize_dynamic(
    x: Any, codes: Any, scale: Any, zero_point: Any | None, blocks: Blocks, levels: Levels, bits: int
) -> bool:
    """Whether blocks fit on chip, and it is done."""
    kind = FLOAT32 if scale.itemsize > 2 else stored(scale.dtype.name)
    launch = _dynamic_launch(x.dtype, bits, blocks, levels, shared_memory(x.data.device_id), kind)
    if launch is None or x.data.ptr % 16 or codes.data.ptr % 16:
        return False
    kernel, units, last, _ = launch
    if zero_point is None or levels.floating or zero_point.itemsize == 4:
        kernel(x, units, (x, codes, scale, 0 if zero_point is None else zero_point, *last))
    else:
        wide = _xp.namespace(x).empty(blocks.count, INT32)
        kernel(x, units, (x, codes, scale, wide, *last))
        store(wide, zero_point)
    return True


@functools.lru_cache(maxsize=1024)
def decoder(bits: int, granularity: Granularity, levels: Levels, scale_dtype: str, zero_dtype: str) -> Decoder:
    """The storey-1 decoder of integers of so many bits."""
    # As AffineStored of kernels/formats/affine.cuh has them, above the zero point of all.
    plain = scale_dtype == "float32" and zero_dtype == "int32" and not levels.floating
    kinds = _STORAGES[scale_dtype] | (zero_dtype != "int32") << 2
    last = levels.zero | kinds << 32

    def numbers(shape: tuple[int, ...]) -> tuple[int, ...]:
        blocks = blocks_of(shape, granularity)
        return blocks.row, blocks.run, blocks.per_row, last

    struct = f"{'Affine' if plain else 'AffineStored'}<{bits}, {str(levels.qmin < 0).lower()}>"
    planes = ("codes", "scale", "zero_point") if plain else ("codes", "scale", "zero_point", "offset")
    return Decoder(_HEADER, struct, planes, numbers, together=True)
