"""Random products of every format that a kernel for few tokens decodes, on a GPU, against float64.

``python tests/fuzz_products.py 5000`` computes that many; ``python tests/fuzz_products.py 5000 7`` from seed 7;
``python tests/fuzz_products.py 5000 0 2 8`` the third part of eight, so that processes side by side compile. Each has a
random shape (odd rows, rows of one group), number of tokens, dtype, bias and mean of x. It prints every one that is
wrong, and how many there were of each route; the status is 1 where one was wrong.
"""

import sys
import time
from collections import Counter

import ml_dtypes
import numpy as np
from gguf_planes import planes_of

import kbitcupy as kb
from kbitcupy.bench.cases import random_array
from kbitcupy.products.functions import plan
from kbitcupy.products.records import Streamed
from kbitcupy.products.routes import Problem, device, stored
from kbitcupy.products.small_batch import SmallBatch

DTYPES = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]
#: Errors over those of rounding the sums, by whether weights or scales are rounded on the way.
LIMITS = {True: 3.0, False: 1.3}


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
    return [format for format in found if format.fragments() is not None or format.records() is not None]


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


def wrong(format, rng, cupy, routes):
    """What is wrong with one random product, or None."""
    fragments, records = format.fragments(), format.records()
    few = SmallBatch() if fragments is not None else Streamed()
    multiple = (fragments.multiple or fragments.granule) if fragments is not None else records.ELEMENTS
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
    off, wanted = (y.get().astype(np.float64) - wanted)[inside], wanted[inside]
    error, size = (float(np.sqrt(np.mean(np.square(numbers)))) for numbers in (off, wanted))
    eps, rounded = float(ml_dtypes.finfo(dtype).eps), route == "plan" or bool(fragments and fragments.entries)
    # Of few numbers the rounding may be lucky: half a unit in the last place is allowed. Where weights are rounded,
    # too, what that leaves does not cancel as the sum may do.
    rounding = max(
        float(np.sqrt(np.mean(np.square(wanted.astype(dtype).astype(np.float64) - wanted)))),
        size * eps / (4 if inside.sum() > 64 else 2),
        rounded * eps / 4 * float(np.sqrt(np.mean((x.get().astype(np.float64) ** 2 @ w.T**2)[inside]))),
    )
    if not error <= LIMITS[rounded] * rounding:
        return f"{format} {dtype} n {n} k {k} m {m} {route}: error {error / rounding:.3g} times that of rounding"
    return None


def main():
    import cupy

    count, seed, part, parts = (*map(int, sys.argv[1:]), *(1000, 0, 0, 1)[len(sys.argv) - 1 :])
    all_formats, routes, bad, start = formats()[part::parts], Counter(), 0, time.time()
    rng = np.random.default_rng([seed, part])
    for i in range(count // parts):
        found = wrong(all_formats[i % len(all_formats)], rng, cupy, routes)
        if found:
            bad += 1
            print(found, flush=True)
    print(
        f"{sum(routes.values())} products of {len(all_formats)} formats, {dict(routes)}, {bad} wrong, "
        f"{time.time() - start:.0f} s"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
