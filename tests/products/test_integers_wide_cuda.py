"""Many int8 tokens times weights of integer codes on Hopper, decoded in registers: NumPy's bits, or nearly so.

Class `TestSmall` is what compute-sanitizer runs.
"""

import functools

import numpy as np
import pytest
from inputs import BFLOAT16, make, same_values
from test_integers import activations, defined, on_device, quantized, random_weight

import kbitcupy as kb
from kbitcupy.products import integer_tile, ternary as ternary_products
from kbitcupy.products.integer_decoded import IntegerDecoded
from kbitcupy.products.integer_tile import CUTS, PAIRS, IntegerTile, cuts, multiply, told
from kbitcupy.products.integers import codes_of
from kbitcupy.products.routes import Problem, device

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]


@pytest.fixture
def hopper(cupy):
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("it is for compute capability 9.0")
    return cupy


def ternary(cupy, rng, rows, depth, granularity):
    """A ternary weight with all four codes, on the host and on the GPU."""
    scale = (rng.random(1 if granularity == "tensor" else rows) * np.exp2(rng.integers(-9, 3))).astype(np.float32)
    q = kb.bitnet.from_trits(rng.integers(-1, 2, (rows, depth)).astype(np.int8), scale, granularity=granularity)
    if rng.random() < 0.3:
        q.planes["codes"][:] = rng.integers(0, 256, q.planes["codes"].shape)
    return q, on_device(cupy, q)


def only(monkeypatch, cut):
    """Every product is cut so."""
    monkeypatch.setattr(integer_tile, "choose", lambda *_: cut)
    for module, name in ((integer_tile, "_launches"), (ternary_products, "_tile")):
        monkeypatch.setattr(module, name, functools.lru_cache(getattr(module, name).__wrapped__))


TAKEN = [
    "int4:block=32",
    "uint4:block=64,zero=int",
    "uint4:block=128,zero=int",
    "int4:block=128,zero=int,zero_dtype=int8,scale_dtype=float16",
    "uint4:block=384,zero=int,zero_dtype=uint8,scale_dtype=bfloat16",
    "uint4:block=32,zero=int,scale_dtype=float16",
    "int4:granularity=channel:0",
    "uint4:granularity=channel:0,zero=int",
    "int4:granularity=tensor",
    "int8:block=128",
    "uint8:block=64",
    "int8:granularity=channel:0",
    "q8_0",
    "q4_0",
]


def check(cupy, x, q, preset, bias=None):
    """By `integer_tile`, however the plan would have it, within what the contract allows; one unit to the bit."""
    on, out = on_device(cupy, q), cupy.full((len(x), q.shape[0]), np.nan, x.dtype)
    known = told(codes_of(q.format, q.shape), *q.shape, preset == "q8_1")
    assert not isinstance(known, str), known
    multiply(cupy.asarray(x), preset, on, None if bias is None else cupy.asarray(bias), out)
    y = out.get()
    if known.codes.group or (known.codes.each and q.shape[1] > 32):
        exactly, size = defined(x.astype(np.float32), q, preset, bias)
        rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(x.dtype.name, 0.0)
        assert (np.abs(y.astype(np.float64) - exactly) <= 2.0**-20 * size + 1.01 * rounding * np.abs(exactly)).all()
    else:
        assert same_values(y, kb.linear(x, q, bias, activations=preset))


