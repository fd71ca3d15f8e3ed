"""Products of ternary weights whose codes are read in place, on a GPU: kernels/linear/ternary_stream.cu.

Two launches: the first one puts the tokens in the order in which the second one takes them, quantized to int8 on the
way (`kbitcupy.products.activations`) or as floats of 16 bits; from Hopper on the second one fetches codes meanwhile.
There one token takes one launch, where the weight is not small, whether it is quantized on the way or int8 already; and
up to 8 that are.
What it gives of int8 is the contract of `kbitcupy.products.ternary`, to the bit. Floats are multiplied by trits, which
16 bits hold, and added in float32; the scale and the bias follow, and one rounding. Where that is faster they go
through `kbitcupy.products.ternary_bulk`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Planned, multiprocessors, packed, shared_memory
from ..backend.structs import Constants
from ..formats.base import Trits, register_templates
from ..formats.ternary import BLOCK
from ..ops import source, widen
from . import activations as tokens_of, int8
from .activations import Norm, Quantizing, Rule, quantizing
from .int8 import BIAS_KINDS, token_planes
from .integer_activations import NUMBERS, floats_of, quantize_into as tokens_in_rows
from .routes import MOST_ALIGNED, Device, Problem, Product, Route, Stored, refused_by_all
from .ternary_bulk import multiply_bulk
from .ternary_rows import TOKENS, Rows, bytes_rows_of, float_rows_of, int8_rows_of, named, quantized_rows_of, rows_of

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
_STREAM_NUMBERS, _GROUP_NUMBERS = ("i8", *("i4",) * 6), ("i8", "i8", *("i4",) * 3)
_STREAM_SIGNATURE, _GROUP_SIGNATURE = (*("p",) * 7, _STREAM_NUMBERS), (*("p",) * 7, _GROUP_NUMBERS)
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


@dataclass(frozen=True, eq=False)
class _Fragments:
    """What the first launch of a product of one shape writes, and what takes it.

    Parameters
    ----------
    product : Rows or _Stream
        The second launch.
    groups : int
        Times 8 tokens, that are written.
    early : bool
        Whether the second launch may start while the kernel ahead of the first one is at work.
    numbers : bytes
        Arguments of the second one behind addresses.
    size, sums_at, scales_at : int
        Bytes of all, and where, behind the fragments, sums begin, of tokens or of groups of whole steps, and scales.
    """

    product: Rows | _Stream
    groups: int
    early: bool
    numbers: bytes
    size: int
    sums_at: int
    scales_at: int


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
        grid = min(tiles, max(1, ready.resident // groups)), groups, 1
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
        grid = min(tiles, ready.resident, 2 * multiprocessors(device)), 1, 1
    return _Stream(ready.launch, grid, groups, steps * _STEP_BYTES * groups * (1 + floats), int(staged > 0))


@functools.lru_cache(maxsize=4096)
def _fragments(
    dtype: np.dtype, tokens: int, rows: int, depth: int, part: Trits, each: int, kind: int, device: int
) -> _Fragments:
    """How a product of two launches is computed, the kernel of the second one compiled.

    `each` is 1 where tokens have a scale each, and `kind` that of the bias.
    """
    group = part.group if part.shares == "group" else 0
    own = rows_of(dtype, tokens, rows, depth, group, device)
    stream = _stream(dtype, tokens, rows, depth, group, device) if own is None else None
    groups = 1 if stream is None else stream.groups
    steps = -(-depth // _STEP)
    many = 8 * groups * steps * (_STEP // group) if group else -(-tokens // 4) * 4
    sums_at = steps * _STEP_BYTES * groups
    scales_at = sums_at + 4 * many
    product = own if stream is None else stream
    assert product is not None
    early = _starts_early(tokens, rows, depth, group > 0 and stream is not None)
    shared = (each,) if group else (each, int(part.shares == "row"))
    if own is not None:
        numbers = own.packed(rows, tokens, depth, *shared, kind)
    else:
        assert stream is not None
        staged, types = ((), _GROUP_NUMBERS) if group else ((stream.staged,), _STREAM_NUMBERS)
        numbers = packed(types, rows, tokens, depth, *shared, *staged, kind)
    return _Fragments(product, groups, early, numbers, scales_at + 4 * tokens, sums_at, scales_at)


def multiply_streamed(
    x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any, rule: Rule | None, norm: Norm | None
) -> None:
    """Fill `out`, which is not empty and on the current device, from x that is quantized by a rule, or int8 already.

    Nothing stands against it (`why_not_streamed`); without a rule floats are quantized as for W8A8.
    """
    if out.dtype == _xp.DOUBLE:
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        multiply_streamed(x, q, part, bias, single, rule, norm)
        widen(single, out)
        return
    if rule is None or isinstance(x, QuantizedArray):
        _multiply_int8(x, q, part, bias, out)
    else:
        _multiply_quantized(source(x, tokens_of.FLOATS), q, part, bias, out, rule, norm)


def _multiply_quantized(
    x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any, rule: Rule, norm: Norm | None
) -> None:
    """Floats that are quantized on the way."""
    rows, depth = q.shape
    tokens, device = out.size // rows, out.data.device_id
    added, kind = int8.bias_of(bias)
    weight, eps = (None, None) if norm is None else (norm.weight, norm.eps)
    address, root = x.data.ptr, 0 if weight is None else weight.data.ptr
    aligned = (address | root) % MOST_ALIGNED == 0
    plan = _quantized(x.dtype, out.dtype, tokens, rows, depth, part, kind, rule, eps, aligned, device)
    if isinstance(plan, _OneLaunch):
        pointers = address, root, q.planes[part.scales].data.ptr, added, out.data.ptr
        plan.product.multiply(pointers, plan.numbers, q, part)
        return
    quantize, fragments = plan
    scratch = _xp.allocate(fragments.size)
    a = scratch.ptr
    sums, scales = a + fragments.sums_at, a + fragments.scales_at
    if rule.granularity == "token":
        quantize.start(address, root, a, scales, sums)
    else:
        about = fragments.groups, part.group if part.shares == "group" else 0, fragments.early
        tokens_of.quantize_into(x, tokens, rule, norm, a, scales, sums, depth, *about)
    _multiply_fragments(fragments, a, sums, scales, q, part, added, out)


class _OneLaunch(NamedTuple):
    """The only launch of a product of one shape, and its numbers."""

    product: Rows
    numbers: bytes


class _TwoLaunches(NamedTuple):
    """The launches of a product of one shape."""

    quantize: Quantizing
    fragments: _Fragments


@functools.lru_cache(maxsize=4096)
def _quantized(
    given: np.dtype,
    dtype: np.dtype,
    tokens: int,
    rows: int,
    depth: int,
    part: Trits,
    kind: int,
    rule: Rule,
    norm_eps: float | None,
    aligned: bool,
    device: int,
) -> _OneLaunch | _TwoLaunches:
    """How a product of floats of the dtype `given` is computed, its kernels compiled.

    `norm_eps` is None without a norm; `aligned`: tokens and the weights of that start at multiples of 16 bytes.
    """
    grouped, by_token = part.shares == "group", rule.granularity == "token"
    if tokens == 1 and not grouped and by_token and aligned:
        one = quantized_rows_of(dtype, rows, depth, device)
        if one is not None:
            normalizes, eps = (0, 0.0) if norm_eps is None else (1, norm_eps)
            of_rows = int(part.shares == "row")
            numbers = one.packed(1 / depth, eps, rows, depth, of_rows, kind, normalizes, *rule.numbers)
            return _OneLaunch(one, numbers)
    fragments = _fragments(dtype, tokens, rows, depth, part, int(by_token), kind, device)
    about = fragments.groups, part.group if grouped else 0, fragments.early, device
    return _TwoLaunches(quantizing(given, tokens, depth, rule, norm_eps, aligned, depth, *about), fragments)


def _multiply_int8(x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any) -> None:
    """Tokens that are int8 already, or floats that become so by W8A8's rule, ahead of the launches."""
    rows, depth = q.shape
    tokens, device, group = out.size // rows, out.data.device_id, part.group if part.shares == "group" else 0
    added, kind = int8.bias_of(bias)
    if isinstance(x, QuantizedArray):
        codes, given = token_planes(x)
        address, scales, each = codes.data.ptr, given.data.ptr, int(given.size == tokens)
    else:
        codes = _xp.allocate(tokens * (depth + 4))
        address, scales, each = codes.ptr, codes.ptr + tokens * depth, 1
        tokens_in_rows(floats_of(x), tokens, "int8", address, scales, 0, NUMBERS.ROWS, 0)
    plan = _given(out.dtype, tokens, rows, depth, part, each, kind, not address % MOST_ALIGNED, device)
    if isinstance(plan, _OneLaunch):
        pointers = address, scales, q.planes[part.scales].data.ptr, added, out.data.ptr
        plan.product.multiply(pointers, plan.numbers, q, part)
        return
    scratch = _xp.allocate(plan.size)
    a = scratch.ptr
    sums = a + plan.sums_at
    numbers = plan.groups, group, depth, depth, int(plan.early)
    _ARRANGER.ready(device).launch((tokens, 1, 1), (address, a, sums, *numbers))
    _multiply_fragments(plan, a, sums, scales, q, part, added, out)


