"""The simple product of any format that has a decoder (kernels/blocks.cu): few tokens, on any GPU, in exact float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import CXX_TYPES
from ..formats import decoders
from .routes import Problem, Product, Route, refused_by_all

# Tokens that share the decoding of a row.
_TOGETHER = 8
# Microseconds of the launch, to decode an element (from half of that for tables of values to a fifth more for bit
# planes), and to multiply it by a token, by the bytes of its dtype, where the weight fills an H200.
_START, _DECODING, _MULTIPLYING = 3.0, 8.0e-7, {2: 1.05e-7, 4: 2.6e-7}
# More tokens decode the weights once more for every eight. That pays beside decoding to memory, which takes two
# launches, but not beside kernels that decode to fragments.
_MORE_START = 7.2
# Elements of a row that a warp decodes at once; where weights are small, the microseconds until it goes on: to decode,
# and for each token.
_AT_ONCE, _WAITING, _WAITING_TOKEN = 256, 0.3, 0.1


def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
    """Fill out[M, N] from x[M, K], a weight and a bias or None; all on one device, the current one."""
    decoder = q.format.decoder
    assert decoder is not None
    if bias is not None and bias.dtype != out.dtype and out.dtype.itemsize == 2:
        # The bias has more bits than x: everything is float32 before the one rounding.
        single, wide = x.astype(np.float32), bias.astype(np.float32, copy=False)
        sums = _xp.namespace(out).empty(out.shape, np.float32)
        multiply(single, q, wide, sums)
        out[...] = sums
        return
    if bias is not None:
        bias = bias.astype(out.dtype, copy=False)
        bias = bias if bias.flags.c_contiguous else bias.copy()
    decoders.multiply(decoder, q.planes, q.shape, x, bias, out)


class Generic(Route):
    """Decode rows in registers, element by element, and multiply in float32."""

    name = "generic"

    def accepts(self, problem: Problem) -> str | None:
        found = refused_by_all(problem, "one weight")
        if found is not None:
            return found
        if problem.format.decoder is None:
            return f"{problem.format} has no decoder"
        if problem.dtype.name not in CXX_TYPES:
            return f"x is {problem.dtype}; sums are float32"
        if not problem.shape[0] or not problem.shape[1]:
            return "the weight is empty"
        return "a stack is for linear_grouped" if problem.stored.lead else None

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        groups = -(-problem.tokens // _TOGETHER)
        multiplying = problem.tokens * _MULTIPLYING[problem.dtype.itemsize]
        waiting = k / _AT_ONCE * (_WAITING + _WAITING_TOKEN * min(problem.tokens, _TOGETHER))
        start = _START if groups <= 1 else _MORE_START
        return start + max(n * k * (groups * _DECODING + multiplying), waiting)

    def prepare(self, problem: Problem) -> Product:
        n, k = problem.shape
        # Many numbers of tokens share a plan: how many these are, the arrays say.
        return lambda x, q, bias, out: multiply(x.reshape(out.size // n, k), q, bias, out.reshape(out.size // n, n))

    def describe(self, problem: Problem) -> str:
        return "rows decoded element by element and multiplied in float32: linear_blocks"
