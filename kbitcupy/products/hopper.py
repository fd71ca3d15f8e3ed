"""The route of up to 128 tokens on Hopper (kernels/linear/hopper_sm90a.cu).

The kernel takes mixtures of experts, too. Here stands what it can take, how its work is cut, and how it is launched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel
from ..backend.structs import Constants
from ..formats.base import Fragments, all_fragments, register_templates
from .fused import (
    DECLARED,
    HALF_CXX,
    ITEM_K,
    NO_EXPERTS,
    PROMOTION,
    SIZES as _SHARED,
    TOKENS,
    VALUES,
    Binder,
    Fused,
    Grouping,
    Multiply,
    arguments_of,
    bias_argument,
    bind,
    refusal,
    rounded_note,
)
from .routes import Device, Problem, Product, Route, refused_by_all

#: Numbers of the kernel: rows of a warpgroup, elements of k that share a scale, the most stages of its ring, where the
#: ring ends in the shared window (whose first 1024 bytes are the system's: 195 KiB leave the scales more of the L1
#: cache, 227 are there where the stages are large), and the bytes of x in a stage of up to 8 tokens, whose second half
#: lies a little further on, so that lanes do not meet in a bank; the bytes of a token's means of x in a stage, and of a
#: row's record.
SIZES = Constants(
    GROUP_ROWS=64,
    GRANULE_K=32,
    MOST_STAGES=20,
    RING_END=196 * 1024 - 512,
    LARGE_RING_END=228 * 1024 - 512,
    DIRECT_BYTES=3072,
    MEANS_BYTES=32,
    RECORD_BYTES=32,
)
TABLE_START, ENTRY_STRIDE = _SHARED.TABLE_START, _SHARED.ENTRY_STRIDE
_DECLARED = (*DECLARED, SIZES)
#: Tokens of a thread block.
TILE_TOKENS = (8, 16, 32, 64, 128)
# Microseconds to decode 64 rows of a stage: by a table; codes of so many bits by arithmetic; to add something to them,
# and for each byte that it is worked out from; to add an offset as `for_type` says.
_BY_TABLE, _WORKED_OUT, _ADDED, _FUSED = 0.19, {4: 0.175, 8: 0.18}, (0.006, 0.0035), 0.016


@functools.cache
def for_type(fragments: Fragments, T: str) -> Fragments:
    """How the kernel takes a format beside x of type `T`.

    Where scale and offset are numbers of that type, it adds to each weight, which costs little.
    """
    half, _ = HALF_CXX
    fused = "FLOAT16_PAIRS" in fragments.hopper and half == T
    return dataclasses.replace(fragments, added=False) if fused else fragments


def decoding(fragments: Fragments) -> float:
    """Microseconds to decode 64 rows of a stage by arithmetic; 0 where a table has the values of codes."""
    if fragments.hopper_entries:
        return 0.0
    if fragments.added:
        added = _ADDED[0] + _ADDED[1] * fragments.beside_bytes
    else:
        added = _FUSED if "FLOAT16_PAIRS" in fragments.hopper else 0.0
    return _WORKED_OUT[fragments.bits] + added


@dataclass(frozen=True)
class TileCut:
    """How the work of ``linear_tile`` is cut.

    Parameters
    ----------
    tokens : int
        Of a thread block.
    groups, k_groups : int
        Warpgroups of a thread block: those with other rows, 64 each, and those that share k.
    splits : int
        Thread blocks that share k, a cluster.
    """

    tokens: int
    groups: int
    k_groups: int
    splits: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return SIZES.GROUP_ROWS * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply, and one that fetches and orders."""
        return 128 * (self.groups * self.k_groups + 1)

    def prepared(self, fragments: Fragments, grouped: bool = False) -> bool:
        """Whether ``arrange_tokens`` brings x into order ahead, and rows have records."""
        return fragments.added and self.tokens >= 64 and not grouped

    def centred(self, fragments: Fragments, grouped: bool = False) -> bool:
        """Whether records of rows say what is added to each weight, which then takes no means of x."""
        paired = (self.tokens, self.k_groups, self.splits) == (64, 2, 2)
        return paired and self.prepared(fragments, grouped) and "INNER_OFFSETS" in fragments.hopper

    def ring_at(self, fragments: Fragments) -> int:
        """Where the ring begins in the shared window: behind the table."""
        return -(-(TABLE_START + fragments.hopper_entries * ENTRY_STRIDE) // 1024) * 1024

    def stage_bytes(self, fragments: Fragments, grouped: bool = False) -> int:
        """x and weights of a stage; means of x and records of rows where something is added to weights."""
        x = SIZES.DIRECT_BYTES if self.tokens == TOKENS and not grouped else self.tokens * ITEM_K * 2
        step = fragments.added and not self.centred(fragments, grouped)
        means = -(-self.tokens * SIZES.MEANS_BYTES // 1024) * 1024 if step else 0
        records = self.rows * SIZES.RECORD_BYTES if self.prepared(fragments, grouped) else 0
        return x + self.rows * ITEM_K * fragments.bits // 8 + means + records

    def stages(self, fragments: Fragments, grouped: bool = False) -> int:
        """Of the ring; the sums of groups do not take its place."""
        room = (SIZES.LARGE_RING_END if grouped or self.tokens >= 64 else SIZES.RING_END) - self.ring_at(fragments)
        room -= self._sums_bytes if grouped else 0
        fitting = min(room // self.stage_bytes(fragments, grouped), SIZES.MOST_STAGES)
        return fitting // self.k_groups * self.k_groups

    def shared(self, fragments: Fragments, grouped: bool = False) -> int:
        """Dynamic shared memory of a thread block."""
        ring, sums = self.stages(fragments, grouped) * self.stage_bytes(fragments, grouped), self._sums_bytes
        return self.ring_at(fragments) - 1024 + (ring + sums if grouped else max(ring, sums))

    def layout(self, fragments: Fragments, grouped: bool = False) -> str:
        """``TileLayout`` of the kernel: the sizes that the host reckons with, which the kernel compares."""
        sizes = self.ring_at(fragments), self.stage_bytes(fragments, grouped), self.stages(fragments, grouped)
        return f"TileLayout<{', '.join(map(str, (*sizes, self._sums_bytes)))}>"

    def microseconds(
        self, n: int, k: int, m: int, processors: int, decoding: float = 0.0, by_table: float = _BY_TABLE
    ) -> float:
        """What a product takes, as measured on an H200.

        Parameters
        ----------
        n, k : int
            Shape of the weight.
        m : int
            Tokens.
        processors : int
            Multiprocessors of the device.
        decoding : float
            That of the format, of `decoding`.
        by_table : float
            The same where that is 0 since a table has the values of codes.
        """
        # What 64 rows and what the tokens of a stage cost; a thread block, and a cluster, beside.
        x = 5.5e-5 * self.tokens**2 if self.tokens <= 64 else 0.7
        stage = self.groups * ((decoding or by_table) + 0.00045 * self.tokens) + x
        cluster = 1.0 if self.splits > 1 else 0.0
        start = 3.0 + (0.1 * (self.k_groups - 1) if decoding else 0.0)
        return self.waves(n, m, processors) * (self.stages_of(k) * stage + start) + cluster

    def waves(self, n: int, m: int, processors: int) -> int:
        """Thread blocks that the busiest multiprocessor has, one after the other."""
        return -(-(-(-n // self.rows) * self.splits * -(-m // self.tokens)) // processors)

    def stages_of(self, k: int) -> int:
        """Stages that a thread block multiplies."""
        return -(-k // (ITEM_K * self.splits))

    @property
    def _sums_bytes(self) -> int:
        return self.k_groups * self.tokens * (self.rows + 4) * 4


@functools.lru_cache(maxsize=1024)
def cut_tile(n: int, k: int, m: int, processors: int, decoding: float = 0.0) -> TileCut:
    """The cut that should be fastest; the parameters are those of `TileCut.microseconds`."""
    fitting = (cut for cut in (INTEGER_CUTS if decoding else tile_cuts()) if cut.tokens >= min(m, 32))
    return min(fitting, key=lambda cut: cut.microseconds(n, k, m, processors, decoding))


GROUPED_CUT = TileCut(TOKENS, 4, 1, 1)
#: Those of formats whose codes are worked out, of which there are many: each kernel has to be compiled.
INTEGER_CUTS = (
    TileCut(16, 4, 1, 1),
    TileCut(16, 2, 2, 1),
    TileCut(16, 1, 4, 1),
    TileCut(16, 1, 4, 2),
    TileCut(64, 4, 1, 1),
    TileCut(64, 2, 2, 2),
)


@functools.cache
def tile_cuts() -> tuple[TileCut, ...]:
    """All that `cut_tile` chooses from.

    Four warpgroups leave the registers for the sums of 64 tokens, two for 128; to add up those of 64 tokens from four
    parts of k takes longer than to have fewer parts.
    """
    cuts = []
    for tokens in TILE_TOKENS:
        cuts += [TileCut(tokens, 4, 1, 1)] if tokens <= 64 else []
        groups = ((2, 2), (1, 4 if tokens <= 32 else 2)) if tokens <= 64 else ((2, 1),)
        cuts += [TileCut(tokens, *shape, splits) for shape in groups for splits in (1, 2)]
    return tuple(cuts)


def _arguments(fragments: Fragments, T: str, cut: TileCut, grouped: bool) -> str:
    numbers = ", ".join(map(str, dataclasses.astuple(cut)))
    layout = cut.layout(for_type(fragments, T), grouped)
    return f"{fragments.hopper.format(T=T)}, {numbers}, {str(grouped).lower()}, {layout}"


def _template(instances: tuple[str, ...] = (), hot: bool = True, name: str = "linear_tile") -> Template:
    axes = (instances,) if instances else ()
    return Template("linear/hopper_sm90a.cu", name, axes, hot=hot, structs=_DECLARED)


def _templates() -> Iterator[Template]:
    """Every cut of the formats with targets; of all others those with the most registers; experts for all."""

    def instances(of: Iterable[Fragments], cuts: Iterable[TileCut], grouped: bool) -> tuple[str, ...]:
        every = (_arguments(fragments, T, cut, grouped) for fragments in of for cut in cuts for T in HALF_CXX)
        return tuple(dict.fromkeys(every))

    decoders = [fragments for fragments in all_fragments() if fragments.hopper]
    targeted = [fragments for fragments in decoders if fragments.targeted]
    others = [fragments for fragments in decoders if not fragments.targeted]
    yield _template(instances(targeted, tile_cuts(), False))
    # The sums of 64 tokens leave some of them one register too few.
    yield _template(instances(others, (TileCut(64, 2, 2, 1), TileCut(128, 2, 1, 1)), False), hot=False)
    yield _template(instances(decoders, (GROUPED_CUT,), True))
    typed = [(for_type(fragments, T), T) for fragments in decoders for T in HALF_CXX]
    added = dict.fromkeys(fragments.hopper.format(T=T) for fragments, T in typed if fragments.added)
    yield _template(tuple(added), name="arrange_tokens")


register_templates(_templates)


class TileKernel(Fused):
    """``linear_tile`` for one format, shape and dtype."""

    def __init__(
        self,
        fragments: Fragments,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: Device,
        cut: TileCut,
        *,
        grouped: bool = False,
    ):
        super().__init__(fragments, shape, dtype)
        fragments = for_type(fragments, self.cxx)
        n, k = shape
        self.kernel = _kernel(
            _arguments(fragments, self.cxx, cut, grouped), cut.threads, cut.shared(fragments, grouped)
        )
        self._cut, self._bind = cut, _binder(fragments, k * fragments.bits // 8, ITEM_K * fragments.bits // 8)
        self._tiles, self._processors = -(-n // cut.rows), device.multiprocessors
        self._centred = cut.centred(fragments, grouped)
        self._arrange: Kernel | None = None
        if cut.prepared(fragments, grouped):
            self._arrange = _arranging(fragments.hopper.format(T=self.cxx))

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        tokens = out.size // self._n
        self.launch(-(-tokens // self._cut.tokens), x, q, bias, out, 0, tokens)

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
        weight, pitch, matrix, room = self.weight(q), 2 * self._k, x.data.ptr, None
        if self._arrange is not None:
            stages, tile = -(-self._k // ITEM_K), self._cut.tokens
            pitch = stages * ITEM_K * 2
            means = 0 if self._centred else blocks * tile * stages * SIZES.MEANS_BYTES
            room = _xp.namespace(x).empty(tokens * pitch + means, np.uint8)
            matrix, partial = room.data.ptr, room.data.ptr + tokens * pitch if means else 0
            units = -(-tokens // TOKENS) * stages
            pointers = x.data.ptr, matrix, partial
            self._arrange.launch(x, (-(-units // _ARRANGING_WARPS),), (*pointers, tile, tokens, self._k))
        map_of_x = _tma.byte_matrix(
            matrix, x.size // self._k, pitch, pitch, self._cut.tokens, _tma.BOX_BYTES, True, PROMOTION
        )
        bias, address, kind = bias_argument(bias, x.dtype)
        arguments = self.arguments(weight, address, kind, out, partial, NO_EXPERTS, tokens)
        grid = self._tiles * self._cut.splits, blocks, 1
        self.kernel.launch(x, grid, (map_of_x, weight.map, *arguments))

    def of_experts(self, grouping: Grouping) -> Multiply:
        """The launch for experts, the kernel compiled."""
        start, blocks = self.kernel.ready(grouping.device).launch, grouping.groups * self._tiles
        grid = min(blocks, self._processors), 1, 1
        # The kernel counts groups, not products.
        numbers = self.numbers(grouping.divisor, grouping.step, _SHARED.NO_BIAS, grouping.groups)
        pitch = 2 * self._k

        def multiply(x: Any, qs: QuantizedArray, out: int, partial: int, groups: int, order: int) -> None:
            weight, rows = self.weight(qs), x.size // self._k
            map_of_x = _tma.byte_matrix(x.data.ptr, rows, pitch, pitch, 1, _tma.BOX_BYTES, True, PROMOTION)
            start(grid, (map_of_x, weight.map, weight.packed, 0, out, partial, groups, order, numbers))

        return multiply


@functools.cache
def _binder(fragments: Fragments, row_bytes: int, box_bytes: int) -> Binder:
    """How the kernel takes a weight: by a tensor map of boxes of 64 rows and `box_bytes`."""

    def map(codes: Any) -> bytes:
        rows = codes.nbytes // row_bytes
        address = codes.data.ptr
        return _tma.byte_matrix(address, rows, row_bytes, row_bytes, SIZES.GROUP_ROWS, box_bytes, True, PROMOTION)

    return functools.partial(bind, fragments=fragments, map=map)


_ARRANGING_WARPS = 4


@functools.cache
def _arranging(decoder: str) -> Kernel:
    signature = *(8,) * 3, *(4,) * 3
    return Kernel(_template(name="arrange_tokens"), (decoder,), 32 * _ARRANGING_WARPS, signature=signature, early=True)


@functools.cache
def _kernel(values: str, threads: int, shared: int) -> Kernel:
    sizes = _tma.MAP_BYTES, _tma.MAP_BYTES, *arguments_of(VALUES.dtype.itemsize)
    return Kernel(_template(), (values,), threads, shared, signature=sizes, early=True)


# ---- the route -----------------------------------------------------------------------------------------------------

# Beyond, cuBLAS reads the decoded weights once for all tokens, and the kernel decodes them again for each tile.
MOST_TOKENS = 128
# Microseconds of the launch; the fraction of the bandwidth at which weights of more bits pass than are quickly decoded,
# by a table and by arithmetic.
_START, _FRACTION, _INTEGERS = 3.0, 0.7, 0.9
# Microseconds for each group more than one that shares k, of codes of 8 bits.
_JOINING = 0.8
# Microseconds to make means of x in a stage; to make them ahead, and how much longer it then takes in a cluster, where
# rows have records.
_MEANS, _AHEAD, _RECORDS = 0.075, 4.0, 1.3


def tile_refusal(problem: Problem) -> str | None:
    """What stands against ``linear_tile``, but for the number of tokens."""
    found = refusal(problem)
    if found is not None:
        return found
    assert problem.device is not None and problem.fragments is not None
    n, k = problem.shape
    if not problem.fragments.hopper:
        return f"it has no decoder for blocks of {problem.fragments.block}"
    if problem.device.capability != 90 or not problem.device.tensor_maps:
        return "it is for compute capability 9.0"
    if k % SIZES.GRANULE_K or k * problem.fragments.bits // 8 % 16:
        return f"rows of {k} elements do not start at multiples of 16 bytes"
    if not problem.fragments.hopper_entries and k % problem.fragments.multiple:
        return f"rows of {k} elements are no multiples of {problem.fragments.multiple}"
    if max(n, k) >= 1 << 30 or n * k >= 1 << 36:
        return "numbers of 32 bits do not reach through the weight"
    together = problem.fragments.scale_bytes * max(1, SIZES.GRANULE_K // problem.fragments.granule)
    if problem.stored.scales < min(4, together):
        return f"the planes of scales do not start at multiples of {together} bytes"
    return None if problem.stored.codes >= 16 else "the plane of codes does not start at a multiple of 16 bytes"


@functools.lru_cache(maxsize=4096)
def tile_kernel(
    fragments: Fragments, shape: tuple[int, int], dtype: np.dtype, device: Device, cut: TileCut, grouped: bool = False
) -> TileKernel:
    """The launcher of ``linear_tile``."""
    return TileKernel(fragments, shape, dtype, device, cut, grouped=grouped)


def rounds_scales(problem: Problem, cut: TileCut) -> bool:
    """Whether weights are multiplied by scales in x's type, which does not hold these.

    It multiplies sums where a row has one scale, and in the kernel's OF_SUMS; halves of float16 lose nothing, nor do
    scales of a byte.
    """
    fragments = problem.fragments
    if fragments is None or not fragments.block:
        return False
    as_they_are = fragments.scale_bytes == 2 and fragments.offset is None
    exact = fragments.scale_bytes == 1 or (as_they_are and problem.dtype == np.float16)
    of_sums = fragments.block >= ITEM_K and not fragments.added and not fragments.hopper_entries
    return not exact and not (of_sums and TOKENS < cut.tokens <= 32)


def _fragments(problem: Problem) -> Fragments:
    assert problem.fragments is not None
    return for_type(problem.fragments, CXX_TYPES[problem.dtype.name])


class Hopper(Route):
    """``linear_tile``: a GEMM of up to 128 tokens by the copy engine and wgmma."""

    name = "hopper"

    def accepts(self, problem: Problem) -> str | None:
        found = refused_by_all(problem, "one weight") or tile_refusal(problem)
        few = problem.tokens <= TOKENS and problem.format.records() is not None
        if found is None and few and rounds_scales(problem, self._cut(problem)):
            return f"up to {TOKENS} tokens are for kernels that keep scales as they are"
        return found or (f"more than {MOST_TOKENS} tokens" if problem.tokens > MOST_TOKENS else None)

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        cut, fragments = self._cut(problem), _fragments(problem)
        work, processors = fragments.tile_work, problem.device.multiprocessors
        stage, by_table = decoding(fragments) * work, _BY_TABLE * work
        multiplying = cut.microseconds(*problem.shape, problem.tokens, processors, stage, by_table)
        (n, k), m = problem.shape, problem.tokens
        if stage and fragments.bits == 8:
            multiplying += cut.waves(n, m, processors) * (cut.k_groups - 1) * _JOINING
        if cut.prepared(fragments):
            multiplying = multiplying * (_RECORDS if cut.splits > 1 else 1.0) + _AHEAD
        elif fragments.added:
            multiplying += cut.waves(n, m, processors) * cut.stages_of(k) * _MEANS
        return max(multiplying, _START + problem.reading / (_INTEGERS if stage else _FRACTION))

    def prepare(self, problem: Problem) -> Product:
        assert problem.device is not None and problem.fragments is not None
        return tile_kernel(problem.fragments, problem.shape, problem.dtype, problem.device, self._cut(problem))

    def describe(self, problem: Problem) -> str:
        cut = self._cut(problem)
        tile = f"{cut.tokens} tokens x {cut.rows} rows a thread block"
        rounded = rounded_note(problem.fragments, problem.dtype, rounds_scales(problem, cut))
        parts = f"k in {cut.k_groups * cut.splits} parts"
        ahead = ", x in its order ahead by arrange_tokens" if cut.prepared(_fragments(problem)) else ""
        return f"weights decoded in registers: linear_tile, {tile}, {parts}{ahead}{rounded}"

    def _cut(self, problem: Problem) -> TileCut:
        assert problem.device is not None
        stage, processors = decoding(_fragments(problem)), problem.device.multiprocessors
        return cut_tile(*problem.shape, problem.tokens, processors, stage)
