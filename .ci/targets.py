"""What products and conversions are to reach on an H200: ``python .ci/targets.py [GROUP...]``, by default all groups.

Each cell is timed as ``kbit bench`` times, and printed with its target; those that fall short are named at the end, and
the status is 1. Where arrays lie moves short products by up to 5 %: those of less than 20 us are timed with all arrays
at five places; the median counts, and the extremes are printed behind it. A target is the least fraction of reading the
weights at the copy bandwidth of the run, the least times that cuBLAS' bfloat16 product of the run takes, the most
microseconds, or the most of them beyond the same product of tokens that are int8 already. Without a target a cell
stands beside others.
"""

import argparse
import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import kbitcupy as kb
from kbitcupy.bench import products
from kbitcupy.bench.cases import random_array, random_words
from kbitcupy.bench.products import INT8_TOKENS, NORMALIZED
from kbitcupy.bench.timing import Case, Session

LARGE, SQUARE, SMALL = (28672, 8192), (8192, 8192), (4096, 4096)
ZERO_POINTS = "uint4:block=128,zero=int"
CHANNELS, BYTES = "uint4:granularity=channel:0,zero=int", "int8:granularity=channel:0"
BFLOAT16 = "bfloat16"  # of activations
#: Products of less than these microseconds are timed at so many places.
SHORT, PLACES = 20.0, 5


@dataclass(frozen=True)
class Times:
    """At least so many times as fast as cuBLAS."""

    least: float


@dataclass(frozen=True)
class Microseconds:
    """At most so many."""

    most: float


@dataclass(frozen=True)
class Beyond:
    """At most so many microseconds more than the same product of tokens that are int8 already, timed before."""

    most: float


#: A fraction, or one of the three; None where there is no target.
Target = float | Times | Microseconds | Beyond | None


@dataclass(frozen=True)
class Products:
    """Products with a weight of one format and shape, by the number of tokens.

    Parameters
    ----------
    format : str
        Of the weight.
    shape : tuple of int
        N and K, or that of experts.
    targets : mapping of int to Target
        By the number of tokens.
    activations : str, optional
        How tokens are quantized, `INT8_TOKENS`, `NORMALIZED`, or `BFLOAT16` for floats of that type.
    """

    format: str
    shape: tuple[int, ...]
    targets: Mapping[int, Target]
    activations: str | None = None


def _few(format, shape, one, eight, sixteen=None, many=None, activations=None):
    times = {16: sixteen, 64: many}
    found = {1: one, 8: eight, **{m: Times(least) for m, least in times.items() if least is not None}}
    return Products(format, shape, found, activations)


def _beside(format, shape, *tokens, activations=None):
    return Products(format, shape, dict.fromkeys(tokens), activations)


