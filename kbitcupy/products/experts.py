"""Routes of `linear_grouped`: each token multiplies the weights that it chose, a mixture of experts.

One launch of a kernel that decodes to fragments takes all experts, between those that sort the products by expert and
combine them. Where there is no such kernel, expert after expert is decoded and multiplied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, IDS_CXX, Template
from ..backend.launch import Planned, Start, packed
from ..formats.base import register_templates
from ..ops import source, take
from .decoded import Decoded
from .fused import GROUP, HALF_CXX, TOKENS, Grouping, Multiply
from .hopper import GROUPED_CUT, tile_kernel, tile_refusal
from .host import Host, working_dtype
from .records import RecordKernel, record_kernel, record_refusal
from .routes import Problem, Product, Route, refused_by_all
from .small_batch import FewKernel, declared_template, few_kernel, few_refusal, kernel_of, misaligned

# A number for each expert, in the 48 KiB of shared memory that every kernel has.
MOST_EXPERTS = 12000
#: dtypes of numbers of experts, as the kernels take them.
IDS = frozenset(np.dtype(name) for name in IDS_CXX)
#: dtypes of weights of slots, as the kernels take them.
WEIGHTS = ("float32",)
_GROUP_BYTES = GROUP.dtype.itemsize
#: The kernels that combine slots: by fma, and with NumPy's bits.
SUMMED, ROUNDED = "combine_slots", "combine_rounded_slots"


def _templates() -> Iterator[Template]:
    yield declared_template(SUMMED, HALF_CXX)
    yield declared_template(ROUNDED, (*HALF_CXX, CXX_TYPES["float32"]), least=0)
    yield declared_template("group_tokens", tuple(IDS_CXX.values()))


register_templates(_templates)


class GroupedKernel(Hashable, Protocol):
    """A kernel for experts of one shape and tokens of one dtype."""

    cxx: str

    def of_experts(self, grouping: Grouping) -> Multiply:
        """The launch, the kernel compiled."""
        ...


def grouped(
    kernel: GroupedKernel,
    x: Any,
    qs: QuantizedArray,
    ids: Any,
    weights: Any,
    out: Any,
    combine: str = SUMMED,
) -> None:
    """Sort by expert, multiply, combine; x is contiguous."""
    experts, rows, _ = qs.shape
    ids = _xp.contiguous(ids if ids.dtype in IDS else ids.astype(np.int64))
    by = None if weights is None else combine
    plan = _plan(kernel, ids.dtype, ids.shape, x.ndim == 2, experts, rows, qs.members > 1, by, x.data.device_id)
    scratch = _xp.allocate(plan.size)
    groups, to = scratch.ptr, out.data.ptr
    order = groups + plan.order
    plan.sort(_ONE_BLOCK, (ids.data.ptr, order, groups, plan.numbers))
    if plan.combine is None:
        plan.multiply(x, qs, to, 0, groups, order)
        return
    weights = source(weights, WEIGHTS)
    partial = groups + plan.partial
    plan.multiply(x, qs, to, partial, groups, order)
    plan.combine.start(partial, weights.data.ptr, to)


@dataclass(frozen=True, eq=False)
class Combining(Planned):
    """The launch that combines the products of one shape.

    Parameters
    ----------
    rounded : bool
        Whether it is the kernel that takes ids.
    numbers : bytes
        Its arguments behind addresses.
    """

    rounded: bool
    numbers: bytes

    def start(self, products: int, weights: int, out: int, ids: int = 0) -> None:
        """Launch it with these addresses: those of `weights` and `ids` may be 0, see kernels/linear/slots.cu."""
        if self.rounded:
            self.launch(self.grid, (products, weights, out, ids, self.numbers))
        else:
            self.launch(self.grid, (products, weights, out, self.numbers))


class _Plan(NamedTuple):
    """The launches for one shape, and what lies where in the one piece of memory for all."""

    size: int  # of the piece
    order: int  # behind the groups
    partial: int  # behind that: the products that are combined
    sort: Start
    numbers: bytes  # its arguments behind addresses
    multiply: Multiply
    combine: Combining | None


_ONE_BLOCK = 1, 1, 1
_SORT, _COMBINING = ("i4", "i4", "i4"), 256  # threads of a block that combines


@functools.lru_cache(maxsize=1024)
def _plan(
    kernel: GroupedKernel,
    ids: np.dtype,
    shape: tuple[int, int],
    shared: bool,
    experts: int,
    rows: int,
    several: bool,
    combine: str | None,
    device: int,
) -> _Plan:
    """`shared`: slots of a token share a row of x; `several`: experts have tensor scales of their own; `combine`: by
    which kernel, None where products are not combined.
    """
    products, slots = math.prod(shape), shape[1]
    room = products // TOKENS + min(products, experts + 1)
    order = _GROUP_BYTES * room
    partial = order + 4 * products
    sort = kernel_of("group_tokens", IDS_CXX[ids.name], 1024, 4 * (experts + 1), (*"ppp", _SORT))
    numbers = packed(_SORT, products, experts, room)
    grouping = Grouping(room, products, slots if shared else 1, int(several), combine is not None, device)
    size, combined = partial, None
    if combine is not None:
        size += 4 * products * rows
        combined = combining(combine, kernel.cxx, products // slots, slots, rows, experts, device)
    return _Plan(size, order, partial, sort.ready(device).launch, numbers, kernel.of_experts(grouping), combined)


@functools.lru_cache(maxsize=1024)
def combining(
    name: str, cxx: str, tokens: int, slots: int, rows: int, experts: int, device: int, id_bytes: int = 0
) -> Combining:
    """How products of so many tokens are combined by one of the two kernels, which is compiled; `id_bytes`: of each of
    the ids, where there are any.
    """
    outputs, rounded = tokens * rows, name == ROUNDED
    types = ("i8", *("i4",) * 4)[: 3 + 2 * rounded]
    numbers = packed(types, *(outputs, slots, rows, experts, id_bytes)[: 3 + 2 * rounded])
    kernel = kernel_of(name, cxx, _COMBINING, 0, (*("p",) * (3 + rounded), types))
    return Combining(kernel.ready(device).launch, (-(-outputs // _COMBINING), 1, 1), rounded, numbers)


def multiply_each(x: Any, qs: Any, ids: Any, weights: Any, out: Any) -> None:
    """Expert after expert, through decoded weights."""
    xp = _xp.namespace(x)
    working = working_dtype(x.dtype)
    _, rows, depth = qs.shape
    products = xp.zeros((*ids.shape, rows), working)
    x = xp.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, depth)).astype(working, copy=False)
    numbers = xp.arange(qs.shape[0])
    for expert in range(qs.shape[0]):
        chosen = ids == expert
        # Rows can be taken that cannot be cut out: double quantization stores the absmax of some of them together.
        this = numbers[expert : expert + 1]
        weight = take(qs, this, dtype=working)[0] if isinstance(qs, QuantizedArray) else qs[expert]
        if isinstance(x, np.ndarray):
            products[chosen] = x[chosen] @ weight.T.astype(working, copy=False)
        else:  # which tokens these are is known on the device only
            xp.copyto(products, xp.matmul(x, weight.T.astype(working, copy=False)), where=chosen[..., None])
    out[...] = products if weights is None else combined(products, weights.astype(working, copy=False))


def combined(products: Any, weights: Any) -> Any:
    """The weighted sum over the slots, in their order."""
    total = products[:, 0] * weights[:, :1] if products.shape[1] else products.sum(1)
    for slot in range(1, products.shape[1]):
        total = total + products[:, slot] * weights[:, slot : slot + 1]
    return total


# ---- routes --------------------------------------------------------------------------------------------------------

# Microseconds of the launches that sort and combine, and the fraction of the bandwidth at which weights pass: by
# ``linear_few``; by the large tiles of ``linear_tile`` where they fill the device twice over, and where they do not.
AROUND, _FRACTION, _FILLED, _UNFILLED, _RECORD_FRACTION = 9.0, 0.6, 0.7, 0.3, 0.3
# The same by ``linear_few`` of integers, which are worked out; the groups of tokens of an expert where they are many.
_INTEGER_FRACTION, _MANY = 0.85, 0.6
# ... and of those that pick an expert's rows and tokens, where one is decoded after the other.
_EACH = 20.0


def refusal_of_all(problem: Problem) -> str | None:
    """What stands against all kernels that take experts."""
    found = refused_by_all(problem, "experts")
    if found is not None:
        return found
    n, k = problem.shape
    if problem.experts > MOST_EXPERTS:
        return f"more than {MOST_EXPERTS} experts"
    if max(problem.tokens, problem.experts * n * k >> 5) >= 1 << 31:
        return "numbers of 32 bits do not reach through the weights"
    return None


def chosen(problem: Problem) -> int:
    """How many experts may be chosen."""
    return min(problem.tokens, problem.experts)


def likely(problem: Problem) -> int:
    """How many experts are chosen on average, where each is as likely."""
    return max(1, round(problem.experts * (1 - (1 - 1 / problem.experts) ** problem.tokens)))


class GroupedSmallBatch(Route):
    """``linear_few`` for experts."""

    name = "grouped_small_batch"

    def accepts(self, problem: Problem) -> str | None:
        found = refusal_of_all(problem) or few_refusal(problem)
        if found:
            return found
        kernel = self._kernel(problem)
        return misaligned(problem, kernel.alignment) if kernel.fits else "the device has too little shared memory"

    def cost(self, problem: Problem) -> float:
        assert problem.fragments is not None
        reading = chosen(problem) * problem.reading
        if problem.fragments.entries:
            return AROUND + reading / _FRACTION
        groups = problem.tokens / (TOKENS * chosen(problem))  # of eight, of an expert: the last one is half full
        return AROUND + reading / _INTEGER_FRACTION * (1.0 if groups <= _MANY else groups + 0.5)

    def prepare(self, problem: Problem) -> Product:
        return functools.partial(grouped, self._kernel(problem))

    def describe(self, problem: Problem) -> str:
        return "sorted by expert, weights decoded in registers: linear_few, 8 tokens a thread block"

    def _kernel(self, problem: Problem) -> FewKernel:
        assert problem.device is not None and problem.fragments is not None
        together = likely(problem)
        return few_kernel(problem.fragments, problem.shape, problem.dtype, problem.device, 1, together, True)


class GroupedHopper(Route):
    """``linear_tile`` for experts."""

    name = "grouped_hopper"

    def accepts(self, problem: Problem) -> str | None:
        return refusal_of_all(problem) or tile_refusal(problem)

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        tiles = chosen(problem) * problem.shape[0] // GROUPED_CUT.rows
        fraction = _FILLED if tiles >= 2 * problem.device.multiprocessors else _UNFILLED
        return AROUND + chosen(problem) * problem.reading / fraction

    def prepare(self, problem: Problem) -> Product:
        assert problem.device is not None and problem.fragments is not None
        arguments = problem.fragments, problem.shape, problem.dtype, problem.device
        return functools.partial(grouped, tile_kernel(*arguments, GROUPED_CUT, True))

    def describe(self, problem: Problem) -> str:
        return f"sorted by expert, weights decoded in registers: linear_tile, {GROUPED_CUT.rows} rows a thread block"


class GroupedRecords(Route):
    """``linear_records`` for experts."""

    name = "grouped_records"

    def accepts(self, problem: Problem) -> str | None:
        found = refusal_of_all(problem) or record_refusal(problem)
        if found:
            return found
        return None if self._kernel(problem).fits else "the device has too little shared memory"

    def cost(self, problem: Problem) -> float:
        return AROUND + chosen(problem) * problem.reading / _RECORD_FRACTION

    def prepare(self, problem: Problem) -> Product:
        return functools.partial(grouped, self._kernel(problem))

    def describe(self, problem: Problem) -> str:
        return "sorted by expert, records of 256 elements decoded in registers: linear_records"

    def _kernel(self, problem: Problem) -> RecordKernel:
        records = problem.format.records()
        assert records is not None and problem.device is not None
        together = chosen(problem)
        return record_kernel(records, problem.shape, problem.dtype, problem.device, together, True)


class EachExpert(Route):
    """Decode expert after expert, and multiply."""

    name = "each_expert"

    def accepts(self, problem: Problem) -> str | None:
        if problem.activations is not None:
            return "it multiplies floats as they came"
        return None if problem.experts else "it is for experts"

    def cost(self, problem: Problem) -> float:
        return problem.experts * (_EACH + (Host() if problem.device is None else Decoded()).cost(problem))

    def prepare(self, problem: Problem) -> Product:
        return multiply_each

    def describe(self, problem: Problem) -> str:
        return f"decode expert after expert to {working_dtype(problem.dtype)}, and multiply"
