"""The route of ternary experts: `kbitcupy.products.ternary_bulk`, among the launches of `kbitcupy.products.experts`."""

from __future__ import annotations

import functools

from .experts import AROUND, chosen, grouped, refusal_of_all
from .routes import Problem, Product, Route
from .ternary_bulk import ExpertKernel, expert_kernel, experts_ring
from .ternary_stream import why_not_floats

# The fraction of the bandwidth at which codes pass.
_FRACTION = 0.3


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
        return functools.partial(grouped, expert_kernel(problem.shape, problem.dtype, problem.device.ordinal))

    def describe(self, problem: Problem) -> str:
        return "sorted by expert, codes read in place as numbers of 16 bits: bulk_ternary_experts"
