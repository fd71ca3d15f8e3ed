"""W8A8 products and SmoothQuant: the definition, its edges, CUDA against NumPy. Compute-sanitizer runs `TestSmall`."""

import concurrent.futures

import numpy as np
import pytest
from hypothesis import given, strategies as st
from inputs import BFLOAT16, DTYPES, assert_repeats, make, repeated, same_values

import kbitcupy as kb
from kbitcupy import affine
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.products import int8 as w8a8

INT8 = {"granularity": ("channel", 0)}


# ---- what the definition says --------------------------------------------------------------------------------------


# The largest scale of which 127 are finite.
LARGEST_SCALE = np.float32(2.0**121)
with np.errstate(over="ignore"):
    while np.isfinite(np.nextafter(LARGEST_SCALE, np.float32(np.inf)) * np.float32(127)):
        LARGEST_SCALE = np.nextafter(LARGEST_SCALE, np.float32(np.inf))


def quantized_tokens(x, smooth=None, fixed=None, qmin=-128):
    """int8 codes and scales, one token after the other."""
    codes, scales = np.zeros(x.shape, np.int64), np.zeros(len(x), np.float32)
    with np.errstate(all="ignore"):
        for m, row in enumerate(x.astype(np.float32)):
            numbers = row if smooth is None else row / smooth
            magnitudes = np.minimum(np.where(np.isnan(numbers), 0, np.abs(numbers)), np.finfo(np.float32).max)
            largest = np.float32(max(magnitudes, default=0))
            scale = (
                np.float32(fixed) if fixed is not None else np.float32(1) if largest == 0 else largest / np.float32(127)
            )
            scale = scale if fixed is not None else min(scale, LARGEST_SCALE)
            scales[m] = scale if 0 < scale < np.inf else 0
            if scales[m]:
                steps = np.rint(numbers / scale)
                codes[m] = np.where(np.isnan(steps), 0, np.clip(steps, qmin, 127)).astype(np.int64)
    return codes, scales


def defined(x, q, smooth=None, bias=None, fixed=None, qmin=-128):
    """The product straight from the definition: int64 sums, then float32 step by step."""
    return rescaled(*quantized_tokens(x, smooth, fixed, qmin), q, bias, x.dtype)


def rescaled(codes, scales, q, bias, dtype):
    rows, depth = q.shape
    sums = codes @ q.planes["codes"].reshape(rows, depth).astype(np.int64).T
    assert np.abs(sums).max(initial=0) < 2**31
    factors = q.planes["scale"]
    factors = np.where(np.isfinite(factors) & (factors > 0), factors, np.float32(0))
    with np.errstate(all="ignore"):
        y = sums.astype(np.float32) * scales[:, None] * factors
        if bias is not None:
            y = y + bias.astype(np.float32)
        return y.astype(dtype)


def weight(rows, depth, seed=1):
    """A compressed weight with every code and scales of many magnitudes."""
    rng = np.random.default_rng([seed, rows, depth])
    codes = rng.integers(-128, 128, rows * depth).astype(np.int8)
    scale = (rng.random(rows) * np.exp2(rng.integers(-14, 2, rows))).astype(np.float32)
    return kb.QuantizedArray(kb.get_format("int8", **INT8), {"codes": codes, "scale": scale}, (rows, depth), "float32")


def vectors(kind, rows, depth, dtype):
    """A bias of `dtype` and divisors."""
    bias = make("normal", rows, dtype, 7)
    smooth = np.exp2(make("normal", depth, np.dtype("float32"), 8))
    if kind == "special" and depth > 8:
        smooth[:6] = 0, np.inf, np.nan, 1e-40, 3e38, -1
    return bias, smooth


VARIANTS = [
    {},
    {"bias": True},
    {"smooth": True},
    {"smooth": True, "bias": True, "fixed": 0.02},
    {"fixed": 3e-3},
    {"fixed": 3e-3, "qmin": -127},
    {"qmin": -127, "bias": True},
]


def arguments_of(variant, kind, rows, depth, dtype):
    """Keyword arguments of `defined`."""
    bias, smooth = vectors(kind, rows, depth, dtype)
    chosen = {"bias": bias, "smooth": smooth, "fixed": variant.get("fixed"), "qmin": variant.get("qmin")}
    return {name: chosen[name] for name in variant}


def product(x, q, smooth=None, bias=None, fixed=None, out=None, qmin=-128):
    """The public call that these arguments ask for."""
    if smooth is None and fixed is None:
        return affine.linear_w8a8(x, q, bias, qmin=qmin, out=out)
    return affine.linear_smoothquant(x, q, smooth, bias, activation_scale=fixed, qmin=qmin, out=out)


