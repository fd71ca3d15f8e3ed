"""Many tokens by the kernel of few, some at a time: integer codes that no kernel for many tokens takes.

Each launch reads the weight again, which is still far quicker than one product after the other (`integers`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..array import QuantizedArray
from .int8 import integers_of, token_planes
from .integer_stream import MOST_TOKENS, IntegerStream, multiply
from .routes import Problem, Product, Route

_STREAM = IntegerStream()


def _some(problem: Problem) -> Problem:
    """That of one launch."""
    return replace(problem, tokens=MOST_TOKENS)


def _part(x: Any, first: int, last: int) -> Any:
    """Some of the tokens, floats or int8."""
    if not isinstance(x, QuantizedArray):
        return x[first:last]
    integers = integers_of(x)
    assert integers is not None
    codes, scales = token_planes(x)
    codes = codes.reshape(-1, x.shape[-1])[first:last]
    scales = scales if scales.size == 1 else scales.reshape(-1)[first:last]
    planes = {integers.codes: codes.reshape(-1), integers.scales: scales}
    return QuantizedArray(x.format, planes, codes.shape, x.dtype)


class IntegerTurns(Route):
    """Quantize and multiply some tokens after the others, by codes that are read in place each time."""

    name = "integer_turns"

    def accepts(self, problem: Problem) -> str | None:
        if problem.tokens <= MOST_TOKENS:
            return "few tokens are multiplied at once"
        return _STREAM.accepts(_some(problem))

    def cost(self, problem: Problem) -> float:
        return -(-problem.tokens // MOST_TOKENS) * _STREAM.cost(_some(problem))

    def prepare(self, problem: Problem) -> Product:
        preset = problem.activations or ""

        def product(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            rows, depth = q.shape
            y = out.reshape(-1, rows)
            given = x if isinstance(x, QuantizedArray) else x.reshape(-1, depth)
            for first in range(0, len(y), MOST_TOKENS):
                last = min(first + MOST_TOKENS, len(y))
                multiply(_part(given, first, last), preset, q, bias, y[first:last])

        return product

    def describe(self, problem: Problem) -> str:
        return f"{_STREAM.describe(problem)}, {MOST_TOKENS} tokens at a time"
