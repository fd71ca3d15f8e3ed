"""Many tokens by cuBLAS, where sums of integers become float32 so often that it takes longer than to decode.

Tokens are quantized as `kbitcupy.products.integer_activations` says, and what the integers of both sides stand for is
rounded to the dtype of x; products are added up in float32. So an output is within 2^-10 of the sum of the magnitudes
of its products for float16, and 2^-7 for bfloat16: like that of floats, and coarser than sums of integers. That is for
float16 and bfloat16, and units of 32 elements; longer ones are multiplied as integers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from . import decoded, integer_activations as tokens_of, integers
from .decoded import Decoded
from .int8 import token_planes
from .integer_activations import NUMBERS, Q8_BLOCK
from .routes import Problem, Product, Route

#: The longest unit, of elements that share all scales.
MOST_UNIT = 32
# Microseconds of the launches that quantize tokens and decode them again, and of an element of these.
_START, _ELEMENT = 8.0, 2e-6
_DECODED = Decoded()


def unit_of(problem: Problem) -> int:
    """Elements that share all scales, of a problem of integer codes."""
    depth = problem.shape[1]
    part = integers.codes_of(problem.format, problem.shape, problem.stored.lead)
    assert part is not None
    return min(part.group or depth, Q8_BLOCK if problem.activations == "q8_1" else depth, depth)


def tokens_in(dtype: np.dtype, x: Any, preset: str, tokens: int, depth: int) -> Any:
    """[tokens, K] in a dtype: what quantized floats, or int8, stand for, on their device, the current one."""
    if isinstance(x, QuantizedArray):
        codes, scales = token_planes(x)
        cupy = _xp.namespace(codes)
        codes, scales = codes.reshape(tokens, depth), scales.reshape(-1, 1)
        scales = cupy.where((scales > 0) & (scales < np.inf), scales, np.float32(0))  # others count as 0
    else:
        x, blocks = tokens_of.floats_of(x), -(-depth // Q8_BLOCK)
        cupy, padded = _xp.namespace(x), tokens_of.padded_of(tokens)
        codes = cupy.empty((tokens, tokens_of.pitch_of(depth)), np.int8)
        scales = cupy.empty((blocks if preset == "q8_1" else 1, padded), np.float32)
        tokens_of.quantize_into(x, tokens, preset, codes.data.ptr, scales.data.ptr, 0, NUMBERS.ROWS, 0)
        codes, scales = codes[:, :depth], scales[:, :tokens].T
    out = cupy.empty((tokens, depth), dtype)
    if scales.shape[1] == 1:
        return cupy.multiply(codes, scales, out=out, casting="unsafe")
    whole = depth // Q8_BLOCK
    middle = whole * Q8_BLOCK  # behind it fewer share a scale
    for first, last, of in ((0, middle, scales[:, :whole]), (middle, depth, scales[:, whole:])):
        if last > first:
            parts, target = codes[:, first:last], out[:, first:last]
            shape = tokens, of.shape[1], -1
            cupy.multiply(parts.reshape(shape), of[..., None], out=target.reshape(shape), casting="unsafe")
    return out


class IntegerDecoded(Route):
    """Quantize tokens, decode them and all of the weight to the dtype of x, and let cuBLAS multiply."""

    name = "integer_decoded"

    def accepts(self, problem: Problem) -> str | None:
        if problem.device is None:
            return "the arrays are in host memory"
        if problem.experts:
            return "it is for one weight"
        preset, lead = problem.activations, problem.stored.lead
        found = integers.why_not(preset, problem.format, problem.shape, lead)
        if found:
            return found
        if problem.dtype.itemsize != 2:
            return "it is for float16 and bfloat16"
        if unit_of(problem) > MOST_UNIT or unit_of(problem) >= problem.shape[1]:
            return f"{unit_of(problem)} elements share all scales, and their sums are exact"
        return None

    def cost(self, problem: Problem) -> float:
        return _START + problem.tokens * problem.shape[1] * _ELEMENT + _DECODED.cost(_as_floats(problem))

    def prepare(self, problem: Problem) -> Product:
        (n, k), preset, dtype = problem.shape, problem.activations or "", problem.dtype

        def product(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            tokens = out.size // n
            decoded.multiply(tokens_in(dtype, x, preset, tokens, k), q, bias, out.reshape(tokens, n))

        return product

    def describe(self, problem: Problem) -> str:
        return f"tokens quantized by {problem.activations!r}; {_DECODED.describe(_as_floats(problem))}"


def _as_floats(problem: Problem) -> Problem:
    """The product of what quantized tokens stand for."""
    return replace(problem, activations=None, aligned=True)
