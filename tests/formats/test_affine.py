"""Affine integers on NumPy: the contract spelled out a second time, boundary cases, bad input."""

import math
import tracemalloc

import numpy as np
import pytest
from affine_inputs import CASES, DTYPES, MASKS, block_numbers, numbers, oracle_steps, wide_divide
from hypothesis import given, strategies as st

import kbitcupy as kb
from kbitcupy import affine
from kbitcupy.errors import FormatError
from kbitcupy.formats import affine as family
from kbitcupy.formats.affine import cuda, numpy as numpy_side

RANGES = [(-128, 127), (0, 255), (-8, 7), (0, 15)]
INF, NAN = np.inf, np.nan


def parameters(shape, granularity, dtype, levels, seed=0):
    """Scales and zero points of every kind that is allowed, in the shape of the granularity."""
    rng = np.random.default_rng(seed)
    _, wanted = block_numbers(shape, granularity)
    scale = np.exp2(rng.uniform(-6, 3, wanted)).astype(np.float64 if dtype == np.float64 else np.float32)
    scale.reshape(-1)[3::5] = 0
    scale.reshape(-1)[4::7] = 1e-42
    return scale, rng.integers(levels[0], levels[1] + 1, wanted).astype(np.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), CASES, ids=str)
def test_every_function_by_its_formula(shape, granularity, dtype):
    block, _ = block_numbers(shape, granularity)
    for kind, (qmin, qmax) in zip(["normal", "special", "wide", "extreme"], RANGES, strict=True):
        x = numbers(kind, shape, dtype)
        scale, zero = parameters(shape, granularity, dtype, (qmin, qmax))
        s, z = scale.reshape(-1)[block], zero.reshape(-1)[block]
        steps = oracle_steps(x, s, qmin - z, qmax - z)
        q = affine.quantize(x, scale, zero, qmin=qmin, qmax=qmax, granularity=granularity)
        assert q.dtype == (np.int8 if qmin < 0 else np.uint8) and np.array_equal(q, steps + z)

        with np.errstate(over="ignore"):
            y = (s * steps.astype(s.dtype)).astype(dtype)
        fake = affine.fake_quantize(x, scale, zero, qmin=qmin, qmax=qmax, granularity=granularity)
        assert fake.dtype == dtype and np.array_equal(fake, y)
        back = affine.dequantize(q, scale, zero, granularity=granularity, dtype=dtype)
        assert back.dtype == dtype and np.array_equal(back, y)

        dy = numbers("normal", shape, dtype, seed=1)
        with np.errstate(all="ignore"):
            u = np.rint((x.astype(s.dtype) / s if dtype == np.float64 else wide_divide(x, s)).astype(np.float64)) + z
        for mask in MASKS:
            inside = {"inclusive": (u >= qmin) & (u <= qmax), "strict": (u > qmin) & (u < qmax), "none": u == u}[mask]
            inside = inside & (s > 0) if mask != "none" else np.ones(shape, bool)
            options = {"qmin": qmin, "qmax": qmax, "granularity": granularity, "mask": mask}
            dx = affine.fake_quantize_backward(dy, x, scale, zero, **options)
            assert dx.dtype == dtype and np.array_equal(dx, np.where(inside, dy, 0))
            dx = affine.quantize_backward(dy, x, scale, zero, **options)
            with np.errstate(all="ignore"):
                wanted = (dy.astype(s.dtype) / s if dtype == np.float64 else wide_divide(dy, s)).astype(dtype)
            assert dx.dtype == dtype and np.array_equal(dx, np.where(inside & (s > 0), wanted, 0))
        dq = affine.dequantize_backward(dy, scale, granularity=granularity)
        assert dq.dtype == dtype and np.array_equal(dq, (dy.astype(s.dtype) * s).astype(dtype))


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3, 0.0078125, 3.7e-6, 1e-42, 0.0, 700.0, 65504.0])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_number(dtype, scale):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    s = np.full(x.shape, scale, np.float32)
    for (qmin, qmax), zero in zip(RANGES, (0, 128, -3, 9), strict=True):
        wanted = oracle_steps(x, s, qmin - zero, qmax - zero)
        q = affine.quantize(x, scale, zero, qmin=qmin, qmax=qmax)
        assert np.array_equal(q, wanted + zero)
        y = affine.fake_quantize(x, scale, zero, qmin=qmin, qmax=qmax)
        assert y.tobytes() == affine.dequantize(q, scale, zero, dtype=dtype).tobytes()
        assert not np.signbit(y[wanted == 0]).any()  # the integer 0 has no sign


