"""Captured calls: what they allocate belongs to the graph, which writes to it at every launch."""

import numpy as np
import pytest

import kbitcupy as kb

SHAPE = (256, 4096)


def numbers(cupy, shape, dtype=np.float16, seed=0):
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype))


def quantizes(format, dtype=np.float16):
    def prepare(cupy):
        x, q = numbers(cupy, SHAPE, dtype), kb.quantize(numbers(cupy, SHAPE, dtype), format)
        return lambda: kb.quantize(x, format, out=q).dequantize()

    return prepare


def decodes(format, dtype):
    def prepare(cupy):
        q = kb.quantize(numbers(cupy, SHAPE), format)
        out = cupy.zeros(SHAPE, dtype)
        return lambda: kb.dequantize(q, out=out)

    return prepare


def multiplies(format, tokens, shape=SHAPE, dtype=np.float16):
    def prepare(cupy):
        q = kb.quantize(numbers(cupy, shape), format)
        x, bias = numbers(cupy, (tokens, shape[1]), dtype), numbers(cupy, shape[:1], np.float64)
        out = cupy.zeros((tokens, shape[0]), dtype)
        return lambda: kb.linear(x, q, bias, out=out)

    return prepare


def chooses(cupy):
    qs = kb.stack([kb.quantize(numbers(cupy, SHAPE, seed=i), "kbit4") for i in range(3)])
    x, weights = numbers(cupy, (20, SHAPE[1])), numbers(cupy, (20, 2), np.float64)
    ids = cupy.asarray(np.random.default_rng(0).integers(0, 3, (20, 2), np.int16))
    out = cupy.zeros((20, SHAPE[0]), np.float16)
    return lambda: kb.linear_grouped(x, qs, ids, weights, out=out)


def multiplies_integers(cupy):
    q = kb.quantize(numbers(cupy, SHAPE), kb.get_format("int8", granularity=("channel", 0)))
    x, out = numbers(cupy, (20, SHAPE[1])), cupy.zeros((20, SHAPE[0]), np.float16)
    return lambda: kb.affine.linear_w8a8(x, q, out=out)


def multiplies_trits(of_scales, **options):
    def prepare(cupy):
        q = kb.quantize(numbers(cupy, SHAPE), kb.get_format("ternary", granularity=of_scales))
        x, out = numbers(cupy, (20, SHAPE[1])), cupy.zeros((20, SHAPE[0]), np.float16)
        return lambda: kb.bitnet.linear(x, q, out=out, **options)

    return prepare


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(quantizes("kbit4"), id="quantize kbit4"),
        pytest.param(quantizes("kbit3", np.float64), id="quantize kbit3 float64"),
        pytest.param(quantizes("nf4"), id="quantize nf4"),
        pytest.param(quantizes(kb.get_format("nf4", double_quant=True)), id="quantize nested nf4"),
        pytest.param(quantizes(kb.get_format("int4", symmetric=False, granularity="token")), id="quantize int4"),
        pytest.param(quantizes(kb.get_format("uint4:block=32,zero=float")), id="quantize with offsets"),
        pytest.param(
            quantizes(kb.get_format("int4:block=32,scale_dtype=float16")), id="quantize with scales of 16 bits"
        ),
        pytest.param(decodes("int4:block=32,zero=float,scale_dtype=float16", np.float32), id="dequantize offsets"),
        pytest.param(decodes("kbit4", np.float64), id="dequantize to float64"),
        pytest.param(multiplies("kbit4", 1), id="linear, one token"),
        pytest.param(multiplies("kbit4", 8, (64, 8192)), id="linear, shared k"),
        pytest.param(multiplies("nf4", 40), id="linear, tiles"),
        pytest.param(multiplies("kbit8", 40), id="linear, decoded"),
        pytest.param(multiplies("kbit8", 40, dtype=np.float32), id="linear, float32"),
        pytest.param(chooses, id="linear_grouped"),
        pytest.param(multiplies_integers, id="linear_w8a8"),
        pytest.param(multiplies_trits("tensor"), id="bitnet.linear"),
        pytest.param(multiplies_trits(("group", 64), norm=True, granularity="tensor"), id="bitnet.linear, groups"),
    ],
)
def test_captured_calls_keep_what_they_allocate(cupy, prepare):
    call = prepare(cupy)
    wanted = call().copy()
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        assert pool.free_bytes() == 0, "memory of the graph is free for others"
        others = [cupy.full(size, 7, np.uint8) for size in (512, 1 << 20, 1 << 24)]
        stream.synchronize()
        for _ in range(2):
            result.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert bool((result == wanted).all())
        assert all(bool((other == 7).all()) for other in others)