SHAPES = [(1, 1, 1), (1, 40, 128), (3, 17, 33), (16, 5, 300), (20, 130, 64), (70, 3, 1040)]


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float64")], ids=str)
@pytest.mark.parametrize("kind", ["normal", "special", "extreme", "subnormal", "zeros", "constant"])
def test_the_definition(kind, dtype):
    for tokens, rows, depth in SHAPES:
        x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
        q = weight(rows, depth)
        for variant in VARIANTS:
            options = arguments_of(variant, kind, rows, depth, dtype)
            y = product(x, q, **options)
            assert y.dtype == dtype and same_values(y, defined(x, q, **options)), (tokens, rows, depth, variant)


@given(st.data())
def test_any_numbers(data):
    tokens, rows, depth = (data.draw(st.integers(1, limit)) for limit in (4, 5, 40))
    dtype = data.draw(st.sampled_from(DTYPES))
    numbers = data.draw(st.lists(st.floats(width=32), min_size=tokens * depth, max_size=tokens * depth))
    with np.errstate(over="ignore"):
        x = np.array(numbers, np.float32).astype(dtype).reshape(tokens, depth)
    q = weight(rows, depth)
    options = arguments_of(data.draw(st.sampled_from(VARIANTS)), "special", rows, depth, dtype)
    assert same_values(product(x, q, **options), defined(x, q, **options))