def test_the_examples_of_the_contract():
    quantize = affine.quantize
    # Half to even, and the zero point is added behind the rounding.
    assert list(quantize(np.float32([0.5, 1.5, 2.5, -0.5, -1.5]), 1.0)) == [0, 2, 2, 0, -2]
    assert list(quantize(np.float32([0.5, 1.5]), 1.0, 3)) == [3, 5]
    # NaN, infinities, and what overflows the quotient.
    x = np.float32([NAN, INF, -INF, 3e38, -3e38])
    assert list(quantize(x, 1e-30, 5)) == [5, 127, -128, 127, -128]
    assert list(quantize(x, 0.0, 5)) == [5] * 5
    assert list(affine.dequantize(np.int8([5, 127, -128]), 0.0, 5)) == [0, 0, 0]
    # Subnormal scales and numbers are numbers.
    assert list(quantize(np.float32([3e-45, -1.4e-44]), 1.4e-45)) == [2, -10]
    assert affine.dequantize(np.int8([3]), 1.4e-45)[0] == np.float32(4.2e-45)


EDGE = np.array([-129.6, -129.5, -128.51, -128.5, -128, 0, 127, 127.49, 127.5, 127.51, NAN, INF, -INF])
INSIDE = [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]  # rint(-128.5) is -128, rint(127.5) is 128
STRICT = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


class TestGradients:
    """x on the edge, between, beyond; scale 0; what is not a number."""

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_on_the_edge_of_the_range(self, dtype):
        x = EDGE.astype(dtype)
        dy = np.linspace(1, 2, x.size).astype(dtype)
        for mask, inside in (("inclusive", INSIDE), ("strict", STRICT), ("none", [1] * x.size)):
            dx = affine.fake_quantize_backward(dy, x, 1.0, qmin=-128, qmax=127, mask=mask)
            assert np.array_equal(dx, np.where(inside, dy, 0))
            dx = affine.quantize_backward(2 * dy, 2 * x, 2.0, mask=mask)
            assert np.array_equal(dx, np.where(inside, dy, 0))

    def test_scale_zero_has_no_gradient(self):
        dy, x = np.float32([1, -2, INF, NAN]), np.float32([0, 1, 2, 3])
        zero = np.zeros(4, np.float32)
        assert np.array_equal(affine.quantize_backward(dy, x, 0.0), zero)
        assert np.array_equal(affine.quantize_backward(dy, x, 0.0, mask="none"), zero)
        assert np.array_equal(affine.fake_quantize_backward(dy, x, 0.0, qmin=0, qmax=3), zero)
        assert np.array_equal(affine.fake_quantize_backward(dy, x, 0.0, qmin=0, qmax=3, mask="none"), dy, True)
        assert np.array_equal(affine.dequantize_backward(dy[:2], 0.0), zero[:2])

    def test_against_differences_of_the_relaxed_function(self):
        """Without rounding, fake_quantize is clamp(x, scale * low, scale * high): the gradient is its slope."""
        rng = np.random.default_rng(0)
        x, scale, zero = rng.normal(0, 3, 2000), 0.037, 11
        low, high = scale * (0 - zero - 0.5), scale * (255 - zero + 0.5)
        h = 1e-6
        slope = (np.clip(x + h, low, high) - np.clip(x - h, low, high)) / (2 * h)
        dx = affine.fake_quantize_backward(np.ones_like(x), x, scale, zero, qmin=0, qmax=255)
        assert np.allclose(dx, slope)

    def test_of_a_range_that_was_found(self):
        x = numbers("normal", (6, 64), np.float32)
        _, scale, zero = affine.dynamic_range(x, granularity="token", symmetric=False)
        dy = numbers("normal", (6, 64), np.float32, seed=1)
        wanted = affine.quantize_backward(dy, x, scale, zero, granularity="token")
        assert np.array_equal(affine.dynamic_range_backward(dy, x, scale, zero, granularity="token"), wanted)
        assert (wanted != 0).mean() > 0.98


def limit_of(dtype, computed):
    """The largest number of `computed` that is finite in `dtype`, by looking for it."""
    low, high = np.array([1, INF], computed).view(f"u{np.dtype(computed).itemsize}").tolist()
    while high - low > 1:
        middle = (low + high) // 2
        number = np.array(middle, f"u{np.dtype(computed).itemsize}").view(computed)
        with np.errstate(over="ignore"):
            low, high = (middle, high) if np.isfinite(number.astype(dtype)) else (low, middle)
    return np.array(low, f"u{np.dtype(computed).itemsize}").view(computed)[()]


LIMITS = {dtype: limit_of(dtype, np.float64 if dtype == np.float64 else np.float32) for dtype in DTYPES}


def kept_finite(scale, reach, dtype):
    """The scale that the contract takes where `reach` steps of the one that was found would not be finite."""
    limit, steps = LIMITS[dtype], type(LIMITS[dtype])(reach)
    with np.errstate(over="ignore"):
        if scale * steps <= limit:
            return scale
        most = limit / steps
        return most if most * steps <= limit else np.nextafter(most, type(limit)(0))


def members(x, block, count):
    """The elements of each block."""
    order = np.argsort(block, axis=None, kind="stable")
    return np.split(x.reshape(-1)[order], np.searchsorted(block.reshape(-1)[order], np.arange(1, count)))[:count]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "granularity"), CASES, ids=str)
