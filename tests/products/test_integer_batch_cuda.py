"""Up to 64 tokens times 4-bit codes in short groups on Hopper, by `integer_batch`, whatever the plan would take.

Class `TestSmall` is what compute-sanitizer runs.
"""

import functools

import numpy as np
import pytest
from inputs import BFLOAT16, make
from test_integers import activations, defined, on_device, random_weight

import kbitcupy as kb
from kbitcupy.products import integer_batch
from kbitcupy.products.integer_batch import IntegerBatch, multiply

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32")]
TAKEN = [("q4_0", "int8"), ("q4_0", "q8_1"), ("q4_k", "q8_1")]
CUTS = [*integer_batch.CUTS.values()]


@pytest.fixture
def hopper(cupy):
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("it is for compute capability 9.0")
    return cupy


def only(monkeypatch, cut):
    """Every product is cut so."""
    monkeypatch.setattr(integer_batch, "choose", lambda *_: cut)
    monkeypatch.setattr(integer_batch, "_launches", functools.lru_cache(integer_batch._launches.__wrapped__))


def check(cupy, x, q, preset, bias=None):
    """Within what the contract allows."""
    on, out = on_device(cupy, q), cupy.full((len(x), q.shape[0]), np.nan, x.dtype)
    multiply(cupy.asarray(x), preset, on, None if bias is None else cupy.asarray(bias), out)
    y = out.get()
    exactly, size = defined(x.astype(np.float32), q, preset, bias)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(x.dtype.name, 0.0)
    assert (np.abs(y.astype(np.float64) - exactly) <= 2.0**-20 * size + 1.01 * rounding * np.abs(exactly)).all()


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("text", "preset"), TAKEN)
def test_integer_codes(hopper, monkeypatch, text, preset, cut):
    """Odd numbers of tokens and rows, rows that are no multiple of a thread block's, few stages and many."""
    only(monkeypatch, cut)
    for number, (tokens, depth) in enumerate(((64, 256), (37, 2048), (1, 4864))):
        rows, dtype = 16 * cut.tiles + 24 + 5 * number, DTYPES[number]
        bias = make("normal", rows, DTYPES[2], 7) if number == 1 else None
        check(hopper, activations("normal", tokens, depth, dtype), random_weight(text, rows, depth), preset, bias)


@pytest.mark.parametrize(("text", "preset"), TAKEN)
def test_the_same_bits_every_time(hopper, text, preset):
    """Of a K that other products do not take."""
    q = random_weight(text, 2900, 4352)
    x = activations("normal", 64, 4352, "float16")
    check(hopper, x, q, preset)
    on, given = on_device(hopper, q), hopper.asarray(x)
    assert kb.explain(given, on, activations=preset).route == IntegerBatch.name
    first = kb.linear(given, on, activations=preset)
    out = hopper.empty_like(first)
    for _ in range(500):
        assert (kb.linear(given, on, activations=preset, out=out) == first).all()


def test_tokens_that_are_int8(hopper):
    """One scale a token, or one for all."""
    q = random_weight("q4_0", 150, 768)
    for shared in ("token", "tensor"):
        codes = kb.quantize(activations("normal", 40, 768, "float16"), "int8", granularity=shared)
        out = hopper.empty((40, 150), np.float16)
        multiply(on_device(hopper, codes), "int8", on_device(hopper, q), None, out)
        wanted = kb.linear(codes, q).astype(np.float32)
        assert np.allclose(out.get().astype(np.float32), wanted, rtol=2e-3, atol=1e-3 * np.abs(wanted).max())


def test_one_term_at_a_time(hopper):
    """Where a token has codes in one unit alone its sum is one term, of which nothing is lost but a rounding."""
    q = random_weight("q4_k", 200, 2048)
    x = np.zeros((64, 2048), np.float32)
    for token in range(64):
        x[token, 32 * token : 32 * token + 32] = make("normal", 32, np.dtype("float32"), token)
    check(hopper, x, q, "q8_1")


@pytest.mark.parametrize("text", ["q4_0", "q4_k"])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_results_that_start_anywhere(hopper, offset, text):
    q = random_weight(text, 250, 512)
    for dtype in DTYPES:
        x = activations("normal", 33, 512, dtype)
        out = hopper.zeros(33 * 250 + offset + 5, dtype)
        view = out[offset : offset + 33 * 250].reshape(33, 250)
        aligned = hopper.empty((33, 250), dtype)
        given = hopper.zeros(33 * 512 + offset, dtype)[offset:].reshape(33, 512)
        given[...] = hopper.asarray(x)
        for target in (view, aligned):
            multiply(given, "q8_1", on_device(hopper, q), None, target)
        assert (view == aligned).all()
        assert not out[:offset].any() and not out[offset + 33 * 250 :].any()


class TestSmall:
    """Every kind of kernel once, in sizes that compute-sanitizer can take."""

    @pytest.mark.parametrize("cut", [CUTS[0], CUTS[1], CUTS[3]], ids=str)
    @pytest.mark.parametrize(("text", "preset"), TAKEN)
    def test_integer_codes(self, hopper, monkeypatch, text, preset, cut):
        only(monkeypatch, cut)
        check(hopper, activations("normal", 61, 1280, "float16"), random_weight(text, 133, 1280), preset)
