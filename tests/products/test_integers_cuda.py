"""Products for few tokens with integers: int4 to uint8 with scales of groups and rows, q8_0, q4_0 and q4_k."""

import numpy as np
import pytest
from inputs import BFLOAT16
from test_linear import HALF, error, exact, host, numbers, reference, weight

import kbitcupy as kb
from kbitcupy.array import QuantizedArray
from kbitcupy.backend.xp import namespace
from kbitcupy.products.routes import Problem, device, stored
from kbitcupy.products.small_batch import MOST_TOKENS, SmallBatch

pytestmark = pytest.mark.gpu

ROUTE = SmallBatch()
FORMATS = [
    *(
        kb.get_format(name, block=block, symmetric=symmetric)
        for name in ("int4", "uint4", "int8", "uint8")
        for block, symmetric in ((32, True), (64, False), (128, False))
    ),
    kb.get_format("int4", block=32, symmetric=False),
    kb.get_format("uint8", block=32, symmetric=False),
    kb.get_format("uint4", block=128),
    kb.get_format("int4", block=256, symmetric=False),
    kb.get_format("int8", block=384),
    kb.get_format("int8", granularity="channel:0"),
    kb.get_format("uint4", granularity="token", symmetric=False),
    *(kb.get_format(name) for name in ("q4_0", "q8_0", "q4_k")),
    *(
        kb.get_format(name, block=block, zero="float")
        for name, block in (("uint4", 32), ("int4", 64), ("uint4", 128), ("int8", 64), ("uint8", 128))
    ),
    kb.get_format("uint4", granularity="channel:0", zero="float"),
    kb.get_format("uint4", block=128, zero="float", scale_dtype="bfloat16"),
    # Scales and zero points that are too narrow for asynchronous copies, and such beside wider ones.
    kb.get_format("uint4", block=128, zero="int", scale_dtype="float16", zero_dtype="uint8"),
    kb.get_format("int4", block=64, zero="int", scale_dtype="bfloat16", zero_dtype="int8"),
    *(kb.get_format("uint4", block=block, zero="int", scale_dtype="float16") for block in (32, 128)),
    kb.get_format("int8", granularity="channel:0", scale_dtype="bfloat16"),
]


def product(x, q, bias=None):
    """By ``linear_few``, whatever the plan would be."""
    problem = Problem(q.format, q.shape, len(x), x.dtype, device(0), True, stored(q))
    refusal = ROUTE.accepts(problem)
    assert refusal is None, refusal
    y = namespace(x).full((len(x), q.shape[0]), np.nan, x.dtype)
    ROUTE.prepare(problem)(x, q, bias, y)
    return y


def limit(y, wanted):
    """What rounding the sums alone does, and a little more: no weight is rounded on the way."""
    rounded = wanted.astype(y.dtype).astype(np.float64)
    return 1.15 * error(rounded, wanted) + 2.0**-20 * float(np.sqrt(np.mean(np.square(wanted))))


def check(y, x, q, bias=None):
    wanted = exact(x, q, bias)
    assert error(y, wanted) <= limit(y, wanted)