@pytest.mark.parametrize("tokens", [17, 40, 300])
@pytest.mark.parametrize("spec", ["int8:block=256", "int8:block=1024", "int4:block=256", "int4:block=512"])
def test_what_shares_a_scale_is_one_sum(hopper, spec, tokens):
    """The second half of a group takes away what the first brings, but for 1 in one: no float may have seen either."""
    rng, format, rows = np.random.default_rng(tokens), kb.get_format(spec), 130
    half = format.block // 2
    codes = rng.integers(-7, 8, (rows, 4, 2, half))
    codes[:, :, 1] = -codes[:, :, 0]
    codes[:, 0, :, 0] = [1, -1]
    x = rng.integers(-126, 127, (tokens, 4, 2, half)).astype(np.float32)
    x[:, :, 1] = x[:, :, 0]
    x[:, 0, :, 0] = [127, 126]  # whose scale is 1
    w, x = (np.pad(part.reshape(len(part), -1), ((0, 0), (0, 32))) for part in (codes, x))
    scale = np.full((rows, 5), 0.37, np.float32)
    q = kb.quantize(w * np.float32(0.37), format, scale=scale)
    assert (kb.dequantize(q) == w * np.float32(0.37)).all()
    check(hopper, x, q, "int8")


def check_ternary(cupy, rng, tokens, rows, depth, granularity, dtype, activations="bitnet"):
    q, on = ternary(cupy, rng, rows, depth, granularity)
    x = make(rng.choice(["normal", "special", "wide"]), tokens * depth, dtype, int(rng.integers(99)))
    x = x.reshape(tokens, depth)
    bias = make("normal", rows, DTYPES[rng.integers(4)], 5) if rng.random() < 0.5 else None
    given = None if bias is None else cupy.asarray(bias)
    wanted = kb.linear(x, q, bias, activations=activations)
    y = kb.linear(cupy.asarray(x), on, given, activations=activations)
    assert same_values(y.get(), wanted), (tokens, rows, depth, granularity, str(dtype), activations)


def least(cut):
    """Blocks of 128 columns of trits, so that each part of k has a stage."""
    return cut.k_groups * cut.boxes(2)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ternary(hopper, monkeypatch, cut, dtype):
    only(monkeypatch, cut)
    rng = np.random.default_rng([dtype.itemsize, CUTS.index(cut)])
    for _ in range(12):
        tokens, rows = int(rng.integers(33, 600)), int(rng.integers(1, 600))
        depth = 128 * int(rng.integers(least(cut), 30))
        granularity = ("tensor", ("channel", 0))[rng.integers(2)]
        check_ternary(hopper, rng, tokens, rows, depth, granularity, dtype, ("bitnet", "int8")[rng.integers(2)])


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_one_block_of_k(hopper, monkeypatch, cut):
    """Fewer stages than the ring has, down to one for each part of k."""
    only(monkeypatch, cut)
    rng = np.random.default_rng(CUTS.index(cut))
    for blocks in (least(cut), least(cut) + 1, 3 * least(cut) - 1):
        check_ternary(hopper, rng, 65, 130, 128 * blocks, "tensor", DTYPES[0])


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 1024), (300, 131_072 - 128), (1, 512), (8193, 640)], ids=str)
def test_large_ternary(hopper, shape):
    """Many tiles for each thread block, and the sums that K allows at the most."""
    rng = np.random.default_rng(shape)
    for tokens in (33, 64, 129, 515):
        check_ternary(hopper, rng, tokens, *shape, ("channel", 0), DTYPES[0])


@pytest.mark.parametrize("tokens", [64, 300])
def test_the_same_bits_every_time(hopper, tokens):
    rng = np.random.default_rng(tokens)
    _, on = ternary(hopper, rng, 2048, 2048, ("channel", 0))
    x = hopper.asarray(make("normal", tokens * 2048, DTYPES[0]).reshape(tokens, 2048))
    first = kb.bitnet.linear(x, on)
    out = hopper.empty_like(first)
    for _ in range(200):
        assert (kb.bitnet.linear(x, on, out=out) == first).all()


