"""33 to 64 tokens in "q8_1" times weights of q4_k, on Hopper.

Two launches: kernels/linear/half_tokens.cu quantizes tokens to halves, kernels/linear/integer_halves_sm90a.cu
multiplies. Codes times inner scales are integers up to 945, which halves hold, and sums of 32 of them times codes of
tokens are exact in float32. What is added up is, of 256 elements of a row,

    -dmin * sum_u(mn_u * (e_u * S_u)) and d * sum_u(e_u * D_u)    D_u with the inner scale in it, u one of eight units

by fma, in the order of k, parts of k in theirs; the first sum by tensor cores, its second factor in three parts. That
is within the contract of `kbitcupy.products.integers`, and the same every time.

Where such a sum is beyond float32 results are infinite or NaN, and parts of what is below 2^-100 may be lost.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import tma as _tma, xp as _xp
from ..backend.compile import Template
from ..backend.launch import Kernel
from ..backend.structs import Constants, Struct
from ..formats.base import IntegerCodes, register_templates
from ..formats.integer_codes import INNER
from ..ops import source, widen
from . import integer_activations as tokens_of, integers
from .activations import FLOATS
from .int8 import BIAS_KINDS, bias_kind
from .integer_batch import RECORDS, Plan, quantize_records, why_not_few
from .routes import Problem, Product, Route

#: Numbers of the kernel: bytes of a row in a table, and most stages of a ring.
SIZES = Constants(TABLE_ROW=40, HALVES_STAGES=16)
#: How a thread block cuts its work: rows, parts of k, stages of codes, stages of all else, and bytes of one.
CUT = Struct("HalvesCut", rows="i4", parts="i4", code_stages="i4", stages="i4", stage_bytes="i4")
MOST_TOKENS = RECORDS.HALVES_TOKENS
#: Fewer are multiplied sooner by two products of few tokens.
LEAST_TOKENS = 33
# Threads of a block, and bytes of its shared memory beside barriers.
_THREADS, _ROOM = 384, 226 << 10
_GROUPS, _ALIGNED = 2, 1024


@dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Parameters
    ----------
    tiles : {1, 2}
        Of 64 rows, of a warpgroup.
    parts : {1, 2}
        Of k: warpgroups with the same rows.
    """

    tiles: int
    parts: int

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return 64 * self.tiles * _GROUPS // self.parts

    def packed(self) -> tuple[bytes, int]:
        """The kernel's argument, and bytes of shared memory."""
        codes = self.rows * RECORDS.RECORD_K // 2
        given = 2 * RECORDS.RECORD_K * MOST_TOKENS + RECORDS.RECORD_BYTES + self.rows * SIZES.TABLE_ROW
        given = -(-given // _ALIGNED) * _ALIGNED
        room, stages = _ROOM - _ALIGNED, 2 * self.parts
        of_codes = min((room - stages * given) // codes // self.parts * self.parts, SIZES.HALVES_STAGES)
        size = max(of_codes * codes + stages * given, self.parts * MOST_TOKENS * (self.rows + 4) * 4)
        packed = CUT.pack(rows=self.rows, parts=self.parts, code_stages=of_codes, stages=stages, stage_bytes=given)
        return packed, size + _ALIGNED


#: Those that there are.
CUTS = (Cut(2, 1), Cut(1, 1), Cut(1, 2))


_TEMPLATE = Template(
    "linear/integer_halves_sm90a.cu", "multiply_half_codes", (("2", "1"),), structs=(BIAS_KINDS, RECORDS, SIZES, CUT)
)
register_templates(_TEMPLATE)
_SIGNATURE = (*(_tma.MAP_BYTES,) * 2, CUT, *("p",) * 5, *("i4",) * 5, "u4")


@functools.cache
def _kernel(tiles: int, shared: int) -> Kernel:
    return Kernel(_TEMPLATE, (str(tiles),), _THREADS, shared, signature=_SIGNATURE, early=True)


def refusal(preset: str | None, part: IntegerCodes, depth: int) -> str | None:
    """What stands against the codes of a weight, or activations."""
    if preset != "q8_1":
        return 'it is for activations="q8_1"'
    if part.added != INNER:
        return "it is for q4_k"
    return f"K must be a multiple of {RECORDS.RECORD_K}" if not depth or depth % RECORDS.RECORD_K else None


@functools.lru_cache(maxsize=4096)
def choose(rows: int, depth: int, processors: int) -> Cut:
    """The cut with the least work for the busiest multiprocessor."""
    blocks = depth // RECORDS.RECORD_K

    def work(cut: Cut) -> float:
        waves = -(-rows // (cut.rows * processors))
        return waves * -(-blocks // cut.parts) * (cut.tiles + 0.5)

    return min((cut for cut in CUTS if cut.parts <= blocks), key=work)


@functools.lru_cache(maxsize=4096)
def plan(rows: int, cut: Cut, device: int) -> Plan:
    """How a product is computed, its kernel compiled."""
    packed, shared = cut.packed()
    return Plan(_kernel(cut.tiles, shared).ready(device).launch, (-(-rows // cut.rows),), packed, cut.rows)


def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any, processors: int) -> None:
    """Fill `out`, which is not empty and whose device is the current one, from floats."""
    part = integers.codes_of(q.format, q.shape, q.lead)
    assert part is not None and part.beside is not None
    bias = None if bias is None else source(bias, FLOATS)
    rows, depth = q.shape
    tokens, blocks = out.size // rows, depth // RECORDS.RECORD_K
    single = out if out.dtype.name in FLOATS else _xp.namespace(out).empty(out.shape, np.float32)
    records = tokens * depth * 2
    scratch = _xp.namespace(out).cuda.alloc(records + blocks * RECORDS.RECORD_BYTES)
    a = scratch.ptr
    quantize_records(tokens_of.floats_of(x), tokens, a, a + records, False)
    made = plan(rows, choose(rows, depth, processors), out.data.device_id)
    planes = q.planes
    maps = (
        _tma.byte_matrix(a, tokens, 2 * depth, 2 * depth, MOST_TOKENS),
        _tma.byte_matrix(planes[part.codes].data.ptr, rows, depth // 2, depth // 2, made.rows),
    )
    added = (0, 0) if bias is None else (bias.data.ptr, bias_kind(bias.dtype))
    pointers = single.data.ptr, a + records, planes[part.scales].data.ptr, planes[part.beside].data.ptr, added[0]
    numbers = tokens, rows, blocks, added[1], bias_kind(single.dtype), 0
    made.launch(made.grid, (*maps, made.cut, *pointers, *numbers))
    if single is not out:
        widen(single, out)


# ---- the route -----------------------------------------------------------------------------------------------------


# Microseconds of the launches; the fraction of the bandwidth at which codes come; of a tile of 64 rows and a stage: all
# as `integer_turns` reckons its own, which takes 1.6 times as long as it says where it is the other choice.
_START, _FRACTION, _OF_TILE = 3.0, 0.75, 0.9


class IntegerHalves(Route):
    """Quantize 33 to 64 tokens, and multiply them as halves on tensor cores by q4_k's codes."""

    name = "integer_halves"

    def accepts(self, problem: Problem) -> str | None:
        rows, depth = problem.shape
        refused = why_not_few(problem, refusal, range(LEAST_TOKENS, MOST_TOKENS + 1))
        if refused is None and (rows * depth >= 1 << 38 or rows >= 1 << 30 or depth >= 1 << 24):
            return "numbers of 32 bits do not reach through the scales"
        return refused

    def cost(self, problem: Problem) -> float:
        assert problem.device is not None
        (rows, depth), processors = problem.shape, problem.device.multiprocessors
        cut = choose(rows, depth, processors)
        waves, stages = -(-rows // (cut.rows * processors)), -(-depth // (RECORDS.RECORD_K * cut.parts))
        return _START + max(waves * stages * (cut.tiles + 0.5) * _OF_TILE, problem.reading / _FRACTION)

    def prepare(self, problem: Problem) -> Product:
        assert problem.device is not None
        processors = problem.device.multiprocessors
        return lambda x, q, bias, out: multiply(x, q, bias, out, processors)

    def describe(self, problem: Problem) -> str:
        assert problem.device is not None
        rows = choose(*problem.shape, problem.device.multiprocessors).rows
        tile = f"all tokens x {rows} rows a thread block, exact sums of 32"
        return f"tokens quantized by {problem.activations!r}, codes decoded to halves: multiply_half_codes, {tile}"
