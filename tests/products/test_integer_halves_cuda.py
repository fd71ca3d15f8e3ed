"""Up to 64 tokens times q4_k's codes as halves on Hopper, by `integer_halves`, whatever the plan would take.

Class `TestSmall` is what compute-sanitizer runs.
"""

import numpy as np
import pytest
from inputs import BFLOAT16, make
from test_integers import activations, defined, on_device, random_weight

import kbitcupy as kb
from kbitcupy.products import integer_halves
from kbitcupy.products.integer_halves import IntegerHalves, multiply

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32")]


@pytest.fixture
def hopper(cupy):
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("it is for compute capability 9.0")
    return cupy


def check(cupy, x, q, bias=None):
    """Within what the contract allows."""
    on, out = on_device(cupy, q), cupy.full((len(x), q.shape[0]), np.nan, x.dtype)
    multiply(cupy.asarray(x), on, None if bias is None else cupy.asarray(bias), out, 132)
    y = out.get()
    exactly, size = defined(x.astype(np.float32), q, "q8_1", bias)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(x.dtype.name, 0.0)
    assert (np.abs(y.astype(np.float64) - exactly) <= 2.0**-20 * size + 1.01 * rounding * np.abs(exactly)).all()


@pytest.mark.parametrize("cut", [*integer_halves.CUTS], ids=str)
def test_codes_as_halves(hopper, monkeypatch, cut):
    """Odd numbers of tokens and rows, rows that are no multiple of a thread block's, few stages and many."""
    monkeypatch.setattr(integer_halves, "choose", lambda *_: cut)
    for number, (tokens, depth) in enumerate(((64, 256 * cut.parts), (37, 4864), (1, 2048))):
        rows, dtype = cut.rows + 24 + 5 * number, DTYPES[number]
        bias = make("normal", rows, DTYPES[2], 7) if number == 1 else None
        check(hopper, activations("normal", tokens, depth, dtype), random_weight("q4_k", rows, depth), bias)


def test_one_term_at_a_time(hopper):
    """Where a token has codes in one unit alone its sum is one term, of which nothing is lost but a rounding."""
    q = random_weight("q4_k", 200, 2048)
    x = np.zeros((64, 2048), np.float32)
    for token in range(64):
        x[token, 32 * token : 32 * token + 32] = make("normal", 32, np.dtype("float32"), token)
    check(hopper, x, q)


def test_the_same_bits_every_time(hopper):
    q = random_weight("q4_k", 2900, 4096)
    x = activations("normal", 64, 4096, "float16")
    check(hopper, x, q)
    on, given = on_device(hopper, q), hopper.asarray(x)
    assert kb.explain(given, on, activations="q8_1").route == IntegerHalves.name
    first = kb.linear(given, on, activations="q8_1")
    out = hopper.empty_like(first)
    for _ in range(1000):
        assert (kb.linear(given, on, activations="q8_1", out=out) == first).all()


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_results_that_start_anywhere(hopper, offset):
    q = random_weight("q4_k", 250, 512)
    for dtype in DTYPES:
        x = activations("normal", 33, 512, dtype)
        out = hopper.zeros(33 * 250 + offset + 5, dtype)
        view = out[offset : offset + 33 * 250].reshape(33, 250)
        aligned = hopper.empty((33, 250), dtype)
        given = hopper.zeros(33 * 512 + offset, dtype)[offset:].reshape(33, 512)
        given[...] = hopper.asarray(x)
        for target in (view, aligned):
            multiply(given, on_device(hopper, q), None, target, 132)
        assert (view == aligned).all()
        assert not out[:offset].any() and not out[offset + 33 * 250 :].any()


class TestSmall:
    """Every kind of kernel once, in sizes that compute-sanitizer can take."""

    @pytest.mark.parametrize("cut", [*integer_halves.CUTS], ids=str)
    def test_codes_as_halves(self, hopper, monkeypatch, cut):
        monkeypatch.setattr(integer_halves, "choose", lambda *_: cut)
        check(hopper, activations("normal", 61, 1280, "float16"), random_weight("q4_k", cut.rows + 5, 1280))