@pytest.mark.parametrize("shared", ["token", "tensor"])
def test_ternary_with_tokens_that_are_int8(hopper, shared):
    rng = np.random.default_rng(3)
    q, on = ternary(hopper, rng, 200, 1024, ("channel", 0))
    x = make("normal", 77 * 1024, DTYPES[0]).reshape(77, 1024)
    codes = kb.quantize(x, "int8", granularity=shared)
    assert same_values(kb.linear(on_device(hopper, codes), on).get(), kb.linear(codes, q))
    away = hopper.empty(77 * 1024 + 1, np.int8)[1:]
    away[:] = hopper.asarray(codes.planes["codes"]).reshape(-1)
    planes = {**on_device(hopper, codes).planes, "codes": away}
    moved = kb.QuantizedArray(codes.format, planes, codes.shape, codes.dtype)
    assert same_values(kb.linear(moved, on).get(), kb.linear(codes, q))


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_results_that_start_anywhere(hopper, offset):
    rng = np.random.default_rng(offset)
    q, on = ternary(hopper, rng, 250, 512, "tensor")
    for dtype in DTYPES:
        x = make("normal", 70 * 512, dtype).reshape(70, 512)
        out = hopper.zeros(70 * 250 + offset + 5, dtype)
        view = out[offset : offset + 70 * 250].reshape(70, 250)
        kb.bitnet.linear(hopper.asarray(x), on, out=view)
        assert same_values(view.get(), kb.bitnet.linear(x, q))
        assert not out[:offset].any() and not out[offset + 70 * 250 :].any()


def kinds(text, preset):
    """The cuts that there are for a format; None where there are none."""
    q = random_weight(text, 2, 768)
    known = told(codes_of(q.format, q.shape), *q.shape, preset == "q8_1")
    if isinstance(known, str):
        return ()
    codes = known.codes
    return [cut for cut in cuts(codes.bits, codes.unit, codes.each) if cut != PAIRS or cut.keeps(codes)]


CASES = [
    (text, preset, cut)
    for text in TAKEN
    for preset in ("int8", "q8_1")
    for cut in kinds(text, preset)
    if (text, preset) != ("int8:granularity=channel:0", "int8")
]


@pytest.mark.parametrize(("text", "preset", "cut"), CASES, ids=str)
def test_integer_codes(hopper, monkeypatch, text, preset, cut):
    """Odd numbers of tokens and rows, a short last stage, a group longer than what is left."""
    only(monkeypatch, cut)
    for number, (tokens, rows, depth) in enumerate(((65, 67, 256 * cut.k_groups), (131, 261, 1120), (1, 130, 2208))):
        dtype = DTYPES[number]
        bias = make("normal", rows, DTYPES[2], 7) if number == 1 else None
        q = random_weight(text, rows, depth)
        check(hopper, activations("normal", tokens, depth, dtype), q, preset, bias)


@pytest.mark.parametrize("text", ["uint4:granularity=channel:0,zero=int", "uint4:block=128,zero=int", "q4_0"])
def test_larger_integers(hopper, text):
    q = random_weight(text, 700, 8192 + 256)
    for preset in ("int8", "q8_1"):
        x = activations("normal", 300 if preset == "int8" else 66, q.shape[1], "float16")
        check(hopper, x, q, preset)
        on, given = on_device(hopper, q), hopper.asarray(x)
        first = kb.linear(given, on, activations=preset)
        assert all((kb.linear(given, on, activations=preset) == first).all() for _ in range(100))


@pytest.mark.parametrize("depth", [64, 1120])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("uint4:block=32,zero=int", "int8"),
        ("int4:block=32", "q8_1"),
        ("uint4:granularity=channel:0", "q8_1"),
        ("q4_0", "int8"),
    ],
)
def test_decoded_integers(cupy, text, preset, dtype, depth):
    """Both sides rounded to the dtype of x, and nothing else."""
    q = kb.quantize(make("normal", 45 * depth, DTYPES[2], 4).reshape(45, depth), text)
    x, bias = activations("normal", 33, depth, dtype), make("normal", 45, DTYPES[2], 7)
    exactly, _ = defined(x.astype(np.float32), q, preset, bias)
    a, e = quantized(x.astype(np.float32), preset)
    size = np.abs((a * e).astype(np.float64)) @ np.abs(kb.dequantize(q)).astype(np.float64).T
    eps = 2.0**-10 if dtype == DTYPES[0] else 2.0**-7
    problem = Problem(q.format, q.shape, 33, dtype, device(0), activations=preset)
    assert IntegerDecoded().accepts(problem) is None
    out = cupy.full((33, 45), np.nan, dtype)
    IntegerDecoded().prepare(problem)(cupy.asarray(x), on_device(cupy, q), cupy.asarray(bias), out)
    off = np.abs(out.get().astype(np.float64) - exactly)
    assert (off <= eps * size + eps * np.abs(exactly) + 2.0**-20).all()
    assert off.max() > 2.0**-20 * size.max()  # it is not the exact one


