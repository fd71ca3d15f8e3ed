"""Products of a few tokens with experts in ternary, in one launch: kernels/linear/ternary_rows.cu.

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
from . import activations as tokens_of
from .activations import Rule
from .fused import HALF_CXX
from .int8 import BIAS_KINDS
from .ternary_rows import (
    ALIGNMENT,
    BESIDE,
    BESIDE_QUANTIZED,
    FILE,
    OLDEST,
    SIZES,
    STAGE,
    TOKENS,
    WARPS,
    map_of,
    staged_bytes,
    stages_of,
)

_IDS = tuple(IDS_CXX.values())
_TYPES = tuple(CXX_TYPES[name] for name in tokens_of.FLOATS)
_FLOATS = Template(FILE, "slots_ternary_floats", (HALF_CXX, _IDS), structs=(BIAS_KINDS, SIZES), least=OLDEST)
_QUANTIZED = Template(FILE, "slots_ternary_quantized", (_TYPES, _IDS), structs=(BIAS_KINDS, SIZES), least=OLDEST)
register_templates(_FLOATS, _QUANTIZED)
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
    stages = stages_of(staged, STAGE, device, 2 * BESIDE if floats else BESIDE_QUANTIZED)
    if stages < 1:
        return None
    template, values = (_FLOATS if floats else _QUANTIZED), (CXX_TYPES[dtype.name], IDS_CXX[ids.name])
    shared = staged + stages * WARPS * STAGE + ALIGNMENT
    kernel = Kernel(template, values, SIZES.ROW_THREADS, shared, signature=_SIGNATURES[template], early=True)
    return kernel.ready(device).launch, (blocks, tokens), (stages, of_pass)


def multiply_slots(x: Any, qs: QuantizedArray, ids: Any, weights: Any, out: Any, rule: Rule | None) -> bool:
    """Fill `out`, on the current device, where this is the way to do so; without a rule tokens stay floats."""
    experts, rows, depth = qs.shape
    ids = _xp.contiguous(ids if ids.dtype.name in IDS_CXX else ids.astype(np.int64))
    tokens, slots = ids.shape
    own = x.ndim == 3
    found = _plan(out.dtype, ids.dtype, tokens, slots, rows, depth, own, rule is None, out.data.device_id)
    if found is None:
        return False
    launch, grid, cut = found
    if weights is not None:
        weights = _xp.contiguous(weights if weights.dtype == np.float32 else weights.astype(np.float32))
    codes, scale = qs.planes["codes"], qs.planes["scale"]
    of_rows = int(scale.size == experts * rows > 1)
    of_experts = rows if of_rows else int(scale.size > 1)
    pointers = x.data.ptr, ids.data.ptr, 0 if weights is None else weights.data.ptr, scale.data.ptr, out.data.ptr
    numbers = experts, rows, of_experts, depth, slots, int(own), of_rows
    quantized = () if rule is None else rule.numbers
    launch(grid, (*pointers, *numbers, *quantized, *cut, map_of(codes, experts * rows, depth, cut[-1])))
    return True
