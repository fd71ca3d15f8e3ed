"""Routes of `linear_grouped` with activations: each product is one of `kbitcupy.products.integers`, to the bit.

Tokens are quantized once, each by itself. Slots are combined in float32, in their order, before the one rounding. With
``"bitnet"`` each product is one of `kbitcupy.products.ternary`: of the same sums, and of tokens by its rule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from . import int8
from .experts import combined
from .integer_activations import BITNET, Tokens, quantize_host
from .integers import Integers, IntegersHost, multiply_cuda, multiply_host, why_not
from .routes import Problem, Product, Route

WANTED = "they must be [E, N, K] in ternary, for activations in bitnet: kb.stack of kb.quantize(w, 'ternary')"
# Microseconds to pick an expert's rows and tokens.
_EACH = 20.0


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


def _finished(products: Any, weights: Any, out: Any) -> None:
    """Fill `out` from the float32 products of all slots."""
    with np.errstate(all="ignore"):
        if weights is not None:
            products = combined(products, weights.astype(np.float32, copy=False))
        if isinstance(out, np.ndarray) or out.dtype != np.float64:
            out[...] = products
        else:
            int8.widened(products, out)


def _multiply_host(x: Any, preset: str, qs: QuantizedArray, ids: Any, weights: Any, out: Any) -> None:
    experts, rows, depth = qs.shape
    tokens = quantize_host(x.reshape(-1, depth), preset)
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
    _finished(products, weights, out)


def _multiply_cuda(x: Any, preset: str, qs: QuantizedArray, ids: Any, weights: Any, out: Any) -> None:
    cupy = _xp.namespace(x)
    _, rows, depth = qs.shape
    ids = _xp.contiguous(ids.astype(np.int64, copy=False))
    products = cupy.zeros((*ids.shape, rows), np.float32)
    if depth:
        slots = ids.shape[1] if x.ndim == 2 else 1
        multiply_cuda(x, preset, qs, None, products, ids, ids.size // slots, slots)
    _finished(products, weights, out)


class IntegerExperts(Route):
    """Quantize tokens, and multiply each by the codes of the experts that it chose."""

    name = "integer_experts"

    def accepts(self, problem: Problem) -> str | None:
        return "the arrays are in host memory" if problem.device is None else _refusal(problem)

    def cost(self, problem: Problem) -> float:
        return Integers().cost(problem)

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""
        return lambda x, qs, ids, weights, out: _multiply_cuda(x, preset, qs, ids, weights, out)

    def describe(self, problem: Problem) -> str:
        return f"tokens quantized by {problem.activations!r}, exact sums of what shares scales: multiply_integers"


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
