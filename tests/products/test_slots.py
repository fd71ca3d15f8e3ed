"""How slots of experts are combined: the kernels in a grid of host threads, and products of experts on a GPU.

Class `TestSmall` is what compute-sanitizer runs.
"""

import ctypes
import functools
import itertools
import os

import numpy as np
import pytest
from host import compiled as host
from inputs import BFLOAT16, DTYPES, make, same_values
from test_integers import on_device, random_weight

import kbitcupy as kb
from kbitcupy.backend.compile import source
from kbitcupy.products.experts import ROUNDED, combined, combining
from kbitcupy.products.small_batch import declared_template

SINGLE, DOUBLE = np.dtype("float32"), np.dtype("float64")
HOST_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
ENTRIES = """
extern "C" void rounded_{dtype}(unsigned grid, const float* products, const float* weights, {type}* y,
                                const void* ids, long long size, int slots, int n, int experts, int id_bytes) {{
    launch(grid, 1, 256, [&] {{
        combine_rounded_slots<{type}>(products, weights, y, ids, size, slots, n, experts, id_bytes);
    }});
}}
extern "C" void summed_{dtype}(unsigned grid, const float* products, const float* weights, {type}* y, long long size,
                               int slots, int n) {{
    launch(grid, 1, 256, [&] {{ combine_slots<{type}>(products, weights, y, size, slots, n); }});
}}
"""
#: Tokens, slots and N: one of each, thread blocks that are full and not, more slots than a loop is unrolled for.
SHAPES = [(1, 1, 1), (3, 2, 85), (2, 8, 256), (5, 9, 300)]
KINDS = ["normal", "extreme", "subnormal", "special", "zeros"]


IDS = ["int32", "int64"]


def problem(rng, tokens, slots, n, kind, ids_dtype="int64", experts=4):
    """float32 products, NaN where there is no expert, weights and ids."""
    products = make(kind, tokens * slots * n, SINGLE, int(rng.integers(99))).reshape(tokens, slots, n)
    weights = make(str(rng.choice(KINDS)), tokens * slots, SINGLE, int(rng.integers(99))).reshape(tokens, slots)
    ids = rng.integers(-1, experts + 1, (tokens, slots)).astype(ids_dtype)
    far = [-(2**40), 2**32, 1 - 2**32] if ids.dtype == np.int64 else [2**30]
    ids[rng.random(ids.shape) < 0.1] = rng.choice([*far, np.iinfo(ids.dtype).min, np.iinfo(ids.dtype).max])
    products[(ids < 0) | (ids >= experts)] = np.nan
    return products, weights, ids


def reference(products, weights, ids, dtype, experts=4):
    """By NumPy's operations, in float32, and one rounding; None for ids: all count."""
    if ids is not None:
        products = np.where(((ids >= 0) & (ids < experts))[..., None], products, np.float32(0))
    with np.errstate(all="ignore"):
        return (products if weights is None else combined(products, weights)).astype(dtype)


def same_bits(a, b):
    """The same numbers, signs of zeros included; any NaN equal to any NaN."""
    signs = [np.signbit(y.astype(np.float32)) & (y == 0) for y in (a, b)]
    return a.dtype == b.dtype and same_values(a, b) and bool((signs[0] == signs[1]).all())


# ---- the kernels on the host -----------------------------------------------------------------------------------------


@functools.cache
def kernels():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    entries = "".join(ENTRIES.format(dtype=dtype, type=type) for dtype, type in HOST_TYPES.items())
    return host.build('#include "grid.h"\n' + source(declared_template(ROUNDED)) + entries)


