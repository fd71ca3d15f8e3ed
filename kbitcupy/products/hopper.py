"""The kernel that multiplies up to 128 tokens by compressed weights on Hopper (kernels/linear/hopper_sm90a.cu).

It takes mixtures of experts, too. Here stands what it can take, how its work is cut, and how it is launched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma
from ..backend.compile import Template
from ..backend.launch import Kernel, capability, multiprocessors
from ..formats.base import Format, register_templates
from ..formats.codebook.kbit import ABSMAX, BLOCK, KBit
from ..formats.codebook.table4 import Table4
from .small_batch import (
    HALF_CXX,
    ITEM_K,
    NO_EXPERTS,
    PROMOTION,
    SIZES,
    TABLE_AT,
    TOKENS,
    VALUES_BYTES,
    Experts,
    Fused,
    Weight,
    bias_argument,
    look_at,
)

# As in kernels/linear/hopper_sm90a.cu, and the tokens of its instances.
_GRANULE_K, _MOST_STAGES = 32, 20
_RING_END, _LARGE_RING_END = 196 * 1024 - 512, 228 * 1024 - 512
TILE_TOKENS = (8, 16, 32, 64, 128)


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

    def ring_at(self, bits: int) -> int:
        """Where the ring begins in the shared window: behind the table."""
        entries = {3: 64, 5: 32}.get(bits, 256)
        return -(-(TABLE_AT + entries * 256) // 1024) * 1024

    def stage_bytes(self, bits: int, grouped: bool = False) -> int:
        """x and weights of a stage."""
        x = 3072 if self.tokens == TOKENS and not grouped else self.tokens * ITEM_K * 2
        return x + 64 * self.groups * ITEM_K * bits // 8

    def stages(self, bits: int, grouped: bool = False) -> int:
        """Of the ring; the sums of groups do not take its place."""
        room = (_LARGE_RING_END if grouped or self.tokens >= 64 else _RING_END) - self.ring_at(bits)
        room -= self._sums_bytes if grouped else 0
        return min(room // self.stage_bytes(bits, grouped), _MOST_STAGES) // self.k_groups * self.k_groups

    def shared(self, bits: int, grouped: bool = False) -> int:
        """Dynamic shared memory of a thread block."""
        ring, sums = self.stages(bits, grouped) * self.stage_bytes(bits, grouped), self._sums_bytes
        return self.ring_at(bits) - 1024 + (ring + sums if grouped else max(ring, sums))

    @property
    def _sums_bytes(self) -> int:
        return self.k_groups * self.tokens * (64 * self.groups + 4) * 4


@functools.lru_cache(maxsize=1024)
def cut_tile(n: int, k: int, m: int, processors: int) -> TileCut:
    """The cut that should be fastest.

    Parameters
    ----------
    n, k : int
        Shape of the weight.
    m : int
        Tokens.
    processors : int
        Multiprocessors of the device.
    """
    items = -(-k // ITEM_K)

    def microseconds(cut: TileCut) -> float:
        # Measured on an H200: what 64 rows and what the tokens of a stage cost; a thread block, and a cluster, beside.
        x = 5.5e-5 * cut.tokens**2 if cut.tokens <= 64 else 0.7
        stage = cut.groups * (0.19 + 0.00045 * cut.tokens) + x
        cluster = 1.0 if cut.splits > 1 else 0.0
        waves = -(-(-(-n // (64 * cut.groups)) * cut.splits * -(-m // cut.tokens)) // processors)
        return waves * (-(-items // cut.splits) * stage + 3.0) + cluster

    return min((cut for cut in tile_cuts() if cut.tokens >= min(m, 32)), key=microseconds)


GROUPED_CUT = TileCut(TOKENS, 4, 1, 1)


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


def _tile_instances(decoders: Iterable[str], cuts: Iterable[TileCut], flavour: str = "false") -> tuple[str, ...]:
    return tuple(
        f"{decoder.format(T=T)}, {', '.join(map(str, dataclasses.astuple(cut)))}, {flavour}"
        for decoder in decoders
        for T in HALF_CXX
        for cut in cuts
    )


_MAIN_TILES = (f"TileKbit<{{T}}, 4, {ABSMAX['e4m4'].kernel}>", "TileTable4<{T}, false>")
_MORE_TILES = (
    *(f"TileKbit<{{T}}, {k}, {absmax.kernel}>" for k in (2, 3, 4, 5) for absmax in ABSMAX.values()),
    "TileTable4<{T}, true>",
)
# Every cut of the formats with targets; of all others those with the most registers.
_LINEAR_TILE = Template("linear/hopper_sm90a.cu", "linear_tile", (_tile_instances(_MAIN_TILES, tile_cuts()),))
register_templates(
    _LINEAR_TILE,
    Template(
        "linear/hopper_sm90a.cu",
        "linear_tile",
        (_tile_instances(_MORE_TILES, (TileCut(64, 2, 2, 1), TileCut(128, 2, 1, 1))),),
        hot=False,  # the sums of 64 tokens leave some of them one register too few
    ),
    Template(
        "linear/hopper_sm90a.cu",
        "linear_tile",
        (_tile_instances((*_MORE_TILES, _MAIN_TILES[1]), (GROUPED_CUT,), "true"),),
    ),
)


class Tile(Fused):
    """``linear_tile`` for one format, shape and dtype."""

    def __init__(
        self,
        format: Format,
        shape: tuple[int, int],
        dtype: np.dtype,
        device: int,
        cut: TileCut,
        *,
        grouped: bool = False,
    ):
        bits, expression, block = _tile_decoder(format)
        super().__init__(format, shape, dtype, block)
        n, k = shape
        arguments = *dataclasses.astuple(cut), str(grouped).lower()
        expression = ", ".join((expression.format(T=self._cxx), *map(str, arguments)))
        self._kernel = _kernel(expression, 128 * (cut.groups * cut.k_groups + 1), cut.shared(bits, grouped))
        self._cut, self._look = cut, _look(k * bits // 8, ITEM_K * bits // 8)
        self._tiles, self._processors = -(-n // (64 * cut.groups)), multiprocessors(device)

    def __call__(self, x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        """Fill out[..., n], each row from that of x."""
        tokens = out.size // self._n
        self._launch(-(-tokens // self._cut.tokens), x, q, bias, out, 0, tokens)

    def _launch(
        self,
        blocks: int,
        x: Any,
        q: QuantizedArray,
        bias: Any,
        out: Any,
        partial: int,
        tokens: int,
        experts: Experts = NO_EXPERTS,
    ) -> None:
        grouped = experts is not NO_EXPERTS
        weight, pitch = self.weight(q), 2 * self._k
        map_of_x = _tma.byte_matrix(
            x.data.ptr,
            x.size // self._k,
            pitch,
            pitch,
            1 if grouped else self._cut.tokens,
            _tma.BOX_BYTES,
            True,
            PROMOTION,
        )
        bias, address, kind = bias_argument(bias, x.dtype)
        # The grouped kernel counts groups, not tokens.
        arguments = self.arguments(weight, address, kind, out, partial, experts, blocks if grouped else tokens)
        grid = (min(blocks * self._tiles, self._processors),) if grouped else (self._tiles * self._cut.splits, blocks)
        self._kernel.launch(x, grid, (map_of_x, weight.map, *arguments, self._values))


@functools.cache
def _look(row_bytes: int, box_bytes: int) -> Callable[[Mapping[str, Any]], Weight]:
    """`look_at` for rows and boxes of so many bytes."""

    def map(planes: Mapping[str, Any]) -> bytes:
        packed = planes["packed"]
        rows = packed.nbytes // row_bytes
        return _tma.byte_matrix(packed.data.ptr, rows, row_bytes, row_bytes, 64, box_bytes, True, PROMOTION)

    return functools.partial(look_at, packed=16, absmax=1, map=map)


@functools.cache
def _kernel(values: str, threads: int, shared: int) -> Kernel:
    sizes = 128, 128, *SIZES, VALUES_BYTES
    return Kernel(_LINEAR_TILE, (values,), threads, shared, signature=sizes, early=True)


def _tile_decoder(format: Format) -> tuple[int, str, int]:
    """Bits of an element, C++ type (``{T}`` is that of x) and block; 0 bits where the kernel has no decoder."""
    if isinstance(format, KBit) and 2 <= format.bits <= 5:
        return format.bits, f"TileKbit<{{T}}, {format.bits}, {ABSMAX[format.absmax].kernel}>", BLOCK
    if isinstance(format, Table4) and format.block >= _GRANULE_K:
        return 4, f"TileTable4<{{T}}, {str(format.double_quant).lower()}>", format.block
    return 0, "", 0


@functools.lru_cache(maxsize=1024)
def tile_refusal(format: Format, shape: tuple[int, int], dtype: np.dtype, device: int, grouped: bool = False) -> str:
    """What stands against ``linear_tile``; nothing: an empty text."""
    bits, _, _ = _tile_decoder(format)
    n, k = shape
    if not bits:
        return f"{format} has no decoder"
    if dtype.itemsize != 2:
        return f"x is {dtype}"
    if capability(device) != 90 or not _tma.available():
        return "it is for compute capability 9.0"
    if k % _GRANULE_K or k * bits // 8 % 16 or not k or not n:
        return f"rows of {k} elements are not whole granules"
    return "" if max(n, k) < 1 << 30 and n * k < 1 << 36 else "numbers of 32 bits do not reach through the weight"