def depth(format, k):
    """The length of a row, whole blocks of them."""
    multiple = format.fragments().multiple or format.fragments().granule
    return -(-k // multiple) * multiple


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_edges(cupy, format, dtype):
    """Whole tiles and rows, odd ones, one group; groups of tokens that are full, and not; means of x far from 0."""
    for n, k in ((144, 1024), (37, 1), (33, 600)):
        q = weight((n, depth(format, k)), format, cupy)
        bias = numbers((n,), np.dtype("float32"), cupy)
        for m in (1, 2, 8, 9, 16, 17, 32):
            if m > MOST_TOKENS[format.fragments().wide]:
                continue
            x = numbers((m, q.shape[1]), dtype, cupy) + dtype.type(m % 2)
            check(product(x, q), x, q)
            check(product(x, q, bias), x, q, bias)


@pytest.mark.parametrize("format", FORMATS[::3], ids=repr)
def test_again(cupy, format):
    """The same bits every time, with all of the device busy."""
    q = weight((4096, 4096), format, cupy)
    for m in (1, 8, 16):
        x = numbers((m, 4096), HALF[0], cupy)
        first = product(x, q)
        assert all((product(x, q) == first).all() for _ in range(40))


def test_what_counts(cupy):
    """Scales that are no positive finite number are 0, and zero points stay within the codes, as where arrays are
    decoded."""
    rng = np.random.default_rng(0)
    for name, bits in (("int4", 4), ("uint4", 4), ("uint8", 8)):
        format = kb.get_format(name, block=128, symmetric=False)
        q = weight((48, 512), format, cupy)
        scale = rng.random(q.planes["scale"].size).astype(np.float32)
        scale[::7], scale[3::11], scale[5::13], scale[6::17] = np.nan, -1, np.inf, 0
        zero = rng.integers(-(2**bits), 2**bits + 9, scale.size).astype(np.int32)
        planes = {**q.planes, "scale": cupy.asarray(scale), "zero_point": cupy.asarray(zero)}
        odd = QuantizedArray(format, planes, q.shape, q.dtype)
        x = numbers((5, 512), HALF[0], cupy)
        check(product(x, odd), x, odd)


@pytest.mark.parametrize("format", ["q4_0", "q4_k"])
def test_any_bytes(cupy, format):
    """Blocks that nobody quantized: all codes and inner scales, scales of any sign."""
    rng = np.random.default_rng(0)
    q = weight((64, 1024), kb.get_format(format), cupy)
    planes = {
        name: cupy.asarray(
            rng.standard_normal(plane.size).astype(np.float16)
            if plane.dtype == np.float16
            else rng.integers(0, 256, plane.size).astype(np.uint8)
        )
        for name, plane in q.planes.items()
    }
    q = QuantizedArray(q.format, planes, q.shape, q.dtype)
    for dtype in HALF:
        x = numbers((7, 1024), dtype, cupy)
        check(product(x, q), x, q)


def test_planes_that_start_anywhere(cupy):
    """Where they start at no multiple of 16 bytes another route takes them, and the product is the same."""
    for format in ("uint4:block=128,symmetric=false", "q4_0", "q4_k"):
        q = weight((64, 512), kb.get_format(format), cupy)
        for away in (1, 4):
            planes = {}
            for name, plane in q.planes.items():
                room = cupy.zeros(plane.size + 16, plane.dtype)
                planes[name] = room[away : away + plane.size]
                planes[name][...] = plane
            moved = QuantizedArray(q.format, planes, q.shape, q.dtype)
            x = numbers((4, 512), HALF[0], cupy)
            assert np.allclose(host(kb.linear(x, moved)), host(kb.linear(x, q)), rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "format",
    [
        "uint4:block=128,symmetric=false",
        "int4:block=32",
        "int8:granularity=channel:0",
        "uint4:block=64,zero=float",
        "q4_0",
        "q8_0",
        "q4_k",
    ],
)
def test_experts(cupy, format, dtype):
    for n in (40, 64):
        qs = kb.stack([weight((n, 512), kb.get_format(format), cupy, seed=i, scale=10.0**-i) for i in range(5)])
        for tokens, slots in ((1, 2), (30, 2), (4, 5)):
            ids = np.random.default_rng(tokens).integers(-1, 6, (tokens, slots))
            x = numbers((tokens, 512), dtype, cupy)
            y = kb.linear_grouped(x, qs, cupy.asarray(ids))
            wanted = reference(x, qs.dequantize(dtype="float32"), ids, None)
            allowed = 2.0**-7 if dtype == BFLOAT16 else 2.0**-10
            assert error(y, wanted) <= allowed * np.sqrt(np.mean(np.square(wanted)))
