"""The kernels of BitNet's activations, trits and groups, in a grid of host threads that flush as the GPU does."""

import ctypes
import functools
import os

import numpy as np
import pytest
from host import compiled as host
from inputs import DTYPES, make, same_values

import kbitcupy as kb
from kbitcupy.backend.compile import source
from kbitcupy.products import activations, ternary

CXX_TYPES = {"float16": "Half", "bfloat16": "Brain", "float32": "float"}
ENTRIES = """
extern "C" void largest_{dtype}(unsigned grid, const {type}* x, const float* w, float* largest, long long m,
                                long long k, int normalizes, double eps) {{
    launch(grid, 1, LANES, [&] {{ largest_of_tokens<{type}>(x, w, largest, m, k, normalizes, eps); }});
}}
extern "C" void quantize_{dtype}(unsigned grid, const {type}* x, const float* w, const unsigned* given,
                                 signed char* codes, float* scales, long long m, long long k, long long pitch,
                                 int normalizes, double norm_eps, float eps, int lowest, int highest, int away) {{
    launch(grid, 1, LANES, [&] {{
        quantize_activations<{type}>(
            x, w, given, codes, scales, m, k, pitch, normalizes, norm_eps, eps, lowest, highest, away);
    }});
}}
extern "C" void normalize_{dtype}(unsigned grid, const {type}* x, const float* w, float* y, long long m, long long k,
                                  double eps) {{
    launch(grid, 1, LANES, [&] {{ normalize_tokens<{type}>(x, w, y, m, k, eps); }});
}}
"""
TRITS = """
extern "C" void trits(unsigned grid, const unsigned char* codes, const float* scale, signed char* trits, float* scales,
                      long long size, long long rows, int shared) {
    launch(grid, 1, DECODE_THREADS, [&] { decode_trits(codes, scale, trits, scales, size, rows, shared); });
}
extern "C" void groups(unsigned grid, const signed char* a, const unsigned char* codes, const float* token_scale,
                       const float* scale, const void* bias, float* y, long long m, long long n, long long k,
                       long long pitch, long long group, int shared, int kind) {
    launch(grid, 1, GROUP_THREADS, [&] {
        multiply_groups(a, codes, token_scale, scale, bias, y, m, n, k, pitch, group, shared, kind);
    });
}
"""


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


@functools.cache
def of_activations():
    entries = "".join(ENTRIES.format(dtype=dtype, type=type) for dtype, type in CXX_TYPES.items())
    return host.build('#include "grid.h"\n' + source(activations._TEMPLATES["quantize_activations"]) + entries)


@functools.cache
def of_weights():
    return host.build('#include "grid.h"\n' + source(ternary._TEMPLATES[0]) + TRITS)


def pointer(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def long(number):
    return ctypes.c_longlong(number)


def quantized(x, rule, norm, pitch):
    """Codes [M, pitch] and scales by the kernels, as the host launches them."""
    tokens, depth = x.shape
    built, dtype = of_activations(), x.dtype.name
    each = rule.granularity == "token"
    codes, scales = np.full((tokens, pitch), 7, np.int8), np.zeros(tokens if each else 1, np.float32)
    weight = None if norm is None else norm.weight
    before = int(norm is not None), ctypes.c_double(0.0 if norm is None else norm.eps)
    given, blocks = None, 1
    if not each:
        largest = np.zeros(tokens, np.float32)
        getattr(built, f"largest_{dtype}")(
            blocks, pointer(x), pointer(weight), pointer(largest), long(tokens), long(depth), *before
        )
        given = largest.view(np.int32).max(keepdims=True)
    lengths = long(tokens), long(depth), long(pitch)
    getattr(built, f"quantize_{dtype}")(
        blocks, pointer(x), pointer(weight), pointer(given), pointer(codes), pointer(scales), *lengths, *before,
        ctypes.c_float(rule.single_eps), rule.lowest, rule.highest, int(rule.rounding == "away"),
    )  # fmt: skip
    return codes, scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "special", "extreme", "subnormal", "huge", "zeros"])
