"""Some tokens in "q8_1" times q4_0 and q4_k on Hopper, by `integer_units` and `spread_units`, whatever the plan
would take.

Class `TestSmall` is what compute-sanitizer runs.
"""

import numpy as np
import pytest
from inputs import BFLOAT16, make
from test_integers import activations, defined, on_device, random_weight

import kbitcupy as kb
from kbitcupy.products.integer_units import IntegerUnits, SpreadUnits, multiply

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32")]
TAKEN = ["q4_0", "q4_k"]
#: Whether all thread blocks have as many stages.
SPREAD = [False, True]


@pytest.fixture
def hopper(cupy):
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("it is for compute capability 9.0")
    return cupy


def check(cupy, x, q, spread, bias=None):
    """Within what the contract allows."""
    on, out = on_device(cupy, q), cupy.full((len(x), q.shape[0]), np.nan, x.dtype)
    multiply(cupy.asarray(x), on, None if bias is None else cupy.asarray(bias), out, spread)
    y = out.get()
    exactly, size = defined(x.astype(np.float32), q, "q8_1", bias)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(x.dtype.name, 0.0)
    assert (np.abs(y.astype(np.float64) - exactly) <= 2.0**-20 * size + 1.01 * rounding * np.abs(exactly)).all()


def depth_of(text, depth, spread):
    """Of q4_k K is a multiple of 2048, or of 1024, and of q4_0 one of 512, where stages are spread."""
    of = (1024 if text == "q4_k" else 512) if spread else 2048 if text == "q4_k" else 256
    return -(-depth // of) * of


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("text", TAKEN)
def test_unit_sums(hopper, text, spread):
    """Odd numbers of tokens and rows, rows that are no multiple of a thread block's, few and many stages: spread, rows
    of which a thread block has a part, all, or several times all.
    """
    cases = (64, 128, 256), (37, 303, 2048), (1, 140, 4864), (64, 260, 512), (48, 129, 8192)
    cases += ((64, 2056, 40960), (33, 20000, 1024), (65, 9000, 2048), (200, 3001, 4096)) if spread else ()
    for number, (tokens, rows, depth) in enumerate(cases):
        depth = depth_of(text, depth, spread)
        bias = make("normal", rows, DTYPES[2], 7) if number == 1 else None
        x = activations("normal", tokens, depth, DTYPES[number % 3])
        check(hopper, x, random_weight(text, rows, depth), spread, bias)


@pytest.mark.parametrize(("route", "tokens"), [(IntegerUnits, 64), (SpreadUnits, 64), (SpreadUnits, 150)])
@pytest.mark.parametrize("text", TAKEN)
def test_the_same_bits_every_time(hopper, text, route, tokens):
    multiprocessors = hopper.cuda.Device().attributes["MultiProcessorCount"]
    q = random_weight(text, (64 if route is IntegerUnits else 160) * multiprocessors - 128, 8192)
    x = activations("normal", tokens, 8192, "float16")
    on, given = on_device(hopper, q), hopper.asarray(x)
    assert kb.explain(given, on, activations="q8_1").route == route.name
    first = kb.linear(given, on, activations="q8_1")
    out = hopper.empty_like(first)
    for _ in range(500):
        assert (kb.linear(given, on, activations="q8_1", out=out) == first).all()


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("text", TAKEN)
def test_graphs_give_the_same_bits(hopper, text, spread):
    """Launches that a graph repeats read what is there then."""
    q, stream = on_device(hopper, random_weight(text, 300, 4096)), hopper.cuda.Stream(non_blocking=True)
    x = [hopper.asarray(activations("normal", 40, 4096, "float16", seed)) for seed in (1, 2)]
    given, out, want = x[0].copy(), hopper.zeros((40, 300), np.float16), []
    for of in x:
        want.append(hopper.zeros_like(out))
        multiply(of, q, None, want[-1], spread)
    hopper.cuda.runtime.deviceSynchronize()
    with stream:
        multiply(given, q, None, out, spread)  # what is allocated and compiled once is there
        stream.begin_capture()
        multiply(given, q, None, out, spread)
        graph = stream.end_capture()
        for of, y in zip(x * 5, want * 5, strict=True):
            given[...] = of
            graph.launch(stream)
            assert (out == y).all()


@pytest.mark.parametrize("text", TAKEN)
def test_tokens_do_not_see_each_other(hopper, text):
    """Those of a product have the bits that each 64 of them have alone where thread blocks end where rows do."""
    rows = 128 * hopper.cuda.Device().attributes["MultiProcessorCount"]
    q, x = random_weight(text, rows, 1024), hopper.asarray(activations("normal", 192, 1024, "float16"))
    on, out = on_device(hopper, q), hopper.full((192, rows), np.nan, np.float16)
    multiply(x, on, None, out, True)
    for begin in range(0, 192, 64):
        alone = hopper.full((64, rows), np.nan, np.float16)
        multiply(x[begin : begin + 64], on, None, alone, True)
        assert (out[begin : begin + 64] == alone).all()


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("text", TAKEN)
def test_one_term_at_a_time(hopper, text, spread):
    """Where a token has codes in one unit alone its sum is one term, of which nothing is lost but a rounding."""
    q = random_weight(text, 200, 2048)
    x = np.zeros((64, 2048), np.float32)
    for token in range(64):
        x[token, 32 * token : 32 * token + 32] = make("normal", 32, np.dtype("float32"), token)
    check(hopper, x, q, spread)


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("text", TAKEN)
@pytest.mark.parametrize("value", [-1.0, 1.0])
def test_sums_that_are_as_large_as_they_can_be(hopper, text, value, spread):
    """All codes of tokens are 127 or -127, which together with those of weights leave no sum below zero."""
    depth = depth_of(text, 1024, spread)
    check(hopper, np.full((64, depth), value, np.float32), random_weight(text, 256, depth), spread)


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("text", TAKEN)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_results_that_start_anywhere(hopper, offset, text, spread):
    depth = depth_of(text, 512, spread)
    q = random_weight(text, 250, depth)
    for dtype in DTYPES:
        x = activations("normal", 33, depth, dtype)
        out = hopper.zeros(33 * 250 + offset + 5, dtype)
        view = out[offset : offset + 33 * 250].reshape(33, 250)
        aligned = hopper.empty((33, 250), dtype)
        given = hopper.zeros(33 * depth + offset, dtype)[offset:].reshape(33, depth)
        given[...] = hopper.asarray(x)
        for target in (view, aligned):
            multiply(given, on_device(hopper, q), None, target, spread)
        assert (view == aligned).all()
        assert not out[:offset].any() and not out[offset + 33 * 250 :].any()


class TestSmall:
    """Every kind of kernel once, in sizes that compute-sanitizer can take."""

    @pytest.mark.parametrize("spread", SPREAD)
    @pytest.mark.parametrize("text", TAKEN)
    def test_unit_sums(self, hopper, text, spread):
        depth = depth_of(text, 1280, spread)
        for tokens in (61, 70)[: 1 + spread]:
            x = activations("normal", tokens, depth, "float16")
            check(hopper, x, random_weight(text, 133, depth), spread)
