"""Random products of ternary weights on a GPU: of int8 tokens they have NumPy's bits, of floats they are near float64.

``python tests/fuzz_ternary.py 5000`` computes that many; ``python tests/fuzz_ternary.py 5000 7`` from seed 7; ``python
tests/fuzz_ternary.py 5000 0 2 8`` the third part of eight, for processes side by side. Each has a random shape, number
of tokens, dtype, granularity, bias, norm and rule, and codes of every kind. ``python tests/fuzz_ternary.py repeat
1000`` computes a few products so many times, while another kernel keeps the memory busy: all have the same bits. What
is wrong is printed, and how many there were of each route; the status is 1 where one was wrong.
"""

import sys
import time
from collections import Counter

import ml_dtypes
import numpy as np
from fuzz_products import rounded
from inputs import BFLOAT16, make, same_values

import kbitcupy as kb
from kbitcupy.products import ternary_rows, ternary_stream

DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
LEAST_ROWS = ternary_rows.LEAST_ROWS
# What plans products.
PLANS = (
    ternary_rows.rows_of,
    ternary_rows.float_rows_of,
    ternary_rows.quantized_rows_of,
    ternary_rows.int8_rows_of,
    ternary_rows.bytes_rows_of,
    ternary_stream._fragments,
    ternary_stream._quantized,
    ternary_stream._given,
)
GRANULARITIES = ["tensor", ("channel", 0), ("group", 32), ("group", 64), ("group", 128), ("group", 96)]


def clear_plans():
    """Products are planned anew, by what `ternary_rows` says now."""
    for function in PLANS:
        function.cache_clear()


def own_rows(monkeypatch, few):
    """Let warps have rows of their own in any weight: as in large ones, or as in those with few rows."""
    monkeypatch.setattr(ternary_rows, "LEAST_ROWS", 1 << 30 if few else 0)
    for name in ("_LEAST_OF_FEW", "_LEAST_OF_SEVERAL", "_EARLY"):
        monkeypatch.setattr(ternary_rows, name, 0)
    clear_plans()


