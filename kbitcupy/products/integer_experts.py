"""Routes of `linear_grouped` with activations: each product is one of `kbitcupy.products.integers`, to the bit.

Tokens are quantized once, each by itself. Slots are combined in float32, in their order, before the one rounding. With
``"bitnet"`` each product is one of `kbitcupy.products.ternary`: of the same sums, and of tokens by its rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..backend.compile import cxx_type
from ..formats.base import Format
from ..ops import source, widen
from . import integer_stream
from .activations import FLOATS
from .experts import IDS, ROUNDED, WEIGHTS, Combining, combined, combining
from .integer_activations import BITNET, Tokens, quantize_host
from .integers import (
    Chosen,
    Integers,
    IntegersHost,
    MultiplyExperts,
    codes_of,
    experts_multiplied,
    multiply_host,
    why_not,
)
from .routes import Problem, Product, Route

WANTED = "they must be [E, N, K] in ternary, for activations in bitnet: kb.stack of kb.quantize(w, 'ternary')"
# Microseconds to pick an expert's rows and tokens.
_EACH = 20.0
# Products that are computed one beside the other, and read the codes of their experts each; microseconds of the
# launches, and the fraction of the bandwidth at which codes pass.
_MOST_PRODUCTS, _STREAM_START, _FRACTION = 65535, 8.0, 0.6


def _refusal(problem: Problem) -> str | None:
    if not problem.experts:
        return "it is for experts"
    preset = problem.activations
    if preset == BITNET:
        part = problem.format.trits(problem.shape)
        if part is None or not part.shares:
            return f"the weights are {problem.format!r}; {WANTED}"
        preset = "int8"  # whose sums these are, with limits of their own
    return why_not(preset, problem.format, (problem.experts, *problem.shape), problem.stored.lead)


def _multiply_host(x: Any, preset: str, qs: QuantizedArray, ids: Any, weights: Any, out: Any) -> None:
    experts, rows, depth = qs.shape
    tokens = quantize_host(x.reshape(math.prod(x.shape[:-1]), depth), preset)
    # The token of each product.
    number = np.arange(ids.size).reshape(ids.shape) if x.ndim == 3 else np.arange(len(ids))[:, None]
    number = np.broadcast_to(number, ids.shape)
    products = np.zeros((*ids.shape, rows), np.float32)
    for expert in np.unique(ids):
        if not 0 <= expert < experts:
            continue
        chosen = ids == expert
        some = Tokens(*(plane[number[chosen]] for plane in tokens))
        found = np.empty((len(some.codes), rows), np.float32)
        multiply_host(some, qs, None, found, int(expert) * rows)
        products[chosen] = found
    with np.errstate(all="ignore"):
        out[...] = products if weights is None else combined(products, weights.astype(np.float32, copy=False))


class _Plan(NamedTuple):
    """The launches for one shape."""

    size: int  # of products in bytes
    multiply: MultiplyExperts | None
    combine: Combining


@functools.lru_cache(maxsize=1024)
def _plan(
    multiplied: Callable[[Chosen], MultiplyExperts],
    format: Format,
    shape: tuple[int, int, int],
    lead: int,
    preset: str,
    dtype: np.dtype,
    out: np.dtype,
    chosen: tuple[int, int],
    shared: bool,
    weighted: bool,
    vector: bool,
    id_bytes: int,
    device: int,
) -> _Plan:
    """How ids of shape `chosen` are gone about; `shared`: slots of a token share a row of x, of type `dtype`."""
    experts, rows, depth = shape
    tokens, slots = chosen
    products, of_x = tokens * slots, (tokens, slots) if shared else (tokens * slots, 1)
    multiply = None
    if depth:
        multiply = multiplied(Chosen(format, shape, lead, dtype, preset, *of_x, vector, id_bytes, device))
    else:  # of no elements all products are zero, as those of no expert are
        experts = 0
    combined = (tokens, slots) if weighted else (products, 1)
    combine = combining(ROUNDED, cxx_type(out), *combined, rows, experts, device, id_bytes)
    return _Plan(4 * products * rows, multiply, combine)


def _multiply_cuda(
    x: Any,
    preset: str,
    qs: QuantizedArray,
    ids: Any,
    weights: Any,
    out: Any,
    multiplied: Callable[[Chosen], MultiplyExperts],
) -> None:
    if out.dtype == _xp.DOUBLE:
        single = _xp.empty(out, out.shape, _xp.SINGLE)
        _multiply_cuda(x, preset, qs, ids, weights, single, multiplied)
        widen(single, out)
        return
    ids, x = _xp.contiguous(ids if ids.dtype in IDS else ids.astype(np.int64)), source(x, FLOATS)
    given, chosen, of_slots = x.data, ids.data.ptr, 0
    address, device = given.ptr, given.device_id
    about = x.dtype, out.dtype, ids.shape, x.ndim == 2, weights is not None, address % 16 == 0, ids.itemsize, device
    plan = _plan(multiplied, qs.format, qs.shape, qs.lead, preset, *about)
    products = _xp.allocate(plan.size)
    if plan.multiply is not None:
        plan.multiply(address, qs, chosen, products.ptr)
    if weights is not None:
        weights = source(weights, WEIGHTS)
        of_slots = weights.data.ptr
    plan.combine.start(products.ptr, of_slots, out.data.ptr, chosen)


class IntegerExperts(Route):
    """Quantize tokens, and multiply each by the codes of the experts that it chose."""

    name = "integer_experts"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are in host memory" if problem.device is None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        return Integers().cost(problem)

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, qs, ids, weights, out: _multiply_cuda(x, preset, qs, ids, weights, out, experts_multiplied)

    def describe(self, problem: Problem) -> str:
        return f"tokens quantized by {problem.activations!r}, exact sums of what shares scales: multiply_integers"


class IntegerExpertsStream(Route):
    """Quantize tokens, and multiply each by the codes of the experts that it chose, which are read in place."""

    name = "integer_experts_stream"

    def accepts(self, problem: Problem) -> str | None:
        if problem.device is None:
            return "the arrays are in host memory"
        refusal = _refusal(problem)
        part = codes_of(problem.format, (problem.experts, *problem.shape), problem.stored.lead)
        if refusal is not None or part is None:
            return refusal
        if problem.tokens > _MOST_PRODUCTS:
            return f"it is for up to {_MOST_PRODUCTS} products"
        return integer_stream.why_not_streamed(problem, part, problem.device)

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        rounds = -(-problem.tokens // problem.device.multiprocessors)
        return _STREAM_START + rounds + problem.tokens * problem.reading / _FRACTION

    def prepare(self, problem: Problem) -> Product:
        preset, multiplied = problem.activations or "", integer_stream.experts_multiplied
        return lambda x, qs, ids, weights, out: _multiply_cuda(x, preset, qs, ids, weights, out, multiplied)

    def describe(self, problem: Problem) -> str:
        how = f"tokens quantized by {problem.activations!r}, codes read in place for integer tensor cores"
        return f"{how}, product by product: stream_integers"


class IntegerExpertsHost(Route):
    """Quantize tokens, and multiply expert after expert exactly by NumPy's BLAS."""

    name = "integer_experts_numpy"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are on a GPU" if problem.device is not None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        one = dataclasses.replace(problem, experts=0)
        return min(problem.experts, problem.tokens) * (_EACH + IntegersHost().cost(one))

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, qs, ids, weights, out: _multiply_host(x, preset, qs, ids, weights, out)

    def describe(self, problem: Problem) -> str:
        return f"NumPy: tokens quantized by {problem.activations!r}, expert after expert"