def activations(shape, scales, dtype, seed=2):
    """Activations that are int8, with every code, and scales of many magnitudes among which some do not count."""
    rng = np.random.default_rng([seed, *shape])
    codes = rng.integers(-128, 128, np.prod(shape)).astype(np.int8)
    scale = (rng.random(scales) * np.exp2(rng.integers(-14, 2, scales))).astype(np.float32)
    scale[3::7], scale[4::7], scale[5::7], scale[6::7] = 0, -1, np.inf, 1e-40
    format = kb.get_format("int8", granularity="tensor" if scales == 1 else "token")
    return kb.QuantizedArray(format, {"codes": codes, "scale": scale}, shape, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float64")], ids=str)
def test_activations_that_are_int8_already(dtype):
    for tokens, rows, depth in SHAPES:
        q = weight(rows, depth)
        bias, _ = vectors("normal", rows, depth, np.dtype("float32"))
        for scales in {tokens, 1}:
            a = activations((tokens, depth), scales, dtype)
            factors = np.where((a.planes["scale"] > 0) & (a.planes["scale"] < np.inf), a.planes["scale"], np.float32(0))
            wanted = rescaled(
                a.planes["codes"].reshape(tokens, depth).astype(np.int64),
                factors.repeat(tokens // scales),
                q,
                bias,
                dtype,
            )
            y = affine.linear_w8a8(a, q, bias)
            assert y.dtype == dtype and same_values(y, wanted)
            assert same_values(affine.linear_smoothquant(a, q, None, bias), wanted)


def test_activations_quantized_beforehand_give_the_same_product():
    """Under every name of the same blocks; smoothed ones, too."""
    x, q = make("special", 3 * 4 * 24, np.dtype("float16")).reshape(3, 4, 24), weight(6, 24)
    x[~np.isfinite(x)] = 0
    for options in ({"granularity": "token"}, {"granularity": ("group", 24)}):
        assert same_values(affine.linear_w8a8(kb.quantize(x, "int8", **options), q), affine.linear_w8a8(x, q))
    rows = kb.quantize(x[0], "int8", granularity=("channel", 0))
    assert same_values(affine.linear_w8a8(rows, q), affine.linear_w8a8(x[0], q))
    single = kb.quantize(x, "int8", scale=0.03)
    assert same_values(affine.linear_w8a8(single, q), affine.linear_smoothquant(x, q, None, activation_scale=0.03))
    _, smooth = vectors("normal", 6, 24, np.dtype("float16"))
    divided = kb.quantize(x.astype(np.float32) / smooth, "int8", granularity="token")
    found = affine.linear_smoothquant(divided, q, None).astype(np.float16)
    assert same_values(found, affine.linear_smoothquant(x, q, smooth))
    out = np.empty((3, 4, 6), np.float16)
    assert affine.linear_w8a8(kb.quantize(x, "int8", granularity="token"), q, out=out) is out


def test_the_lowest_code():
    """-inf, and what a scale that was found beforehand does not reach."""
    identity = kb.QuantizedArray(
        kb.get_format("int8", **INT8),
        {"codes": np.eye(4, dtype=np.int8).reshape(-1), "scale": np.ones(4, np.float32)},
        (4, 4),
        "float32",
    )
    x = np.float32([[-1000, 1000, -127, -128]])
    for qmin in (-128, -127):
        found = affine.linear_smoothquant(x, identity, None, activation_scale=1, qmin=qmin)
        assert np.array_equal(found, [[qmin, 127, -127, qmin]])
    x[0] = -np.inf, 0, 1, np.nan
    lowest, found = (affine.linear_w8a8(x, identity, qmin=qmin)[0, 0] for qmin in (-128, -127))
    assert found == LARGEST_SCALE * np.float32(-127) and lowest == -np.inf


@pytest.mark.parametrize("depth", [1, 1023, 1024, 1025, 5000, w8a8.MAX_DEPTH])
def test_sums_are_exact(depth):
    """Also the largest there are: every product 128 * 128."""
    rng = np.random.default_rng(depth)
    a, w = (rng.integers(-128, 128, (2, depth)).astype(np.int8) for _ in range(2))
    a[0] = w[0] = -128
    assert np.array_equal(w8a8.integer_product(a, w), a.astype(np.int64) @ w.astype(np.int64).T)


def test_quantization_is_the_affine_one():
    x = make("special", 6 * 50, np.dtype("float32")).reshape(6, 50)
    codes, scales = w8a8.quantize_tokens(x, None, None)
    expected, scale, _ = affine.dynamic_range(x, granularity="token")
    assert np.array_equal(codes, expected) and np.array_equal(scales, scale)


def test_scales_that_do_not_count():
    q = weight(4, 32)
    q.planes["scale"][:] = 0, -1, np.inf, np.nan
    x = make("normal", 64, np.dtype("float32")).reshape(2, 32)
    assert not affine.linear_w8a8(x, q).any()
    assert np.array_equal(affine.linear_w8a8(x, q, np.arange(4.0)), np.tile(np.arange(4, dtype=np.float32), (2, 1)))


def test_shapes_layouts_and_out():
    q = weight(6, 24)
    x = make("normal", 3 * 4 * 24, np.dtype("float16")).reshape(3, 4, 24)
    flat = affine.linear_w8a8(x.reshape(12, 24), q)
    assert np.array_equal(affine.linear_w8a8(x, q), flat.reshape(3, 4, 6))
    assert np.array_equal(affine.linear_w8a8(x[1, 2], q), flat[6])
    assert np.array_equal(affine.linear_w8a8(np.asfortranarray(x[0]), q), flat[:4])
    assert np.array_equal(affine.linear_w8a8(x[::2], q), flat.reshape(3, 4, 6)[::2])
    out = np.empty((3, 4, 6), np.float16)
    assert affine.linear_w8a8(x, q, out=out) is out and np.array_equal(out, flat.reshape(3, 4, 6))
    tokens = kb.quantize(np.ones((6, 24), np.float32), "int8", granularity="token")  # the same blocks
    assert affine.linear_w8a8(x, tokens).shape == (3, 4, 6)
    for empty in (np.empty((0, 24), np.float32), np.empty((2, 0, 24), np.float32)):
        assert affine.linear_w8a8(empty, q).shape == (*empty.shape[:-1], 6)
    assert affine.linear_w8a8(x, weight(0, 24)).shape == (3, 4, 0)
    nothing = affine.linear_w8a8(np.empty((2, 0), np.float32), weight(3, 0), np.arange(3.0))
    assert np.array_equal(nothing, [[0, 1, 2], [0, 1, 2]])


def test_every_tiling_is_the_best_somewhere():
    """... and none has parts of k without work."""
    chosen = set()
    for channels in (100, 1024, 4096, 8192, 14336, 28672):
        for depth in (16, 128, 384, 4096, 8192, 14336):
            for tokens in (1, 9, 17, 64, 65, 128, 256, 512, 1000, 4096):
                tiling = w8a8.choose_tiling(tokens, channels, depth, 132)
                assert tiling is not None or tokens <= 16
                assert tiling is None or tiling.split * 128 < depth + 128
                chosen.add(tiling)
    assert chosen == {None, *w8a8._TILINGS}


# ---- SmoothQuant ---------------------------------------------------------------------------------------------------


def outlier_data(tokens=256, rows=192, depth=512):
    """Activations with six channels a hundred times larger than the others, as in large language models."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, depth), (rows, depth)))
    x[:, rng.choice(depth, 6, replace=False)] *= 100
    return x, w


def smoothed(x, w):
    calibration = affine.Calibration().update(x)
    s = affine.smooth_scales(calibration.absmax, w)
    return s, kb.quantize(affine.smooth_weight(w, s), "int8", **INT8), calibration.activation_scale(s)


@pytest.mark.parametrize("static", [False, True])
def test_smoothquant_beats_w8a8_on_outliers(xp, static):
    """The root of the mean squared error falls by a factor of at least 4.5 (2.5 with one static scale)."""
    x, w = (xp.asarray(a) for a in outlier_data())
    exact = x.astype(np.float64) @ w.astype(np.float64).T

    def error(y):
        return float(xp.sqrt(((y - exact) ** 2).mean()))

    plain = error(affine.linear_w8a8(x, kb.quantize(w, "int8", **INT8)))
    s, q, scale = smoothed(x, w)
    smooth = error(affine.linear_smoothquant(x, q, s, activation_scale=scale if static else None))
    assert smooth * (2.5 if static else 4.5) < plain


def test_smoothing_changes_no_product():
    x, w = outlier_data(8, 8, 64)
    s, _, _ = smoothed(x, w)
    assert np.allclose((x / s) @ affine.smooth_weight(w, s).T, x @ w.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 1])
def test_smooth_scales(alpha):
    a, w = np.array([4.0, 0, 1e-9, 9], np.float32), np.array([[1, 0, -2, 4], [-16, 0, 1, 0]], np.float32)
    expected = np.maximum(a, 1e-5) ** alpha / np.maximum(np.abs(w).max(0), 1e-5) ** (1 - alpha)
    assert np.allclose(affine.smooth_scales(a, w, alpha), expected, rtol=1e-6)


def test_calibration():
    calibration = affine.Calibration()
    with pytest.raises(ValueError, match="no batch has been seen"):
        calibration.absmax  # noqa: B018
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal(shape).astype(np.float16) for shape in ((4, 8), (2, 3, 8), (8,), (0, 8))]
    batches[0][1, 1], batches[1][0, 0, 2] = np.nan, -np.inf
    for batch in batches:
        assert calibration.update(batch) is calibration
    rows = np.concatenate([batch.reshape(-1, 8) for batch in batches]).astype(np.float32)
    rows[np.isnan(rows)] = 0
    expected = np.minimum(np.abs(rows).max(0), np.finfo(np.float32).max)
    assert calibration.absmax.dtype == np.float32 and np.array_equal(calibration.absmax, expected)
    s = np.arange(1, 9, dtype=np.float32)
    assert calibration.activation_scale(s) == [(expected / s).max() / np.float32(127)]
    assert calibration.activation_scale() == [expected.max() / np.float32(127)]
    assert affine.Calibration().update(np.zeros((2, 8), np.float32)).activation_scale() == [1]
    with pytest.raises(ValueError, match=r"batch has shape \(2, 9\); it must be \[\.\.\., 8\]"):
        calibration.update(np.zeros((2, 9), np.float32))
    with pytest.raises(ValueError, match=r"batch has shape \(\); it must be"):
        affine.Calibration().update(np.float32(1))
    with pytest.raises(TypeError, match="batch is int64"):
        calibration.update(np.zeros((2, 8), int))


# ---- errors --------------------------------------------------------------------------------------------------------

X, Q = np.ones((2, 32), np.float32), weight(4, 32)
ONES = np.ones(32, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: affine.linear_w8a8(X[:, :31], Q), ValueError, r"x has shape \(2, 31\).*\[\.\.\., 32\]"),
        (lambda: affine.linear_w8a8(np.float32(1), Q), ValueError, r"x has shape \(\)"),
        (lambda: affine.linear_w8a8(X.astype("i4"), Q), TypeError, "x is int32"),
        (lambda: affine.linear_w8a8(X.astype("f8"), Q, out=np.empty((2, 4), "f4")), TypeError, "out is float32"),
        (lambda: affine.linear_w8a8(X, Q, qmin=-126), FormatError, "qmin is -126; allowed are -128 and -127"),
        (lambda: affine.linear_w8a8(X, Q, qmin=-127.0), FormatError, "qmin is -127.0"),
        (lambda: affine.linear_w8a8(kb.quantize(X, "uint8"), Q), FormatError, "x is .*'uint8'.* a symmetric int8 with"),
        (
            lambda: affine.linear_w8a8(kb.quantize(X, "int8", symmetric=False), Q),
            FormatError,
            "a symmetric int8 with a",
        ),
        (
            lambda: affine.linear_w8a8(kb.quantize(X, "int8", granularity=("group", 8)), Q),
            FormatError,
            "scale for each token or for all",
        ),
        (lambda: affine.linear_w8a8(kb.quantize(X, "kbit4"), Q), FormatError, "x is .*kbit4"),
        (lambda: affine.linear_w8a8(kb.quantize(X, "int8"), Q, qmin=-127), FormatError, "qmin goes with activations"),
        (
            lambda: affine.linear_smoothquant(kb.quantize(X, "int8"), Q, ONES),
            FormatError,
            "smooth goes with .*pass None",
        ),
        (
            lambda: affine.linear_smoothquant(kb.quantize(X, "int8"), Q, None, activation_scale=1.0),
            FormatError,
            "activation_scale goes with",
        ),
        (lambda: affine.linear_w8a8(kb.quantize(X[:, :31], "int8"), Q), ValueError, r"x has shape \(2, 31\)"),
        (lambda: affine.linear_w8a8(X, X), TypeError, "qw is ndarray; it must be a QuantizedArray"),
        (lambda: affine.linear_w8a8(X, kb.quantize(X, "kbit4")), FormatError, "it must be .N, K. in a symmetric int8"),
        (lambda: affine.linear_w8a8(X, kb.quantize(X, "int8")), FormatError, "scale for each row"),
        (
            lambda: affine.linear_w8a8(X, kb.quantize(X, "int8", symmetric=False, **INT8)),
            FormatError,
            "symmetric int8",
        ),
        (lambda: affine.linear_w8a8(X, kb.quantize(X, "uint8", **INT8)), FormatError, "symmetric int8"),
        (lambda: affine.linear_w8a8(X, kb.quantize(X[None], "int8", **INT8)), FormatError, r"shape \(1, 2, 32\)"),
        (lambda: affine.linear_w8a8(np.ones((1, 131072), "f4"), weight(1, 131072)), ValueError, "up to K = 131071"),
        (lambda: affine.linear_w8a8(X, Q, np.ones(5)), ValueError, r"bias has shape \(5,\); it must be \(4,\)"),
        (lambda: affine.linear_w8a8(X, Q, np.ones(4, int)), TypeError, "bias is int64"),
        (lambda: affine.linear_w8a8(X, Q, out=np.empty((2, 4), "f2")), TypeError, "out is float16"),
        (lambda: affine.linear_w8a8(X, Q, out=np.empty((4, 2), "f4")), ValueError, r"out has shape \(4, 2\)"),
        (lambda: affine.linear_w8a8(X, Q, out=np.empty((2, 8), "f4")[:, ::2]), ValueError, "not C-contiguous"),
        (lambda: affine.linear_smoothquant(X, Q, ONES[1:]), ValueError, r"smooth has shape \(31,\)"),
        (lambda: affine.linear_smoothquant(X, Q, ONES, activation_scale=0), FormatError, "activation_scale is 0"),
        (lambda: affine.linear_smoothquant(X, Q, ONES, activation_scale=1e-60), FormatError, "finite in float32"),
        (
            lambda: affine.linear_smoothquant(X, Q, ONES, activation_scale=np.nan),
            FormatError,
            "activation_scale is nan",
        ),
        (lambda: affine.linear_smoothquant(X, Q, ONES, activation_scale=ONES), ValueError, "it must be one number"),
        (lambda: affine.smooth_scales(ONES, X, 2), ValueError, "alpha is 2; it must be a number from 0 to 1"),
        (lambda: affine.smooth_scales(ONES[1:], X), ValueError, "activation_absmax has shape"),
        (lambda: affine.smooth_scales(ONES, ONES), ValueError, r"weight has shape \(32,\); it must be \[N, K\]"),
        (lambda: affine.smooth_weight(Q, ONES), TypeError, "weight is a QuantizedArray"),
        (lambda: affine.smooth_weight(X.astype(int), ONES), TypeError, "weight is int64"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_devices(cupy):
    x, q = cupy.asarray(X), Q.to_device("cuda:0")
    for call, message in (
        (lambda: affine.linear_w8a8(X, q), "x is on cpu and the weight on cuda:0"),
        (lambda: affine.linear_w8a8(x, q, np.ones(4, "f4")), "bias is on cpu and x on cuda:0"),
        (lambda: affine.linear_w8a8(x, q, out=np.empty((2, 4), "f4")), "out is on cpu"),
        (lambda: affine.linear_smoothquant(x, q, ONES), "smooth is on cpu"),
        (
            lambda: affine.linear_smoothquant(X, Q, ONES, activation_scale=cupy.ones(1)),
            "activation_scale is on cuda:0 and x on cpu",
        ),
        (lambda: affine.Calibration().update(x).update(X), "batch is on cpu and the earlier ones on cuda:0"),
        (lambda: affine.smooth_weight(x, ONES), "smooth is on cpu"),
    ):
        with pytest.raises(DeviceError, match=message):
            call()


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def on_device(cupy, value):
    if isinstance(value, kb.QuantizedArray):
        return value.to_device("cuda:0")
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def check(cupy, x, q, **options):
    """CUDA and NumPy, bit for bit."""
    y = product(on_device(cupy, x), on_device(cupy, q), **{n: on_device(cupy, v) for n, v in options.items()})
    expected = product(x, q, **options)
    assert y.dtype == expected.dtype and y.shape == expected.shape and same_values(y.get(), expected)


@pytest.fixture(params=["chosen", "mma.sync", *w8a8._TILINGS], ids=str)
def path(request, monkeypatch, cupy):
    """Which kernel multiplies; tilings where the GPU has wgmma."""
    if request.param == "mma.sync":
        monkeypatch.setattr(w8a8, "_multiprocessors", lambda device: 0)
    elif request.param != "chosen":
        if not w8a8._multiprocessors(0):
            pytest.skip("needs a Hopper GPU")
        chosen = w8a8.choose_tiling

        def choose(tokens, channels, depth, multiprocessors):
            return request.param if request.param.splits(depth) else chosen(tokens, channels, depth, multiprocessors)

        monkeypatch.setattr(w8a8, "choose_tiling", choose)
    w8a8._plan.cache_clear()
    yield request.param
    w8a8._plan.cache_clear()


class TestSmall:
    """Every kernel at sizes around its tiles, with edges in all three directions."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("path", ["chosen", "mma.sync", w8a8._TILINGS[0]], ids=str, indirect=True)
    def test_streams(self, cupy, path, dtype):
        for tokens, rows, depth in ((1, 1, 1), (1, 33, 16), (3, 50, 1000), (8, 16, 2048), (9, 31, 144), (16, 40, 1184)):
            x = make("special", tokens * depth, dtype).reshape(tokens, depth)
            for variant in VARIANTS:
                check(cupy, x, weight(rows, depth), **arguments_of(variant, "special", rows, depth, dtype))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tiles(self, cupy, path, dtype):
        for tokens, rows, depth in ((17, 1, 1), (20, 130, 64), (65, 264, 272), (130, 100, 1040), (260, 300, 129)):
            x = make("special", tokens * depth, dtype).reshape(tokens, depth)
            for variant in VARIANTS[1:4:2]:
                check(cupy, x, weight(rows, depth), **arguments_of(variant, "special", rows, depth, dtype))

    @pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float64")], ids=str)
    def test_activations_that_are_int8_already(self, cupy, path, dtype):
        for tokens, rows, depth in ((1, 33, 128), (3, 50, 1000), (9, 31, 256), (20, 130, 64), (130, 100, 1040)):
            bias, _ = vectors("normal", rows, depth, np.dtype("float32"))
            for scales in {tokens, 1}:
                check(cupy, activations((tokens, depth), scales, dtype), weight(rows, depth), bias=bias)

    def test_float64(self, cupy):
        for tokens, rows, depth in ((1, 33, 128), (20, 130, 64)):
            x = make("special", tokens * depth, np.dtype("float32")).astype(np.float64).reshape(tokens, depth)
            for variant in VARIANTS:
                check(cupy, x, weight(rows, depth), **arguments_of(variant, "special", rows, depth, DTYPES[0]))

    def test_long_rows(self, cupy):
        """Rows that a thread block does not hold in registers."""
        for dtype in DTYPES:
            for depth in (8200, 20001):
                x = make("normal", 2 * depth, dtype).reshape(2, depth)
                check(cupy, x, weight(3, depth))
                check(cupy, x, weight(3, depth), **arguments_of(VARIANTS[2], "normal", 3, depth, dtype))

    @pytest.mark.parametrize("offset", [1, 2, 4, 8, 15])
    def test_unaligned_arrays(self, cupy, offset):
        """Everything may start at any element."""
        for tokens, depth in ((5, 128), (40, 160)):
            rows = 72
            x = make("normal", tokens * depth, np.dtype("float16")).reshape(tokens, depth)
            q = weight(rows, depth)
            bias, smooth = vectors("normal", rows, depth, BFLOAT16)

            def shifted(array):
                room = cupy.zeros(array.size + offset + 64, array.dtype)
                view = room[offset : offset + array.size].reshape(array.shape)
                view[...] = cupy.asarray(array)
                return view, room

            planes = {name: shifted(plane)[0] for name, plane in q.planes.items()}
            out, room = shifted(np.zeros((tokens, rows), np.float16))
            moved = kb.QuantizedArray(q.format, planes, q.shape, q.dtype)
            for smoothing in (None, smooth):
                product(
                    shifted(x)[0],
                    moved,
                    bias=shifted(bias)[0],
                    smooth=None if smoothing is None else shifted(smooth)[0],
                    out=out,
                )
                assert same_values(out.get(), product(x, q, bias=bias, smooth=smoothing))
                assert not room[:offset].any() and not room[offset + out.size :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "extreme", "subnormal", "zeros"])
def test_kinds(cupy, kind, dtype):
    for tokens, rows, depth in ((1, 70, 512), (16, 33, 1024), (40, 200, 256), (200, 300, 384)):
        x = make(kind, tokens * depth, dtype).reshape(tokens, depth)
        for variant in VARIANTS:
            check(cupy, x, weight(rows, depth), **arguments_of(variant, kind, rows, depth, dtype))


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (16, 1000, 4112), (33, 520, 8192), (300, 1500, 2048)])
def test_larger_products(cupy, path, shape):
    """Several tiles, many stages; with a K at which rounds of the ring are not whole."""
    tokens, rows, depth = shape
    x = make("normal", tokens * depth, np.dtype("float16")).reshape(tokens, depth)
    check(cupy, x, weight(rows, depth), **arguments_of(VARIANTS[1], "normal", rows, depth, np.dtype("float32")))