def test_ranges_by_their_formula(shape, granularity, symmetric):
    block, wanted = block_numbers(shape, granularity)
    for dtype in DTYPES:
        largest = float(np.nextafter(dtype.type(INF), dtype.type(0)))
        for kind in ("normal", "special", "zeros", "extreme"):
            x = numbers(kind, shape, dtype)
            if kind == "normal":
                x = np.abs(x) + dtype.type(1)  # the range is widened to hold 0
            known = [member[~np.isnan(member)] for member in members(x.astype(np.float64), block, math.prod(wanted))]
            ends = [(max(member.min(initial=0), -largest), min(member.max(initial=0), largest)) for member in known]
            for qmin, qmax in RANGES:
                options = {"qmin": qmin, "qmax": qmax, "granularity": granularity, "symmetric": symmetric}
                scale, zero = affine.choose_qparams(x, **options)
                computed = np.float64 if dtype == np.float64 else np.float32
                assert (scale.dtype, scale.shape, zero.dtype, zero.shape) == (computed, wanted, np.int32, wanted)
                for i, (low, high) in enumerate(ends):
                    if symmetric:
                        point = 0 if qmin < 0 else (qmax + 1) // 2
                        s = computed(max(high, -low)) / computed(qmax - point)
                    else:
                        s = computed(min(high - low, np.finfo(np.float64).max) / (qmax - qmin))
                        with np.errstate(all="ignore"):
                            point = qmin - np.rint(computed(low) / s) if s else qmin
                        point = min(max(point, qmin), qmax)
                    s = kept_finite(s, qmax - point if symmetric else max(qmax - point, point - qmin), dtype)
                    if low == high == 0:
                        s, point = 1, point if symmetric else qmin
                    assert (scale.reshape(-1)[i], zero.reshape(-1)[i]) == (s, point)
                q, s, z = affine.dynamic_range(x, **options)
                assert np.array_equal(s, scale) and np.array_equal(z, zero)
                assert np.array_equal(q, affine.quantize(x, s, z, qmin=qmin, qmax=qmax, granularity=granularity))


