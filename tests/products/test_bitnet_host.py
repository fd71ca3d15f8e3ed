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
from kbitcupy.products import activations, int8, ternary, ternary_stream

CXX_TYPES = {"float16": "Half", "bfloat16": "Brain", "float32": "float"}
ENTRIES = """
extern "C" void largest_{dtype}(unsigned grid, const {type}* x, const float* w, float* largest, long long m,
                                long long k, int normalizes, double eps) {{
    launch(grid, 1, LANES, [&] {{ largest_of_tokens<{type}>(x, w, largest, m, k, normalizes, eps); }});
}}
extern "C" void quantize_{dtype}(unsigned grid, unsigned threads, int vector, const {type}* x, const float* w,
                                 const unsigned* given,
                                 signed char* codes, float* scales, int* sums, long long m, long long k,
                                 long long pitch, int groups, int group, int normalizes, double norm_share,
                                 double norm_eps, float eps,
                                 int lowest, int highest, int away) {{
    const auto call = [&](auto kernel) {{
        launch(grid, 1, threads, [&] {{
            kernel(x, w, given, codes, scales, sums, m, k, pitch, groups, group, normalizes, norm_share, norm_eps, eps,
                   lowest, highest, away);
        }});
    }};
    if (vector) call(quantize_activations<{type}, true>);
    else call(quantize_activations<{type}, false>);
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


STREAMS = """
extern "C" void arrange(unsigned grid, const signed char* rows, unsigned char* a, int* sums, int groups,
                        int group, int k, int pitch) {
    launch(grid, 1, ARRANGE_THREADS, [&] { arrange_tokens(rows, a, sums, groups, group, k, pitch, 0); });
}
#define STREAM(TOKENS)                                                                                             \\
    extern "C" void stream_##TOKENS(                                                                               \\
        unsigned grid, unsigned threads, const unsigned char* codes, const unsigned char* a, const int* sums,      \\
        const float* token_scale, const float* scale, const void* bias, float* y, long long n, int m, int k,       \\
        int token_step, int scale_step, int staged, int kind) {                                                    \\
        launch(grid, 1, threads, [&] {                                                                             \\
            stream_ternary<float, TOKENS, Integers>(                                                               \\
                codes, a, sums, token_scale, scale, bias, y, n, m, k, token_step, scale_step, staged, kind);       \\
        });                                                                                                        \\
    }
STREAM(8)
STREAM(16)
#define GROUPS(SIZE)                                                                                               \\
    extern "C" void groups_##SIZE(                                                                                 \\
        unsigned width, unsigned height, const unsigned char* codes, const unsigned char* a, const int* sums,      \\
        const float* token_scale, const float* scale, const void* bias, float* y, long long n, long long m, int k, \\
        int token_step, int kind) {                                                                                \\
        launch(width, height, GROUP_THREADS, [&] {                                                                 \\
            stream_ternary_groups<float, SIZE>(                                                                    \\
                codes, a, sums, token_scale, scale, bias, y, n, m, k, token_step, kind);                           \\
        });                                                                                                        \\
    }
GROUPS(32)
GROUPS(64)
GROUPS(128)
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


@functools.cache
def of_streams():
    return host.build('#include "grid.h"\n' + source(ternary_stream._STREAM) + STREAMS)


