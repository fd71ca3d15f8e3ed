"""Products of ternary weights and floats of 16 bits by bulk copies, on a GPU: kernels/linear/ternary_bulk.cu.

One launch, which puts the tokens in order itself; of one weight, and of the experts of `kbitcupy.products.experts`.
Trits are multiplied as numbers of 16 bits, which hold them, and added in float32; scale and bias follow.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend.compile import CXX_TYPES, Template
from ..backend.launch import Kernel, capability, multiprocessors, shared_memory
from ..backend.structs import Constants
from ..formats.base import Trits, register_templates
from . import activations as tokens_of, int8
from .fused import GROUP, HALF_CXX, TOKENS, Grouping, Multiply
from .int8 import BIAS_KINDS

_STEP = tokens_of.SIZES.STEP
_FILE, _OLDEST = "linear/ternary_bulk.cu", 90
_SIZES = Constants(STEP=_STEP, MULTIPLIERS=8, FILLERS=4, MOST_STAGES=16)
# Of experts: a multiprocessor has several thread blocks.
_EXPERT_SIZES = Constants(STEP=_STEP, MULTIPLIERS=8, FILLERS=2, MOST_STAGES=16)
_BULK = Template(_FILE, "bulk_ternary", (HALF_CXX,), structs=(BIAS_KINDS, _SIZES, GROUP), least=_OLDEST)
_EXPERTS = Template(
    _FILE,
    "bulk_ternary_experts",
    ((*HALF_CXX, CXX_TYPES["float32"]), HALF_CXX),
    structs=(BIAS_KINDS, _EXPERT_SIZES, GROUP),
    least=_OLDEST,
)
register_templates(_BULK, _EXPERTS)
_SIGNATURE = (*("p",) * 5, "i8", *("i4",) * 7)
_EXPERT_SIGNATURE = (*("p",) * 6, "i8", *("i4",) * 3, "i8", *("i4",) * 3)
# Rows of a tile; bytes of a row that are copied at a time; the fewest stages; what else a thread block has.
_TILE, _PIECE, _FEWEST_STAGES, _BESIDE = 32, 1024, 2, 20 << 10
# Rows for each multiprocessor from which on several tokens are faster so.
_MANY_ROWS = 192
# Of experts: thread blocks of a multiprocessor, stages that are enough, and rows of a thread block.
_RESIDENT, _STAGES, _EXPERT_ROWS = 2, 5, 192


def _staged(tokens: int, depth: int) -> int:
    """Bytes of tokens in shared memory: of whole steps."""
    return 2 * tokens * -(-depth // _STEP) * _STEP


def bulk_ring(tokens: int, depth: int, room: int) -> tuple[int, int, int] | None:
    """Bytes of a row in a stage, from row to row there, and stages; None where so many bytes have no room."""
    row_bytes = depth // 4
    pieces = -(-row_bytes // _PIECE)
    piece = -(-row_bytes // (pieces * 64)) * 64
    # Neighbouring rows lie half of the banks apart.
    pitch = (piece + 63) // 128 * 128 + 64
    stages = min(_SIZES.MOST_STAGES, (room - _BESIDE - _staged(tokens, depth)) // (_TILE * pitch))
    return (piece, pitch, stages) if stages >= _FEWEST_STAGES else None


# ---- one weight ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: np.dtype, tokens: int, rows: int, depth: int, device: int
) -> tuple[Any, tuple[int], tuple[int, int, int]] | None:
    """The launch of a kernel, its grid and ring; None where it is not for such a product."""
    if capability(device) < _OLDEST or tokens > TOKENS:
        return None
    if tokens > 1 and rows < _MANY_ROWS * multiprocessors(device):
        return None
    ring = bulk_ring(tokens, depth, shared_memory(device))
    if ring is None:
        return None
    shared = _TILE * ring[1] * ring[2] + _staged(tokens, depth)
    grid = min(-(-rows // (_TILE // 2)), multiprocessors(device))
    return _kernel(dtype, shared).ready(device).launch, (grid,), ring


@functools.cache
def _kernel(dtype: np.dtype, shared: int) -> Kernel:
    threads = 32 * (_SIZES.MULTIPLIERS + _SIZES.FILLERS)
    return Kernel(_BULK, (CXX_TYPES[dtype.name],), threads, shared, signature=_SIGNATURE, early=True)


def multiply_bulk(x: Any, q: QuantizedArray, part: Trits, bias: Any, out: Any, tokens: int) -> bool:
    """Fill `out`, on the current device, where this is the way to do so."""
    rows, depth = q.shape
    found = _plan(out.dtype, tokens, rows, depth, out.data.device_id)
    if found is None:
        return False
    launch, grid, ring = found
    added, kind = (0, 0) if bias is None else (bias.data.ptr, int8.bias_kind(bias.dtype))
    weight, gamma = q.planes[part.codes].data.ptr, q.planes[part.scales].data.ptr
    of_rows = int(part.shares == "row")
    launch(grid, (weight, x.data.ptr, gamma, added, out.data.ptr, rows, tokens, depth, of_rows, kind, *ring))
    return True


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_ring(depth: int, device: int) -> tuple[int, int, int] | None:
    """The ring of a thread block; None where a multiprocessor has no room for it."""
    for resident in range(_RESIDENT, 0, -1):
        ring = bulk_ring(TOKENS, depth, shared_memory(device) // resident)
        if ring is not None:
            return ring[0], ring[1], min(ring[2], _STAGES)
    return None


class ExpertKernel:
    """The kernel for experts of one shape and tokens of one dtype, of which `kbitcupy.products.experts` asks."""

    #: The oldest architecture.
    least = _OLDEST

    def __init__(self, shape: tuple[int, int], dtype: np.dtype, ring: tuple[int, int, int]):
        self._rows, self._depth = shape
        self.cxx, self._ring = CXX_TYPES[dtype.name], ring
        shared = _TILE * ring[1] * ring[2] + _staged(TOKENS, self._depth)
        threads = 32 * (_EXPERT_SIZES.MULTIPLIERS + _EXPERT_SIZES.FILLERS)
        self._kernels = {
            combined: Kernel(_EXPERTS, (cxx, self.cxx), threads, shared, signature=_EXPERT_SIGNATURE, early=True)
            for combined, cxx in ((False, self.cxx), (True, CXX_TYPES["float32"]))
        }
        self._parts = -(-self._rows // _EXPERT_ROWS)

    def of_experts(self, grouping: Grouping) -> Multiply:
        """The launch for experts, the kernel compiled."""
        start = self._kernels[grouping.combined].ready(grouping.device).launch
        grid = self._parts, grouping.groups, 1

        def multiply(x: Any, qs: QuantizedArray, out: int, partial: int, groups: int, order: int) -> None:
            codes, scale = qs.planes["codes"].data.ptr, qs.planes["scale"]
            of_rows = int(scale.size == qs.shape[0] * self._rows > 1)
            of_experts = self._rows if of_rows else int(scale.size > 1)
            pointers = codes, x.data.ptr, scale.data.ptr, groups, order, partial or out
            start(grid, (*pointers, self._rows, self._depth, grouping.divisor, of_rows, of_experts, *self._ring))

        return multiply


@functools.lru_cache(maxsize=256)
def expert_kernel(shape: tuple[int, int], dtype: np.dtype, device: int) -> ExpertKernel:
    """The kernel of a product that `experts_ring` has room for."""
    ring = experts_ring(shape[1], device)
    assert ring is not None
    return ExpertKernel(shape, dtype, ring)