@pytest.mark.parametrize("percentile", [None, 100, 99], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4"])
def test_finite_numbers_stay_finite(name, dtype, symmetric, percentile):
    """At the end of a dtype, where half a step more is infinite; and numbers within their error bound."""
    end = np.nextafter(dtype.type(INF), dtype.type(0))
    rng = np.random.default_rng(0)
    x = (rng.uniform(-1, 1, (512, 32)) * float(end)).astype(dtype)
    x[::2, 0], x[1::2, 0], x[::3, 1] = end, -end, end
    for granularity in ("tensor", "token", ("group", 8), ("channel", 1)):
        options = {"granularity": granularity, "symmetric": symmetric, "percentile": percentile}
        q = kb.quantize(x, name, **options)
        assert np.isfinite(q.dequantize()).all()
        if dtype != np.float64:
            assert kb.metrics.error_bound(x, q, q.dequantize(dtype="float32")).violations == 0
        else:  # the functions keep scales of float64
            levels = {"qmin": q.format.levels.qmin, "qmax": q.format.levels.qmax}
            scale, zero = affine.choose_qparams(x, **levels, **options)
            assert np.isfinite(affine.fake_quantize(x, scale, zero, granularity=granularity, **levels)).all()


@pytest.mark.parametrize("reach", [1, 7, 8, 127, 128, 255, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scale_that_keeps_numbers_finite_is_the_largest(dtype, reach):
    computed = type(LIMITS[dtype])
    with np.errstate(over="ignore"):
        found = numpy_side.finite_scale(computed([LIMITS[dtype]]), reach, dtype)[0]
        assert np.isfinite((found * computed(reach)).astype(dtype))
        beyond = found
        for _ in range(3):  # rounding may leave a product where it is
            beyond = np.nextafter(beyond, computed(INF))
        assert reach == 1 or not np.isfinite((beyond * computed(reach)).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8", "uint4"])
def test_ordinary_scales_are_what_the_range_says(name, dtype):
    """Up to half of the largest number there is, whatever the zero point."""
    rng = np.random.default_rng(1)
    end = float(np.nextafter(dtype.type(INF), dtype.type(0)))
    computed = type(LIMITS[dtype])
    x = (rng.uniform(-0.5, 0.5, (64, 16)) * end * np.exp2(-np.arange(64.0) / 2)[:, None]).astype(dtype)
    levels = kb.get_format(name).levels
    options = {"qmin": levels.qmin, "qmax": levels.qmax, "granularity": "token"}
    wide = x.astype(computed)
    low, high = wide.min(1).clip(max=0).astype(np.float64), wide.max(1).clip(min=0).astype(np.float64)
    scale, _ = affine.choose_qparams(x, symmetric=False, **options)
    assert np.array_equal(scale, ((high - low) / (levels.qmax - levels.qmin)).astype(computed))
    scale, _ = affine.choose_qparams(x, **options)
    assert np.array_equal(scale, np.abs(wide).max(1) / computed(levels.divisor))


@pytest.mark.parametrize(("shape", "granularity"), [c for c in CASES if math.prod(c[0])], ids=str)
def test_percentiles_are_numpys(shape, granularity):
    block, wanted = block_numbers(shape, granularity)
    x = numbers("wide", shape, np.dtype("float32"))
    each, percentiles = members(x, block, math.prod(wanted)), (100, 99.9, 75, 1e-3)

    def ends(of):
        return [np.percentile(of(member), percentiles, method="inverted_cdf") for member in each]

    largests, highs, lows = ends(np.abs), ends(np.positive), ends(np.negative)
    for place, percentile in enumerate(percentiles):
        scale, _ = affine.choose_qparams(x, granularity=granularity, percentile=percentile)
        found, _ = affine.choose_qparams(x, granularity=granularity, percentile=percentile, symmetric=False)
        for i in range(scale.size):
            largest = largests[i][place]
            assert scale.reshape(-1)[i] == (largest / np.float32(127) if largest else 1)
            high, low = max(highs[i][place], np.float32(0)), max(lows[i][place], np.float32(0))
            width = np.float32((float(high) + float(low)) / 255)
            assert found.reshape(-1)[i] == (width if high or low else 1)
    assert np.array_equal(
        affine.choose_qparams(x, granularity=granularity)[0],
        affine.choose_qparams(x, granularity=granularity, percentile=100)[0],
    )


@given(st.data())
def test_what_is_decoded_is_near(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape, granularity = data.draw(st.sampled_from(CASES))
    name = data.draw(st.sampled_from(["int8", "uint8", "int4", "uint4"]))
    symmetric = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(["normal", "small", "wide", "subnormal", "constant", "extreme"]))
    x = numbers(kind, shape, dtype, data.draw(st.integers(0, 1000)))
    x[~np.isfinite(x.astype(np.float64))] = 0
    q = kb.quantize(x, name, granularity=granularity, symmetric=symmetric)
    assert np.isfinite(q.dequantize().astype(np.float64)).all()
    y = q.dequantize(dtype="float64" if dtype == np.float64 else "float32")
    assert kb.metrics.error_bound(x, q, y).violations == 0
    # The functions give the same integers and numbers as the format.
    levels = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}[name]
    if dtype != np.float64:  # whose scales a format rounds to float32
        codes, scale, zero = affine.dynamic_range(
            x, qmin=levels[0], qmax=levels[1], granularity=granularity, symmetric=symmetric
        )
        assert np.array_equal(q.planes["scale"], scale.reshape(-1))
        if not symmetric:
            assert np.array_equal(q.planes["zero_point"], zero.reshape(-1))
        y = affine.dequantize(codes, scale, zero, granularity=granularity, dtype=dtype)
        assert q.dequantize().tobytes() == y.tobytes()


# ---- the container ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_packing(name, size):
    x = np.random.default_rng(size).integers(-8, 8, size).astype(np.float32)
    x += 8 * (name == "uint4")
    q = kb.quantize(x, name, symmetric=False, scale=1.0, zero_point=0)
    packed = q.planes["codes"]
    assert packed.dtype == np.uint8 and packed.size == -(-size // 2)
    for i, value in enumerate(x.astype(int)):
        assert packed[i // 2] >> i % 2 * 4 & 15 == value & 15
    if size % 2:
        assert packed[-1] >> 4 == 0
    assert np.array_equal(q.dequantize(), x)


@pytest.mark.parametrize(
    ("granularity", "shapes"),
    [
        ("tensor", [(), (1,), (1, 1)]),
        ("token", [(4, 3), (4, 3, 1), (12,)]),
        (("channel", 1), [(3,), (3, 1)]),
        (("group", 4), [(4, 3, 2), (4, 3, 2, 1), (24,)]),
        (("group", 8), [(4, 3, 1), (4, 3, 1, 1), (12,)]),
    ],
    ids=str,
)
def test_shapes_of_given_scales(granularity, shapes):
    x = numbers("normal", (4, 3, 8), np.float32)
    scale = np.exp2(np.arange(np.prod(shapes[0], dtype=int)) / 8).astype(np.float32)
    zero = np.arange(scale.size, dtype=np.int32)
    found = set()
    for shape in shapes:
        s, z = scale.reshape(shape), zero.reshape(shape)
        codes = affine.quantize(x, s, z, granularity=granularity)
        q = kb.quantize(x, "int8", granularity=granularity, scale=s, zero_point=z, symmetric=False)
        assert np.array_equal(q.planes["codes"], codes.reshape(-1))
        found.add(affine.dequantize(codes, s, z, granularity=granularity).tobytes())
        found.add(q.dequantize().tobytes())
    assert len(found) == 1


def test_scales_of_a_square_are_those_of_the_documented_shape():
    x = numbers("normal", (2, 8), np.float32)
    scale = np.float32([[1, 2], [4, 8]])
    codes = affine.quantize(x, scale, granularity=("group", 4))
    assert np.array_equal(codes[0, 4:], affine.quantize(x[0, 4:], 2.0))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "token", ("channel", 1), ("group", 48)], ids=str)
def test_a_percentile_takes_one_copy(granularity, symmetric):
    """... of float32, and a byte for each element while NaN are looked for."""
    x = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
    tracemalloc.start()
    affine.choose_qparams(x, granularity=granularity, symmetric=symmetric, percentile=99)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * x.nbytes


def test_scales_that_are_given():
    x = numbers("normal", (4, 6), np.float32)
    scale = np.float32([[0.1], [0.2], [0.0], [0.4]])
    q = kb.quantize(x, "int8", granularity="token", scale=scale)
    assert np.array_equal(q.planes["scale"], scale.reshape(-1)) and list(q.planes) == ["codes", "scale"]
    assert np.array_equal(q.planes["codes"], affine.quantize(x, scale, granularity="token").reshape(-1))
    q = kb.quantize(x, "uint8", symmetric=False, scale=0.02, zero_point=100)
    assert q.planes["zero_point"][0] == 100 and q.planes["scale"][0] == np.float32(0.02)
    assert kb.quantize(x, "uint8", symmetric=False, scale=0.02).planes["zero_point"][0] == 0
    assert kb.quantize(x, "int8", percentile=50).planes["scale"] < kb.quantize(x, "int8").planes["scale"]
    assert kb.quantize(x, "int8", percentile=50).format == kb.get_format("int8", percentile=50)
    assert kb.quantize(x, "int8:scale=0.02").format == kb.get_format("int8")
    with pytest.raises(FormatError, match="percentile says how a scale is found, and scale gives one"):
        kb.quantize(x, "int8", percentile=50, scale=0.1)
    with pytest.raises(FormatError, match="kbit4 takes no scale: beside its options it takes codebook"):
        kb.quantize(x, "kbit4", scale=0.1)


@pytest.mark.parametrize("name", ["int8", "uint4"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "granularity", ["tensor", "token", ("channel", 0), ("channel", 1), ("channel", -1), ("group", 4)], ids=str
)
def test_rows_stay_what_they_are(name, symmetric, granularity):
    x = numbers("normal", (5, 6, 10), np.float32) * np.exp2(np.arange(5, dtype=np.float32))[:, None, None]
    q = kb.quantize(x, name, granularity=granularity, symmetric=symmetric)
    y = q.dequantize()
    for key in (slice(1, 4), slice(None, None, -2), [4, 0, 0], np.array([True, False, True, True, False])):
        assert np.array_equal(q[key].dequantize(), y[key])
    assert np.array_equal(kb.take(q, [2, 2]), y[[2, 2]])
    assert np.array_equal(q[3].dequantize(), y[3])
    assert np.array_equal(q[3][1:3].dequantize(), y[3, 1:3])
    assert np.array_equal(kb.take(q, [[2, 2], [0, 1]]), y[[[2, 2], [0, 1]]])
    if granularity in ("tensor", "token", ("channel", -1), ("group", 4)):
        assert np.array_equal(q[np.array([[0, 1]])].dequantize(), y[[[0, 1]]])
    else:
        with pytest.raises(FormatError, match="index with a flat array"):
            q[np.array([[0, 1]])]


GRANULARITIES = ["tensor", "token", ("group", 4), *(("channel", axis) for axis in (0, 1, 2, -1, -2, -3))]


def valid(granularity, shape):
    return bool(shape) and (granularity[0] != "channel" or -len(shape) <= granularity[1] < len(shape))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int8", "uint4"])
@pytest.mark.parametrize(
    ("shape", "granularity"),
    [(s, g) for s in [(8,), (4, 8), (4, 1), (1, 6), (2, 3, 8), (4, 1, 4)] for g in GRANULARITIES if valid(g, s)],
    ids=str,
)
def test_a_stack_keeps_the_scales_of_its_members(shape, granularity, name, symmetric):
    """Whatever their elements share, along an inner axis too."""
    x = numbers("normal", (3, *shape), np.float32) * np.float32([1, 30, 0.01]).reshape(3, *[1] * len(shape))
    members = [kb.quantize(part, name, granularity=granularity, symmetric=symmetric) for part in x]
    if math.prod(shape) * members[0].format.bits % 8:
        with pytest.raises(FormatError, match="no whole bytes"):
            kb.stack(members)
        return
    one = kb.stack(members[:1])
    kb.QuantizedArray(one.format, one.planes, one.shape, one.dtype)  # checks its planes
    assert np.array_equal(one.dequantize()[0], members[0].dequantize())
    alike = kb.stack([members[1]] * 2)
    assert np.array_equal(alike.dequantize(), np.stack([members[1].dequantize()] * 2))
    stack = kb.stack(members)
    again = kb.QuantizedArray.from_config(stack.config(), stack.planes)
    assert again.members == stack.members and np.array_equal(again.dequantize(), stack.dequantize())
    assert np.array_equal(stack.dequantize(), np.stack([member.dequantize() for member in members]))
    for i, member in enumerate(members):
        found = stack[i]
        kb.QuantizedArray(found.format, found.planes, found.shape, found.dtype)
        assert found.shape == member.shape and np.array_equal(found.dequantize(), member.dequantize())
        assert all(np.array_equal(found.planes[plane], member.planes[plane]) for plane in member.planes)
    assert np.array_equal(kb.concatenate([stack[:1], stack[1:]]).dequantize(), stack.dequantize())
    twice = kb.stack([stack, stack])
    assert np.array_equal(twice.dequantize(), np.stack([stack.dequantize()] * 2))
    assert np.array_equal(twice[1][2].dequantize(), members[2].dequantize())
    assert np.array_equal(stack[[2, 0]].dequantize(), stack.dequantize()[[2, 0]])
    assert np.array_equal(kb.take(stack, [2, 0]), stack.dequantize()[[2, 0]])
    kb.quantize(x[0], stack[1].format, out=(part := stack[1]))
    assert np.array_equal(stack.dequantize()[:2], np.stack([members[0].dequantize()] * 2))
    assert np.array_equal(part.dequantize(), stack[0].dequantize())


@pytest.mark.parametrize("granularity", ["tensor", "token", ("channel", 0), ("channel", -2), ("group", 16)], ids=str)
def test_products_with_a_stack(granularity):
    """The experts of a layer: each is multiplied as it is, alone."""
    w = numbers("normal", (3, 24, 32), np.float32) * np.float32([1, 30, 0.01]).reshape(3, 1, 1)
    experts = [kb.quantize(part, "int8", granularity=granularity) for part in w]
    x = numbers("normal", (5, 32), np.float32, seed=1)
    ids = [[0, 2], [1, 0], [2, 2], [1, 1], [0, 1]]
    found = kb.linear_grouped(x, kb.stack(experts), ids)
    for token, slots in enumerate(ids):
        for slot, expert in enumerate(slots):
            assert np.allclose(found[token, slot], kb.linear(x[token], experts[expert]), rtol=1e-5, atol=1e-6)
    if granularity not in ("tensor", ("group", 16)):
        assert np.array_equal(affine.linear_w8a8(x, kb.stack(experts)[1]), affine.linear_w8a8(x, experts[1]))


@pytest.mark.parametrize("granularity", [("channel", 0), ("channel", 1), ("channel", -1)], ids=str)
def test_concatenated_channels(granularity):
    x = numbers("normal", (6, 8), np.float32) * np.exp2(np.arange(6, dtype=np.float32))[:, None]
    parts = [kb.quantize(part, "int8", granularity=granularity, symmetric=False) for part in (x[:2], x[2:])]
    if granularity == ("channel", 0):
        whole = kb.concatenate(parts)
        assert np.array_equal(
            whole.planes["scale"], kb.quantize(x, "int8", **parts[0].format.options()).planes["scale"]
        )
        assert np.array_equal(whole.dequantize(), np.concatenate([part.dequantize() for part in parts]))
        return
    with pytest.raises(FormatError, match="differ in their plane 'scale'"):
        kb.concatenate(parts)
    twice = kb.concatenate([parts[1], parts[1]])
    assert np.array_equal(twice.dequantize(), np.concatenate([parts[1].dequantize()] * 2))


@given(st.data())
def test_chains_of_shapes_with_lengths_of_zero(data):
    """Whatever may be reshaped, cut, stacked and joined gives an array that the constructor takes."""
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=3)))
    granularity = data.draw(st.sampled_from([g for g in GRANULARITIES if valid(g, shape)]))
    name, symmetric = data.draw(st.sampled_from(["int8", "int4"])), data.draw(st.booleans())
    x = numbers("normal", shape, np.float32)
    q = kb.quantize(x, name, granularity=granularity, symmetric=symmetric)
    y = q.dequantize()
    for _ in range(data.draw(st.integers(1, 4))):
        change = data.draw(st.sampled_from(["reshape", "rows", "row", "stack", "concatenate"]))
        try:
            if change == "reshape":
                lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3))
                if math.prod(lengths) != y.size:
                    continue
                q, y = q.reshape(lengths), y.reshape(lengths)
            elif change == "rows" and y.ndim:
                cut = slice(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3)))
                q, y = q[cut], y[cut]
            elif change == "row" and y.ndim and len(y):
                q, y = q[-1], y[-1]
            elif change == "stack":
                q, y = kb.stack([q, q]), np.stack([y, y])
            elif change == "concatenate" and y.ndim:
                q, y = kb.concatenate([q, q]), np.concatenate([y, y])
        except FormatError:
            continue
        kb.QuantizedArray.from_config(q.config(), q.planes)
        assert q.shape == y.shape and np.array_equal(q.dequantize(), y)


