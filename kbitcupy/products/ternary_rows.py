"""Products of up to 8 tokens and ternary weights, whose codes the copy engine brings: kernels/linear/ternary_rows.cu.

The second launch of `kbitcupy.products.ternary_stream`, from Hopper on: a warp has rows of its own and waits for no
other warp. Tokens, and what comes of them, are as there, to the bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, capability, multiprocessors, shared_memory
from ..backend.structs import Constants
from ..backend.tma import MAP_BYTES, byte_matrix
from ..formats.base import Trits, register_templates
from . import activations as tokens_of
from .fused import HALF_CXX
from .int8 import BIAS_KINDS

_FILE, _OLDEST = "linear/ternary_rows.cu", 90
_STEP = tokens_of.SIZES.STEP
_SIZES = Constants(STEP=_STEP, ROW_THREADS=512, MOST_ROW_STAGES=4, OWN_OCTETS=4, LANES=tokens_of.LANES)
_TYPES = tuple(CXX_TYPES[name] for name in tokens_of.FLOATS)
#: Sizes of groups that have kernels, the most tokens, and the most that are quantized in the same launch.
GROUPS, TOKENS, QUANTIZED_TOKENS = (32, 64, 128), 8, 1
_ROWS = Template(_FILE, "rows_ternary", (_TYPES,), structs=(BIAS_KINDS, _SIZES), least=_OLDEST)
_OF_GROUPS = Template(
    _FILE, "rows_ternary_groups", (_TYPES, tuple(map(str, GROUPS))), structs=(BIAS_KINDS, _SIZES), least=_OLDEST
)
_QUANTIZED = Template(_FILE, "rows_ternary_quantized", (_TYPES,), structs=(BIAS_KINDS, _SIZES), least=_OLDEST)
_FLOATS = Template(_FILE, "rows_ternary_floats", (HALF_CXX,), structs=(BIAS_KINDS, _SIZES), least=_OLDEST)
register_templates(_ROWS, _OF_GROUPS, _QUANTIZED, _FLOATS)
_SIGNATURE = (*("p",) * 6, "i8", *("i4",) * 8, MAP_BYTES)
_GROUP_SIGNATURE = (*("p",) * 6, "i8", *("i4",) * 6, MAP_BYTES)
_FLOAT_SIGNATURE = (*("p",) * 4, "i8", *("i4",) * 7, MAP_BYTES)
_QUANTIZED_SIGNATURE = (*("p",) * 5, "i8", *("i4",) * 5, "f8", "f4", *("i4",) * 6, MAP_BYTES)
# Warps of a thread block; rows of a pass; bytes of a row in a box, and of boxes in a stage of a warp.
_WARPS, _PASS, _LINE, _STAGE = _SIZES.ROW_THREADS // 32, 16, 128, 2 * 16 * 128
# Stages of a warp beyond which its first codes, and the tokens, only come later; bytes beside stages and tokens, and
# what stages begin at.
_STAGES, _BESIDE, _ALIGNMENT = 2, 4 << 10, 1 << 10


@dataclass(frozen=True, eq=False)
class Rows:
    """The launch for products of one shape.

    Parameters
    ----------
    launch : callable
        The kernel, loaded.
    grid : tuple of int
        Thread blocks.
    cut : tuple of int
        The last numbers of the kernel's arguments.
    """

    launch: Any
    grid: tuple[int]
    cut: tuple[int, ...]

    def multiply(self, pointers: tuple[int, ...], numbers: tuple[float, ...], q: QuantizedArray, part: Trits) -> None:
        """Start it with all arguments but the cut and the map of the weight."""
        rows, depth = q.shape
        pitch = depth // 4
        codes = byte_matrix(q.planes[part.codes].data.ptr, rows, pitch, pitch, self.cut[-1], _LINE, True, 128)
        self.launch(self.grid, (*pointers, *numbers, *self.cut, codes))


def _staged(tokens: int, depth: int) -> int:
    """Bytes of int8 tokens in shared memory, of whole lines of codes."""
    return -(-depth // (4 * _LINE)) * 4 * _LINE * tokens


def cut_of(rows: int, depth: int, blocks: int, group: int) -> tuple[int, int]:
    """Warps that share rows, and rows of a pass.

    Examples
    --------
    >>> [cut_of(rows, depth, 132, 0) for rows, depth in ((28672, 8192), (8192, 8192), (4096, 4096), (2560, 2560))]
    [(1, 14), (4, 16), (8, 16), (4, 5)]
    """
    of_block, lines = -(-rows // blocks), -(-depth // (4 * _LINE))
    share = 1
    while not group and 2 * share <= min(_WARPS, lines) and -(-of_block * 2 * share // _WARPS) <= _PASS:
        share *= 2
    of_team = -(-of_block * share // _WARPS)
    return share, -(-of_team // -(-of_team // _PASS))


@functools.lru_cache(maxsize=4096)
def rows_of(dtype: np.dtype, tokens: int, rows: int, depth: int, group: int, device: int) -> Rows | None:
    """How a product is computed, its kernel compiled; None where it is not for such a product.

    `group` is 0 where one scale is for all, or for a row.
    """
    if capability(device) < _OLDEST or tokens > TOKENS or group not in (0, *GROUPS):
        return None
    blocks = min(multiprocessors(device), rows)
    share, of_pass = cut_of(rows, depth, blocks, group)
    staged = _staged(tokens, depth) + (depth // group * 4 * TOKENS if group else 0)
    stage = _WARPS * (_STAGE + (_STAGE * 4 // group * 4 if group else 0))
    stages = min(_STAGES, (shared_memory(device) - _BESIDE - staged) // stage)
    if stages < 1:
        return None
    launch = _kernel(dtype, group, staged + stages * stage + _ALIGNMENT).ready(device).launch
    cut = (stages, of_pass) if group else (share, stages, of_pass)
    return Rows(launch, (blocks,), cut)


@functools.lru_cache(maxsize=4096)
def quantized_rows_of(dtype: np.dtype, tokens: int, rows: int, depth: int, device: int) -> Rows | None:
    """The same of one launch that quantizes the tokens, too, from their floats."""
    found = rows_of(dtype, tokens, rows, depth, 0, device)
    if found is None or tokens > QUANTIZED_TOKENS or depth > 8 * _SIZES.OWN_OCTETS * _SIZES.ROW_THREADS:
        return None
    stages = found.cut[1]
    shared = _staged(tokens, depth) + stages * _WARPS * _STAGE + _ALIGNMENT
    kernel = Kernel(
        _QUANTIZED,
        (CXX_TYPES[dtype.name],),
        _SIZES.ROW_THREADS,
        shared,
        signature=_QUANTIZED_SIGNATURE,
        early=True,
    )
    return Rows(kernel.ready(device).launch, found.grid, found.cut)


@functools.lru_cache(maxsize=4096)
def float_rows_of(dtype: np.dtype, tokens: int, rows: int, depth: int, device: int) -> Rows | None:
    """The same of floats of 16 bits, in one launch."""
    if capability(device) < _OLDEST or tokens > TOKENS:
        return None
    blocks = min(multiprocessors(device), rows)
    share, of_pass = cut_of(rows, depth, blocks, 0)
    staged = 2 * _staged(tokens, depth)
    stages = min(_STAGES, (shared_memory(device) - _BESIDE - staged) // (_WARPS * _STAGE))
    if stages < 1:
        return None
    shared = staged + stages * _WARPS * _STAGE + _ALIGNMENT
    values = (CXX_TYPES[dtype.name],)
    kernel = Kernel(_FLOATS, values, _SIZES.ROW_THREADS, shared, signature=_FLOAT_SIGNATURE, early=True)
    return Rows(kernel.ready(device).launch, (blocks,), (share, stages, of_pass))


@functools.cache
def _kernel(dtype: np.dtype, group: int, shared: int) -> Kernel:
    cxx = CXX_TYPES[dtype.name]
    template, values = (_OF_GROUPS, (cxx, str(group))) if group else (_ROWS, (cxx,))
    signature = _GROUP_SIGNATURE if group else _SIGNATURE
    return Kernel(template, values, _SIZES.ROW_THREADS, shared, signature=signature, early=True)