def test_activations(kind, dtype):
    tokens, depth, pitch = 2, 300, 384
    x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
    g = make("normal", depth, np.dtype("float32"), 7)
    for rule, norm in (
        (activations.Rule(), None),
        (activations.Rule(), activations.Norm(g, 0.0)),
        (activations.Rule(4, "tensor", "away", -127), activations.Norm(None, 1e-6)),
        (activations.Rule(8, "token", "away", -128, 0), None),
        (activations.Rule(8, "tensor", "even", -128, 1e-42), None),
    ):
        wanted = activations.quantize(x, rule, norm)
        codes, scales = quantized(x, rule, norm, pitch)
        assert np.array_equal(codes[:, :depth], wanted[0]) and not codes[:, depth:].any(), (rule, norm)
        assert scales.tobytes() == wanted[1].tobytes(), (rule, norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["wide", "special", "extreme", "subnormal", "zeros"])
def test_rms_norm(kind, dtype):
    tokens, depth = 3, 521
    x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
    for weight in (None, make("extreme", depth, np.dtype("float32"), 7)):
        wanted, found = np.empty((2, tokens, depth), np.float32)
        activations.normalize(x, activations.Norm(weight, 1e-12), wanted)
        getattr(of_activations(), f"normalize_{dtype.name}")(
            2, pointer(x), pointer(weight), pointer(found), long(tokens), long(depth), ctypes.c_double(1e-12)
        )
        assert same_values(found, wanted)


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (5, 128), (9, 1031)], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_trits(shape, offset):
    """Every code, planes that begin anywhere, nothing beside the end."""
    rng = np.random.default_rng([offset, *shape])
    size, (rows, _) = int(np.prod(shape)), shape
    codes = rng.integers(0, 256, offset + 32 * -(-size // 128), np.uint8)[offset:]
    trits = np.full(size + 64, 7, np.int8)
    for shared in (0, 1):
        scale, scales = rng.random(1 if shared else rows).astype(np.float32), np.zeros(rows + 1, np.float32)
        of_weights().trits(
            2, pointer(codes), pointer(scale), pointer(trits), pointer(scales), long(size), long(rows), shared
        )
        assert np.array_equal(trits[:size], kb.formats.ternary.unpack(codes)[:size]) and (trits[size:] == 7).all()
        assert (scales[:rows] == scale).all() and scales[rows] == 0


@pytest.mark.parametrize(("depth", "group"), [(64, 32), (100, 7), (2600, 64), (130, 129)])
def test_groups(depth, group):
    rng = np.random.default_rng([depth, group])
    tokens, rows = 3, 5
    a = rng.integers(-128, 128, (tokens, depth)).astype(np.int8)
    t = rng.integers(-1, 2, (rows, depth)).astype(np.int8)
    scale = np.exp2(rng.uniform(-140, 20, (rows, -(-depth // group)))).astype(np.float32)
    q = kb.bitnet.from_trits(t, scale, granularity=("group", group))
    for shared, kind in ((1, None), (0, "float32"), (0, "float16"), (0, "bfloat16")):
        token_scale = rng.random(1 if shared else tokens).astype(np.float32)
        bias = None if kind is None else make("normal", rows, next(d for d in DTYPES if d == kind))
        wanted, found = np.empty((2, tokens, rows), np.float32)
        ternary._multiply_host(a, token_scale, q, q.format.trits(q.shape), bias, wanted)
        lengths = map(long, (tokens, rows, depth, depth, group))
        number = 0 if kind is None else ternary._BIASES[kind]
        arrays = map(pointer, (a, q.planes["codes"], token_scale, q.planes["scale"], bias, found))
        of_weights().groups(2, *arrays, *lengths, shared, number)
        assert same_values(found, wanted)