@pytest.mark.parametrize("granularity", ["token", ("channel", 0)], ids=str)
def test_elements_of_a_vector_by_two_axes(granularity):
    """With one scale for all, or one each: neither is what the result's rows would have."""
    q, key = (
        kb.quantize(numbers("normal", (8,), np.float32), "int8", granularity=granularity),
        np.array([[0, 3], [5, 1]]),
    )
    with pytest.raises(FormatError, match="index with a flat array"):
        q[key]
    assert np.array_equal(q[key.reshape(-1)].dequantize(), q.dequantize()[key.reshape(-1)])


def test_a_format_is_made_once():
    made = kb.get_format("int8", granularity=("channel", 1))
    assert kb.get_format("int8", granularity=("channel", 1)) is made
    same = kb.get_format("int8", granularity=["channel", 1], symmetric=True)
    assert same == made and hash(same) == hash(made)
    others = [{"granularity": ("channel", 0)}, {"symmetric": False}, {"percentile": 99.0}]
    others = [kb.get_format("int8", **{"granularity": ("channel", 1), **other}) for other in others]
    assert made not in others
    assert len({hash(each) for each in (made, *others)}) == 4  # those of one name are not compared where plans are kept
    assert made not in (kb.get_format("uint8", granularity=("channel", 1)), kb.get_format("kbit4"), "int8")
    for number in (True, 1.0):  # equal to 1, but not numbers of an axis
        with pytest.raises(FormatError, match="granularity is"):
            kb.get_format("int8", granularity=("channel", number))


