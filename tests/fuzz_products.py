"""Random products of every format that a kernel for few tokens decodes, on a GPU, against float64.

``python tests/fuzz_products.py 5000`` computes that many; ``python tests/fuzz_products.py 5000 7`` from seed 7;
``python tests/fuzz_products.py 5000 0 2 8`` the third part of eight, so that processes side by side compile. Each has a
random shape (odd rows, rows of one group), number of tokens, dtype, bias and mean of x; formats of integer codes, and
GGUF's types, have products with activations that are quantized, too, which are compared with their exact integers, or
with what these tokens stand for. With ``--repeat 1000``
there are no random products: each format multiplies the same x so many times, and all results must have the same bits.
It prints every one that is wrong, and how many there were of each route; the status is 1 where one was wrong.
"""

import argparse
import itertools
import math
import sys
import time
from collections import Counter

import ml_dtypes
import numpy as np
from gguf_planes import planes_of

import kbitcupy as kb
from kbitcupy.bench.cases import random_array
from kbitcupy.products.functions import plan
from kbitcupy.products.fused import gentle_factor, rounds_both_ways
from kbitcupy.products.int8 import factors
from kbitcupy.products.integer_activations import quantize_host
from kbitcupy.products.integers import PRESETS, units_of
from kbitcupy.products.records import Streamed
from kbitcupy.products.routes import Problem, device, stored
from kbitcupy.products.small_batch import SmallBatch

DTYPES = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]
#: One product in so many may be called wrong though it is right.
ODDS = 1e9


def formats():
    """All of them, and options that decode in another way."""
    found = [kb.get_format(name) for name in kb.list_formats()]
    for name in ("int4", "uint4", "int8", "uint8"):
        for zero in ("none", "int", "float"):
            found += [kb.get_format(name, block=block, zero=zero) for block in (32, 64, 128, 256)]
            found.append(kb.get_format(name, granularity="channel:0", zero=zero))
            found.append(kb.get_format(name, block=128, zero=zero, scale_dtype="float16"))
        narrow = {"block": 64, "zero": "int", "zero_dtype": name.rstrip("48"), "scale_dtype": "bfloat16"}
        found.append(kb.get_format(name, **{**narrow, "zero_dtype": narrow["zero_dtype"] + "8"}))
    for name in ("nf4", "fp4"):
        found += [
            kb.get_format(name, block=block, double_quant=double) for block in (16, 32, 256) for double in (False, True)
        ]
    found += [kb.get_format(f"kbit{k}", absmax=absmax) for k in range(2, 9) for absmax in ("float16", "float32")]
    found += [kb.get_format(f"kbit{k}", codebook="custom") for k in range(2, 9)]
    found += [kb.get_format("kbit3", codebook="custom", absmax=absmax) for absmax in ("float16", "float32")]
    found.append(kb.get_format("table4", codebook="custom"))
    return [format for format in found if format.fragments() is not None or format.records() is not None]


def shortest_row(format):
    """Elements of a row of one group, or block."""
    fragments, records = format.fragments(), format.records()
    step = (fragments.multiple or fragments.granule) if fragments is not None else getattr(records, "ELEMENTS", 32)

    def whole(elements):
        try:
            format.check_shape((1, elements))
        except kb.KbitError:
            return False
        return True

    return next(elements for elements in itertools.count(step, step) if whole(elements))


def random_weight(format, shape, rng, cupy):
    """An array of random bits, with zero points that lie in the range and a little beyond."""
    q = random_array(format, shape, cupy)
    planes = dict(q.planes)
    if format.records() is not None:
        planes = {name: cupy.asarray(plane) for name, plane in planes_of(format, shape, rng.integers(1 << 30)).items()}
    if "codes" in planes:
        bits = rng.integers(0, 256, planes["codes"].size, np.uint8)
        planes["codes"] = cupy.asarray(bits.view(planes["codes"].dtype))
    if "zero_point" in planes:
        low, high = format.levels.qmin, format.levels.qmax
        beyond = 3 * (planes["zero_point"].dtype == np.int32)
        points = rng.integers(low - beyond, high + 1 + beyond, planes["zero_point"].size)
        planes["zero_point"] = cupy.asarray(points.astype(planes["zero_point"].dtype))
    return kb.QuantizedArray(format, planes, shape, q.dtype)


def size(numbers):
    """Their root mean square."""
    return float(np.sqrt(np.mean(np.square(numbers))))