def test_every_half_number(cupy):
    """All 65536 of them, under scales of their own and under static ones: codes times scales, by an identity."""
    size = 256
    codes = np.eye(size, dtype=np.int8).reshape(-1)
    planes = {"codes": codes, "scale": np.ones(size, np.float32)}
    identity = kb.QuantizedArray(kb.get_format("int8", **INT8), planes, (size, size), "float32")
    for dtype in DTYPES[:2]:
        every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        for x in (every.reshape(size, size), every.reshape(size, size).T.copy()):
            check(cupy, x, identity)
            for fixed in (1.0, 0.7, 3e-5, 1e-40, 2.0**-62, 250.0, 1e30):
                check(cupy, x, identity, fixed=fixed)


def test_sums_at_the_edge_of_int32(cupy):
    depth = w8a8.MAX_DEPTH
    q = weight(2, depth)
    q.planes["codes"].reshape(2, depth)[0] = -128
    for tokens in (1, 20):
        x = np.full((tokens, depth), -1e9, np.float32)
        check(cupy, x, q, fixed=1.0)


def test_device_scales_are_not_read(cupy):
    q = on_device(cupy, weight(8, 32))
    for bad in (0.0, -1.0, np.inf, np.nan):
        y = product(cupy.ones((3, 32), "f4"), q, fixed=cupy.asarray([bad]))
        assert not y.any()