def weight(rng, rows, depth, granularity, cupy):
    """One on the host, the same on the GPU."""
    count = 1 if granularity == "tensor" else rows
    if granularity[0] == "group":
        count *= -(-depth // granularity[1])
    scale = (rng.random(count) * np.exp2(rng.integers(-9, 3, count))).astype(np.float32)
    q = kb.bitnet.from_trits(rng.integers(-1, 2, (rows, depth)).astype(np.int8), scale, granularity=granularity)
    if rng.random() < 0.2:
        q.planes["codes"][:] = rng.integers(0, 256, q.planes["codes"].shape)
    return q, kb.QuantizedArray(q.format, {n: cupy.asarray(p) for n, p in q.planes.items()}, q.shape, q.dtype)


def shape_of(rng):
    """Tokens, rows and depth: small ones, rows that thread blocks share, and long tokens."""
    depth = int(128 * rng.integers(1, 33)) if rng.random() < 0.9 else int(rng.integers(1, 4000))
    if rng.random() < 0.1:
        depth = 128 * int(rng.integers(33, 300))
    tokens = int(rng.choice([1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 32, 33, 40, 64, 100, 300]))
    rows = int(rng.integers(1, 100)) if rng.random() < 0.5 else int(rng.integers(100, 5000))
    return tokens, max(1, min(rows, 20_000_000 // (tokens * depth))), depth


def warps_have_rows(any):
    """Let warps have rows of their own however few these are, or where thread blocks have many."""
    ternary_rows.LEAST_ROWS = 0 if any else LEAST_ROWS
    clear_plans()


def wrong_experts(rng, cupy, routes):
    """The same of experts: of which each product is BitLinear, or of floats."""
    floats = rng.random() < 0.4
    tokens, slots, experts = (int(rng.integers(1, 9)) for _ in range(3))
    if rng.random() < 0.4:  # so many that they are sorted by expert
        tokens *= 40
    rows, depth = int(rng.integers(1, 700)), int(128 * rng.integers(1, 20))
    granularity = GRANULARITIES[rng.integers(2 if floats else 3)]
    if granularity[0] == "group" and depth < granularity[1]:
        granularity = "tensor"
    dtype = DTYPES[rng.integers(2 if floats else 4)]
    members = [weight(rng, rows, depth, granularity, cupy) for _ in range(experts)]
    qs, on = (kb.stack([m[i] for m in members]) for i in range(2))
    each = rng.random() < 0.3
    kind = "normal" if floats else rng.choice(["normal", "special"])
    x = make(kind, tokens * (slots if each else 1) * depth, dtype, int(rng.integers(99)))
    x = x.reshape((tokens, slots, depth) if each else (tokens, depth))
    ids = rng.integers(-1, experts + 1, (tokens, slots))
    mixed = rng.random((tokens, slots)).astype(np.float32) if rng.random() < 0.5 else None
    given, chosen = cupy.asarray(x), cupy.asarray(ids)
    on_gpu = None if mixed is None else cupy.asarray(mixed)
    activations = None if floats else "bitnet"
    y = cupy.asnumpy(kb.linear_grouped(given, on, chosen, on_gpu, activations=activations)).astype(np.float64)
    routes[kb.explain(given, on, activations=activations, expert_ids=ids).route] += 1
    what = f"experts {granularity} {dtype} {tokens} x {slots} of {experts} x {rows} x {depth} {each} {mixed is None}"
    if floats:
        w, wide = qs.dequantize(dtype=np.float32), x.astype(np.float32) if each else x.astype(np.float32)[:, None]
        exact, size = np.zeros((2, tokens, slots, rows))
        for expert in range(experts):
            t, s = np.nonzero(ids == expert)
            own = wide[t, s if each else 0]
            exact[t, s], size[t, s] = own @ w[expert].T.astype(np.float64), np.abs(own) @ np.abs(w[expert]).T
        if mixed is not None:
            exact, size = ((v * mixed[:, :, None]).sum(1) for v in (exact, size))
        eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype.name]
        inside = np.abs(exact) < (3e4 if dtype == np.float16 else 1e37)
        good = (np.abs(y - exact) <= np.abs(exact) * eps * 1.01 + 1e-5 * size + 2.0**-24)[inside].all()
        return None if good else f"floats {what}"
    wanted = kb.linear_grouped(x, qs, ids, mixed, activations="bitnet").astype(np.float64)
    if mixed is None:
        good = same_values(y, wanted)
    else:
        with np.errstate(all="ignore"):
            good = np.allclose(y, wanted, rtol=1e-2, atol=1e-6, equal_nan=True)
    return None if good else what


def near(y, x, q, bias, route):
    """Whether a product of floats is as near the exact one as float32 sums and one rounding leave it.

    The weights are exact; what decodes them to the dtype of x first rounds each of them once, with which the product is
    exact: scales of groups have errors of their own, which do not cancel where the terms do.
    """
    eps = float(ml_dtypes.finfo(x.dtype).eps) if x.dtype.itemsize == 2 else 0.0
    with np.errstate(over="ignore"):
        w, wide = q.dequantize(dtype=np.float32).astype(np.float64), x.astype(np.float64)
        if route == "decoded" and eps:
            w = rounded(w, eps)
        exact = wide @ w.T + (0 if bias is None else bias.astype(np.float64))
        bound = 1e-5 * (np.abs(wide) @ np.abs(w).T + np.abs(exact))
    inside = np.abs(exact) < (3e4 if x.dtype == np.float16 else 1e37)
    good = np.abs(y.astype(np.float64) - exact) <= bound + np.abs(exact) * eps * 1.01 + 2.0**-24
    return good[inside].all()


def wrong(rng, cupy, routes):
    """What is wrong with one random product, or None."""
    if rng.random() < 0.1:
        return wrong_experts(rng, cupy, routes)
    tokens, rows, depth = shape_of(rng)
    own = rng.random() < 0.5
    warps_have_rows(own)
    if own:
        tokens = min(tokens, int(rng.integers(1, 9)))
    granularity = GRANULARITIES[rng.integers(len(GRANULARITIES))]
    if granularity[0] == "group" and depth < granularity[1]:
        granularity = "tensor"
    dtype = DTYPES[rng.integers(4)]
    q, on = weight(rng, rows, depth, granularity, cupy)
    x = make(rng.choice(["normal", "normal", "special", "wide"]), tokens * depth, dtype, int(rng.integers(1 << 30)))
    x = x.reshape(tokens, depth)
    bias = make("normal", rows, DTYPES[rng.integers(4)], 5) if rng.random() < 0.5 else None
    on_gpu = None if bias is None else cupy.asarray(bias)
    what = f"{granularity} {dtype} {tokens} x {rows} x {depth} rows {own}"
    if rng.random() < 0.25 and np.isfinite(x.astype(np.float64)).all():
        given = cupy.asarray(x)
        route = kb.explain(given, on, on_gpu).route
        routes[route] += 1
        y = cupy.asnumpy(kb.linear(given, on, on_gpu))
        return None if near(y, x, q, bias, route) else f"floats {what} {route}"
    if rng.random() < 0.25:
        of = str(rng.choice(["token", "tensor"]))
        finite = np.where(np.isfinite(x.astype(np.float64)), x, np.zeros_like(x))
        tokens_on = kb.quantize(cupy.asarray(finite), "int8", granularity=of)
        given = kb.QuantizedArray(
            tokens_on.format, {n: cupy.asnumpy(p) for n, p in tokens_on.planes.items()}, x.shape, x.dtype
        )
        y = kb.bitnet.linear(tokens_on, on, on_gpu)
        routes["int8 tokens"] += 1
        return None if same_values(cupy.asnumpy(y), kb.bitnet.linear(given, q, bias)) else f"int8 {what} {of}"
    norm = (None, True, make("normal", depth, DTYPES[2], 7))[rng.integers(3)]
    given = cupy.asarray(norm) if isinstance(norm, np.ndarray) else norm
    options = ({}, {"granularity": "tensor"}, {"bits": 4, "rounding": "away"}, {"qmin": -127, "eps": 0})[
        rng.integers(4)
    ]
    wanted = kb.bitnet.linear(x, q, bias, norm=norm, **options)
    y = kb.bitnet.linear(cupy.asarray(x), on, on_gpu, norm=given, **options)
    routes[kb.explain(cupy.asarray(x), on, activations="bitnet").route] += 1
    return None if same_values(cupy.asnumpy(y), wanted) else f"bitnet {what} norm {norm is not None} {options}"


def repeated(count, cupy):
    """Products of which not all repeats have the same bits."""
    rng, bad = np.random.default_rng(0), 0
    beside, stream = cupy.zeros(1 << 26, np.float32), cupy.cuda.Stream(non_blocking=True)
    for tokens, rows, depth in [
        (1, 28672, 8192),
        (8, 28672, 8192),
        (8, 8192, 8192),
        (8, 4096, 14336),
        (16, 4096, 4096),
        (3, 1000, 640),
    ]:
        codes = cupy.asarray(rng.integers(0, 256, rows * depth // 4, np.uint8))
        q = kb.QuantizedArray(
            kb.get_format("ternary"), {"codes": codes, "scale": cupy.ones(1, np.float32)}, (rows, depth), DTYPES[0]
        )
        x = cupy.asarray(make("normal", tokens * depth, DTYPES[0]).reshape(tokens, depth))
        given = kb.quantize(x, "int8", granularity="token")
        for name, call in (
            ("int8", lambda q=q, x=given: kb.bitnet.linear(x, q)),
            ("bitnet", lambda q=q, x=x: kb.bitnet.linear(x, q, norm=True)),
            ("floats", lambda q=q, x=x: kb.linear(x, q)),
        ):
            first, differ = call(), cupy.zeros((), np.int64)
            for i in range(count):
                if i % 4 == 0:
                    with stream:
                        beside += 1
                differ += (call().view(np.uint16) != first.view(np.uint16)).any()
            stream.synchronize()
            if int(differ):
                bad += 1
                print(f"{name} {tokens} x {rows} x {depth}: {int(differ)} of {count} differ", flush=True)
    return bad


def main():
    import cupy

    start = time.time()
    if sys.argv[1] == "repeat":
        bad = repeated(int(sys.argv[2]), cupy)
        print(f"{sys.argv[2]} repeats, {bad} products differ, {time.time() - start:.0f} s")
        return int(bad > 0)
    count, seed, part, parts = (*map(int, sys.argv[1:]), *(1000, 0, 0, 1)[len(sys.argv) - 1 :])
    rng, routes, bad = np.random.default_rng([seed, part]), Counter(), 0
    for _ in range((count + parts - 1 - part) // parts):  # of all parts together `count`
        found = wrong(rng, cupy, routes)
        if found:
            bad += 1
            print(found, flush=True)
    print(f"{sum(routes.values())} products, {dict(routes)}, {bad} wrong, {time.time() - start:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