def pointer(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def on_host(name, products, weights, dtype, *ids):
    """Results of a kernel, [tokens, N], or of products without weights."""
    tokens, slots, n = products.shape
    y = np.zeros((tokens, n) if weights is not None else products.shape, dtype)
    arguments = *map(pointer, (products, weights, y, *ids)), ctypes.c_longlong(y.size)
    numbers = slots if weights is not None else 1, n, *((4, 0 if ids[0] is None else ids[0].itemsize) if ids else ())
    getattr(kernels(), f"{name}_{dtype.name}")(-(-y.size // 256), *arguments, *numbers)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_slots_on_the_host(kind, dtype):
    """NumPy's bits, where kernels flush; products of no expert count as zero, and are not read."""
    rng = np.random.default_rng([dtype.itemsize, KINDS.index(kind)])
    for shape, ids_dtype in itertools.product(SHAPES, IDS):
        products, weights, ids = problem(rng, *shape, kind, ids_dtype)
        for given, of in ((weights, ids), (None, ids), (np.abs(weights), ids)):
            y = on_host("rounded", products, given, dtype, of)
            assert same_bits(y, reference(products, given, of, dtype)), (shape, given is None)
        assert same_bits(on_host("rounded", products, weights, dtype, None), reference(products, weights, None, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_summed_slots_on_the_host(dtype):
    """Each sum within a rounding of the exact one of its two terms."""
    rng = np.random.default_rng(dtype.itemsize)
    for tokens, slots, n in SHAPES:
        products = rng.standard_normal((tokens, slots, n)).astype(np.float32)
        weights = rng.standard_normal((tokens, slots)).astype(np.float32)
        y = on_host("summed", products, weights, dtype).astype(np.float64)
        terms = products.astype(np.float64) * weights[..., None]
        rounding = {2: 2.0**-8 if dtype == BFLOAT16 else 2.0**-11, 4: 0.0}[dtype.itemsize]
        exact, size = terms.sum(1), np.abs(terms).sum(1)
        assert (np.abs(y - exact) <= rounding * np.abs(exact) + slots * 2.0**-24 * size + 2.0**-25).all()


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def combined_on_gpu(cupy, products, weights, dtype, ids):
    """Results of the kernel, as `on_host`."""
    tokens, slots, n = products.shape
    shape = (tokens, n) if weights is not None else products.shape
    y = cupy.full(shape, 7, dtype)
    about = (tokens, slots) if weights is not None else (tokens * slots, 1)
    id_bytes = 0 if ids is None else ids.itemsize
    plan = combining(ROUNDED, kb.backend.compile.CXX_TYPES[dtype.name], *about, n, 4, 0, id_bytes)
    given = [None if array is None else cupy.asarray(array) for array in (products, weights, ids)]
    at = [0 if array is None else array.data.ptr for array in given]
    plan.start(at[0], at[1], y.data.ptr, at[2])
    return y.get()


def stacked(cupy, text, rows, depth, experts=4):
    """Experts of a format, on the host and on the GPU."""
    members = [random_weight(text, rows, depth, seed) for seed in range(experts)]
    return kb.stack(members), kb.stack([on_device(cupy, q) for q in members])


def check_slots(cupy, rng, text, preset, dtype, tokens, slots, rows, depth, own, route=None, ids_dtype="int64"):
    """Slots are combined as NumPy combines the products of the same tokens in float32, to the bit."""
    qs, on = stacked(cupy, text, rows, depth)
    kind = "normal" if dtype == DOUBLE else str(rng.choice(["normal", "special"]))
    shape = (tokens, slots, depth) if own else (tokens, depth)
    x = make(kind, int(np.prod(shape)), SINGLE if dtype == DOUBLE else dtype, 3).astype(dtype).reshape(shape)
    _, weights, ids = problem(rng, tokens, slots, 1, "normal", ids_dtype)
    given, chosen, of_slots = cupy.asarray(x), cupy.asarray(ids), cupy.asarray(weights)
    if route is not None:
        assert kb.explain(given, on, activations=preset, expert_ids=ids).route == route
    with np.errstate(all="ignore"):
        single = cupy.asarray(x.astype(np.float32))
    products = kb.linear_grouped(single, on, chosen, activations=preset).get()
    outside = (ids < 0) | (ids >= len(qs))
    assert not products[outside].any() and not np.signbit(products[outside]).any()
    y = kb.linear_grouped(given, on, chosen, activations=preset).get()
    assert same_bits(y, reference(products, None, ids, dtype))
    for of in (of_slots, cupy.asfortranarray(of_slots)):
        y = kb.linear_grouped(given, on, cupy.asfortranarray(chosen), of, activations=preset).get()
        assert same_bits(y, reference(products, weights, ids, dtype)), (text, preset, tokens, slots, own)
    if route == "integer_experts" or preset == "bitnet":
        assert same_values(y, kb.linear_grouped(x, qs, ids, weights, activations=preset))


#: Weights, activations and the route that takes them: products in place, the plain kernel, ternary codes.
WAYS = [
    ("q4_0", "q8_1", "integer_experts_stream"),
    ("q4_k", "q8_1", "integer_experts_stream"),
    ("int4:block=128", "int8", "integer_experts_stream"),
    ("int8:granularity=tensor", "int8", "integer_experts"),
    ("uint8:block=40", "q8_1", "integer_experts"),
    ("ternary:block=64", "bitnet", "integer_experts"),
    ("ternary", "bitnet", "ternary_slots"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, DOUBLE], ids=str)
@pytest.mark.parametrize(("text", "preset", "route"), WAYS, ids=lambda value: value if isinstance(value, str) else None)
def test_slots_of_experts(cupy, text, preset, route, dtype):
    """One slot and many, few tokens and so many that ternary products are sorted; rows of x that slots share or not."""
    rng = np.random.default_rng([dtype.itemsize, len(text)])
    way = None if dtype == DOUBLE and preset == "bitnet" else route
    for tokens, slots, rows in ((1, 1, 640), (3, 9, 70), (33, 8, 130)):
        for own, ids_dtype in itertools.product((False, True), IDS):
            check_slots(cupy, rng, text, preset, dtype, tokens, slots, rows, 1280, own, way, ids_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["float16", BFLOAT16, "float64"], ids=str)
@pytest.mark.parametrize("ids_dtype", ["int32", "uint8", "uint64"])
@pytest.mark.parametrize(("text", "preset"), [("q4_0", "q8_1"), ("ternary", "bitnet")])
def test_other_weights_and_ids(cupy, text, preset, ids_dtype, given):
    """Weights become float32 first, as NumPy rounds them, subnormal numbers kept; ids are of any dtype of integers."""
    _, on = stacked(cupy, text, 40, 256)
    rng = np.random.default_rng(1)
    for tokens in (7, 70):
        x = cupy.asarray(make("normal", tokens * 256, SINGLE).reshape(tokens, 256))
        ids = rng.integers(0, 6, (tokens, 3)).astype(ids_dtype)
        weights = make("subnormal", tokens * 3, SINGLE).astype(given).reshape(tokens, 3)
        products = kb.linear_grouped(x, on, cupy.asarray(ids), activations=preset).get()
        y = kb.linear_grouped(x, on, cupy.asarray(ids), cupy.asarray(weights), activations=preset).get()
        assert same_bits(y, reference(products, weights.astype(np.float32), ids.astype(np.int64), SINGLE))


def test_rows_of_no_elements(xp):
    """Their products are zero, and with weights zero times these."""
    q = kb.bitnet.from_trits(xp.zeros((3, 0), np.int8))
    weights = np.float32([[1, -1], [np.inf, 1], [-2, -3]])
    ids = xp.asarray([[0, 1], [1, 0], [-1, 5]])
    for preset in ("int8", "bitnet"):
        for dtype in (*DTYPES, DOUBLE):
            x, qs = xp.zeros((3, 0), dtype), kb.stack([q, q])
            y = kb.linear_grouped(x, qs, ids, activations=preset)
            assert y.shape == (3, 2, 3) and not kb.backend.xp.to_device(y, "cpu").any()
            y = kb.backend.xp.to_device(kb.linear_grouped(x, qs, ids, xp.asarray(weights), activations=preset), "cpu")
            assert same_bits(y, reference(np.zeros((3, 2, 3), np.float32), weights, None, np.dtype(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["int8", "q8_1", "bitnet"])
def test_no_tokens_and_no_slots(cupy, preset):
    _, on = stacked(cupy, "ternary:block=64", 40, 256)
    for tokens, slots in ((0, 2), (3, 0)):
        x, ids = cupy.ones((tokens, 256), np.float16), cupy.zeros((tokens, slots), np.int64)
        assert kb.linear_grouped(x, on, ids, activations=preset).shape == (tokens, slots, 40)
        y = kb.linear_grouped(x, on, ids, cupy.ones((tokens, slots), np.float32), activations=preset)
        assert y.shape == (tokens, 40) and not y.get().any()


class TestSmall:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rounded_slots(self, cupy, dtype):
        """Any numbers, by the kernel alone."""
        rng = np.random.default_rng(dtype.itemsize)
        for shape in SHAPES:
            for kind in KINDS:
                products, weights, ids = problem(rng, *shape, kind)
                _, _, narrow = problem(rng, *shape, kind, "int32")
                for of, chosen in ((weights, ids), (None, ids), (weights, narrow), (weights, None)):
                    y = combined_on_gpu(cupy, products, of, dtype, chosen)
                    assert same_bits(y, reference(products, of, chosen, dtype)), (shape, kind)

    @pytest.mark.parametrize(
        ("text", "preset", "route"), WAYS, ids=lambda value: value if isinstance(value, str) else None
    )
    def test_slots(self, cupy, text, preset, route):
        rng = np.random.default_rng(len(text))
        for own, ids_dtype in ((False, "int64"), (True, "int32")):
            check_slots(cupy, rng, text, preset, DTYPES[0], 3, 3, 40, 1280, own, route, ids_dtype)
