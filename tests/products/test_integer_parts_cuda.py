"""Tiles of integer codes that several thread blocks multiply together, each a part of k."""

import functools

import numpy as np
import pytest
from inputs import make, same_values
from test_integers import activations, on_device, random_weight
from test_integers_wide_cuda import check, hopper, only  # noqa: F401

import kbitcupy as kb
from kbitcupy.products import integer_tile
from kbitcupy.products.integer_tile import CUTS, multiply

pytestmark = pytest.mark.gpu

GROUPS, ROWS = "uint4:block=128,zero=int", "uint4:granularity=channel:0,zero=int"
SPECS = [GROUPS, "int8:block=128", ROWS, "int4:granularity=tensor"]


@pytest.fixture
def together(hopper, monkeypatch):  # noqa: F811
    """Whatever tiles there are, the last ones are multiplied together, in parts of one stage or more."""
    only(monkeypatch, CUTS[-1])
    monkeypatch.setattr(integer_tile, "_LEAST_PART", 1)
    monkeypatch.setattr(integer_tile, "_ADDING", -(10**6))
    monkeypatch.setattr(integer_tile, "plan", functools.lru_cache(integer_tile.plan.__wrapped__))
    return hopper


@pytest.mark.parametrize("text", SPECS)
def test_parts(together, text):
    """Parts of one stage, and of most of a tile's; some blocks without any; tiles of few tokens and rows."""
    shapes = [(65, 67, 256), (131, 261, 1120), (300, 1000, 2208), (1, 130, 4096), (257, 2600, 1024), (700, 5000, 384)]
    for number, (tokens, rows, depth) in enumerate(shapes):
        dtype = ("float16", "bfloat16", "float32")[number % 3]
        # In float32 a bias that is far beyond all terms is rounded more coarsely than the terms' magnitudes allow.
        bias = make("normal", rows, np.dtype("float32"), 7) if number in (1, 3) else None
        check(together, activations("normal", tokens, depth, dtype), random_weight(text, rows, depth), "int8", bias)


@pytest.mark.parametrize("text", [GROUPS, ROWS])
def test_parts_behind_whole_tiles(together, text):
    q = random_weight(text, 17500, 512)
    check(together, activations("normal", 140, 512, "float16"), q, "int8")


@pytest.mark.parametrize("text", [GROUPS, ROWS])
def test_tokens_that_are_int8(together, text):
    q = random_weight(text, 520, 1024)
    codes = kb.quantize(activations("normal", 270, 1024, "float32"), "int8", granularity="token")
    on, given, out = on_device(together, q), on_device(together, codes), together.empty((270, 520), np.float32)
    for _ in range(3):
        multiply(given, "int8", on, None, out)
    wanted = kb.linear(codes, q)
    if text == ROWS:
        assert same_values(out.get(), wanted)
    else:
        size = np.abs(kb.dequantize(codes)).astype(np.float64) @ np.abs(kb.dequantize(q)).astype(np.float64).T
        assert (np.abs(out.get().astype(np.float64) - wanted) <= 2.0**-20 * size).all()


@pytest.mark.parametrize("text", [GROUPS, ROWS])
def test_the_same_bits(together, text):
    """Every time, in a graph, of which each launch finds what the one before has left, and on two streams at once."""
    cupy = together
    on = on_device(cupy, random_weight(text, 3000, 2048))
    given = [cupy.asarray(activations("normal", 400, 2048, "float16"))]
    given.append(given[0][::-1].copy())
    wanted, outs = [], [cupy.empty((400, 3000), np.float16) for _ in given]
    for x, out in zip(given, outs, strict=True):
        multiply(x, "int8", on, None, out)
        wanted.append(out.copy())
    for _ in range(50):
        multiply(given[0], "int8", on, None, outs[0])
        assert (outs[0] == wanted[0]).all()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in given]
    cupy.cuda.Device().synchronize()
    graphs = []
    for stream, x, out in zip(streams, given, outs, strict=True):
        with stream:
            multiply(x, "int8", on, None, out)
            stream.begin_capture()
            for _ in range(3):
                multiply(x, "int8", on, None, out)
            graphs.append(stream.end_capture())
    for _ in range(20):
        for out in outs:
            out.fill(0)
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            for stream, graph in zip(streams, graphs, strict=True):
                graph.launch(stream)
        cupy.cuda.Device().synchronize()
        assert all((out == each).all() for out, each in zip(outs, wanted, strict=True))
    for _ in range(30):
        for stream, x, out in zip(streams, given, outs, strict=True):
            with stream:
                multiply(x, "int8", on, None, out)
    cupy.cuda.Device().synchronize()
    assert all((out == each).all() for out, each in zip(outs, wanted, strict=True))


class TestSmall:
    """What compute-sanitizer can take."""

    def test_parts(self, together):
        for text in (GROUPS, ROWS):
            check(together, activations("normal", 67, 1120, "float16"), random_weight(text, 133, 1120), "int8")