def pointer(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def long(number):
    return ctypes.c_longlong(number)


def quantized(x, rule, norm, pitch, groups=0, group=0):
    """Codes [M, pitch], or fragments, scales and sums by the kernels, as the host launches them."""
    tokens, depth = x.shape
    built, dtype = of_activations(), x.dtype.name
    each = rule.granularity == "token"
    codes, scales = np.full((tokens, pitch), 7, np.int8), np.zeros(tokens if each else 1, np.float32)
    if groups:
        codes = np.full(-(-depth // 256) * groups * 2048, 7, np.int8)
    sums = np.zeros((-(-depth // group), 8 * groups) if group else tokens, np.int32)
    weight = None if norm is None else norm.weight
    before = int(norm is not None), ctypes.c_double(0.0 if norm is None else norm.eps)
    given, blocks = None, 1
    if not each:
        largest = np.zeros(tokens, np.float32)
        getattr(built, f"largest_{dtype}")(
            blocks, pointer(x), pointer(weight), pointer(largest), long(tokens), long(depth), *before
        )
        given = largest.view(np.int32).max(keepdims=True)
    lengths = long(tokens), long(depth), long(pitch), groups, group
    arrays = map(pointer, (x, weight, given, codes, scales, sums))
    aligned = not any(a is not None and a.ctypes.data % 16 for a in (x, weight))
    vector = int(aligned and depth % 8 == 0 and pitch % 8 == 0)
    call = getattr(built, f"quantize_{dtype}")
    numbers = ctypes.c_float(rule.single_eps), *rule.numbers[1:]
    share = ctypes.c_double(1 / depth)
    call(blocks, activations._threads(depth), vector, *arrays, *lengths, before[0], share, before[1], *numbers)
    return codes, scales, sums


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
        codes, scales, sums = quantized(x, rule, norm, pitch)
        assert np.array_equal(codes[:, :depth], wanted[0]) and not codes[:, depth:].any(), (rule, norm)
        assert scales.tobytes() == wanted[1].tobytes(), (rule, norm)
        assert np.array_equal(sums, wanted[0].sum(1, dtype=np.int32))


def fragments(codes, groups, group=0):
    """The orders of kernels/linear/fragments.cuh, of [8 tokens, token, 256 k]; what is nothing stays 7."""
    tokens, depth = codes.shape
    wide = np.full((groups * 8, -(-depth // 256) * 256), 7, np.int8)
    wide[:tokens, :depth] = codes
    if group:  # [128 k, field / 2, field % 2, t, 8] to [128 k, field / 2, groups, token, t, field % 2, 8]
        return wide.reshape(groups, 8, -1, 2, 2, 4, 8).transpose(2, 3, 0, 1, 5, 4, 6).reshape(-1)
    # [256 k, t / 2, field, t % 2, 16] to [256 k, field, groups, token, t, 16]
    return wide.reshape(groups, 8, -1, 2, 4, 2, 16).transpose(2, 4, 0, 1, 3, 5, 6).reshape(-1)


@pytest.mark.parametrize(("tokens", "depth", "groups"), [(1, 128, 1), (3, 640, 1), (11, 384, 2)])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_fragments(tokens, depth, groups, group):
    x = make("normal", tokens * depth, np.dtype("float32")).reshape(tokens, depth)
    wanted, _ = activations.quantize(x, activations.Rule())
    expected = group_sums(wanted, groups, group) if group else wanted.sum(1, dtype=np.int32)
    codes, _, sums = quantized(x, activations.Rule(), None, depth, groups, group)
    assert np.array_equal(codes, fragments(wanted, groups, group)) and np.array_equal(sums, expected)
    codes[:], sums[:] = 7, 0
    of_streams().arrange(tokens, pointer(wanted), pointer(codes), pointer(sums), groups, group, depth, depth)
    assert np.array_equal(codes, fragments(wanted, groups, group)) and np.array_equal(sums, expected)


def group_sums(codes, groups, group):
    """int32[K / group, 8 groups], of tokens that are nothing 0."""
    tokens, depth = codes.shape
    sums = np.zeros((depth // group, groups * 8), np.int32)
    sums[:, :tokens] = codes.reshape(tokens, -1, group).sum(2, dtype=np.int32).T
    return sums


def test_tokens_longer_than_the_room():
    """What is beyond it is read again."""
    depth = activations.SIZES.ROOM + 300
    x = make("extreme", 2 * depth, np.dtype("float16")).reshape(2, depth)
    norm = activations.Norm(make("normal", depth, np.dtype("float32"), 7), 1e-5)
    for given in (None, norm):
        wanted = activations.quantize(x, activations.Rule(), given)
        codes, scales, _ = quantized(x, activations.Rule(), given, depth)
        assert np.array_equal(codes, wanted[0]) and scales.tobytes() == wanted[1].tobytes()


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
        number = 0 if kind is None else int8.bias_kind(bias.dtype)
        arrays = map(pointer, (a, q.planes["codes"], token_scale, q.planes["scale"], bias, found))
        of_weights().groups(2, *arrays, *lengths, shared, number)
        assert same_values(found, wanted)


@pytest.mark.parametrize(("tokens", "rows", "depth", "warps"), [(1, 40, 128, 4), (3, 16, 384, 4), (8, 33, 1280, 5)])
@pytest.mark.parametrize("shared", [0, 1])
def test_streams(tokens, rows, depth, warps, shared):
    """Codes in place, on the host's mma, every code: rows of thread blocks that follow each other, steps of none."""
    rng = np.random.default_rng([tokens, rows, depth, shared])
    a = rng.integers(-128, 128, (tokens, depth)).astype(np.int8)
    t = rng.integers(-1, 2, (rows, depth)).astype(np.int8)
    q = kb.bitnet.from_trits(t, np.exp2(rng.uniform(-140, 20, 1 if shared else rows)).astype(np.float32),
                             granularity="tensor" if shared else ("channel", 0))  # fmt: skip
    q.planes["codes"][:] = rng.integers(0, 256, q.planes["codes"].shape)
    token_scale = rng.random(1 if shared else tokens).astype(np.float32)
    sums = a.sum(1, dtype=np.int32)
    for held, kind in ((8, None), (8, "float32"), (16, "bfloat16")):
        bias = None if kind is None else make("normal", rows, next(d for d in DTYPES if d == kind))
        wanted, found = np.zeros((2, tokens, rows), np.float32)
        ternary._multiply_host(a, token_scale, q, q.format.trits(q.shape), bias, wanted)
        number = 0 if kind is None else int8.bias_kind(bias.dtype)
        operands = fragments(a, held // 8)
        arrays = map(pointer, (q.planes["codes"], operands, sums, token_scale, q.planes["scale"], bias, found))
        lengths = long(rows), tokens, depth, 1 - shared, 1 - shared
        given = list(arrays)
        for staged in (0, 1):
            found[:] = 7
            getattr(of_streams(), f"stream_{held}")(2, 32 * warps, *given, *lengths, staged, number)
            assert same_values(found, wanted), staged


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(1, 17, 128), (9, 33, 2432)])
def test_streams_of_groups(tokens, rows, depth, group):
    """The same with terms that are added in order, over several turns."""
    rng = np.random.default_rng([tokens, rows, depth, group])
    a = rng.integers(-128, 128, (tokens, depth)).astype(np.int8)
    t = rng.integers(-1, 2, (rows, depth)).astype(np.int8)
    scale = np.exp2(rng.uniform(-140, 20, (rows, depth // group))).astype(np.float32)
    q = kb.bitnet.from_trits(t, scale, granularity=("group", group))
    q.planes["codes"][:] = rng.integers(0, 256, q.planes["codes"].shape)
    operands = fragments(a, -(-tokens // 8), 1)
    for shared, kind in ((1, None), (0, "float32")):
        token_scale = rng.random(1 if shared else tokens).astype(np.float32)
        bias = None if kind is None else make("normal", rows, np.dtype(kind))
        wanted, found = np.zeros((2, tokens, rows), np.float32)
        ternary._multiply_host(a, token_scale, q, q.format.trits(q.shape), bias, wanted)
        whole = np.zeros((-(-depth // 256) * 256 // group, 8 * -(-tokens // 8)), np.int32)
        whole[: depth // group] = group_sums(a, -(-tokens // 8), group)
        arrays = map(pointer, (q.planes["codes"], operands, whole, token_scale, q.planes["scale"], bias, found))
        lengths = long(rows), long(tokens), depth, 1 - shared, 0 if kind is None else int8.bias_kind(bias.dtype)
        getattr(of_streams(), f"groups_{group}")(2, -(-tokens // 8), *arrays, *lengths)
        assert same_values(found, wanted)


def test_warps():
    assert all(4 <= ternary_stream._warps(pairs, most) <= most for pairs in range(1, 300) for most in (6, 8))
    assert [ternary_stream._warps(pairs, 8) for pairs in (8, 16, 5, 14, 28)] == [8, 8, 5, 7, 7]
