"""Products of ternary weights whose codes are read in place, on a GPU: kernels/linear/ternary_stream.cu.

Two launches: the first one puts the tokens in the order in which the second one takes them, quantized to int8 on the
way (`kbitcupy.products.activations`) or as floats of 16 bits; from Hopper on the second one fetches codes meanwhile.
There one token takes one launch, where the weight is not small, whether it is quantized on the way or int8 already.
What it gives of int8 is the contract of `kbitcupy.products.ternary`, to the bit. Floats are multiplied by trits, which
16 bits hold, and added in float32; the scale and the bias follow, and one rounding. Where that is faster they go
through `kbitcupy.products.ternary_bulk`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Planned, multiprocessors, shared_memory
from ..backend.structs import Constants
from ..formats.base import Trits, register_templates
from ..formats.ternary import BLOCK
from ..ops import source, widen
from . import activations as tokens_of, int8
from .activations import Norm, Rule
from .int8 import BIAS_KINDS, token_planes
from .routes import MOST_ALIGNED, Device, Problem, Product, Route, Stored, refused_by_all
from .ternary_bulk import multiply_bulk
from .ternary_rows import TOKENS, float_rows_of, int8_rows_of, named, quantized_rows_of, rows_of

_STREAM_FILE = "linear/ternary_stream.cu"
_STREAM_SIZES = Constants(
    STEP=tokens_of.SIZES.STEP,
    STREAM_THREADS=256,
    FEW_THREADS=192,
    STREAM_DEPTH=2,
    ARRANGE_THREADS=256,
    GROUP_THREADS=256,
)
_STEP = tokens_of.SIZES.STEP
_STEP_BYTES = 8 * _STEP  # of 8 tokens
_ROWS = 16  # of a thread block at a time
_QUEUE = 44 << 10  # bytes of shared memory that a thread block has anyway, or a little less
_STREAM_TOKENS = (8, 16, 32)
# With groups, of whose sizes these have kernels, 8 tokens are in the second dimension of a grid.
_STREAM_GROUPS, _MOST_GROUP_TOKENS = (32, 64, 128), 8 * 65535
# Floats, where one scale is for all or for a row.
_FLOATS, _FLOAT_TOKENS = (CXX_TYPES["float16"], CXX_TYPES["bfloat16"]), (8, 16)
_OLDEST = 80  # with mma of 32 bytes
# Elements from which on a weight gains more by codes that are asked for before tokens are there than these lose by it.
_EARLY = 1 << 25
_STREAM_TYPES = tuple(CXX_TYPES[name] for name in tokens_of.FLOATS)


def _stream_template(name: str, *axes: tuple[str, ...], least: int = _OLDEST) -> Template:
    return Template(_STREAM_FILE, name, axes, structs=(BIAS_KINDS, _STREAM_SIZES), least=least)


_STREAM = _stream_template("stream_ternary", _STREAM_TYPES, tuple(map(str, _STREAM_TOKENS)), ("Integers",))
_STREAM_FLOATS = _stream_template("stream_ternary", _FLOATS, tuple(map(str, _FLOAT_TOKENS)), ("Floats",))
_STREAM_OF_GROUPS = _stream_template("stream_ternary_groups", _STREAM_TYPES, tuple(map(str, _STREAM_GROUPS)))
_ARRANGE = _stream_template("arrange_tokens", least=0)
_ARRANGE_FLOATS = _stream_template("arrange_floats", _FLOATS, least=0)
register_templates(_STREAM, _STREAM_FLOATS, _STREAM_OF_GROUPS, _ARRANGE, _ARRANGE_FLOATS)
_STREAM_SIGNATURE = (*("p",) * 7, "i8", *("i4",) * 6)
_GROUP_SIGNATURE = (*("p",) * 7, "i8", "i8", *("i4",) * 3)
_ARRANGER = Kernel(_ARRANGE, (), _STREAM_SIZES.ARRANGE_THREADS, signature=(*("p",) * 3, *("i4",) * 5), early=True)


def why_not_streamed(tokens: int, depth: int, part: Trits, lies: Stored, gpu: Device) -> str | None:
    """What stands against reading codes in place."""
    grouped = part.shares == "group"
    if grouped and part.group not in _STREAM_GROUPS:
        return f"groups are of {part.group} elements; it is for {', '.join(map(str, _STREAM_GROUPS))}"
    most = _MOST_GROUP_TOKENS if grouped else _STREAM_TOKENS[-1]
    if tokens > most:
        return f"it is for up to {most} tokens"
    if depth % BLOCK or lies.codes < MOST_ALIGNED or (grouped and lies.scales < MOST_ALIGNED):
        return f"K must be a multiple of {BLOCK}, and the planes start at multiples of {MOST_ALIGNED} bytes"
    return None if gpu.capability >= _OLDEST else "it needs a GPU of compute capability 8.0"


def _warps(pairs: int, most: int) -> int:
    """Warps of a thread block for so many pairs of steps along K: all with the same number of them, or nearly so."""

    def idle(warps: int) -> tuple[float, int]:
        return -(-pairs // warps) * warps / pairs, -warps

    return min(range(4, most + 1), key=idle)


def _starts_early(tokens: int, rows: int, depth: int, many_blocks: bool) -> bool:
    """Whether the product may start while the kernel ahead of its tokens is at work.

    Not where what quantizes finds no room beside it, or where it has small thread blocks with scales of groups: there
    tokens come later by more than codes come earlier.
    """
    return tokens <= TOKENS and rows * depth >= _EARLY and not many_blocks


@dataclass(frozen=True, eq=False)
class _Stream(Planned):
    """The second launch of a product of one shape.

    Parameters
    ----------
    groups : int
        Times 8 tokens, that are read.
    code_bytes : int
        Bytes of all fragments.
    staged : int
        1 where thread blocks stage tokens in shared memory.
    """

    groups: int
    code_bytes: int
    staged: int


@functools.cache
def _stream_kernel(dtype: str, tokens: int, operand: str, warps: int, staged: int) -> Kernel:
    template = _STREAM if operand == "Integers" else _STREAM_FLOATS
    values = CXX_TYPES[dtype], str(tokens), operand
    return Kernel(template, values, 32 * warps, staged, signature=_STREAM_SIGNATURE, early=True)


@functools.cache
def _arranger_of_floats(dtype: np.dtype) -> Kernel:
    threads = _STREAM_SIZES.ARRANGE_THREADS
    return Kernel(_ARRANGE_FLOATS, (CXX_TYPES[dtype.name],), threads, signature=("p", "p", "i4", "i4"), early=True)


@functools.cache
def _group_kernel(dtype: str, group: int) -> Kernel:
    values = CXX_TYPES[dtype], str(group)
    return Kernel(_STREAM_OF_GROUPS, values, _STREAM_SIZES.GROUP_THREADS, signature=_GROUP_SIGNATURE, early=True)


@functools.lru_cache(maxsize=4096)
def _stream(
    dtype: np.dtype, tokens: int, rows: int, depth: int, group: int, device: int, floats: bool = False
) -> _Stream:
    """How a product is computed, its kernel compiled. `group` is 0 where one scale is for all, or for a row."""
    staged = 0
    steps, tiles = -(-depth // _STEP), -(-rows // _ROWS)
    if group:
        ready, groups = _group_kernel(dtype.name, group).ready(device), -(-tokens // 8)
        grid: tuple[int, ...] = min(tiles, max(1, ready.resident // groups)), groups
    else:
        held = next(count for count in _STREAM_TOKENS if tokens <= count)
        operand, groups = "Floats" if floats else "Integers", held // 8
        pairs = -(-steps // 2)
        most = _STREAM_SIZES.FEW_THREADS if held > 16 else _STREAM_SIZES.STREAM_THREADS
        warps = _warps(pairs, most // 32)
        # Two thread blocks have to find room.
        staged = -(-pairs // warps) * warps * 2 * _STEP * tokens * (1 + floats)
        staged = staged if staged <= shared_memory(device) // 2 - _QUEUE else 0
        ready = _stream_kernel(dtype.name, held, operand, warps, staged).ready(device)
        # More than two blocks of a multiprocessor at a time leave more of it idle at the end.
        grid = (min(tiles, ready.resident, 2 * multiprocessors(device)),)
    return _Stream(ready.launch, grid, groups, steps * _STEP_BYTES * groups * (1 + floats), int(staged > 0))


def multiply_streamed(
    x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any, rule: Rule | None, norm: Norm | None
) -> None:
    """Fill `out`, which is not empty and on the current device, from x that is quantized by a rule, or int8 already.

    Nothing stands against it (`why_not_streamed`); without a rule floats are quantized as for W8A8.
    """
    rows, depth = q.shape
    tokens = out.size // rows
    single = out
    if out.dtype == np.float64:
        single = _xp.namespace(out).empty(out.shape, np.float32)
    group = part.group if part.shares == "group" else 0
    added, kind = (0, 0) if bias is None else (bias.data.ptr, int8.bias_kind(bias.dtype))
    weight, gamma, y = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr, single.data.ptr
    by = None if isinstance(x, QuantizedArray) else rule
    if by is not None and not group and tokens == 1 and by.granularity == "token":
        x = source(x, tokens_of.FLOATS)
        quantized = quantized_rows_of(single.dtype, rows, depth, out.data.device_id)
        root = 0 if norm is None or norm.weight is None else norm.weight.data.ptr
        if quantized is not None and not (x.data.ptr | root) % 16:
            before = (1 / depth, 0.0) if norm is None else (1 / depth, norm.eps)
            numbers = *before, rows, depth, int(part.shares == "row"), kind, int(norm is not None), *by.numbers
            quantized.multiply((x.data.ptr, root, gamma, added, y), numbers, q, part)
            if single is not out:
                widen(single, out)
            return
    codes: Any = None
    found: Any = None
    if by is None:
        codes, found = (
            token_planes(x) if isinstance(x, QuantizedArray) else int8.quantize_on_gpu(x.reshape(tokens, depth))
        )
        int8_rows = None if group or tokens > 1 else int8_rows_of(single.dtype, rows, depth, out.data.device_id)
        if int8_rows is not None and not codes.data.ptr % 16:
            pointers = codes.data.ptr, found.data.ptr, gamma, added, y
            int8_rows.multiply(pointers, (rows, depth, int(part.shares == "row"), kind), q, part)
            if single is not out:
                widen(single, out)
            return
    own_rows = rows_of(single.dtype, tokens, rows, depth, group, out.data.device_id)
    plan = _stream(single.dtype, tokens, rows, depth, group, out.data.device_id) if own_rows is None else None
    # Fragments, and behind them sums, of tokens or of groups of whole steps, and scales.
    groups = 1 if plan is None else plan.groups
    many = 8 * groups * -(-depth // _STEP) * (_STEP // group) if group else -(-tokens // 4) * 4
    code_bytes = -(-depth // _STEP) * _STEP_BYTES * groups
    scratch = _xp.namespace(out).cuda.alloc(code_bytes + 4 * (many + tokens))
    a = scratch.ptr
    sums, scales = a + code_bytes, a + code_bytes + 4 * many
    each, early = 1, _starts_early(tokens, rows, depth, group > 0 and own_rows is None)
    if by is not None:
        x = source(x, tokens_of.FLOATS)
        tokens_of.quantize_into(x, tokens, by, norm, a, scales, sums, depth, groups, group, early)
        each = int(by.granularity == "token")
    else:
        _ARRANGER.launch(codes, (tokens,), (codes, a, sums, groups, group, depth, depth, int(early)))
        scales, each = found.data.ptr, int(found.size == tokens)
    if plan is None:
        assert own_rows is not None
        shared = (each,) if group else (each, int(part.shares == "row"))
        pointers = a, sums, scales, *(() if group else (gamma,)), added, y
        own_rows.multiply(pointers, (rows, tokens, depth, *shared, kind), q, part)
    elif group:
        plan.launch(plan.grid, (weight, a, sums, scales, gamma, added, y, rows, tokens, depth, each, kind))
    else:
        of_rows = int(part.shares == "row")
        plan.launch(
            plan.grid, (weight, a, sums, scales, gamma, added, y, rows, tokens, depth, each, of_rows, plan.staged, kind)
        )
    if single is not out:
        widen(single, out)


def _multiply_floats(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    part = q.format.trits(q.shape, q.lead)
    assert part is not None
    rows, depth = q.shape
    tokens = out.size // rows
    own_rows = float_rows_of(out.dtype, tokens, rows, depth, out.data.device_id)
    if own_rows is not None:
        added, kind = (0, 0) if bias is None else (bias.data.ptr, int8.bias_kind(bias.dtype))
        pointers = x.data.ptr, q.planes[part.scales].data.ptr, added, out.data.ptr
        own_rows.multiply(pointers, (rows, tokens, depth, int(part.shares == "row"), kind), q, part)
        return
    if multiply_bulk(x, q, part, bias, out, tokens):
        return
    plan = _stream(out.dtype, tokens, rows, depth, 0, out.data.device_id, True)
    scratch = _xp.namespace(out).cuda.alloc(plan.code_bytes)
    per_block = 4 * _STREAM_SIZES.ARRANGE_THREADS
    grid = -(-(-(-depth // _STEP) * _STEP) // per_block), tokens
    _arranger_of_floats(x.dtype).launch(x, grid, (x, scratch.ptr, plan.groups, depth))
    added, kind = (0, 0) if bias is None else (bias.data.ptr, int8.bias_kind(bias.dtype))
    weight, gamma = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    of_rows = int(part.shares == "row")
    plan.launch(
        plan.grid,
        (weight, scratch.ptr, 0, 0, gamma, added, out.data.ptr, rows, tokens, depth, 0, of_rows, plan.staged, kind),
    )


# Microseconds of the launches, and times of reading the weight, for each 8 tokens.
_START, _READS = 4.0, 2.0


def why_not_floats(problem: Problem) -> str | None:
    """What stands against reading the codes of a weight, or of an expert, in place for floats."""
    assert problem.device is not None
    part = problem.format.trits(problem.shape)
    if part is None or not part.shares:
        return f"the weight is {problem.format!r}; it is for ternary"
    if part.shares == "group":
        return "groups have scales of their own"
    if CXX_TYPES.get(problem.dtype.name) not in _FLOATS:
        return f"x is {problem.dtype}; it is for 16 bits"
    if not problem.shape[0] or not problem.shape[1]:
        return "the weight is empty"
    return why_not_streamed(1, problem.shape[1], part, problem.stored, problem.device)


class TernaryFloats(Route):
    """Put tokens in order, and multiply them in 16 bits by codes that are read in place."""

    name = "ternary_floats"

    def accepts(self, problem: Problem) -> str | None:
        refusal = refused_by_all(problem, "one weight")
        if refusal is not None or problem.device is None:
            return refusal
        if problem.stored.lead:
            return "a stack is for linear_grouped"
        if problem.tokens > _FLOAT_TOKENS[-1]:
            return f"it is for up to {_FLOAT_TOKENS[-1]} tokens"
        return why_not_floats(problem)

    def cost(self, problem: Problem) -> float:
        return _START + problem.reading * _READS * -(-problem.tokens // 8)

    def prepare(self, problem: Problem) -> Product:
        def product(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            bias = None if bias is None else source(bias, tokens_of.FLOATS)
            _multiply_floats(x, q, bias, out)

        return product

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        name = named("stream_ternary", problem.tokens, problem.shape[0], problem.device)
        return f"tokens put in order, codes read in place as numbers of 16 bits, tensor cores: {name}"