def rounded(v, eps):
    """Numbers rounded to a type of this eps, without the ends of its range."""
    mantissa, exponent = np.frexp(v)
    return np.ldexp(np.rint(mantissa * (2 / eps)) / (2 / eps), exponent)


def with_scales(q, scale, offset):
    """What the codes of a weight stand for with another scale in place of its own; `offset` says whether with its own
    offsets, or minima."""
    fragments, planes = q.format.fragments(), dict(q.planes)
    inner = fragments.beside and fragments.offset  # 6 bits in two planes, less 32: 33
    if inner:
        planes[fragments.beside] = np.full_like(planes[fragments.beside], 0x11)
        planes[fragments.offset] = np.full_like(planes[fragments.offset], 0xAAAA)
    several = fragments.scales, fragments.nested_scales, None if inner else fragments.offset, fragments.tensor_scale
    for name in filter(None, several):
        if name not in planes:
            continue
        plane = planes[name]
        if fragments.nested_scales and name in (fragments.scales, fragments.nested_scales):
            planes[name] = np.zeros_like(plane)  # their offset is then the scale
        elif name == fragments.tensor_scale:
            planes[name] = np.ones_like(plane)
        elif plane.dtype == np.uint8:  # E4M4
            planes[name] = np.full_like(plane, 176 if scale else 0)
        else:
            planes[name] = np.full_like(plane, scale)
    if fragments.added and fragments.beside == "offset" and not offset:
        planes["offset"] = np.zeros_like(planes["offset"])
    elif fragments.added and fragments.beside != "offset":  # a scale and that of minima
        planes[fragments.scales][1::2] = q.planes[fragments.scales][1::2] if offset else 0
    found = kb.QuantizedArray(q.format, planes, q.shape, q.dtype).dequantize(dtype="float32")
    return found.astype(np.float64)


def as_multiplied(q, w, route, dtype):
    """The weights that a product may have been computed with, in place of `w`.

    A route may decode weights to the dtype of x, which rounds them once. A kernel may round the values of a codebook to
    the nearest, and their products with scales, which may have been rounded before. These errors are no noise: equal
    weights have the same one. So they are worked out. Where values are rounded both ways that is noise: `by_table`.
    """
    fragments, eps = q.format.fragments(), float(ml_dtypes.finfo(dtype).eps)
    if fragments is None or (route != "plan" and not fragments.entries):
        return [w, *([rounded(w, eps)] if route == "plan" else [])]
    if route != "plan" and fragments.in_two_parts:
        return [rounded(w, eps)]
    values, offsets = with_scales(q, 1.0, False), with_scales(q, 0.0, True)
    scales = np.divide(w - offsets, values, out=np.zeros_like(w), where=values != 0)
    # A scale of the whole array multiplies sums. The others are quotients that lie a little beside what is stored, and
    # of halves one in eight is halfway between two bfloat16: there that would decide.
    whole = float(q.planes[fragments.tensor_scale][0]) if fragments.tensor_scale in q.planes else 1.0
    stored, own = q.planes[fragments.scales].dtype, scales / whole
    if fragments.entries and stored.itemsize == 2 and not fragments.beside:
        own = rounded(own, float(ml_dtypes.finfo(stored).eps))
    power = factor_of(q, dtype)
    table = values * power if both_ways(fragments) else rounded(values * power, eps)
    found = [table / power * scales + offsets, rounded(table * rounded(own, eps), eps) / power * whole + offsets]
    return [*found, rounded(w, eps)] if route == "plan" else found


def both_ways(fragments):
    """Whether values of a codebook are rounded both ways."""
    return fragments.small_batch.startswith(("Table4", "Kbit")) and not (
        fragments.known_values and not rounds_both_ways(np.array(fragments.known_values, np.float32))
    )


def factor_of(q, dtype):
    """What a kernel multiplies a codebook by before it rounds it, but for a power of two."""
    fragments = q.format.fragments()
    if fragments.known_values:
        return gentle_factor(np.array(fragments.known_values, np.float32), dtype)
    if both_ways(fragments):  # the kernel tries one a thread
        return gentle_factor(q.planes[fragments.values], dtype, 512)
    return 1.0


