"""Products of dispatches to experts: lists of tokens sorted by expert, as servers of mixtures of experts keep them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES, IDS_CXX, Template
from ..backend.launch import Kernel
from ..backend.structs import Constants
from ..formats.base import register_templates
from .functions import linear_grouped
from .fused import SIZES

_THREADS = 128
_TEMPLATE = Template(
    "linear/dispatch.cu",
    "combine_dispatches",
    (tuple(CXX_TYPES.values()), tuple(IDS_CXX.values())),
    hot=False,
    structs=(SIZES, Constants(THREADS=_THREADS)),
)
register_templates(_TEMPLATE)
_MOST_BLOCKS = 1 << 15  # along the second axis of a grid


@functools.cache
def _kernel(dtype: np.dtype, ids: np.dtype) -> Kernel:
    values = CXX_TYPES[dtype.name], IDS_CXX[ids.name]
    return Kernel(_TEMPLATE, values, _THREADS, signature=("p", "p", "p", "i8", "i8"), early=True)


def multiply(y: Any, weights: Any, tokens: Any, offsets: Any, factors: Any, out: Any) -> None:
    """Fill out[T, N]: of each dispatch i of expert e, offsets[e] <= i < offsets[e + 1], factors[i] times the product of
    token tokens[i] with that expert is added to the token's row, in their order.

    Parameters
    ----------
    y : array
        [T, K].
    weights : QuantizedArray or array
        [E, N, K].
    tokens, offsets : array of int
        [M] and [E + 1], which ascends. Dispatches of no expert and numbers of no token count for nothing.
    factors : array or None
        [M]; None: all 1.
    out : array
        Of y's dtype, C-contiguous, on its device, which is the current one.
    """
    xp = _xp.namespace(y)
    count, experts = tokens.size, len(offsets) - 1
    if not count or not out.size or not y.size:
        out.fill(0)
        return
    ids = xp.searchsorted(offsets, xp.arange(count, dtype=offsets.dtype), side="right") - 1  # -1 or `experts`: none
    rows = xp.take(y, tokens % len(y), axis=0)
    ones = None if factors is None else factors[:, None]
    products = linear_grouped(rows, weights, ids[:, None], ones).reshape(count, -1)
    assert experts > 0
    if not isinstance(y, np.ndarray):
        tokens = _xp.contiguous(tokens if tokens.dtype.name in IDS_CXX else tokens.astype(np.int64))
        columns = min(-(-out.shape[1] // _THREADS), _MOST_BLOCKS)
        _kernel(y.dtype, tokens.dtype).launch(out, (len(y), columns), (products, tokens, out, count, out.shape[1]))
        return
    there = (tokens >= 0) & (tokens < len(y))
    sums = np.zeros(out.shape, np.float32)
    np.add.at(sums, tokens[there], products[there].astype(np.float32))
    out[...] = sums
