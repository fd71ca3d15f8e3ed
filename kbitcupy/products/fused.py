"""What the kernels share that multiply compressed weights: sizes, arguments, and how a weight is bound to them.

They decode weights in registers, to fragments, and never write them; see `kbitcupy.formats.base.Fragments` for what
they need of a format. The constants and structs that host and kernels both know are declared here, for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_TYPES
from ..backend.launch import Struct, Type, packed
from ..backend.structs import Constants
from ..formats.base import Fragments
from .routes import Problem

#: Numbers of kernels/linear/decoder.cuh: elements of k and rows of a k-tile, tokens of an mma; where the table of
#: values begins in the shared window, the bytes from entry to entry, and those behind it, of which ``linear_few`` needs
#: more; kinds of bias.
SIZES = Constants(
    ITEM_K=128,
    ITEM_ROWS=16,
    TOKENS=8,
    TABLE_START=2048,
    ENTRY_STRIDE=256,
    HEAD=1024,
    FEW_HEAD=2048,
    NO_BIAS=0,
    OWN_BIAS=1,
    FLOAT_BIAS=2,
)
ITEM_K, ITEM_ROWS, TOKENS = SIZES.ITEM_K, SIZES.ITEM_ROWS, SIZES.TOKENS
#: The values of a codebook, times `power`, and those of 8-bit scales: by value, so that nothing is uploaded.
VALUES = Struct("Values", power="f4", value=("f4", 32), map=("f4", 256))
#: The products of one expert that a thread block computes: order[first .. first + count]; -1 is no expert.
GROUP = Struct("Group", expert="i4", first="i4", count="i4", unused="i4")
#: What stands ahead of the source of all of them.
DECLARED = (SIZES, VALUES, GROUP)

HALF_CXX = (CXX_TYPES["float16"], CXX_TYPES["bfloat16"])
#: Bytes that the L2 cache fetches together: rows of a box are shorter than 256, and what stands beside them another
#: warp fetches a little later.
PROMOTION = 128
# Addresses of planes of a weight, and numbers behind addresses.
_PLANES, _NUMBERS = ("p",) * 5, ("i4",) * 7


def arguments_of(*behind: int) -> tuple[Type, ...]:
    """Types of what `Fused.arguments` returns, the last of which has structs of these sizes at its end."""
    numbers: tuple[str | int | Struct, ...] = *_NUMBERS, *behind
    return _PLANES, "p", "p", "p", "p", "p", numbers


@dataclass(frozen=True)
class Decoder:
    """The sizes of a format's decoder, for k-tiles of `ITEM_K` elements of a row.

    Parameters
    ----------
    fragments : Fragments
        What the format says of itself.
    """

    fragments: Fragments

    @property
    def item_bytes(self) -> int:
        """Codes of a k-tile of a row."""
        return ITEM_K * self.fragments.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Scales of a k-tile of a row in shared memory, with what stands beside them."""
        groups = ITEM_K // self.fragments.granule
        scales, beside = groups * self.fragments.scale_bytes, groups * self.fragments.beside_bytes
        if self.fragments.entries:
            return scales
        # Each of the two begins where it can be copied to.
        end = (_rounded_up(scales, _piece_of(beside)) if beside else scales) + beside
        return _rounded_up(end, max(4, _piece_of(scales), _piece_of(beside) if beside else 4))

    @property
    def single(self) -> bool:
        """Whether ``linear_one`` has it: tables of values that a warp has lanes for, scales that are used as stored."""
        return self.fragments.single and self.fragments.copied and self.fragments.entries > 0

    @property
    def elements_in_gaps(self) -> int:
        """Elements of x, of two bytes, in the gaps of the table of values: half of each entry."""
        return self.fragments.entries * (SIZES.ENTRY_STRIDE // 2) // 2

    @property
    def layout(self) -> str:
        """``Layout`` of kernels/linear/decoder.cuh: the sizes that the host reckons with, which the kernels compare."""
        gaps, swizzled = (str(flag).lower() for flag in (self.fragments.gaps, self.fragments.swizzled))
        return f"Layout<{self.fragments.entries}, {gaps}, {self.item_bytes}, {self.scale_bytes}, {swizzled}>"

    def shared_bytes(self, eights: int, items: int, warps: int, once: bool = False) -> int:
        """Shared memory of a thread block of ``linear_few``; `once`: where k goes through at once."""
        # Inner scales are made to floats when those before are used up.
        buffers = 1 if once and not self.fragments.copied and self.fragments.beside else 2
        stages = warps * items * ITEM_ROWS * (self.item_bytes + buffers * self.scale_bytes)
        slots = 2 if eights == 2 else 4
        sums = 0 if self.fragments.gaps else slots * warps * ITEM_ROWS * TOKENS * eights * 4
        return self._table_bytes - SIZES.HEAD + SIZES.FEW_HEAD + sums + stages

    def shared_bytes_one(self, k: int, run: int, items: int, warps: int) -> int:
        """... of ``linear_one``."""
        slots = warps * items * ITEM_ROWS * (self.item_bytes + self.scale_bytes)
        return self._table_bytes + (0 if self.fragments.gaps else k * 2) + slots + (run + warps) * ITEM_ROWS * 4

    @property
    def _table_bytes(self) -> int:
        """Shared memory up to the end of the table of values and of what stands behind it."""
        return SIZES.TABLE_START + self.fragments.entries * SIZES.ENTRY_STRIDE + SIZES.HEAD


def _piece_of(nbytes: int) -> int:
    """The bytes by which so many are copied at once."""
    return next((piece for piece in (16, 8, 4) if nbytes % piece == 0), nbytes)


def _rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@functools.lru_cache(maxsize=256)
def _values_of(fragments: Fragments, dtype: np.dtype) -> bytes:
    """What a kernel knows of a format by value; planes with values of their own come first."""
    struct = VALUES.zeros()
    if not fragments.entries:  # what is turned over of a code
        struct["value"].view(np.uint32)[0] = fragments.signed << fragments.bits - 1
    if fragments.known_values:
        values = np.array(fragments.known_values, np.float32)
        parts = fragments.in_two_parts
        struct["power"] = _power_below(values)
        if not parts:  # rounding takes nothing of two
            struct["power"] *= np.float32(gentle_factor(values, dtype))
        scaled = values * struct["power"]
        if not parts and not rounds_both_ways(values):
            scaled = scaled.astype(dtype)
        room = struct["map" if parts else "value"]
        room[: values.size] = scaled
    if fragments.scale_values:
        struct["map"] = fragments.scale_values
    return struct.tobytes()


@functools.lru_cache(maxsize=256)
def values_between(fragments: Fragments, dtype: np.dtype) -> bytes:
    """The same as `_values_of` with words in place of values, see `between`: then thread blocks need not make them."""
    struct = np.frombuffer(_values_of(fragments, dtype), VALUES.dtype).copy()
    struct["value"] = between(struct["value"], dtype).view(np.float32)
    return struct.tobytes()


def between(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What ``between`` of kernels/linear/decoder.cuh makes of float32, for a `dtype` of two bytes.

    In the upper half of a word stands the number of `dtype` at a value or next to it towards zero, in the lower half
    how far the value is from there to the next number, in parts of 2^16.
    """
    if dtype != np.float16:  # the upper half of a float32
        return values.view(np.uint32)
    nearest = values.astype(np.float16)
    low = nearest.view(np.uint16) - (np.abs(nearest) > np.abs(values))
    start, end = (bits.view(np.float16).astype(np.float32) for bits in (low, low + np.uint16(1)))
    part = np.abs(values - start) / np.abs(end - start)  # without rounding: a step is a power of two
    return low.astype(np.uint32) << 16 | (part * 65536).astype(np.uint32)


# Steps between the numbers of a type from 1 to 2.
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def rounded_note(fragments: Fragments | None, dtype: np.dtype, scales: bool) -> str:
    """What an explanation says of numbers that a kernel rounds to x's type before it multiplies them.

    Weights of bit planes are values times scales in that type; values that are not known ahead, those of a codebook of
    one's own, are rounded both ways. Other tables multiply sums by their scales.
    """
    assert fragments is not None
    own = bool(fragments.entries) and fragments.owned and not fragments.known_values and not fragments.in_two_parts
    what = " and ".join(name for name, rounded in (("values", own), ("scales", scales)) if rounded)
    return f", {what} rounded to {dtype}" if what else ""


def rounds_both_ways(values: np.ndarray) -> bool:
    """Whether a table of values holds some places of a value rounded up and others down, so that their mean is right.

    Else each is rounded to the nearest. What that does to weights of a code, the code of the negative value undoes,
    where there is one.
    """
    found = np.sort(values)
    return not np.array_equal(found, -found[::-1])


def gentle_factor(values: np.ndarray, dtype: np.dtype, tried: int = 8192) -> float:
    """A factor from 1 to 2 with which `values` lose least when they are rounded to `dtype`.

    Of values that are rounded to the nearest that is the sum of squared errors; of those that are rounded both ways,
    `rounds_both_ways`, the variance, f (1 - f) steps where one is part f of a step above the number below it. It is
    the same for every weight of an index, so it is worth some choice; products are divided by the factor in fp32.
    """
    factors = np.float32(1) + np.arange(tried, dtype=np.float32) / np.float32(tried)
    scaled = np.asarray(values, np.float32)[None, :] * _power_below(values) * factors[:, None]
    off = np.abs(scaled.astype(dtype).astype(np.float64) - scaled)
    step = np.ldexp(_EPS[dtype.name], np.frexp(scaled)[1] - 1)
    lost = (off * (step - off) if rounds_both_ways(values) else np.square(off)) / np.square(factors[:, None])
    return float(factors[lost.sum(1).argmin()])


def _power_below(values: np.ndarray) -> np.float32:
    """The power of two that brings the largest magnitude to 1 .. 2: then the range of half precision is enough."""
    return np.float32(np.ldexp(np.float32(1), 1 - np.frexp(np.abs(values).max())[1]))


class Experts(NamedTuple):
    """What a mixture of experts adds to the arguments of a kernel.

    Parameters
    ----------
    groups, order : int
        Addresses of what ``group_tokens`` writes.
    divisor : int
        Product number p is that of row p / divisor of x.
    step : int
        Tensor scales of an expert: 1, or 0 where they share one.
    """

    groups: int
    order: int
    divisor: int
    step: int


NO_EXPERTS = Experts(0, 0, 1, 0)


class Grouping(NamedTuple):
    """The products with experts that one launch has, sorted into groups.

    Parameters
    ----------
    groups, products : int
        How many there are, at the most.
    divisor, step : int
        As of `Experts`.
    combined : bool
        Whether products stay float32, to be combined.
    device : int
        Its number.
    """

    groups: int
    products: int
    divisor: int
    step: int
    combined: bool
    device: int


#: A launch for experts: called with x, the weights, and addresses: of results, of products where they are combined,
#: else 0, and of what ``group_tokens`` writes, the groups and the order.
Multiply: TypeAlias = Callable[[Any, QuantizedArray, int, int, int, int], None]


class Bound(NamedTuple):
    """A weight as a kernel takes it.

    Parameters
    ----------
    codes : int
        Address of that plane.
    planes : tuple of int
        Addresses of the scales, the nested scales or what else stands beside scales, their offset, the tensor scale
        and the values; 0 for none.
    packed : bytes
        The same as one argument.
    map : bytes
        The tensor map of the codes.
    """

    codes: int
    planes: tuple[int, ...]
    packed: bytes
    map: bytes


#: Makes a `Bound` of planes.
Binder = Callable[[Mapping[str, Any]], Bound]


def bind(planes: Mapping[str, Any], fragments: Fragments, map: Callable[[Any], bytes]) -> Bound:
    """A weight as a kernel takes it; `map` makes the tensor map of the plane of codes."""
    beside = fragments.beside or fragments.nested_scales
    roles = fragments.scales, beside, fragments.offset, fragments.tensor_scale, fragments.values
    found = (planes.get(name) if name else None for name in roles)
    codes = planes[fragments.codes]
    addresses = tuple(0 if plane is None else plane.data.ptr for plane in found)
    return Bound(codes.data.ptr, addresses, packed(_PLANES, *addresses), map(codes))


class Fused:
    """What the launchers of the kernels have in common.

    Parameters
    ----------
    fragments : Fragments
        Of the weight's format.
    shape : tuple of int
        Its N and K.
    dtype : numpy.dtype
        Of x.
    """

    #: Launches the kernel: blocks of tokens, x, the weight, bias, out, where sums of parts go, tokens, and experts.
    launch: Callable[..., None]
    #: The same object for all kernels that take a weight in the same way.
    _bind: Binder

    def __init__(self, fragments: Fragments, shape: tuple[int, int], dtype: np.dtype):
        self._n, self._k = shape
        self._block = fragments.block or self._k
        self.cxx = CXX_TYPES[dtype.name]
        #: Structs that are passed by value behind numbers.
        self._behind = self._values = _values_of(fragments, dtype)

    def weight(self, q: QuantizedArray) -> Bound:
        """The weight as the kernel takes it, which is found out once.

        Kernels for other numbers of tokens take it in the same way: so a weight keeps few entries.
        """
        found: Bound | None = q._launches.get(self._bind)
        if found is None:
            found = q._launches[self._bind] = self._bind(q.planes)
        return found

    def arguments(
        self, weight: Bound, bias: int, kind: int, out: Any, partial: int, experts: Experts, tokens: int
    ) -> tuple[int | bytes, ...]:
        """Those that the kernels have in common, from the scales on."""
        groups, order, divisor, step = experts
        numbers = self.numbers(divisor, step, kind, tokens)
        return weight.packed, bias, out.data.ptr, partial, groups, order, numbers

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - launchers are kept as long
    def numbers(self, divisor: int, step: int, kind: int, tokens: int) -> bytes:
        """What stands behind addresses, with `_behind`."""
        return packed(_NUMBERS, divisor, step, kind, tokens, self._n, self._k, self._block) + self._behind


def bias_argument(bias: Any, dtype: np.dtype) -> tuple[Any, int, int]:
    """A bias as the kernels take it, which must outlive the launch, its address, and its kind."""
    if bias is None:
        return None, 0, _NO_BIAS
    if bias.dtype not in (dtype, _xp.SINGLE):
        bias = bias.astype(np.float32)
    bias = bias if bias.flags.c_contiguous else bias.copy()
    return bias, bias.data.ptr, _OWN_BIAS if bias.dtype == dtype else _FLOAT_BIAS


#: The types of tokens that a kernel quantizes, and of their results.
NUMBERS = Constants(HALF_NUMBERS=0, BFLOAT_NUMBERS=1, FLOAT_NUMBERS=2)
KINDS = {"float16": NUMBERS.HALF_NUMBERS, "bfloat16": NUMBERS.BFLOAT_NUMBERS, "float32": NUMBERS.FLOAT_NUMBERS}


@functools.cache
def kind_of(dtype: np.dtype) -> int:
    """How kernels that quantize know a dtype of tokens, and of results."""
    return KINDS[dtype.name]


_NO_BIAS, _OWN_BIAS, _FLOAT_BIAS = SIZES.NO_BIAS, SIZES.OWN_BIAS, SIZES.FLOAT_BIAS


def no_map(_: Any) -> bytes:
    """An argument in the place of a tensor map where there is no use for one."""
    return bytes(_tma.MAP_BYTES)


def refusal(problem: Problem) -> str | None:
    """What stands against all kernels that decode to fragments; None where nothing does."""
    if problem.fragments is None:
        return f"{problem.format} has no decoder to fragments"
    if problem.dtype.itemsize != 2:
        return f"x is {problem.dtype}; the tensor cores take float16 and bfloat16"
    if not problem.shape[0] or not problem.shape[1]:
        return "the weight is empty"
    members = problem.stored.members
    if problem.experts:
        # The kernels read one tensor scale for each expert, and know no other planes of members but those of rows.
        known = problem.fragments.tensor_scale is not None or not problem.fragments.entries
        if members != 1 and (members != problem.experts or not known):
            return f"a stack of {members} arrays with planes of their own, for {problem.experts} experts"
    elif problem.stored.lead:
        return "a stack is for linear_grouped"
    return None if problem.aligned else "x does not start at a multiple of 16 bytes"
