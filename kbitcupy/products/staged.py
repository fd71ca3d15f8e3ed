"""``activations="q8_1"`` for formats that are no plain integer codes: tokens are quantized, and multiplied.

Tokens are those of `kbitcupy.products.integer_activations`, ``e * q`` with one scale for 32 neighbours, and

    y = decode(W) . (e * q) + bias

in float32, rounded once. Each number of a token, a product of two float32 numbers, is rounded to float32, and so is a
sum after each term, in the order of the library that multiplies. On a GPU few tokens are multiplied as the integers
that they are: what shares all factors is added up exactly, and scaled after that. Up to four tokens may become sums of
two halves instead (kernels/linear/token_halves.cuh), and are multiplied as tokens of float16 are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..array import QuantizedArray
from ..backend import xp as _xp
from ..formats.base import Fragments
from ..ops import widen
from . import host
from .decoded import Decoded
from .fused import TOKENS
from .generic import Generic
from .integer_activations import NUMBERS, Q8_BLOCK, floats_of, padded_of, pitch_of, quantize_host, quantize_into
from .integer_stream import MOST_TOKENS as STREAMED, IntegerStream, flavour_of, quantize_to_halves, why_not_streamed
from .integers import stored_codes
from .records import MOST_TOKENS, RecordKernel, in_halves, record_kernel, record_refusal, staged_cost
from .routes import Problem, Product, Route, choices
from .small_batch import BLOCKED, IN_HALVES, INTEGER_COLUMNS, FewKernel, SmallBatch, of_integers, of_one_token


def staged(x: Any) -> Any:
    """Tokens [M, K], K whole blocks of 32, quantized and decoded: float32, on their device, the current one."""
    tokens, depth = x.shape
    if isinstance(x, np.ndarray):
        codes, scales = quantize_host(x, "q8_1")
        return (codes.reshape(tokens, -1, Q8_BLOCK) * scales[..., None]).reshape(tokens, depth)
    codes, scales = quantized(floats_of(x), tokens, depth)
    blocks = depth // Q8_BLOCK
    parts = codes[:, :depth].reshape(tokens, blocks, Q8_BLOCK)
    return (parts * scales[:, :tokens].T[..., None]).reshape(tokens, depth)


def quantized(x: Any, tokens: int, depth: int) -> tuple[Any, Any]:
    """int8 codes [tokens, pitch] of tokens on a GPU, contiguous, and float32 scales [depth / 32, padded]."""
    xp = _xp.namespace(x)
    codes = xp.empty((tokens, pitch_of(depth)), np.int8)
    scales = xp.empty((depth // Q8_BLOCK, padded_of(tokens)), np.float32)
    quantize_into(x, tokens, "q8_1", codes.data.ptr, scales.data.ptr, 0, NUMBERS.ROWS, 0)
    return codes, scales


class Staged(Route):
    """Quantize tokens, and multiply what they stand for in float32."""

    name = "staged"

    def accepts(self, problem: Problem) -> str | None:
        if problem.activations != "q8_1":
            return 'it quantizes activations: ask for activations="q8_1"'
        if problem.experts:
            return "it is for one weight"
        if problem.format.records() is None:
            return f"{problem.format} is not integers times factors of 16 neighbours or more, as GGUF's types are"
        return "a stack is for linear_grouped" if problem.stored.lead else None

    def cost(self, problem: Problem) -> float:
        if problem.device is None:
            return host.Host().cost(_as_floats(problem))
        return _QUANTIZING + choices(_as_floats(problem), _ROUTES)[0].cost

    def prepare(self, problem: Problem) -> Product:
        n, k = problem.shape
        if problem.device is None:
            product: Product = host.multiply
        else:
            product = choices(_as_floats(problem), _ROUTES)[0].route.prepare(_as_floats(problem))

        def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            tokens = out.size // n
            single = out.reshape(tokens, n)
            if single.dtype != np.float32:
                single = _xp.namespace(out).empty((tokens, n), np.float32)
            product(staged(x.reshape(tokens, k)), q, bias, single)
            if single.dtype != out.dtype:
                widen(single.reshape(out.shape), out)

        return multiply

    def describe(self, problem: Problem) -> str:
        if problem.device is None:
            return "NumPy: tokens quantized by 'q8_1', then multiplied in float32"
        best = choices(_as_floats(problem), _ROUTES)[0].route
        return f"tokens quantized by 'q8_1'; {best.describe(_as_floats(problem))}"


class StagedFew(SmallBatch):
    """Quantize tokens, and multiply them by ``linear_few``: what shares factors is added up exactly."""

    name, way = "staged_small_batch", BLOCKED

    def accepts(self, problem: Problem) -> str | None:
        refusal = _refusal(problem)
        if refusal is not None:
            return refusal
        if problem.fragments is None or not of_integers(problem.fragments).blocked:
            return f"it has no decoder of {problem.format} for quantized tokens"
        return super().accepts(_as_halves(problem))

    def cost(self, problem: Problem) -> float:
        more = _PAIRED_MORE if self._paired(problem) else _MORE
        return _AHEAD + super().cost(_as_halves(problem)) * (more if problem.tokens > TOKENS else 1.0)

    def prepare(self, problem: Problem) -> Product:
        n, k = problem.shape
        kernel = self._kernel(_as_halves(problem))

        def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            tokens = out.size // n
            padded = padded_of(tokens)
            scratch = _xp.allocate(2 * tokens * k + k // Q8_BLOCK * 4 * padded)  # codes as halves, and scales
            codes, scales = _xp.namespace(out).ndarray((tokens, k), _HALF, scratch), scratch.ptr + 2 * tokens * k
            quantize_to_halves(floats_of(x), tokens, scratch.ptr, scales)
            kernel.blocked(codes, scales, padded, q, bias, out)

        return _in_single(multiply)

    def describe(self, problem: Problem) -> str:
        return f"tokens quantized by 'q8_1'; {super().describe(_as_halves(problem))}"

    def _fraction(self, problem: Problem) -> float:
        return _PAIRED_FRACTION if self._paired(problem) else super()._fraction(problem)

    @staticmethod
    def _paired(problem: Problem) -> bool:
        assert problem.fragments is not None
        return of_integers(problem.fragments).paired


class StagedHalves(StagedFew):
    """Up to four tokens that ``linear_few`` quantizes, as sums of two halves."""

    name, way = "staged_halves", IN_HALVES
    #: The most tokens, in numbers and words, and what they are to a decoder.
    most, up_to, taken = TOKENS // 2, f"up to {TOKENS // 2} tokens", "tokens in two halves"

    def accepts(self, problem: Problem) -> str | None:
        refusal = _refusal(problem)
        if refusal is not None:
            return refusal
        if problem.fragments is None or not self._decodes(problem.fragments):
            return f"it has no decoder of {problem.format} for {self.taken}"
        if problem.tokens > self.most:
            return f"it is for {self.up_to}"
        return SmallBatch.accepts(self, _as_halves(problem)) or self._refusal_of(self._kernel(_as_halves(problem)))

    def cost(self, problem: Problem) -> float:
        return _HALVES_START + problem.reading + _HALVES_TOKEN * max(0, problem.tokens - 2)

    def prepare(self, problem: Problem) -> Product:
        kernel = self._kernel(_as_halves(problem))

        def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            kernel.in_halves(_aligned(floats_of(x)), q, bias, out)

        return _in_single(multiply)

    def _decodes(self, fragments: Fragments) -> bool:
        return fragments.halves

    def _refusal_of(self, kernel: FewKernel) -> str | None:
        return None if kernel.staged else "tokens have no room in shared memory"


class StagedColumns(StagedHalves):
    """One token that ``linear_few`` quantizes, whose blocks of 32 have columns of an mma of their own."""

    name, way = "staged_columns", INTEGER_COLUMNS
    most, up_to, taken = 1, "one token", "the integers of one token"

    def cost(self, problem: Problem) -> float:
        return _COLUMNS_START + problem.reading / _COLUMNS_FRACTION

    def _decodes(self, fragments: Fragments) -> bool:
        return of_one_token(of_integers(fragments))

    def _refusal_of(self, kernel: FewKernel) -> str | None:
        return None if kernel.columns else "no clusters share k in whole blocks of 256"


def _refusal(problem: Problem) -> str | None:
    """What stands against every kernel that quantizes the tokens of one weight."""
    if problem.activations != "q8_1":
        return 'it quantizes activations: ask for activations="q8_1"'
    if problem.device is None:
        return "the arrays are in host memory"
    return "it is for one weight" if problem.experts else None


class StagedStream(IntegerStream):
    """Quantize tokens, and multiply them on integer tensor cores by what codes that are read in place stand for."""

    name = "staged_stream"

    def accepts(self, problem: Problem) -> str | None:
        refusal = _refusal(problem) or ("a stack is for linear_grouped" if problem.stored.lead else None)
        if refusal is not None:
            return refusal
        assert problem.device is not None
        part = problem.format.staged_codes(problem.shape)
        if part is None:
            return f"codes of {problem.format} are no places in a table of integers, nor have they minima"
        if problem.tokens > STREAMED:
            return f"it is for up to {STREAMED} tokens"
        return why_not_streamed(problem, part, problem.device)

    def cost(self, problem: Problem) -> float:
        part = stored_codes(problem.format, problem.shape)
        flavour = None if part is None else flavour_of(part, True)
        assert flavour is not None
        of_one, of_eight, of_more = _STREAM_FRACTIONS[flavour.codes]
        return _STREAM_START + problem.reading / (
            of_more if problem.tokens > TOKENS else of_eight if problem.tokens > 1 else of_one
        )


class StagedRecords(Route):
    """Tokens that ``linear_records`` quantizes and multiplies as integers: what shares factors is added up exactly."""

    name = "staged_records"

    def accepts(self, problem: Problem) -> str | None:
        # Their dtype does not matter, nor where they begin.
        refusal = _refusal(problem) or record_refusal(_as_halves(problem))
        if refusal:
            return refusal
        if problem.tokens > MOST_TOKENS:
            return f"more than {MOST_TOKENS} tokens"
        return None if self._kernel(problem).fits else "the device has too little shared memory"

    def cost(self, problem: Problem) -> float:
        return _QUANTIZED * min(problem.tokens, 2 * TOKENS) + staged_cost(problem)

    def prepare(self, problem: Problem) -> Product:
        kernel = self._kernel(problem)

        def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
            kernel.staged(_aligned(floats_of(x)), q, bias, out)

        return _in_single(multiply)

    def describe(self, problem: Problem) -> str:
        return f"tokens quantized by 'q8_1'; {self._kernel(problem).describe(problem.tokens)}"

    def _kernel(self, problem: Problem) -> RecordKernel:
        records = problem.format.records()
        assert records is not None and problem.device is not None
        half = np.dtype(np.float16)
        about = records, problem.shape, half, problem.device, problem.tokens
        return record_kernel(*about, staged=True, halves=in_halves(problem))


_HALF = np.dtype(np.float16)
_ROUTES = Generic(), Decoded()
# Microseconds of the launches that quantize tokens and decode them again.
_QUANTIZING = 12.0
# ... that quantizes them, while weights are on their way; how much longer more than eight take, whose sums have scales;
# of a thread block, to quantize a token itself.
_AHEAD, _MORE, _QUANTIZED = 3.5, 1.17, 0.5
# Where k-tiles come two by two: the fraction of the bandwidth at which weights pass, and how much longer more take.
_PAIRED_FRACTION, _PAIRED_MORE = 0.97, 1.05
# Of codes that are read in place: microseconds of the launches, and the fraction of the bandwidth at which codes pass,
# of one token, of 8 and of more.
_STREAM_START = 4.0
_STREAM_FRACTIONS = {
    "MINIMA4": (1.0, 0.97, 0.84),
    "TABLE_HALVES4": (1.03, 0.94, 0.6),
    "TABLE4": (1.03, 0.91, 0.58),
}
# Of one token whose blocks have columns of their own: less to begin with, and a little more of each byte.
_COLUMNS_START, _COLUMNS_FRACTION = 2.8, 0.98
# Of tokens in two halves, which pass as floats do once they are quantized; and of each token from the third one on.
_HALVES_START, _HALVES_TOKEN = 6.25, 1.0


def _as_halves(problem: Problem) -> Problem:
    """The product of the codes of quantized tokens, which lie as a kernel wants them."""
    return dataclasses.replace(problem, dtype=np.dtype(np.float16), activations=None, aligned=True)


def _aligned(x: Any) -> Any:
    """x, or a copy of it that starts at a multiple of 16 bytes."""
    return x.copy() if x.data.ptr % 16 else x


def _in_single(product: Product) -> Product:
    """A product that kernels have no float64 of: it fills float32 in its place."""

    def multiply(x: Any, q: QuantizedArray, bias: Any, out: Any) -> None:
        single = out if out.dtype != _xp.DOUBLE else _xp.empty(out, out.shape, _xp.SINGLE)
        product(x, q, bias, single)
        if single is not out:
            widen(single, out)

    return multiply


def _as_floats(problem: Problem) -> Problem:
    """The product of what quantized tokens stand for."""
    return dataclasses.replace(problem, dtype=np.dtype(np.float32), activations=None, aligned=True)