def test_shapes_that_keep_blocks():
    x = numbers("normal", (4, 6, 8), np.float32)
    token, channel = kb.quantize(x, "int8", granularity="token"), kb.quantize(x, "int8", granularity=("channel", 1))
    assert np.array_equal(token.reshape(24, 8).dequantize(), token.dequantize().reshape(24, 8))
    assert np.array_equal(channel.reshape(4, 6, 2, 4).dequantize(), channel.dequantize().reshape(4, 6, 2, 4))
    for q, shape in ((token, (4, 48)), (channel, (2, 2, 6, 8)), (channel, (6, 4, 8))):
        with pytest.raises(FormatError):
            q.reshape(shape)
    with pytest.raises(FormatError, match=r"rows of shape \(\) are not whole blocks: those are groups of 4 elements"):
        kb.quantize(x[0, 0], "int8", granularity=("group", 4))[:4]
    with pytest.raises(FormatError, match=r"\(5,\) are not whole blocks: 5 codes of 4 bits are no whole bytes: call"):
        kb.quantize(x[:, 0, :5], "int4")[:2]


def test_finer_is_better():
    """On data with outlier channels, each finer granularity has a better signal to noise ratio."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 512)).astype(np.float32)
    x[:, ::100] *= 50
    ratios = [
        kb.metrics.sqnr_db(x, kb.quantize(x, "int4", granularity=g).dequantize())
        for g in ("tensor", "token", ("group", 128), ("group", 32))
    ]
    assert ratios == sorted(ratios) and ratios[-1] > ratios[0] + 5


# ---- bad input -------------------------------------------------------------------------------------------------------

X = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: affine.quantize(X, -1.0), FormatError, "scale holds -1.0; scales must be finite"),
        (lambda: affine.quantize(X, NAN), FormatError, "scale holds nan"),
        (lambda: affine.quantize(X, 1e39), FormatError, "scale holds inf; scales must be finite in float32"),
        (lambda: affine.quantize(X, [0.1, INF, 1, 1], granularity="token"), FormatError, "scale holds inf"),
        (
            lambda: affine.quantize(X, np.ones((2, 4)), granularity=("group", 3)),
            FormatError,
            r"scale has shape \(2, 4\); this granularity needs shape \(4, 2\) .* flat: \(8,\)\).*: transpose it",
        ),
        (
            lambda: affine.quantize(X, 1.0, np.zeros((2, 4), int), granularity=("group", 3)),
            FormatError,
            r"zero_point has shape \(2, 4\); .*: transpose it",
        ),
        (lambda: kb.quantize(X, "int4", granularity=("group", 3), scale=np.ones((2, 4))), FormatError, "transpose it"),
        (lambda: affine.quantize(X, np.ones((2, 2)), granularity="token"), FormatError, r"needs shape \(4,\)"),
        (lambda: affine.quantize(X, [0.1, 0.2]), FormatError, r"scale has shape \(2,\); .* needs shape \(1,\)"),
        (lambda: affine.quantize(X, "1"), TypeError, "scale is str, which holds no numbers"),
        (
            lambda: affine.quantize(X, 1.0, 128),
            FormatError,
            "zero_point holds 128; it must lie in the range, -128 to 127",
        ),
        (lambda: affine.quantize(X, 1.0, 0.5), TypeError, "zero_point is float64; it must hold integers"),
        (lambda: affine.quantize(X, 1.0, 0, qmin=1, qmax=9), FormatError, "zero_point holds 0"),
        (lambda: affine.quantize(X, 1.0, qmin=-1, qmax=200), FormatError, "within -128 to 127, or within 0 to 255"),
        (lambda: affine.quantize(X, 1.0, qmin=0, qmax=256), FormatError, "allowed is -128 <= qmin < qmax <= 255"),
        (lambda: affine.quantize(X, 1.0, qmin=5, qmax=5), FormatError, "qmin < qmax"),
        (lambda: affine.quantize(X, 1.0, qmin=0.0, qmax=5), FormatError, "qmin is 0.0; it must be an integer"),
        (lambda: affine.quantize(X.astype(int), 1.0), TypeError, "x is int64; allowed are float16"),
        (lambda: affine.quantize(X, 1.0, out=X), TypeError, "out is float32; this range needs int8"),
        (lambda: affine.quantize(X, 1.0, out=np.empty(3, np.int8)), ValueError, r"out has shape \(3,\)"),
        (lambda: affine.quantize(X, 1.0, out=np.empty((6, 4), np.int8).T), ValueError, "out is not C-contiguous"),
        (lambda: affine.quantize(X, 1.0, out=[1]), TypeError, "out is list"),
        (lambda: affine.quantize(X, 1.0, granularity="row"), FormatError, "granularity is 'row'; allowed are 'tensor'"),
        (lambda: affine.quantize(X, 1.0, granularity=("group", 0)), FormatError, "must be at least 1"),
        (lambda: affine.quantize(X, 1.0, granularity=("group", 1.5)), FormatError, "granularity is"),
        (lambda: affine.quantize(X, 1.0, granularity=("channel", 2)), FormatError, "axis 2 .* is out of range"),
        (lambda: affine.quantize(X, 1.0, granularity=("channel", -3)), FormatError, "axis -3 .* is out of range"),
        (lambda: affine.quantize(X[0, 0], 1.0, granularity="token"), FormatError, "0-d array"),
        (lambda: affine.dequantize(X, 1.0), TypeError, "q is float32; allowed are int8 and uint8"),
        (lambda: affine.dequantize(X.astype("i1"), 1.0, 200), FormatError, "zero_point holds 200"),
        (lambda: affine.fake_quantize(X, 1.0, qmin=0, qmax=1 << 21), FormatError, "allowed is -1048576"),
        (lambda: affine.fake_quantize(X, 1.0, qmin=0, qmax=9, out=X.astype("f8")), TypeError, "out is float64"),
        (lambda: affine.fake_quantize_backward(X[0], X, 1.0, qmin=0, qmax=9), ValueError, "they must be alike"),
        (lambda: affine.quantize_backward(X, X.astype("f2"), 1.0), ValueError, "they must be alike"),
        (lambda: affine.quantize_backward(X, X, 1.0, mask="soft"), FormatError, "mask is 'soft'; allowed are"),
        (lambda: affine.choose_qparams(X, symmetric=1), FormatError, "symmetric is 1"),
        (lambda: affine.choose_qparams(X, percentile=0), FormatError, "percentile is 0; it must be a number above 0"),
        (lambda: affine.choose_qparams(X, percentile=101.0), FormatError, "percentile is 101.0"),
        (lambda: affine.dynamic_range(X, qmin=-9, qmax=0), FormatError, "pass symmetric=False"),
        (lambda: kb.quantize(X, "int8", granularity=["channel"]), FormatError, "granularity is"),
        (lambda: kb.quantize(X, "int8", granularity=("channel", 5)), FormatError, "axis 5"),
        (lambda: kb.quantize(X, "int8", symmetric="yes"), FormatError, "symmetric is 'yes'"),
        (lambda: kb.quantize(X, "int8", zero_point=3), FormatError, "zero_point goes with scale"),
        (lambda: kb.quantize(X, "int8", scale=1.0, percentile=99), FormatError, "leave one of them away"),
        (lambda: kb.quantize(X, "int8", scale=-1.0), FormatError, "scale holds -1.0"),
        (lambda: kb.quantize(X, "int4", scale=1.0, symmetric=False, zero_point=9), FormatError, "zero_point holds 9"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_out_is_filled_and_given_back():
    x = numbers("normal", (4, 6), np.float32)
    out = np.empty(x.shape, np.int8)
    assert affine.quantize(x, 0.1, out=out) is out
    assert affine.dynamic_range(x, out=out)[0] is out
    y = np.empty_like(x)
    assert affine.dequantize(out, 0.1, out=y) is y
    assert affine.fake_quantize(x, 0.1, qmin=-8, qmax=7, out=y) is y
    assert affine.dequantize_backward(x, 0.1, out=y) is y
    copy = x.copy()
    assert affine.fake_quantize(copy, 0.1, qmin=-8, qmax=7, out=copy) is copy  # in place
    assert np.array_equal(copy, affine.fake_quantize(x, 0.1, qmin=-8, qmax=7))
    read_only = np.empty(x.shape, np.int8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        affine.quantize(x, 0.1, out=read_only)


def test_divisions_by_multiplication():
    """What kernels/affine.cuh divides by rows and runs with is exact beside all multiples, beyond 2^31 elements too."""
    rng = np.random.default_rng(0)
    for row in (8, 9, 24, 1000, 4096, 5003, 50257, (1 << 29) - 1, 1 << 29, *rng.integers(8, 1 << 28, 40).tolist()):
        struct = cuda.Geometry(family.blocks_of((6, row), "token"), family.SIGNED8)._struct
        short, long = int(struct["by_row"]["magic"]), int(struct["long_by_row"])
        shift = int(struct["by_row"]["shift"])
        for times in rng.integers(1, 1 << 34, 50).tolist():
            for number in (times * row - 1, times * row, times * row + 1):
                assert number * long >> 64 + shift == number // row
                number %= 1 << 31
                assert number * short >> 32 + shift == number // row
