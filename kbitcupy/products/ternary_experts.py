"""The routes of ternary experts: `kbitcupy.products.ternary_slots` for a few tokens, and for many, which are sorted by
expert, among the launches of `kbitcupy.products.experts`; there floats go by `kbitcupy.products.ternary_bulk`, too.
"""

from __future__ import annotations

import functools
from typing import Any

from ..array import QuantizedArray
from .activations import FLOATS, Rule
from .experts import AROUND, MOST_EXPERTS, ROUNDED, chosen, grouped, refusal_of_all
from .fused import TOKENS
from .integer_activations import BITNET
from .integer_experts import IntegerExperts
from .routes import Problem, Product, Route
from .ternary_bulk import ExpertKernel, expert_kernel, experts_ring
from .ternary_slots import ExpertRows, expert_rows, multiply_slots, quantized_expert_rows
from .ternary_stream import why_not_floats, why_not_streamed

# The fraction of the bandwidth at which codes pass; microseconds of the one launch of few tokens.
_FRACTION, _START = 0.3, 4.0
# Products up to which each token's experts are read for it alone: of floats and of integers, and of integers that are
# too long to be sorted, whose other way is slow; the most that are sorted, whose groups of up to 8 lie along the second
# axis of a grid.
_FEW, _FEW_INTEGERS, _FEW_LONG, _MOST_SORTED = 256, 160, 4096, 400_000
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
    """Quantize tokens by BitNet's rule, and multiply them by the codes of the experts that they chose."""

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
        if not problem.shape[1]:
            return "rows have no elements"
        if problem.dtype.name not in FLOATS or not problem.aligned:
            return f"x is {problem.dtype}; it is for floats of up to 32 bits that start at a multiple of 16 bytes"
        if problem.device.capability < ExpertKernel.least:
            return "it needs a GPU of compute capability 9.0"
        most = _FEW_LONG if self._sorted(problem) is None else _MOST_SORTED
        if problem.tokens > most:
            return f"it is for up to {most} products"
        return why_not_streamed(1, problem.shape[1], part, problem.stored, problem.device)

    def cost(self, problem: Problem) -> float:
        if problem.tokens <= _FEW_INTEGERS or self._sorted(problem) is None:
            return _START + problem.tokens * problem.reading
        groups = max(chosen(problem), problem.tokens / TOKENS)
        return AROUND + groups * problem.reading / _FRACTION

    def prepare(self, problem: Problem) -> Product:
        plain, by_expert = IntegerExperts().prepare(problem), self._sorted(problem)

        def product(x: Any, qs: QuantizedArray, ids: Any, weights: Any, out: Any) -> None:
            if ids.size > _FEW_INTEGERS and by_expert is not None:
                grouped(by_expert, x, qs, ids, weights, out, ROUNDED)
            elif not multiply_slots(x, qs, ids, weights, out, _RULE):
                plain(x, qs, ids, weights, out)

        return product

    def describe(self, problem: Problem) -> str:
        if problem.tokens <= _FEW_INTEGERS or self._sorted(problem) is None:
            return "tokens quantized to int8, codes of the experts of each read in place: slots_ternary_quantized"
        return "sorted by expert, quantized to int8, codes read in place: rows_ternary_experts_quantized"

    def _sorted(self, problem: Problem) -> ExpertRows | None:
        assert problem.device is not None
        if problem.experts > MOST_EXPERTS or problem.experts * problem.shape[0] >= 1 << 31:
            return None
        return quantized_expert_rows(problem.shape, problem.dtype, _RULE, problem.device)
