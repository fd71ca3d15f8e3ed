"""Products on NumPy: weights are decoded to float32, some rows at a time, and multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..ops import dequantize
from .kept import kept
from .routes import Problem, Product, Route

# About this many elements are decoded at a time: the cache holds them until they are multiplied. With more than a few
# tokens more of them, since the tokens are made ready for each product anew. And the rows that all pieces are multiples
# of; 256 rows are whole runs of nested absmax values, whatever their length.
_CHUNK, _FEW, _WIDER = 1 << 18, 32, 4
_CHUNK_ROWS, _NESTED_ROWS = 16, 256
# Microseconds of a decoded element, and of a product and its addition.
_DECODING, _MULTIPLYING = 2e-3, 5e-5


def working_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype to multiply in: float32, or float64 for float64."""
    return dtype if dtype == np.float64 else np.dtype(np.float32)


def multiply(x: np.ndarray, q: QuantizedArray, bias: Any, out: np.ndarray) -> None:
    """Fill out[M, N] from x[M, K], a weight and a bias or None.

    A weight that is kept decoded is multiplied in the same pieces, so that the bits are the same.
    """
    rows, depth = q.shape
    working = working_dtype(x.dtype)
    x = x.astype(working, copy=False)
    whole = kept(q, f"decoded {working}", rows * depth * working.itemsize, lambda: dequantize(q, dtype=working))
    step = _rows_at_a_time(q, len(x))
    room = np.empty((min(step, rows) if whole is None else 0, depth), working)
    with np.errstate(over="ignore", invalid="ignore"):  # what leaves the range of a dtype becomes infinite, as on a GPU
        for start in range(0, rows, step):
            if whole is None:
                part = q if step >= rows else q[start : start + step]
                weight = dequantize(part, out=room[: len(part)])
            else:
                weight = whole[start : start + step]
            product = x @ weight.T
            if bias is not None:
                product += bias[start : start + step].astype(working, copy=False)
            out[:, start : start + step] = product


def _rows_at_a_time(q: QuantizedArray, tokens: int) -> int:
    rows, depth = q.shape
    if not q.format.rows_are_blocks(q.shape):
        return max(1, rows)
    nested = any(spec.every > 1 for spec in q.format.planes(q.shape).values())
    unit = _NESTED_ROWS if nested else _CHUNK_ROWS
    return max(1, _CHUNK * (1 if tokens <= _FEW else _WIDER) // max(1, depth) // unit) * unit


class Host(Route):
    """Decode to float32 (float64 for float64) and multiply by NumPy's BLAS."""

    name = "numpy"

    def accepts(self, problem: Problem) -> str | None:
        if problem.device is not None:
            return "the arrays are on a GPU"
        if problem.activations is not None:
            return "it multiplies floats as they came"
        return "it is for one weight" if problem.experts else None

    def cost(self, problem: Problem) -> float:
        n, k = problem.shape
        return n * k * (_DECODING + _MULTIPLYING * problem.tokens)

    def prepare(self, problem: Problem) -> Product:
        n, k = problem.shape
        # Many numbers of tokens share a plan: how many these are, the arrays say.
        return lambda x, q, bias, out: multiply(x.reshape(out.size // n, k), q, bias, out.reshape(out.size // n, n))

    def describe(self, problem: Problem) -> str:
        return f"NumPy: decode some rows at a time and multiply, in {working_dtype(problem.dtype)}"
