"""The route for few tokens and any GGUF type: ``linear_records`` decodes records of 256 elements in registers.

It takes whatever `kbitcupy.formats.base.Records` describes, for one weight and for mixtures of experts
(kernels/linear/gguf_stream.cu). Here stands what it can take, how its work is cut, and how it is launched.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, Struct, Type, packed
from ..formats.base import Records, all_records, register_templates
from .fused import (
    DECLARED,
    HALF_CXX,
    ITEM_ROWS,
    NUMBERS,
    SIZES,
    TOKENS,
    Grouping,
    Multiply,
    bias_argument,
    kind_of,
)
from .integer_activations import Q8_BLOCK
from .routes import Device, Problem, Product, Route, refused_by_all
from .small_batch import add_up, launch_in_parts, room_for_parts

#: The addresses of the fields of a weight.
RECORD_PLANES = Struct("RecordPlanes", field=("u8", 5))
#: What ``linear_records`` is told of its work: the records of a row; warps of a team, and how many tiles' sums have
#: room for it; where in shared memory there are the decoder's table, barriers, x, sums of x, scales of tokens, sums of
#: products, and the stages of records; bytes behind two steps of x; and 0.
RECORD_CUT = Struct(
    "RecordCut",
    records="i4",
    warps="i4",
    ring="i4",
    table="u4",
    barriers="u4",
    x="u4",
    sums_of_x="u4",
    scales="u4",
    sums="u4",
    stages="u4",
    gap="u4",
    zero="u4",
)
#: Instead of a number of eights: up to four tokens, each in two halves.
IN_HALVES = -1
_RINGS = 4, 3  # tiles whose sums have room in shared memory
_DECLARED = (*DECLARED, RECORD_PLANES, RECORD_CUT, NUMBERS)
_NUMBERS = ("i4",) * 7
_ARGUMENTS: tuple[Type, ...] = ("p", RECORD_PLANES, *["p"] * 6, (*_NUMBERS, RECORD_CUT))
_WARPS = 16  # of a multiprocessor at the most, by the registers of a thread


def _template(records: Records, instances: tuple[str, ...] = (), hot: bool = False) -> Template:
    axes = (instances,) if instances else ()
    about: dict[str, Any] = {"header": records.header, "structs": (*_DECLARED, *records.declared), "least": 80}
    return Template("linear/gguf_stream.cu", "linear_records", axes, hot=hot, **about)


def _arguments(records: Records, T: str, grouped: bool, eights: int = 0, columns: bool = False) -> str:
    way = "Lanes" if records.lanes and eights <= 0 else "Record"
    decoder = records.struct.format(way=way)
    return f"{T}, {f'Columns<{decoder}>' if columns else decoder}, {str(grouped).lower()}, {eights}"


def _templates() -> Iterator[Template]:
    half, other = HALF_CXX
    floats = (False,), (True,)
    for records in all_records():
        kinds: tuple[tuple[Any, ...], ...] = *floats, (False, 1), *((False, 0, True),) * records.columns
        yield _template(records, tuple(_arguments(records, half, *kind) for kind in kinds), hot=True)
        # Sixteen tokens take all registers: on some GPUs a few spill.
        more = *(_arguments(records, other, *kind) for kind in floats), _arguments(records, half, False, 2)
        yield _template(records, more)
        if records.halves:
            yield _template(records, (_arguments(records, half, False, IN_HALVES),), hot=True)


register_templates(_templates)


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class RecordKernel:
    """``linear_records`` for one format, shape and dtype, and how many tokens or groups of them there are.

    Parameters
    ----------
    records : Records
        How the format is decoded.
    shape : tuple of int
        N and K of the weight, or of one expert.
    dtype : numpy.dtype
        Of x.
    device : Device
        Where it runs.
    tokens : int
        Tokens; of experts the groups of tokens that are there at once.
    grouped : bool, default False
        Whether it is the flavour for experts.
    staged : bool, default False
        Whether it is the flavour for quantized tokens.
    halves : bool, default False
        ... of which each becomes a sum of two halves.
    """

    def __init__(
        self,
        records: Records,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: Device,
        tokens: int,
        grouped: bool = False,
        staged: bool = False,
        halves: bool = False,
    ):
        self._n, k = shape
        self._records, self.cxx = records, CXX_TYPES[dtype.name]
        self._eights = IN_HALVES if halves else 1 + (tokens > TOKENS) if staged else 0
        #: Tokens of a thread block.
        self.tokens = TOKENS // 2 if halves else TOKENS * max(self._eights, 1)
        each, m = k // records.ELEMENTS, TOKENS if grouped else min(tokens, self.tokens)
        together = tokens if grouped else self._parts(tokens)
        found, self._splits = None, 1
        for splits in (1,) if grouped else range(1, 1 + min(each, _MOST_SPLITS)):
            if found is not None and (each // splits < _WARPS or splits > self._splits + 2):
                break
            # As few parts as do, or up to two more of a long row, where a multiprocessor then has more warps.
            cut = self._cut(each, splits, m, device.shared_memory)
            if cut is not None and (found is None or cut[0] * cut[1] > found[0] * found[1]):
                found, self._splits = cut, splits
        #: Whether the device has the shared memory.
        self.fits = found is not None
        warps, resident, places, shared = found or (1, 1, {}, 0)
        splits = self._splits
        tiles, blocks = -(-self._n // ITEM_ROWS), max(1, device.multiprocessors * resident // (splits * together))
        alone = records.stride > _LARGE and not staged
        self._teams = 1 if alone else _teams(tiles, blocks, warps)
        self._blocks = -(-tiles // (-(-tiles // (blocks * self._teams)) * self._teams))
        self._packed = RECORD_CUT.pack(records=each, warps=warps // self._teams, gap=records.gap, zero=0, **places)
        columns = records.columns and tokens == 1 and not (grouped or staged) and self.cxx == HALF_CXX[0]
        values = _arguments(records, HALF_CXX[0] if staged else self.cxx, grouped, self._eights, columns)
        self._kernel = _kernel(records, values, 32 * warps, shared)

    def _cut(self, each: int, splits: int, m: int, room: int) -> tuple[int, int, dict[str, int], int] | None:
        """Warps of a thread block that has one of `splits` parts of the `each` records of a row and `m` tokens, how
        many such blocks a multiprocessor has, what lies where in shared memory, and how much that is; None where it is
        too much.
        """
        records, best = self._records, None
        share = -(-each // splits)
        barriers = _rounded_up(4 * records.table)
        x = barriers + 16 * max(_RINGS) * _MOST_TEAMS
        many = TOKENS if self._eights == IN_HALVES else self.tokens
        m = 2 * m if self._eights == IN_HALVES else m
        if self._eights > 0:  # bytes, 64 of all tokens at a time; scales of 32
            sums_of_x = x + share * (records.ELEMENTS * m + 4 * _GAP)
            scaled, summed = records.ELEMENTS // Q8_BLOCK, records.summed and not records.folded
            sub = min(records.sub, Q8_BLOCK)
            of_sums = _APART[sub] if records.apart else records.ELEMENTS // sub * 4
        else:  # halves; one scale where they are none by themselves
            sums_of_x = x + share * (records.ELEMENTS * 2 * m + 8 * records.gap)
            scaled, summed = self._eights == IN_HALVES or self.cxx != HALF_CXX[0], records.summed and not records.folded
            of_sums = records.ELEMENTS // records.sub * 4
        scales = sums_of_x + share * of_sums * many * summed
        sums = scales + share * scaled * many * 4
        # Each warp has a record of every tile or two. Many warps first, then a longer ring, then few thread blocks.
        for ring, warps in itertools.product(_RINGS, range(min(_WARPS, each // splits), 0, -1)):
            stages = sums + ring * warps * _SUMS * many // TOKENS
            shared = stages + warps * ITEM_ROWS * records.stride
            if shared > room or warps < min(_FEW_WARPS, each // splits):
                continue
            resident = min(_WARPS // warps, (room + 1024) // (shared + 1024))
            if best is None or resident * warps > best[0] * best[1]:
                places = {"x": x, "sums_of_x": sums_of_x, "scales": scales, "sums": sums, "stages": stages}
                best = warps, resident, {"ring": ring, "barriers": barriers, **places}, shared
        return best

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        launch_in_parts(self.launch, TOKENS, self._splits, x, q, bias, out)

    def launch(
        self,
        blocks: int,
        x: Any,
        q: QuantizedArray,
        bias: Any,
        out: Any,
        partial: int,
        tokens: int,
    ) -> None:
        bias, address, kind = bias_argument(bias, x.dtype)
        planes, scale = self._planes(q)
        pointers = x.data.ptr, planes, scale, address, out.data.ptr, partial, 0, 0
        numbers = self._numbers(1, 0, kind, tokens)
        self._kernel.launch(x, (self._blocks, self._splits, blocks), (*pointers, numbers))

    def of_experts(self, grouping: Grouping) -> Multiply:
        """The launch for experts, the kernel compiled."""
        start, grid = self._kernel.ready(grouping.device).launch, (self._blocks, self._splits, grouping.groups)
        numbers = self._numbers(grouping.divisor, grouping.step, SIZES.NO_BIAS, grouping.products)

        def multiply(x: Any, qs: QuantizedArray, out: int, partial: int, groups: int, order: int) -> None:
            planes, scale = self._planes(qs)
            start(grid, (x.data.ptr, planes, scale, 0, out, partial, groups, order, numbers))

        return multiply

    def staged(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n] from tokens that the kernel quantizes, both float16, bfloat16 or float32."""
        tokens, partial = out.size // self._n, room_for_parts(self._splits, out)
        if bias is not None and bias.dtype != _xp.SINGLE:
            bias = bias.astype(np.float32)
        bias, address, kind = bias_argument(bias, _xp.SINGLE)
        planes, scale = self._planes(q)
        to = 0 if partial is None else partial.data.ptr
        pointers = x, planes, scale, address, out.data.ptr, to, 0, 0
        numbers = self._numbers(1, 0, kind, tokens, kind_of(x.dtype), kind_of(out.dtype))
        self._kernel.launch(out, (self._blocks, self._splits, self._parts(tokens)), (*pointers, numbers))
        if partial is not None:
            add_up(partial, self._splits, bias, out)

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - launchers are kept as long
    def _numbers(self, divisor: int, step: int, kind: int, tokens: int, given: int = 0, made: int = 0) -> bytes:
        """What stands behind addresses; `given` and `made`: dtypes of quantized tokens and of their results."""
        return packed(_NUMBERS, divisor, step, kind, tokens, self._n, given, made) + self._packed

    def _planes(self, q: QuantizedArray) -> tuple[bytes, int]:
        """The planes of a weight as the kernel takes them, and its tensor scale or 0, found out once."""
        found = q._launches.get(self._records)
        if found is None:
            found = q._launches[self._records] = _bound(self._records, q)
        return found

    def describe(self, tokens: int) -> str:
        """A few words on the launch."""
        grid = self._blocks, self._splits, self._parts(tokens)
        each = f"{self.tokens} tokens a thread block"
        return f"records of 256 elements decoded in registers: linear_records, {each}, grid {grid}"

    def _parts(self, tokens: int) -> int:
        """Thread blocks with other tokens."""
        return -(-tokens // self.tokens)


# Thread blocks that may share k; the fewest warps of a thread block that has work for them; teams of warps; bytes of a
# warp's sums, and behind 64 codes of all tokens; bytes of a token's sums for minima, by elements of a sub-block; the
# bytes of a record beyond which one team is faster than two, since it reads more of a row at a time.
_MOST_SPLITS, _FEW_WARPS, _MOST_TEAMS, _SUMS, _GAP, _APART, _LARGE = 64, 8, 2, 512, 16, {16: 96, 32: 64}, 192


def _teams(tiles: int, blocks: int, warps: int) -> int:
    """Of the warps of a thread block: two, which join sums of half as many warps, where none of them wait for more."""

    def busy(teams: int) -> float:
        return tiles / (-(-tiles // (blocks * teams)) * blocks * teams)

    return 2 if warps >= _FEW_WARPS and warps % 2 == 0 and busy(2) >= 0.98 * busy(1) else 1


def _bound(records: Records, q: QuantizedArray) -> tuple[bytes, int]:
    """The planes of a weight as the kernel takes them, and its tensor scale or 0."""
    addresses = [q.planes[name].data.ptr for name, _ in records.fields]
    scale = q.planes.get(records.tensor_scale) if records.tensor_scale else None
    packed = RECORD_PLANES.pack(field=(*addresses, *[0] * (5 - len(addresses))))
    return packed, 0 if scale is None else scale.data.ptr


@functools.lru_cache(maxsize=1024)
def _kernel(records: Records, values: str, threads: int, shared: int) -> Kernel:
    return Kernel(_template(records), (values,), threads, shared, signature=_ARGUMENTS, early=True)


@functools.lru_cache(maxsize=4096)
def record_kernel(
    records: Records,
    shape: tuple[int, int],
    dtype: np.dtype,
    device: Device,
    tokens: int,
    grouped: bool = False,
    staged: bool = False,
    halves: bool = False,
) -> RecordKernel:
    """The launcher of ``linear_records``."""
    return RecordKernel(records, shape, dtype, device, tokens, grouped, staged, halves)


# ---- routes --------------------------------------------------------------------------------------------------------

#: The most tokens: each eight decode the weights again.
MOST_TOKENS = 64
# Microseconds of the launches; the fraction of the bandwidth at which weights pass; microseconds to decode an element.
_START, _FRACTION, _DECODING = 4.0, 0.85, 1.8e-7
# What sixteen quantized tokens take longer than eight.
_SIXTEEN = 1.25


def record_refusal(problem: Problem) -> str | None:
    """What stands against ``linear_records``, but for the number of tokens."""
    records = problem.format.records()
    if records is None:
        return f"{problem.format} has no decoder of records"
    if problem.dtype.itemsize != 2:
        return f"x is {problem.dtype}; the tensor cores take float16 and bfloat16"
    n, k = problem.shape
    if not n or not k:
        return "the weight is empty"
    assert problem.device is not None
    if problem.device.capability < 80:
        return "it needs compute capability 8.0"
    if k % records.ELEMENTS:
        return f"rows of {k} elements are not whole records of {records.ELEMENTS}"
    if max(problem.experts, 1) * n * k // records.ELEMENTS >= 1 << 31:
        return "numbers of 32 bits do not reach through the weight"
    if not problem.stored.whole:
        return "the planes do not start where they can be copied from"
    if not problem.experts and problem.stored.lead:
        return "a stack is for linear_grouped"
    if problem.experts and problem.stored.members not in (1, problem.experts):
        return f"a stack of {problem.stored.members} arrays with planes of their own, for {problem.experts} experts"
    return None if problem.aligned else "x does not start at a multiple of 16 bytes"


def _cost(problem: Problem, work: float) -> float:
    """Microseconds of a product that decodes weights in so many times the time of one that takes them once."""
    n, k = problem.shape
    return _START + max(problem.reading / _FRACTION, n * k * _DECODING * work)


def in_halves(problem: Problem) -> bool:
    """Whether quantized tokens are so few that they become sums of two halves, and as fast as floats."""
    records = problem.format.records()
    return records is not None and records.halves and problem.tokens <= TOKENS // 2


def staged_cost(problem: Problem) -> float:
    """The same of quantized tokens, 8 or 16 at once, but for quantizing them."""
    records = problem.format.records()
    assert records is not None
    if in_halves(problem):
        return _cost(problem, records.lanes)
    times = 1.0 if problem.tokens <= TOKENS else _SIXTEEN * -(-problem.tokens // (2 * TOKENS))
    return _cost(problem, records.integers * times)


class Streamed(Route):
    """``linear_records``."""

    name = "records"

    def accepts(self, problem: Problem) -> str | None:
        found = refused_by_all(problem, "one weight") or record_refusal(problem)
        if found:
            return found
        if problem.tokens > MOST_TOKENS:
            return f"more than {MOST_TOKENS} tokens"
        return None if self._kernel(problem).fits else "the device has too little shared memory"

    def cost(self, problem: Problem) -> float:
        records = problem.format.records()
        assert records is not None
        return _cost(problem, (records.lanes or records.work) * -(-problem.tokens // TOKENS))

    def prepare(self, problem: Problem) -> Product:
        return self._kernel(problem)

    def describe(self, problem: Problem) -> str:
        return self._kernel(problem).describe(problem.tokens)

    def _kernel(self, problem: Problem) -> RecordKernel:
        records = problem.format.records()
        assert records is not None and problem.device is not None
        return record_kernel(records, problem.shape, problem.dtype, problem.device, problem.tokens)