def test_layouts(cupy):
    base = cupy.asarray(make("normal", 64 * 48, np.dtype("float32"))).reshape(64, 48)
    for x in (base.T[:, :32], cupy.asfortranarray(base), base[::-1, ::3], base[3], base.reshape(4, 16, 48)):
        q = weight(10, x.shape[-1])
        assert same_values(affine.linear_w8a8(x, on_device(cupy, q)).get(), affine.linear_w8a8(x.get(), q))
    assert affine.linear_w8a8(base[:0], on_device(cupy, weight(5, 48))).shape == (0, 5)
    nothing = affine.linear_w8a8(cupy.empty((20, 0), "f4"), on_device(cupy, weight(3, 0)), cupy.arange(3.0))
    assert np.array_equal(nothing.get(), np.tile(np.arange(3.0), (20, 1)))


def test_calibration_agrees(cupy):
    x, w = outlier_data()
    host, device = (affine.Calibration().update(a).update(a * 2) for a in (x, cupy.asarray(x)))
    assert np.array_equal(device.absmax.get(), host.absmax)
    s = affine.smooth_scales(host.absmax, w)
    there = affine.smooth_scales(device.absmax, cupy.asarray(w))
    assert np.allclose(there.get(), s, rtol=1e-6)
    scale = device.activation_scale(cupy.asarray(s))
    assert scale.get() == host.activation_scale(s)
    assert np.array_equal(affine.smooth_weight(cupy.asarray(w), cupy.asarray(s)).get(), affine.smooth_weight(w, s))


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_graph_capture(cupy, tokens):
    q = weight(520, 256)
    there, (bias, smooth) = on_device(cupy, q), vectors("normal", 520, 256, np.dtype("float32"))
    x, y, z = cupy.ones((tokens, 256), "f2"), cupy.empty((tokens, 520), "f2"), cupy.empty((tokens, 520), "f2")
    s, b = cupy.asarray(smooth), cupy.asarray(bias)

    def calls():
        affine.linear_w8a8(x, there, b, out=y)
        affine.linear_smoothquant(x, there, s, activation_scale=0.01, out=z)

    calls()  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            calls()
        finally:  # a stream that stays in capture fails every later test of the process
            graph = stream.end_capture()
    for seed in range(3):
        data = make("normal", x.size, np.dtype("float16"), seed).reshape(x.shape)
        x.set(data)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert same_values(y.get(), affine.linear_w8a8(data, q, bias))
        assert same_values(z.get(), affine.linear_smoothquant(data, q, smooth, activation_scale=0.01))