@functools.lru_cache(maxsize=4096)
def _given(
    dtype: np.dtype, tokens: int, rows: int, depth: int, part: Trits, each: int, kind: int, aligned: bool, device: int
) -> _OneLaunch | _Fragments:
    """How a product of int8 tokens is computed, its kernels compiled; `aligned`: they start at 16 bytes' multiples."""
    if part.shares != "group" and aligned:
        of_rows = int(part.shares == "row")
        numbers: tuple[int, ...] = rows, depth, of_rows, kind
        if tokens == 1:
            product = int8_rows_of(dtype, rows, depth, device)
        else:
            product = bytes_rows_of(dtype, tokens, rows, depth, device)
            numbers = rows, tokens, depth, each, of_rows, kind
        if product is not None:
            return _OneLaunch(product, product.packed(*numbers))
    return _fragments(dtype, tokens, rows, depth, part, each, kind, device)


def _multiply_fragments(
    plan: _Fragments, a: int, sums: int, scales: int, q: QuantizedArray, part: Trits, added: int, out: Any
) -> None:
    """The launch that takes what lies at these addresses."""
    gamma, y, product = q.planes[part.scales].data.ptr, out.data.ptr, plan.product
    if not isinstance(product, Rows):
        weight = q.planes[part.codes].data.ptr
        product.launch(product.grid, (weight, a, sums, scales, gamma, added, y, plan.numbers))
    elif part.shares == "group":
        product.multiply((a, sums, scales, added, y), plan.numbers, q, part)
    else:
        product.multiply((a, sums, scales, gamma, added, y), plan.numbers, q, part)