def by_table(q, w, dtype):
    """Of each weight a variance that what its rounded value may be off is sub-Gaussian with, or None.

    A table of values has the number of `dtype` below a value in some places and that above it in others, so that their
    mean is right. Where a value is part f of a step above the lower one, it is off by -f or 1 - f steps, which is
    sub-Gaussian with (1 - 2f) / (2 ln((1 - f) / f)) (Kearns and Saul, 1998), for f = 1/2 with 1/4.
    """
    fragments = q.format.fragments()
    if fragments is None or not fragments.entries or fragments.in_two_parts or not both_ways(fragments):
        return None
    values, offsets = with_scales(q, 1.0, False), with_scales(q, 0.0, True)
    scales = np.divide(w - offsets, values, out=np.zeros_like(w), where=values != 0)
    factor = factor_of(q, dtype)
    mantissa, exponent = np.frexp(np.abs(values) * factor)
    step = float(ml_dtypes.finfo(dtype).eps) / 2
    above = mantissa / step % 1.0
    part = np.clip(np.minimum(above, 1 - above), 1e-9, 0.5 - 1e-6)
    proxy = np.where(above == 0, 0.0, (1 - 2 * part) / (2 * np.log((1 - part) / part)))
    return proxy * np.square(np.ldexp(step, exponent) / factor * scales)


def allowed(q, x, w, wanted, inside, route, dtype):
    """The largest root mean square of errors of a right product, of the outputs `inside`.

    An error has four parts.
    1. What rounded weights make, which is known (`as_multiplied`): the largest of what may have been the case.
    2. The rounding of an output. It is at most half a unit in the last place; over all its values it is as good as
       uniform there, of variance ulp^2 / 12, and independent of the others. Uniform numbers are sub-Gaussian with that
       variance, so that (Hsu, Kakade and Zhang, 2012) the sum of their squares is more than
       sum v + 2 sqrt(t sum v^2) + 2 t max v in one of exp(t) cases. Few outputs may thus be off by half a unit each,
       and many hardly by more than a right rounding is.
    3. What sums in fp32 leave out, of which a tensor core cuts off what is below 2^-23 of its largest number.
    4. What a table of rounded values makes (`by_table`): noise of the weights, the same for all tokens. So the outputs
       of a row of weights count as one number in the bound of the second part.
    """
    info = ml_dtypes.finfo(dtype)
    weights = max(size((x @ (used - w).T)[inside]) for used in as_multiplied(q, w, route, dtype))
    ulp = np.ldexp(float(info.eps), np.maximum(np.frexp(np.abs(wanted[inside]))[1] - 1, int(info.minexp)))
    variance, t = np.square(ulp) / 12, math.log(ODDS)
    outputs = math.sqrt(min(most(variance, t), np.square(ulp / 2).sum()) / ulp.size)
    sums = 2.0**-22 * size((np.abs(x) @ np.abs(w).T)[inside])
    table = by_table(q, w, dtype)
    noise = 0.0 if table is None else math.sqrt(most((inside * (np.square(x) @ table.T)).sum(0), t) / ulp.size)
    return 1.1 * weights + outputs + sums + noise


def most(variance, t):
    """What the sum of squares of independent numbers, sub-Gaussian with these variances, exceeds in one of exp(t)."""
    return variance.sum() + 2 * math.sqrt(t * np.square(variance).sum()) + 2 * t * variance.max()