@pytest.mark.parametrize("tokens", [1, 20, 200])
def test_weights_that_were_just_written_beside_int8_activations(cupy, tokens):
    """No kernel is launched ahead of the product that would have waited for what wrote the weight."""
    there, out = on_device(cupy, weight(520, 1024)), cupy.empty((tokens, 520), "f2")
    a = activations((tokens, 1024), tokens, np.dtype("float16"))
    x = on_device(cupy, a)
    rng = np.random.default_rng(tokens)
    for _ in range(10):
        codes = rng.integers(-128, 128, 520 * 1024).astype(np.int8)
        new = cupy.asarray(codes)
        cupy.cuda.Device().synchronize()
        cupy.add(new, 0, out=there.planes["codes"], casting="unsafe")
        affine.linear_w8a8(x, there, out=out)
        y = out.copy()
        q = kb.QuantizedArray(there.format, {"codes": codes, "scale": there.planes["scale"].get()}, (520, 1024), "f4")
        assert same_values(y.get(), affine.linear_w8a8(a, q))


@pytest.mark.parametrize("tokens", [1, 20, 200])
def test_weights_and_activations_that_were_just_written(cupy, tokens):
    """The second kernel of a product starts before the first one has ended, but not before those ahead of both."""
    there, x = on_device(cupy, weight(520, 1024)), cupy.empty((tokens, 1024), "f2")
    out = cupy.empty((tokens, 520), "f2")
    rng = np.random.default_rng(tokens)
    for _ in range(10):
        data = rng.standard_normal(x.shape).astype("f2")
        codes = rng.integers(-128, 128, 520 * 1024).astype(np.int8)
        scale = rng.random(520).astype(np.float32)
        new = cupy.asarray(data), cupy.asarray(codes), cupy.asarray(scale)
        cupy.cuda.Device().synchronize()
        for target, values in zip((x, there.planes["codes"], there.planes["scale"]), new, strict=True):
            cupy.add(values, 0, out=target, casting="unsafe")
        affine.linear_w8a8(x, there, out=out)
        y = out.copy()
        out.fill(7)
        q = kb.QuantizedArray(there.format, {"codes": codes, "scale": scale}, there.shape, there.dtype)
        assert same_values(y.get(), affine.linear_w8a8(data, q))