@pytest.mark.parametrize("shared", ["token", "tensor"])
def test_decoded_integers_of_tokens_that_are_int8(cupy, shared):
    q = kb.quantize(make("normal", 20 * 96, DTYPES[2], 4).reshape(20, 96), "int4:block=32")
    codes = kb.quantize(activations("normal", 7, 96, "float16"), "int8", granularity=shared)
    problem = Problem(q.format, q.shape, 7, DTYPES[0], device(0), activations="int8")
    out = cupy.empty((7, 20), np.float16)
    IntegerDecoded().prepare(problem)(on_device(cupy, codes), on_device(cupy, q), None, out)
    wanted = kb.dequantize(codes).astype(np.float64) @ kb.dequantize(q).astype(np.float64).T
    assert np.abs(out.get() - wanted).max() <= 2.0**-8 * np.abs(wanted).max()


def test_integers_with_tokens_that_are_int8(hopper):
    for text in ("uint4:granularity=channel:0,zero=int", "int4:granularity=tensor"):
        q = random_weight(text, 50, 736)
        for shared in ("token", "tensor"):
            codes = kb.quantize(activations("normal", 70, 736, "float16"), "int8", granularity=shared)
            assert same_values(kb.linear(on_device(hopper, codes), on_device(hopper, q)).get(), kb.linear(codes, q))


def test_what_the_route_refuses(hopper):
    for text, depth, why in (
        ("int4:block=32", 200, "multiples of 16 bytes"),
        ("int4:block=40", 320, "groups are of 40"),
        ("uint8:block=128,zero=int", 256, "zero points of 4 bits"),
        ("q4_k", 256, "scales"),
    ):
        q = on_device(hopper, random_weight(text, 64, depth))
        found = kb.explain(hopper.zeros((100, depth), np.float16), q, activations="int8")
        assert why in {row.route: row.reason for row in found}[IntegerTile.name]


def test_explain_names_the_kernel(hopper):
    _, on = ternary(hopper, np.random.default_rng(0), 4096, 4096, "tensor")
    found = kb.explain(hopper.zeros((64, 4096), np.float16), on, activations="bitnet")
    assert found.route == "ternary_tile" and "wgmma_integers" in found[0].reason


class TestSmall:
    """Every kind of kernel once, in sizes that compute-sanitizer can take."""

    @pytest.mark.parametrize("cut", CUTS, ids=str)
    def test_ternary(self, hopper, monkeypatch, cut):
        only(monkeypatch, cut)
        rng = np.random.default_rng(1)
        for dtype in (DTYPES[0], DTYPES[2]):
            check_ternary(hopper, rng, 67, 133, 128 * 9, ("channel", 0), dtype)

    @pytest.mark.parametrize("preset", ["int8", "q8_1"])
    @pytest.mark.parametrize("text", ["uint4:block=128,zero=int", "int4:granularity=channel:0", "q4_0", "q8_0"])
    def test_integer_codes(self, hopper, monkeypatch, text, preset):
        for cut in kinds(text, preset):
            only(monkeypatch, cut)
            check(hopper, activations("normal", 67, 1120, "float16"), random_weight(text, 133, 1120), preset)