EXPERTS = products.EXPERTS[:3]
#: What quantizing tokens behind an RMSNorm may add.
QUANTIZING = Beyond(2.0)
GROUPS = {
    "floats": [
        _few(ZERO_POINTS, LARGE, 0.82, 0.79, 2.1, 1.4),
        _few("q4_0", LARGE, 0.81, 0.78, 2.0, 1.35),
        _few("q4_k", LARGE, 0.79, 0.76, 1.9, 1.3),
        _few(BYTES, LARGE, 0.85, 0.83, 1.6, 1.35),
        _few("q8_0", LARGE, 0.85, 0.83, 1.6, 1.35),
        _few("kbit6", LARGE, 0.55, 0.50),
        _few("kbit8", LARGE, 0.55, 0.50),
        *(_few(name, SQUARE, 0.68, 0.64, 1.8, 1.25) for name in (ZERO_POINTS, "q4_0", "q4_k")),
        _few(ZERO_POINTS, LARGE, 0.82, 0.79, activations=BFLOAT16),
        _few("q4_0", LARGE, 0.81, 0.78, activations=BFLOAT16),
        _few("q4_k", LARGE, 0.69, 0.66, activations=BFLOAT16),
        _few("q8_0", LARGE, 0.85, 0.83, activations=BFLOAT16),
    ],
    "integers": [
        _few(ZERO_POINTS, LARGE, 0.80, 0.79, 2.7, 2.1, "int8"),
        _few("q4_0", LARGE, 0.78, 0.75, 2.3, 1.1, "q8_1"),
        _few("q4_k", LARGE, 0.78, 0.75, 2.3, 1.1, "q8_1"),
        _few(ZERO_POINTS, SQUARE, 0.68, 0.64, 1.8, 1.25, "int8"),
        _few("q4_0", SQUARE, 0.68, 0.64, 1.8, 1.25, "q8_1"),
        _few("q4_k", SQUARE, 0.68, 0.64, 1.8, 1.25, "q8_1"),
        Products(CHANNELS, LARGE, {512: Times(1.6), 2048: Times(1.6)}, "int8"),
        Products(ZERO_POINTS, LARGE, {512: Times(1.3), 2048: Times(1.3)}, "int8"),
    ],
    "gguf": [
        *(_few(name, LARGE, 0.80, 0.77) for name in ("q4_1", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4")),
        *(_few(name, LARGE, 0.75, 0.72) for name in ("q5_0", "q5_1", "q5_k")),
        _few("q6_k", LARGE, 0.80, 0.78),
        _few("q2_k", LARGE, 0.50, 0.48),
        _few("q3_k", LARGE, 0.46, 0.44),
        *(_few(name, LARGE, 0.28, 0.26) for name in ("iq2_xxs", "iq2_xs")),
        _few("iq2_s", LARGE, 0.33, 0.31),
        *(_few(name, LARGE, 0.38, 0.36) for name in ("iq3_xxs", "iq3_s")),
        *(_few(name, LARGE, 0.20, 0.20) for name in ("iq1_s", "iq1_m", "tq1_0")),
        *(_few(name, SQUARE, 0.68, 0.64, 1.8, 1.25) for name in ("q4_1", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4")),
        *(Products(name, EXPERTS, {8: 0.48, 64: 0.48}) for name in ("q4_0", "q4_k")),
        # Beside those of floats above: up to 16 tokens, .03 less.
        *(
            _beside(name, LARGE, 1, 8, 16, activations="q8_1")
            for name in ("q4_1", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "q5_0", "q6_k", "q8_0")
        ),
    ],
    "ternary": [
        Products("ternary", LARGE, {1: 0.80, 8: 0.75, 64: Microseconds(36)}, INT8_TOKENS),
        Products("ternary", SQUARE, {1: 0.57, 8: 0.53, 64: None}, INT8_TOKENS),
        Products("ternary", SMALL, {1: Microseconds(3.6), 8: None, 64: None}, INT8_TOKENS),
        *(
            Products("ternary", shape, dict.fromkeys((1, 8, 64), QUANTIZING), activations)
            for activations in ("bitnet", NORMALIZED)
            for shape in (LARGE, SQUARE, SMALL)
        ),
        *(_few(f"ternary:block={group}", LARGE, 0.60, 0.5625, activations="bitnet") for group in (64, 128)),
        Products("ternary", LARGE, {1: 0.50}),
        *(
            _beside(name, LARGE, 512, 4096, activations=activations)
            for name, activations in (
                ("ternary", INT8_TOKENS),
                (BYTES, INT8_TOKENS),
                ("ternary", "bitnet"),
                (BYTES, "int8"),
            )
        ),
        Products("ternary", EXPERTS, {8: 0.30, 64: 0.34}, "bitnet"),
    ],
}
#: Conversions of 2^28 float16 numbers to and from ternary weights, and the least fractions of the copy bandwidth.
CONVERSIONS = {"scale known": 0.85, "absmean": None, "dequantize": 0.90}


def short_of(target, us, fraction, other):
    """Whether a time misses its target; `other` is that of the product that it is compared with."""
    if isinstance(target, Times):
        return other / us < target.least
    if isinstance(target, Microseconds):
        return us > target.most
    if isinstance(target, Beyond):
        return us - other > target.most
    return target is not None and fraction < target


def weight_of(cell, xp):
    """Random bits, of experts one behind the other."""
    *stack, rows, depth = cell.shape
    whole = random_array(kb.get_format(cell.format), (math.prod(stack) * rows, depth), xp)
    return whole.reshape(cell.shape) if stack else whole


def product(cell, tokens, xp):
    """A function of a weight: the call that is timed, and the bytes that it must read."""
    floats = (None, ml_dtypes.bfloat16) if cell.activations == BFLOAT16 else (cell.activations, np.float16)
    return products.product_with(xp, cell.shape, tokens, *floats)


def conversion(what, x):
    """The call that is timed, and the bytes that it must move; absmean reads x once more."""
    q = kb.quantize(x, "ternary", scale=0.7)
    out = kb.dequantize(q)
    if what == "dequantize":
        return (lambda: kb.dequantize(q, out=out)), x.nbytes + q.nbytes
    if what == "absmean":
        return (lambda: kb.quantize(x, "ternary")), 2 * x.nbytes + q.nbytes
    return (lambda: kb.quantize(x, "ternary", scale=0.7)), x.nbytes + q.nbytes


class Timed:
    """Times cells on the GPU of a session, prints them, and remembers which fall short."""

    def __init__(self, session):
        self._session, self._cublas, self._of_int8, self.short = session, {}, {}, []

    def cublas(self, shape, tokens):
        """Microseconds of torch's bfloat16 product."""
        if (shape, tokens) not in self._cublas:
            gpu, torch = self._session.gpu, self._session.torch
            codes = gpu.cupy.asarray(random_words(math.prod(shape) // 8).view(np.uint8))
            weights = functools.partial(products._moved, gpu.cupy, codes)
            make = functools.partial(products._cublas, torch, shape, tokens)
            self._cublas[shape, tokens] = gpu.time(Case("cuBLAS", make, capture=True), "cuBLAS", weights).us
        return self._cublas[shape, tokens]

    def products(self, cell):
        gpu = self._session.gpu
        weights = []  # at each place; all are kept, or the next one would lie where the last one did
        for tokens, target in cell.targets.items():
            prepared, rows = [], []
            while not rows or (len(rows) < PLACES and rows[0].us < SHORT):
                if len(weights) == len(rows):
                    weights.append(products.Rotated(weight_of(cell, gpu.cupy), gpu.cupy))
                prepared.append(product(cell, tokens, gpu.cupy))
                rows.append(gpu.time(Case("linear", prepared[-1]), cell.format, weights[len(rows)]))
            rows.sort(key=lambda row: row.us)
            row = rows[len(rows) // 2]
            what, other = (cell.format, cell.shape, tokens), None
            if cell.activations == INT8_TOKENS:
                self._of_int8[what] = row.us
            if isinstance(target, Times):
                other = self.cublas(cell.shape, tokens)
            elif isinstance(target, Beyond):
                other = self._of_int8[what]
            label = f"{cell.format}{'' if cell.activations is None else '+' + cell.activations}"
            self._say(f"{label} {'x'.join(map(str, cell.shape))} {tokens}", target, row, other, rows)
        self._session.release()

    def conversion(self, what, target):
        inputs = self._session.inputs(1 << 28, np.dtype("float16"))
        case = Case(what, functools.partial(conversion, what))
        self._say(f"ternary {what}", target, self._session.gpu.time(case, what, functools.partial(inputs.get, False)))

    def _say(self, name, target, row, other=None, places=()):
        beside = ""
        if isinstance(target, Times):
            beside = f", {other / row.us:.2f} x"
        elif isinstance(target, Beyond):
            beside = f", {row.us - other:+.2f} us"
        between = f" ({places[0].us:.2f} to {places[-1].us:.2f})" if len(places) > 1 else ""
        short = short_of(target, row.us, row.fraction, other)
        if short:
            self.short.append(name)
        measured = f"{row.us:.2f} us{between}, {row.fraction:.3f}{beside}"
        print(f"{name}: {measured}; {target}{' SHORT' if short else ''}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    names = parser.parse_args().groups or list(GROUPS)
    if unknown := set(names) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    session = Session("cuda:0", quick=True)
    with session.opened() as machine:
        gpu = session.gpu
        gpu.captured = 64  # the start of a graph is as long as a call
        print(f"{gpu.name}, driver {machine['driver']}, copy bandwidth {gpu.bandwidth * 1e-9:.0f} GB/s")
        timed = Timed(session)
        for name in names:
            if name == "ternary":
                for what, target in CONVERSIONS.items():
                    timed.conversion(what, target)
                session.kept(None, lambda: None)  # gives the inputs back
            for cell in GROUPS[name]:
                timed.products(cell)
    print(f"{len(timed.short)} fall short{': ' + ', '.join(timed.short) if timed.short else ''}")
    return 1 if timed.short else 0


if __name__ == "__main__":
    sys.exit(main())