def test_threads(cupy):
    """Each thread launches with buffers of its own."""
    q = on_device(cupy, weight(264, 512))
    inputs = [
        make("normal", tokens * 512, np.dtype("float16"), tokens).reshape(tokens, 512) for tokens in (3, 40, 70, 5)
    ]
    expected = [affine.linear_w8a8(x, q.get()) for x in inputs]
    for x in inputs:
        affine.linear_w8a8(cupy.asarray(x), q)  # compiles
    cupy.cuda.Device().synchronize()

    def work(x):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            there = cupy.asarray(x)
            results = [affine.linear_w8a8(there, q) for _ in range(50)]
            stream.synchronize()
            return [y.get() for y in results]

    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
        for found, y in zip(pool.map(work, inputs), expected, strict=True):
            assert all(same_values(each, y) for each in found)


def test_work_goes_to_the_current_stream(cupy):
    """Another product keeps the stream busy; the call neither waits nor runs ahead."""
    q = on_device(cupy, weight(520, 1024))
    x = cupy.asarray(make("normal", 64 * 1024, np.dtype("float32"))).reshape(64, 1024)
    affine.linear_w8a8(x, q)
    busy = cupy.random.standard_normal((8192, 8192), dtype="f4")
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = x * 1
        for _ in range(20):
            busy = busy @ busy * 1e-4
        late *= 3
        y = affine.linear_w8a8(late, q)
        assert not stream.done
    stream.synchronize()
    assert same_values(y.get(), affine.linear_w8a8(x.get() * np.float32(3), q.get()))


def test_more_than_two_to_the_31_elements(cupy, large_memory):
    """A weight of 2^31 + 2^17 bytes, and a result of more than 2^31 elements."""
    large_memory(20)
    depth, rows = 8192, (1 << 18) + 16
    piece = weight(16, depth)
    planes = {name: repeated(cupy, plane, len(plane) * (rows // 16)) for name, plane in piece.planes.items()}
    q = kb.QuantizedArray(piece.format, planes, (rows, depth), "float32")
    for tokens in (3, 20):
        x = make("normal", tokens * depth, np.dtype("float16")).reshape(tokens, depth)
        for found, expected in zip(affine.linear_w8a8(cupy.asarray(x), q), affine.linear_w8a8(x, piece), strict=True):
            assert_repeats(found, expected)
    del q, planes
    x, q = make("normal", 32, np.dtype("float16")).reshape(1, 32), weight(1 << 16, 32)
    y = affine.linear_w8a8(repeated(cupy, x, (1 << 15) + 1), on_device(cupy, q))
    assert_repeats(y, affine.linear_w8a8(x, q))