def _multiply_floats(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    part = q.format.trits(q.shape, q.lead)
    assert part is not None
    rows, depth = q.shape
    tokens = out.size // rows
    own_rows = float_rows_of(out.dtype, tokens, rows, depth, out.data.device_id)
    if own_rows is not None:
        added, kind = int8.bias_of(bias)
        pointers = x.data.ptr, q.planes[part.scales].data.ptr, added, out.data.ptr
        own_rows.multiply(pointers, own_rows.packed(rows, tokens, depth, int(part.shares == "row"), kind), q, part)
        return
    if multiply_bulk(x, q, part, bias, out, tokens):
        return
    added, kind = int8.bias_of(bias)
    of_rows = int(part.shares == "row")
    plan, numbers = _of_floats(out.dtype, tokens, rows, depth, of_rows, kind, out.data.device_id)
    scratch = _xp.allocate(plan.code_bytes)
    per_block = 4 * _STREAM_SIZES.ARRANGE_THREADS
    grid = -(-(-(-depth // _STEP) * _STEP) // per_block), tokens
    _arranger_of_floats(x.dtype).launch(x, grid, (x, scratch.ptr, plan.groups, depth))
    weight, gamma = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    plan.launch(plan.grid, (weight, scratch.ptr, 0, 0, gamma, added, out.data.ptr, numbers))


@functools.lru_cache(maxsize=4096)
def _of_floats(
    dtype: np.dtype, tokens: int, rows: int, depth: int, of_rows: int, kind: int, device: int
) -> tuple[_Stream, bytes]:
    """The second launch of a product of floats, and its numbers."""
    plan = _stream(dtype, tokens, rows, depth, 0, device, True)
    return plan, packed(_STREAM_NUMBERS, rows, tokens, depth, 0, of_rows, plan.staged, kind)


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