def wrong(format, rng, cupy, routes):
    """What is wrong with one random product, or None."""
    fragments, multiple = format.fragments(), shortest_row(format)
    few = SmallBatch() if fragments is not None and fragments.small_batch else Streamed()
    n = int(rng.choice([1, 3, 16, 33, 48, 64, 100, 144, 512, 1040]))
    k = (
        multiple * int(rng.choice([1, 2, 3, 4, 7, 8, 16, 32]))
        if rng.random() < 0.6
        else -(-1024 // multiple) * multiple
    )
    m = int(rng.choice([1, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32]))
    dtype = DTYPES[int(rng.integers(2))]
    q = random_weight(format, (n, k), rng, cupy)
    x = cupy.asarray((rng.standard_normal((m, k)) + rng.integers(2)).astype(np.float32).astype(dtype))
    bias = cupy.asarray(rng.standard_normal(n).astype(np.float32)) if rng.random() < 0.3 else None
    problem = Problem(format, (n, k), m, x.dtype, device(0), True, stored(q))
    y = cupy.full((m, n), np.nan, dtype)
    if few.accepts(problem) is None and rng.random() < 0.7:
        route = few.name
        few.prepare(problem)(x, q, bias, y)
    else:
        route = "plan"
        plan(format, (n, k), x.dtype, m, 0, True, stored(q))(x, q, bias, y)
    routes[route] += 1
    w = q.get().dequantize(dtype="float32").astype(np.float64)
    wanted = x.get().astype(np.float64) @ w.T + (0 if bias is None else bias.get().astype(np.float64))
    inside = np.abs(wanted) < float(ml_dtypes.finfo(dtype).max) / 2
    if not inside.any():
        return None
    error = size((y.get().astype(np.float64) - wanted)[inside])
    limit = allowed(q.get(), x.get().astype(np.float64), w, wanted, inside, route, dtype)
    if not error <= limit:
        return f"{format} {dtype} n {n} k {k} m {m} {route}: error {error:.3g}, at most {limit:.3g} is allowed"
    return None


def changing(format, preset, times, cupy, routes):
    """What comes out differently when the same product is computed so many times, for a few numbers of tokens."""
    rng, found, multiple = np.random.default_rng(0), [], shortest_row(format)
    q = random_weight(format, (1040, -(-4096 // multiple) * multiple), rng, cupy)
    for m in (1, 8, 16, 64):
        x = cupy.asarray(rng.standard_normal((m, q.shape[1])).astype(np.float16))
        first = kb.linear(x, q, activations=preset)
        y, others = cupy.empty((m, q.shape[0]), x.dtype), cupy.zeros((), np.int64)
        for _ in range(times):
            kb.linear(x, q, activations=preset, out=y)
            others += (y.view(np.uint16) != first.view(np.uint16)).any()
        routes[kb.explain(x, q, activations=preset).route] += times
        if int(others):
            found.append(f"{format} {preset} m {m}: {int(others)} of {times} products have other bits")
    return found


def integer_formats():
    """Formats of integer codes, each with the ways in which activations are quantized, and GGUF's other types."""
    names = [*formats(), *(kb.get_format("ternary", **options) for options in ({}, {"block": 64}))]
    names += [kb.get_format(name, block=40, zero="int") for name in ("uint4", "int8")]
    found = [(format, preset) for format in names for preset in PRESETS if format.integer_codes((1, 256)) is not None]
    codes = {format for format, _ in found}
    return [*found, *((format, "q8_1") for format in names if format.records() is not None and format not in codes)]


def terms(a, part, rows, blocked):
    """The sum of terms, in float64, and of their magnitudes, of quantized tokens and some rows of a weight."""
    y, size = 0.0, 0.0
    scales = factors(a.scales).astype(np.float64)
    for first, last in units_of(a.codes.shape[1], part.group, blocked):
        here = slice(first, last)
        e = scales[:, first // 32 if blocked else 0][:, None]
        group = first // part.group if part.group else 0
        term = a.codes[:, here].astype(np.float64) @ rows.codes[:, here].T.astype(np.float64) * e
        term = term * rows.scale[:, group].astype(np.float64)
        y, size = y + term, size + np.abs(term)
        if rows.offset is not None:
            term = (
                a.codes[:, here].sum(axis=1, dtype=np.float64)[:, None] * e * rows.offset[:, group].astype(np.float64)
            )
            y, size = y + term, size + np.abs(term)
    return y, size


def in_float32(size, depth):
    """What no output of a product in float32 is off, but one in `ODDS`, of so many terms whose magnitudes make `size`.

    Route `staged` rounds each number of a token, and cuBLAS each of `depth` sums, in an order of its own: by at most
    2^-24 of a number that is not above `size`. Such errors are as good as independent, with mean 0, so what they make
    is sub-Gaussian with the variance of depth + 1 numbers that are off by all of that (Hoeffding, 1963; of sums Higham
    and Mary, 2019). `most` bounds the sum of their squares.
    """
    return 2.0**-24 * math.sqrt(2 * math.log(2 * ODDS * np.size(size)) * (depth + 1)) * size


def wrong_integers(format, preset, rng, cupy, routes):
    """What is wrong with one random product of quantized activations, or None."""
    n = int(rng.choice([1, 3, 16, 33, 100, 144, 512, 1040, 5000]))
    k = format.block if format.family == "gguf" else 32
    k *= int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 17, 40]))
    if format.name in ("int8", "uint8") and rng.random() < 0.2:
        k += int(rng.integers(1, 32))
    m = int(rng.choice([1, 1, 2, 3, 5, 7, 8, 8, 9, 12, 16, 16, 17, 40, 64, 70, 129, 300]))
    # Some kernels for more tokens take rows of whole stages only, which are drawn too seldom otherwise.
    if rng.random() < 0.25:
        k, m = 1024 * int(rng.integers(1, 9)), int(rng.choice([17, 33, 64, 65, 100, 129, 200, 300, 520]))
    dtype = [*DTYPES, np.dtype("float32")][int(rng.integers(3))]
    q = random_weight(format, (n, k), rng, cupy)
    x = cupy.asarray((rng.standard_normal((m, k)) + rng.integers(2)).astype(np.float32).astype(dtype))
    bias = cupy.asarray(rng.standard_normal(n).astype(np.float32)) if rng.random() < 0.3 else None
    y = cupy.full((m, n), np.nan, dtype)
    kb.linear(x, q, bias, activations=preset, out=y)
    route = kb.explain(x, q, bias, activations=preset).route
    routes[f"{preset} {route}"] += 1
    on_host = q.get()
    part = format.integer_codes((n, k))
    a = quantize_host(x.get(), preset)
    if part is not None:
        exact, size = terms(a, part, part.rows(on_host.planes, k, 0, n), preset == "q8_1")
    else:
        numbers = a.codes.astype(np.float64) * np.repeat(a.scales.astype(np.float64), 32, axis=1)[:, :k]
        w = on_host.dequantize(dtype="float32").astype(np.float64)
        exact, size = numbers @ w.T, np.abs(numbers) @ np.abs(w).T
    exact = exact + (0 if bias is None else bias.get())
    inside = np.abs(exact) < float(ml_dtypes.finfo(dtype).max) / 2
    eps = float(ml_dtypes.finfo(dtype).eps)
    if route == "integer_decoded":  # both sides are rounded, each number
        given = quantize_host(x.get(), preset)
        tokens = np.abs(given.codes * np.repeat(given.scales, -(-k // given.scales.shape[1]), axis=1)[:, :k])
        size = 2.0**20 * eps * (tokens.astype(np.float64) @ np.abs(kb.dequantize(on_host)).astype(np.float64).T)
    outputs = np.abs(exact) * eps * 0.51 + (2.0**-25 if dtype == np.float16 else 0.0)
    allowed = outputs + (in_float32(size, k) if route == "staged" else 2.0**-20 * size)
    off = np.abs(y.get().astype(np.float64) - exact)
    bad = inside & ~(off <= allowed)
    if route == "staged" and not bad.any():
        sums = np.maximum(off - outputs, 0)[inside & (size > 0)] / size[inside & (size > 0)]
        variance = np.full(max(1, sums.size), (k + 1) * 2.0**-48)
        if np.square(sums).sum() > most(variance, math.log(ODDS)):
            return f"{format} {preset} {dtype} n {n} k {k} m {m} {route}: {np.sqrt(np.mean(sums**2)):.3g} of the terms"
    if bad.any():
        worst = (off / allowed)[bad].max()
        return f"{format} {preset} {dtype} n {n} k {k} m {m} {route}: {bad.sum()} wrong, {worst:.3g} times"
    return None


def main():
    import cupy

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=1000, help="random products of all parts")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("part", type=int, nargs="?", default=0, help="which of the parts this process takes, from 0 on")
    parser.add_argument("parts", type=int, nargs="?", default=1)
    parser.add_argument("--repeat", type=int, metavar="TIMES", help="compute the same products so many times instead")
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=math.inf, help="begin no product after")
    given = parser.parse_args()
    cases = [*((format, None) for format in formats()), *integer_formats()][given.part :: given.parts]
    routes, bad, start = Counter(), 0, time.time()
    rng = np.random.default_rng([given.seed, given.part])
    own = (given.count + given.parts - 1 - given.part) // given.parts  # of all parts together `count`
    for i in range(len(cases) if given.repeat else own):
        if time.time() - start > given.limit:
            break
        format, preset = cases[i % len(cases)]
        if given.repeat:
            found = changing(format, preset, given.repeat, cupy, routes)
        elif preset is None:
            found = list(filter(None, [wrong(format, rng, cupy, routes)]))
        else:
            found = list(filter(None, [wrong_integers(format, preset, rng, cupy, routes)]))
        bad += len(found)
        for text in found:
            print(text, flush=True)
    print(
        f"{sum(routes.values())} products of {len(cases)} cases, {dict(routes)}, {bad} wrong, "
        f"{time.time() - start:.0f} s"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
