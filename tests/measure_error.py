"""Errors of the kernels that decode weights in registers, beside those of cuBLAS, on a GPU.

``python tests/measure_error.py`` prints those of `FORMATS`; ``python tests/measure_error.py q4_k nf4``
those of these formats. An error is the root mean square of what outputs are off the product in float64 of the decoded
weight; that of cuBLAS is its error with the weight decoded to the dtype of x. Outputs are rounded in both. x is
N(0, 1), and N(1, 1), where zero points, offsets and minima count. For a number of tokens those ways are measured that
the plan takes for one of the weights `PLANNED`.

What is promised (`LIMITS`): the error of cuBLAS where a weight enters the product exactly, or rounded once as a decoded
one is; 1.4 times as much where float32 scales or values of a codebook of one's own are rounded first, of which
`kbitcupy.explain` tells.
"""

import dataclasses
import sys

import ml_dtypes
import numpy as np

import kbitcupy as kb
from kbitcupy.products.functions import LINEAR
from kbitcupy.products.routes import Problem, choices, device, stored

DTYPES = (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16))
TOKENS = (1, 8, 16, 64)
MEANS = (0, 1)
SHAPE = (1024, 4096)
PLANNED = (SHAPE, (4096, 4096), (8192, 8192), (28672, 8192))
#: The ways that decode weights in registers.
ROUTES = ("single_token", "small_batch", "hopper", "records")
#: What an error may be, in errors of cuBLAS, by whether the explanation says that something is rounded.
LIMITS = {False: 1.1, True: 1.4}
FORMATS = (
    *(f"{name},block={block}" for name in ("int4:zero=none", "uint4:zero=int") for block in (32, 64, 128)),
    *("uint4:zero=float,block=64", "uint4:zero=int,block=128,scale_dtype=float16"),
    *(f"{name},granularity=channel:0" for name in ("int4:zero=none", "uint4:zero=int", "int8:zero=none")),
    *("int8:block=32", "int8:block=128", "uint8:zero=int,block=64"),
    *("kbit6", "kbit7", "kbit8", "kbit8:absmax=float32", "q8_0", "q4_0", "q4_k"),
    *("kbit2", "kbit3", "kbit4", "kbit4:absmax=float32", "kbit5", "fp4"),
    *("nf4", "nf4:block=16", "nf4:block=32,double_quant=True"),
    *(f"table4:block={block},codebook=custom" for block in (16, 32, 64)),
    *(f"kbit{k}:codebook=custom" for k in (2, 3, 4, 5)),
    *("kbit2:absmax=float16,codebook=custom", "kbit3:absmax=float32,codebook=custom"),
)


def weight(format, cupy, shape=SHAPE):
    """A weight of normal numbers; a codebook of one's own is that of nf4, which has more values below zero, or so many
    between them."""
    w = cupy.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    name = format.removesuffix("codebook=custom").rstrip(":,")
    if name == format:
        return kb.quantize(w, name)
    count = 1 << kb.get_format(name).fragments().bits
    values = np.interp(np.linspace(0, 15, count), np.arange(16), kb.get_format("nf4").fragments().known_values)
    return kb.quantize(w, name, codebook=values.astype(np.float32))


def measured(q, cupy, dtype=DTYPES[0], tokens=TOKENS, means=MEANS):
    """(route, tokens, mean of x, error over that of cuBLAS, its limit) of each way that takes a product."""
    exact, decoded = q.dequantize(dtype="float32").astype(np.float64), q.dequantize(dtype=dtype)
    for m in tokens:
        problem = Problem(q.format, q.shape, m, dtype, device(exact.device.id), True, stored(q))
        plans = [choices(dataclasses.replace(problem, shape=shape), LINEAR)[0].route for shape in PLANNED]
        ways = [route for route in LINEAR if route in plans and route.name in ROUTES and route.accepts(problem) is None]
        for mean in means:
            x = np.random.default_rng(m).standard_normal((m, q.shape[1])).astype(np.float32) + np.float32(mean)
            x = cupy.asarray(x.astype(dtype))
            wanted = x.astype(np.float64) @ exact.T
            base = _error(x @ decoded.T, wanted)
            for route in ways:
                out = cupy.full(wanted.shape, np.nan, dtype)
                route.prepare(problem)(x, q, None, out)
                limit = LIMITS["rounded to" in route.describe(problem)]
                yield route.name, m, mean, _error(out, wanted) / base, limit


def _error(y, wanted):
    return float(np.sqrt(((y.astype(np.float64) - wanted) ** 2).mean()))


def main():
    import cupy

    bad = 0
    for format in sys.argv[1:] or FORMATS:
        q = weight(format, cupy)
        for dtype in DTYPES:
            worst = {}
            for route, m, mean, error, limit in measured(q, cupy, dtype):
                worst.setdefault((route, limit), []).append((error, m, mean))
                bad += not error <= limit
            found = "; ".join(
                f"{route} {max(errors)[0]:.2f} of {limit} (M = {max(errors)[1]}, mean {max(errors)[2]})"
                for (route, limit), errors in worst.items()
            )
            print(f"{format} {dtype}: {found}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
