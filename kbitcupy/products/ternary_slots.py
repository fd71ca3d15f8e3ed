"""Products of tokens with experts in ternary: kernels/linear/ternary_rows.cuh.

A few of them in one launch, `multiply_slots`; of many tokens of 16 bits that are sorted by expert, `ExpertRows`.

Where each token's experts are read for it alone there is nothing to sort, and what a token's experts give can be added
up where it is computed. Tokens are floats of 16 bits, or quantized by BitNet's rule on the way; then each product has
the bits of `kbitcupy.products.ternary`, and sums over slots those of NumPy.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, IDS_CXX, Template
from ..backend.launch import Kernel, capability, multiprocessors
from ..backend.tma import MAP_BYTES
from ..formats.base import register_templates
from ..ops import source
from . import activations as tokens_of
from .activations import Rule
from .fused import HALF_CXX, Grouping, Multiply
from .routes import Device
from .ternary_rows import (
    ALIGNMENT,
    BESIDE,
    FEW_FILE,
    FEW_SIZES,
    FEW_STRUCTS,
    FILE,
    OLDEST,
    SIZES,
    STAGE,
    STRUCTS,
    TOKENS,
    WARPS,
    map_of,
    staged_bytes,
    stages_of,
)

_IDS, _IDS_DTYPES = tuple(IDS_CXX.values()), frozenset(map(np.dtype, IDS_CXX))
_TYPES = tuple(CXX_TYPES[name] for name in tokens_of.FLOATS)
_FLOATS = Template(FILE, "slots_ternary_floats", (HALF_CXX, _IDS), structs=STRUCTS, least=OLDEST)
_QUANTIZED = Template(FILE, "slots_ternary_quantized", (_TYPES, _IDS), structs=STRUCTS, least=OLDEST)
_SORTED = Template(
    FILE, "rows_ternary_experts", ((*HALF_CXX, CXX_TYPES["float32"]), HALF_CXX), structs=STRUCTS, least=OLDEST
)
_SORTED_QUANTIZED = Template(
    FEW_FILE, "rows_ternary_experts_quantized", (_TYPES, _TYPES), structs=FEW_STRUCTS, least=OLDEST
)
register_templates(_FLOATS, _QUANTIZED, _SORTED, _SORTED_QUANTIZED)
# Of tokens of floats, and of those that are quantized on the way.
_SORTED_SIGNATURES = tuple(
    (*("p",) * 5, "i8", *("i4",) * 3, "i8", *rule, "i4", "i4", MAP_BYTES) for rule in ((), ("f4", *("i4",) * 3))
)
# Rows of a thread block, of sorted experts; rows and threads of those that quantize, which are smaller, with one stage
# of a warp: several of them are on a multiprocessor, and one quantizes while another multiplies.
_SORTED_ROWS, _SORTED_QUANTIZED_SIZES = 768, (384, FEW_SIZES.ROW_THREADS)
_NUMBERS = (*("i8",) * 3, *("i4",) * 4)
_SIGNATURES = {
    _FLOATS: (*("p",) * 5, *_NUMBERS, "i4", "i4", MAP_BYTES),
    _QUANTIZED: (*("p",) * 5, *_NUMBERS, "f4", *("i4",) * 5, MAP_BYTES),
}
# Rows of a pass; the fewest of a thread block; the most tokens, along the second axis of a grid.
_PASSES, _FEWEST_ROWS, _MOST_TOKENS = range(4, 17), 16, 65535


def cut_of(rows: int, slots: int, blocks: int) -> tuple[int, int]:
    """Thread blocks of a token, of about so many, and rows of a pass.

    Examples
    --------
    >>> cut_of(768, 8, 16), cut_of(768, 8, 2)
    ((16, 12), (2, 16))
    """
    blocks = max(1, min(blocks, rows // _FEWEST_ROWS))
    of_block = -(-rows // blocks)

    def steps(of_pass: int) -> tuple[int, int]:
        spans = slots * -(-of_block // of_pass)
        return -(-spans // WARPS) * (of_pass + 2), -of_pass  # besides its rows each pass has a beginning and an end

    return blocks, min(_PASSES, key=steps)


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: np.dtype, ids: np.dtype, tokens: int, slots: int, rows: int, depth: int, own: bool, floats: bool, device: int
) -> tuple[Any, tuple[int, int], tuple[int, int]] | None:
    """The launch, its grid, and stages and rows of a pass; None where it is not for such products."""
    most = TOKENS if own and not floats else SIZES.MOST_SLOTS
    if capability(device) < OLDEST or slots > most or tokens > _MOST_TOKENS:
        return None
    if not floats and depth > 16 * SIZES.ROW_THREADS:
        return None
    blocks, of_pass = cut_of(rows, slots, multiprocessors(device) // tokens)
    staged = staged_bytes(slots if own else 1, depth) * (1 + floats) + 4 * slots * -(-rows // blocks)
    stages = stages_of(staged, STAGE, device, 2 * BESIDE)
    if stages < 1:
        return None
    template, values = (_FLOATS if floats else _QUANTIZED), (CXX_TYPES[dtype.name], IDS_CXX[ids.name])
    shared = staged + stages * WARPS * STAGE + ALIGNMENT
    kernel = Kernel(template, values, SIZES.ROW_THREADS, shared, signature=_SIGNATURES[template], early=True)
    return kernel.ready(device).launch, (blocks, tokens), (stages, of_pass)


def multiply_slots(x: Any, qs: QuantizedArray, ids: Any, weights: Any, out: Any, rule: Rule | None) -> bool:
    """Fill `out`, on the current device, where this is the way to do so; without a rule tokens stay floats."""
    experts, rows, depth = qs.shape
    ids = _xp.contiguous(ids if ids.dtype in _IDS_DTYPES else ids.astype(np.int64))
    tokens, slots = ids.shape
    own = x.ndim == 3
    found = _plan(out.dtype, ids.dtype, tokens, slots, rows, depth, own, rule is None, out.data.device_id)
    if found is None:
        return False
    launch, grid, cut = found
    if weights is not None:
        weights = source(weights, ("float32",))
    codes, scale = qs.planes["codes"], qs.planes["scale"]
    of_rows, of_experts = scales_of(qs)
    pointers = x.data.ptr, ids.data.ptr, 0 if weights is None else weights.data.ptr, scale.data.ptr, out.data.ptr
    numbers = experts, rows, of_experts, depth, slots, int(own), of_rows
    quantized = () if rule is None else rule.numbers
    launch(grid, (*pointers, *numbers, *quantized, *cut, map_of(codes, experts * rows, depth, cut[-1])))
    return True


class ExpertRows:
    """The kernel for experts of one shape and tokens of one dtype, of which `kbitcupy.products.experts` asks.

    Parameters
    ----------
    shape : tuple of int
        N and K of an expert.
    dtype : numpy.dtype
        Of the tokens.
    stages : int
        Of the ring of a warp.
    rule : Rule, optional
        By which tokens are quantized on the way.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype, stages: int, rule: Rule | None = None):
        self._rows, self._depth = shape
        self._rule = () if rule is None else rule.numbers
        self.cxx = CXX_TYPES[dtype.name]
        most, threads = (_SORTED_ROWS, SIZES.ROW_THREADS) if rule is None else _SORTED_QUANTIZED_SIZES
        self._parts, warps = -(-self._rows // most), threads // 32
        of_part = -(-self._rows // self._parts)
        of_warp = -(-of_part // warps)
        self._cut = stages, -(-of_warp // -(-of_warp // _PASSES[-1]))
        shared = (1 + (rule is None)) * staged_bytes(TOKENS, self._depth) + stages * warps * STAGE + ALIGNMENT
        template, signature = (_SORTED if rule is None else _SORTED_QUANTIZED), _SORTED_SIGNATURES[rule is not None]
        self._kernels = {
            combined: Kernel(template, (cxx, self.cxx), threads, shared, signature=signature, early=True)
            for combined, cxx in ((False, self.cxx), (True, CXX_TYPES["float32"]))
        }

    def of_experts(self, grouping: Grouping) -> Multiply:
        """The launch for experts, the kernel compiled."""
        start = self._kernels[grouping.combined].ready(grouping.device).launch
        grid = self._parts, grouping.groups, 1

        def multiply(x: Any, qs: QuantizedArray, out: int, partial: int, groups: int, order: int) -> None:
            codes, scale = qs.planes["codes"], qs.planes["scale"]
            pointers = x.data.ptr, scale.data.ptr, groups, order, partial or out
            numbers = self._rows, self._depth, grouping.divisor, *scales_of(qs), *self._rule, *self._cut
            codes_map = map_of(codes, qs.shape[0] * self._rows, self._depth, self._cut[-1])
            start(grid, (*pointers, *numbers, codes_map))

        return multiply


def scales_of(qs: QuantizedArray) -> tuple[int, int]:
    """From row to row, and from expert to expert, in the plane of scales of a stack."""
    experts, rows, _ = qs.shape
    size = qs.planes["scale"].size
    of_rows = int(size == experts * rows > 1)
    return of_rows, rows if of_rows else int(size > 1)


@functools.lru_cache(maxsize=256)
def expert_rows(shape: tuple[int, int], dtype: np.dtype, device: int) -> ExpertRows | None:
    """The kernel; None where the device has no room for it."""
    stages = stages_of(2 * staged_bytes(TOKENS, shape[1]), STAGE, device, 2 * BESIDE)
    return ExpertRows(shape, dtype, stages) if capability(device) >= OLDEST and stages > 0 else None


@functools.lru_cache(maxsize=256)
def quantized_expert_rows(shape: tuple[int, int], dtype: np.dtype, rule: Rule, gpu: Device) -> ExpertRows | None:
    """The same of tokens that are quantized; None where they, or a thread block, would have too little room."""
    depth = shape[1]
    room = gpu.shared_memory - 2 * BESIDE - FEW_SIZES.ROW_THREADS // 32 * STAGE
    if gpu.capability < OLDEST or depth > 32 * FEW_SIZES.ROW_THREADS or staged_bytes(TOKENS, depth) > room:
        return None
    return ExpertRows(shape, dtype, 1, rule)
