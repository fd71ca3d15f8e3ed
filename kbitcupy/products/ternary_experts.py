"""The routes of ternary experts: `kbitcupy.products.ternary_slots` for a few tokens, floats of many by
`kbitcupy.products.ternary_bulk`, among the launches of `kbitcupy.products.experts`.
"""

from __future__ import annotations

import functools
from typing import Any

from ..array import QuantizedArray
from .activations import FLOATS, Rule
from .experts import AROUND, chosen, grouped, refusal_of_all
from .integer_activations import BITNET
from .integer_experts import IntegerExperts
from .routes import Problem, Product, Route
from .ternary_bulk import ExpertKernel, expert_kernel, experts_ring
from .ternary_slots import expert_rows, multiply_slots
from .ternary_stream import why_not_floats, why_not_streamed

# The fraction of the bandwidth at which codes pass; microseconds of the one launch of few tokens.
_FRACTION, _START = 0.3, 4.0
# Products up to which each token's experts are read for it alone: of floats, and of integers, whose other way is slow.
_FEW, _FEW_INTEGERS = 256, 4096
_RULE = Rule()


class GroupedTernary(Route):
    """Multiply floats by the codes of the experts that they chose."""

    name = "grouped_ternary"

    def accepts(self, problem: Problem) -> str | None:
        found = refusal_of_all(problem) or why_not_floats(problem)
        if found or problem.device is None:
            return found
        if problem.device.capability < ExpertKernel.least:
            return "it needs a GPU of compute capability 9.0"
        ring = experts_ring(problem.shape[1], problem.device.ordinal)
        return None if ring else "the device has too little shared memory"

    def cost(self, problem: Problem) -> float:
        return AROUND + chosen(problem) * problem.reading / _FRACTION

    def prepare(self, problem: Problem) -> Product:
        assert problem.device is not None
        arguments = problem.shape, problem.dtype, problem.device.ordinal
        sorted_by_expert = functools.partial(grouped, expert_rows(*arguments) or expert_kernel(*arguments))

        def product(x: Any, qs: QuantizedArray, ids: Any, weights: Any, out: Any) -> None:
            if ids.size > _FEW or not multiply_slots(x, qs, ids, weights, out, None):
                sorted_by_expert(x, qs, ids, weights, out)

        return product

    def describe(self, problem: Problem) -> str:
        if problem.tokens <= _FEW:
            return "codes of the experts of each token read in place as numbers of 16 bits: slots_ternary_floats"
        return "sorted by expert, codes read in place as numbers of 16 bits: rows_ternary_experts"


class TernarySlots(Route):
    """Quantize tokens by BitNet's rule, and multiply each by the codes of the experts that it chose, in one launch."""

    name = "ternary_slots"

    def accepts(self, problem: Problem) -> str | None:
        if problem.activations != BITNET:
            return "it quantizes tokens as BitNet does"
        refusal = IntegerExperts().accepts(problem)
        if refusal is not None or problem.device is None:
            return refusal
        part = problem.format.trits(problem.shape)
        assert part is not None
        if part.shares == "group":
            return "groups have scales of their own"
        if problem.tokens > _FEW_INTEGERS:
            return f"it is for up to {_FEW_INTEGERS} products"
        if problem.dtype.name not in FLOATS or not problem.aligned:
            return f"x is {problem.dtype}; it is for floats of up to 32 bits that start at a multiple of 16 bytes"
        if problem.device.capability < ExpertKernel.least:
            return "it needs a GPU of compute capability 9.0"
        return why_not_streamed(1, problem.shape[1], part, problem.stored, problem.device)

    def cost(self, problem: Problem) -> float:
        return _START + problem.tokens * problem.reading

    def prepare(self, problem: Problem) -> Product:
        plain = IntegerExperts().prepare(problem)

        def product(x: Any, qs: QuantizedArray, ids: Any, weights: Any, out: Any) -> None:
            if not multiply_slots(x, qs, ids, weights, out, _RULE):
                plain(x, qs, ids, weights, out)

        return product

    def describe(self, problem: Problem) -> str:
        return "tokens quantized to int8, codes of the experts of each read in place: slots_ternary_quantized"
