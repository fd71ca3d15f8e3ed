"""Affine integers with an offset for each block, and scales of 16 bits: the contract once more, and its boundaries."""

import math

import ml_dtypes
import numpy as np
import pytest
from affine_inputs import BFLOAT16, CASES, DTYPES, block_numbers, numbers
from hypothesis import given, strategies as st

import kbitcupy as kb
from kbitcupy import affine
from kbitcupy.errors import FormatError
from kbitcupy.formats.affine.stored import SCALE_DTYPES, stored

RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int4": (-8, 7), "uint4": (0, 15)}
INF, NAN = np.inf, np.nan
TYPES = {"float32": np.dtype("f4"), "float16": np.dtype("f2"), "bfloat16": BFLOAT16}
FINFO = {name: ml_dtypes.finfo(dtype) for name, dtype in TYPES.items()}
EVERY_KIND = ["normal", "special", "zeros", "extreme", "constant", "subnormal", "wide"]
ROOM = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}


def codes_of(q):
    """The integers of an array, in its shape."""
    codes = q.planes["codes"]
    if q.format.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], 1).reshape(-1)[: q.size].astype(np.int8)
        codes = np.where((codes > 7) & (q.format.levels.qmin < 0), codes - 16, codes)
    return codes.astype(np.int64).reshape(q.shape)


def nearest(value, name):
    """Rounded by way of float32, and not to infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return min(max(float(np.float32(value).astype(TYPES[name])), -largest(name)), largest(name))


def largest(name):
    return float(FINFO[name].max)


def toward(value, name, up):
    """The nearest number of a dtype that is not on the other side, by looking at its neighbours."""
    near, end = nearest(value, name), largest(name) if up else -largest(name)
    if near == end or (near >= value if up else near <= value):
        return near
    return float(np.nextafter(TYPES[name].type(near), TYPES[name].type(end)))


def oracle(member, dtype, name, scale_dtype):
    """Scale and offset of one block, from the text of the contract."""
    qmin, qmax = RANGES[name]
    of = "float32" if dtype == np.float64 else dtype.name
    end = {"float16": 65520 - 2.0**-8, "bfloat16": (2 - 2.0**-8 - 2.0**-23) * 2.0**127, "float32": largest("float32")}[
        of
    ]
    end = float(np.float32(min(largest(of), end * (1 - ROOM[scale_dtype]))))
    member = member.astype(np.float64)
    member = member[~np.isnan(member)]
    low, high = (min(max(f(), -end), end) for f in (member.min, member.max)) if member.size else (0.0, 0.0)
    least = float(FINFO[scale_dtype].smallest_subnormal)
    most = toward(min(largest("float32") / max(-qmin, qmax), largest(scale_dtype)), scale_dtype, up=False)
    wanted = (high - low) / (qmax - qmin)
    with np.errstate(under="ignore"):
        scale = 1.0 if low == high else max(float(np.float32(min(wanted, most))), least)
    first = (low + high) / 2 - scale * (qmax - qmin) / 2 if wanted > most else low
    first = low if low == high else first - scale * qmin
    if scale_dtype == "float32":
        return scale, nearest(first, "float32")
    offset = nearest(first, scale_dtype) if qmin else toward(first, scale_dtype, up=False)
    if low == high == offset:
        return 1.0, offset
    reached = max((high - offset) / qmax, (low - offset) / qmin if qmin else -INF)
    return max(toward(min(reached, most), scale_dtype, up=True), least), offset


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize(("shape", "granularity"), CASES, ids=str)
def test_offsets_by_their_formula(shape, granularity, scale_dtype):
    block, wanted = block_numbers(shape, granularity)
    first = CASES.index((shape, granularity)) + SCALE_DTYPES.index(scale_dtype)  # each case has its kinds of numbers
    for i, dtype in enumerate(DTYPES):
        for j, kind in enumerate((EVERY_KIND * 3)[first % 7 + i :][:3]):
            x = numbers(kind, shape, dtype)
            if kind == "normal":
                x = np.asarray(x + dtype.type(290))
            name = list(RANGES)[(first + i + j) % 4]
            q = kb.quantize(x, name, granularity=granularity, zero="float", scale_dtype=scale_dtype)
            scale, offset = q.planes["scale"], q.planes["offset"]
            assert scale.dtype == offset.dtype == TYPES[scale_dtype] and scale.shape == (math.prod(wanted),)
            for number in {*range(min(scale.size, 12)), *range(scale.size)[-4:]}:
                found = float(scale[number]), float(offset[number])
                assert found == oracle(x[block == number], dtype, name, scale_dtype), (kind, dtype, name)
            assert not np.signbit(offset[offset == 0]).any()
            # What is stored decides: one IEEE operation after the other, in the dtype of the array.
            computed = np.float64 if dtype == np.float64 else np.float32
            s, o = (plane.astype(computed)[block] for plane in (scale, offset))
            qmin, qmax = RANGES[name]
            with np.errstate(all="ignore"):
                steps = np.rint((x.astype(computed) - o) / s)
                code = np.clip(np.where(np.isnan(steps), 0, steps), qmin, qmax)
                s, o = s.astype(np.float32), o.astype(np.float32)
                y = (s * code.astype(np.float32) + o).astype(dtype)
            assert np.array_equal(codes_of(q), code)
            assert q.dequantize().tobytes() == y.tobytes()


# ---- what is promised ------------------------------------------------------------------------------------------------


def centered_db(x, q):
    """Signal to noise, the signal being what remains of x without its mean."""
    x = x.astype(np.float64)
    return 10 * np.log10(x.var() / np.mean((x - q.dequantize(dtype="float32")) ** 2))


def temperatures(kind):
    """290 +- 5 K, float32."""
    noise = np.random.default_rng(0).standard_normal(1 << 16)
    if kind == "sine":
        noise = np.sin(np.linspace(0, 8 * np.pi, 1024, endpoint=False))
    elif kind == "correlated":
        for i in range(1, noise.size):
            noise[i] += 0.9 * noise[i - 1]
    return (290 + 5 * noise / noise.std()).astype(np.float32)


@pytest.mark.parametrize(("kind", "eight", "four"), [("white", 46, 21.5), ("correlated", 49.5, 25), ("sine", 61, 37)])
def test_temperatures_keep_their_variation(kind, eight, four):
    x = temperatures(kind)
    for name in RANGES:
        q = kb.quantize(x, name, block=32, zero="float")
        assert centered_db(x, q) >= (eight if q.format.bits == 8 else four)
        assert q.nbytes * 8 / x.size == q.format.bits + 2
        assert centered_db(x, kb.quantize(x, name, block=32, zero="int")) < 25
    # An offset of 16 bits costs steps, and does not cut anything off.
    for scale_dtype, loss in (("float16", 1.2), ("bfloat16", 2.5)):
        q = kb.quantize(x, "uint8", block=32, zero="float", scale_dtype=scale_dtype)
        assert centered_db(x, q) >= eight - loss and q.nbytes * 8 / x.size == 9
        assert kb.metrics.error_bound(x, q).violations == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_equal_numbers_come_back_exactly(name, dtype):
    values = [0.0, -0.0, 290.3, -1e-3, 6.1e-8, 60000.0, -60000.0, float(ml_dtypes.finfo(dtype).tiny)]
    if dtype != np.float16:
        values += [1e-42, -3.1e38, 2.0**127]
    x = np.repeat(np.float32(values).astype(dtype)[:, None], 8, 1)
    q = kb.quantize(x, name, granularity="token", zero="float")
    assert np.array_equal(q.dequantize(), x) and (q.planes["scale"] == 1).all() and not codes_of(q).any()


def test_what_is_not_a_number():
    x = np.float32([[NAN, 290, 291, NAN], [NAN] * 4, [INF, 1, 2, -INF], [INF] * 4, [290, NAN, INF, 290]])
    q = kb.quantize(x, "uint4", granularity="token", zero="float")
    scale, offset, codes = q.planes["scale"], q.planes["offset"], codes_of(q)
    assert offset[0] == 290 and list(codes[0]) == [0, 0, 15, 0] and offset[1] == 0 and scale[1] == 1
    assert list(codes[2]) == [15, 8, 8, 0] or list(codes[2]) == [15, 7, 7, 0]
    assert offset[3] > 3.4e38 and list(codes[3]) == [15] * 4 and np.isfinite(q.dequantize()[:4]).all()
    assert offset[4] == 290 and codes[4, 2] == 15


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("length", [32, 2056])
def test_signaling_nan_is_ignored_like_any(length, dtype):
    x = numbers("normal", (3, length), dtype, 1)
    x[:, length // 2] = NAN
    signaling = x.copy()
    bits = {"float16": 0x7D00, "bfloat16": 0x7FA0, "float32": 0x7FA00000}[dtype.name]
    signaling.view(f"u{dtype.itemsize}")[:, length // 2] = bits
    q, wanted = (kb.quantize(each, "int4", granularity="token", zero="float") for each in (signaling, x))
    assert all(np.array_equal(q.planes[name], wanted.planes[name]) for name in wanted.planes)


def test_zeros_stay_zeros_behind_a_relu():
    x = np.maximum(np.random.default_rng(0).standard_normal((8, 64)), 0).astype(np.float32)
    for name in RANGES:
        y = kb.quantize(x, name, granularity="token", zero="float").dequantize()
        assert (y[x == 0] == 0).all()


@given(st.data())
def test_what_is_finite_stays_finite_and_near(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape, granularity = data.draw(st.sampled_from(CASES))
    zero = data.draw(st.sampled_from(["none", "int", "float"]))
    options = {"scale_dtype": data.draw(st.sampled_from(SCALE_DTYPES)), "zero": zero}
    if data.draw(st.booleans()):
        options["percentile"] = 90
    kind = data.draw(st.sampled_from(["normal", "small", "wide", "subnormal", "constant", "extreme", "special"]))
    with np.errstate(over="ignore", invalid="ignore"):
        x = numbers(kind, shape, dtype, data.draw(st.integers(0, 1000)))
        x = np.asarray(x + dtype.type(data.draw(st.sampled_from([0, 290, -3e4, 1e37]))))
    x[~np.isfinite(x.astype(np.float64))] = 0
    q = kb.quantize(x, data.draw(st.sampled_from(list(RANGES))), granularity=granularity, **options)
    assert np.isfinite(q.dequantize().astype(np.float64)).all()
    scale = q.planes["scale"].astype(np.float64)
    assert np.isfinite(scale).all() and (scale >= 0).all() and ((scale > 0).all() or zero != "float")
    y = q.dequantize(dtype="float64" if dtype == np.float64 else "float32")
    assert kb.metrics.error_bound(x, q, y).violations == 0


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RANGES)
def test_all_of_a_dtype(name, dtype, scale_dtype):
    """From end to end, and from one end to near it: finite, and within the bound."""
    end = ml_dtypes.finfo(dtype).max
    rows = [[end, -end], [end, end * dtype.type(0.5)], [-end, -end * dtype.type(0.99)], [end, 0], [0, -end], [end, end]]
    x = np.array(rows, dtype).repeat(8, 1)
    for zero in ("none", "int", "float"):
        q = kb.quantize(x, name, granularity="token", zero=zero, scale_dtype=scale_dtype)
        assert np.isfinite(q.dequantize()).all()
        if dtype != np.float64:
            assert kb.metrics.error_bound(x, q, q.dequantize(dtype="float32")).violations == 0


@pytest.mark.parametrize("name", RANGES)
def test_percentiles_are_numpys(name):
    x = (290 + numbers("wide", (6, 200), np.dtype("f4"))).astype(np.float32)
    qmin, qmax = RANGES[name]
    for percentile in (100, 99.5, 80):
        q = kb.quantize(x, name, granularity="token", zero="float", percentile=percentile)
        high = np.percentile(x, percentile, axis=1, method="inverted_cdf").astype(np.float64)
        low = -np.percentile(-x, percentile, axis=1, method="inverted_cdf").astype(np.float64)
        scale = ((high - low) / (qmax - qmin)).astype(np.float32)
        assert np.array_equal(q.planes["scale"], scale)
        assert np.array_equal(q.planes["offset"], (low - scale.astype(np.float64) * qmin).astype(np.float32))
    whole = kb.quantize(x, name, granularity="token", zero="float").planes
    same = kb.quantize(x, name, granularity="token", zero="float", percentile=100).planes
    assert all(np.array_equal(whole[plane], same[plane]) for plane in whole)


# ---- scales of 16 bits -----------------------------------------------------------------------------------------------


def test_sizes():
    x = numbers("normal", (64, 256), np.dtype("f4"))
    sizes = {
        ("int4", "none", "float16"): 4.125,
        ("int4", "none", "float32"): 4.25,
        ("uint4", "int", "bfloat16"): 4.1875,
        ("int4", "float", "float16"): 4.25,
        ("int8", "float", "float32"): 8.5,
    }
    for (name, zero, scale_dtype), bits in sizes.items():
        more = {"zero_dtype": "int8" if name[0] == "i" else "uint8"} if zero == "int" else {}
        q = kb.quantize(x, name, block=128, zero=zero, scale_dtype=scale_dtype, **more)
        assert q.nbytes * 8 / x.size == bits


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("name", RANGES)
def test_scales_are_rounded_before_integers_are_chosen(name, zero, scale_dtype):
    x = np.concatenate([numbers("normal", (20, 64), np.dtype("f4")), numbers("wide", (20, 64), np.dtype("f4"))])
    q = kb.quantize(x, name, granularity="token", zero=zero, scale_dtype=scale_dtype)
    exact = kb.quantize(x, name, granularity="token", zero=zero)
    scale = np.float32([nearest(value, scale_dtype) for value in exact.planes["scale"]])
    assert np.array_equal(q.planes["scale"].astype(np.float32), scale)
    qmin, qmax = RANGES[name]
    low = np.minimum(x.min(1), 0)
    point = np.clip(qmin - np.rint(low / scale), qmin, qmax).astype(np.int32)
    if zero == "none":
        point = np.full(len(x), q.format.levels.zero, np.int32)
    else:
        assert np.array_equal(q.planes["zero_point"], point)
    wanted = affine.quantize(x, scale, point, qmin=qmin, qmax=qmax, granularity="token")
    assert np.array_equal(codes_of(q), wanted)
    wide = affine.dequantize(wanted, scale, point, granularity="token")
    assert np.array_equal(q.dequantize(), wide)


def test_scales_that_a_dtype_does_not_hold():
    """Neither infinite nor 0: the largest and the smallest number there is."""
    x = np.float32([[1e30, -1e30], [1e-30, -1e-30], [0, 0], [3e38, 1e38]]).repeat(4, 1)
    for zero in ("none", "int", "float"):
        q = kb.quantize(x, "int8", granularity="token", zero=zero, scale_dtype="float16")
        assert list(q.planes["scale"][:3].astype(float)) == [65504, 2.0**-24, 1]
        assert np.isfinite(q.dequantize()).all() and kb.metrics.error_bound(x, q).violations == 0
        q = kb.quantize(x * np.float32(1e-8), "int8", granularity="token", zero=zero, scale_dtype="bfloat16")
        assert q.planes["scale"][1] > 0 and kb.metrics.error_bound(x * np.float32(1e-8), q).violations == 0


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_rounding_up_and_down(scale_dtype):
    """Beside all 16-bit numbers: `below` and `above` give neighbours, or the number itself."""
    kind = stored(scale_dtype)
    every = np.arange(1 << 16, dtype=np.uint16).view(TYPES[scale_dtype])
    with np.errstate(invalid="ignore"):  # some are signalling NaN
        every = np.unique(every[np.isfinite(every)].astype(np.float64))
    assert np.array_equal(kind.below(every), every) and np.array_equal(kind.above(every), every)
    between = (every[1:] + every[:-1]) / 2
    assert np.array_equal(kind.below(between), every[:-1]) and np.array_equal(kind.above(between), every[1:])
    beyond = np.array([-1e300, 1e300])
    assert np.array_equal(kind.below(beyond), kind.above(beyond)) and np.isfinite(kind.above(beyond)).all()


# ---- options, given numbers ------------------------------------------------------------------------------------------


def test_what_zero_and_symmetric_mean():
    for symmetric, zero in ((True, "none"), (False, "int")):
        format = kb.get_format("int4", block=32, symmetric=symmetric)
        assert format == kb.get_format("int4", block=32, zero=zero) == kb.get_format(f"int4:block=32,zero={zero}")
        assert format.zero == zero and format.config()["symmetric"] is symmetric and "zero" not in format.config()
    assert str(kb.get_format("int4:symmetric=false")) == "int4:zero=int"
    floating = kb.get_format("int4:block=32,zero=float")
    assert floating.config() == {"name": "int4", "granularity": ["group", 32], "zero": "float"}
    assert floating != kb.get_format("int4:block=32,zero=int")
    narrow = kb.get_format("uint4:zero=int,zero_dtype=uint8,scale_dtype=bfloat16")
    assert kb.get_format(str(narrow)) == narrow != kb.get_format("uint4:zero=int")
    assert kb.get_format("int4", zero_dtype="int32", scale_dtype="float32") == kb.get_format("int4")


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_given_scales_and_offsets(scale_dtype):
    x = (290 + numbers("normal", (4, 24), np.dtype("f4"))).astype(np.float32)
    scale = np.exp2(np.arange(12) / 7 - 8).astype(np.float32).reshape(4, 3)
    offset = (285 + np.arange(12) / 3).astype(np.float32).reshape(4, 3)
    for s, o in ((scale, offset), (0.05, offset), (scale, 288), (0.05, 287.7), (scale.reshape(-1), None)):
        more = {} if o is None else {"offset": o}
        q = kb.quantize(x, "int8", block=8, zero="float", scale_dtype=scale_dtype, scale=s, **more)
        stored_s = np.broadcast_to(np.asarray(s, np.float32).reshape(-1), 12).astype(TYPES[scale_dtype])
        stored_o = np.broadcast_to(np.asarray(o or 0 if o is None else o, np.float32).reshape(-1), 12)
        stored_o = stored_o.astype(TYPES[scale_dtype])
        assert q.planes["scale"].tobytes() == stored_s.tobytes() and q.planes["offset"].tobytes() == stored_o.tobytes()
        wide = [plane.astype(np.float32).reshape(4, 3).repeat(8, 1) for plane in (stored_s, stored_o)]
        code = np.clip(np.rint((x - wide[1]) / wide[0]), -128, 127)
        assert np.array_equal(codes_of(q), code) and np.array_equal(
            q.dequantize(), wide[0] * code.astype("f4") + wide[1]
        )


def test_planes_of_other_origin():
    """Negative scales count beside offsets, zero ones give the offset, and what is not finite is no secret."""
    codes = np.arange(8, dtype=np.uint8)
    scale = np.float32([2, -2, 0, NAN, INF, 1e-42, 1, 3e38]).repeat(1)
    offset = np.float32([1, 1, 5, 5, 5, 1e-42, INF, 0])
    planes = {"codes": codes, "scale": scale, "offset": offset}
    q = kb.QuantizedArray(kb.get_format("uint8:block=1,zero=float"), planes, (8,), "float32")
    small = np.float32(1e-42)
    wanted = np.float32([1, -1, 5, 5, 5, 5 * small + small, INF, INF])
    assert np.array_equal(q.dequantize(), wanted)


X = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kb.get_format("int4", zero="some"), "zero is 'some'; allowed are 'none', 'int', 'float'"),
        (lambda: kb.get_format("int4", zero=True), "zero is True; allowed are"),
        (lambda: kb.get_format("int4", zero="float", symmetric=False), "symmetric False, which means 'int': leave one"),
        (lambda: kb.get_format("int4", scale_dtype="float64"), "scale_dtype is 'float64'; allowed are 'float32', 'fl"),
        (
            lambda: kb.get_format("int4", zero="int", zero_dtype="uint8"),
            "zero_dtype is 'uint8'; int4 allows 'int32' and",
        ),
        (lambda: kb.get_format("uint4", zero_dtype="uint8"), "zero_dtype='uint8' goes with zero='int'; zero is 'none'"),
        (lambda: kb.quantize(X, "int4", zero="float", offset=1.0), "offset goes with scale and zero='float'"),
        (lambda: kb.quantize(X, "int4", zero="int", scale=1.0, offset=1.0), "offset goes with scale and zero='float'"),
        (lambda: kb.quantize(X, "int4", zero="float", scale=1.0, zero_point=1), "zero_point goes with scale and zero="),
        (
            lambda: kb.quantize(X, "int4", zero="float", scale=1.0, offset=INF),
            "offset holds inf; offsets must be finite",
        ),
        (lambda: kb.quantize(X, "int4", zero="float", scale=1.0, offset=1e39), "offset holds inf"),
        (lambda: kb.quantize(X, "int4", zero="float", scale=-1.0), "scale holds -1.0"),
        (lambda: kb.quantize(X, "int4", zero="float", scale=1.0, offset=[1, 2]), r"offset has shape \(2,\); this gran"),
        (
            lambda: kb.quantize(X, "int4", scale_dtype="float16", scale=1e6),
            "scale holds 1000000.0; with scale_dtype='fl",
        ),
        (
            lambda: kb.quantize(X, "int4", zero="float", scale_dtype="float16", scale=1.0, offset=7e4),
            "offset holds 70000.0; with scale_dtype='float16' it must be finite in float16",
        ),
        (lambda: kb.quantize(X, "kbit4", offset=1.0), "kbit4 takes no offset"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(FormatError, match=message):
        call()


# ---- what other projects write ---------------------------------------------------------------------------------------


def words(codes, bits):
    """[..., K] as a little-endian stream of `bits` bits in uint32, the first element in the lowest bits."""
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] * bits // 32), np.uint32)
    for k in range(codes.shape[-1]):
        found[..., k * bits // 32] |= codes[..., k].astype(np.uint32) << np.uint32(k * bits % 32)
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (8, 128)])
def test_mlx(bits, group, dtype):
    """As MLX writes it: scales of either sign, an offset that is an end of the range."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 5, 256))
    scales = (rng.standard_normal((3, 5, 256 // group)) / 16).astype(TYPES[dtype])
    biases = (290 * rng.standard_normal(scales.shape)).astype(TYPES[dtype])
    q = affine.from_mlx(words(codes, bits), scales, biases, bits=bits, group_size=group)
    assert (q.shape, q.dtype, str(q.format)) == (
        codes.shape,
        TYPES[dtype],
        f"uint{bits}:block={group},zero=float" + (f",scale_dtype={dtype}" if dtype != "float32" else ""),
    )
    s, b = (array.astype(np.float32).repeat(group, -1) for array in (scales, biases))
    wanted = s * codes.astype(np.float32) + b
    assert (scales < 0).any() and q.dequantize(dtype="float32").tobytes() == wanted.tobytes()
    assert np.array_equal(q.dequantize(), wanted.astype(TYPES[dtype]))
    assert q.planes["codes"].nbytes == codes.size * bits // 8 and q[1].shape == (5, 256)


def by_hqq(codes, bits):
    """HQQ's rows: of 4 bits row r and row r + R / 2 in one byte, the first in the high half."""
    half = len(codes) // 2
    return codes.astype(np.uint8) if bits == 8 else (codes[:half] << 4 | codes[half:]).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])
def test_hqq(bits, group, dtype):
    rng = np.random.default_rng(bits)
    n, k = 6, 192
    codes = rng.integers(0, 1 << bits, (n * k // group, group))
    scale = np.exp2(rng.uniform(-8, -2, (len(codes), 1))).astype(TYPES[dtype])
    zero = rng.uniform(0, 1 << bits, (len(codes), 1)).astype(TYPES[dtype])
    q = affine.from_hqq(by_hqq(codes, bits), scale, zero, shape=(n, k), nbits=bits, group_size=group)
    assert (q.shape, q.dtype, str(q.format)) == ((n, k), TYPES[dtype], f"uint{bits}:block={group},zero=float")
    s, z = scale.astype(np.float64), zero.astype(np.float64)
    exact = ((codes - z) * s).reshape(n, k)
    found = q.dequantize(dtype="float32")
    if dtype == "float32":
        assert np.allclose(found, exact, rtol=0, atol=2.0**-22 * (1 << bits) * s.max())
    else:
        assert np.array_equal(found, exact.astype(np.float32))
    assert (
        affine.from_hqq(
            by_hqq(codes, bits), scale, zero, shape=(n, k), nbits=bits, group_size=group, dtype="float32"
        ).dtype
        == np.float32
    )


W, S = np.zeros((2, 16), np.uint32), np.ones((2, 2), np.float16)
H, Z = np.zeros((2, 64), np.uint8), np.ones((4, 1), np.float16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: affine.from_mlx(W, S, S, bits=3), FormatError, "integers have 3 bits; those of 4 and 8"),
        (lambda: affine.from_mlx(W, S, S, group_size=32), FormatError, r"weight has shape \(2, 16\), scales \(2, 2\)"),
        (lambda: affine.from_mlx(W, S, S[:1]), FormatError, r"biases \(1, 2\)"),
        (lambda: affine.from_mlx(W, S, S, group_size=0), FormatError, "block is 0"),
        (lambda: affine.from_mlx(W.astype("i8"), S, S), TypeError, "weight is int64"),
        (lambda: affine.from_mlx(W, S.astype(int), S), TypeError, "scales are int64; allowed are float32, float16"),
        (lambda: affine.from_mlx(W, S, S.astype("f4")), TypeError, "biases float32; .* must be alike"),
        (lambda: affine.from_hqq(H, Z, Z, shape=(4, 64), nbits=2), FormatError, "integers have 2 bits"),
        (lambda: affine.from_hqq(H, Z, Z, shape=(2, 64)), FormatError, r"W_q has shape \(2, 64\).*need \(1, 64\)"),
        (lambda: affine.from_hqq(H, Z, Z, shape=(8, 32)), FormatError, "where K consists of whole groups"),
        (lambda: affine.from_hqq(H, Z, Z, shape=(3, 64)), FormatError, "an even number of them"),
        (lambda: affine.from_hqq(H.astype("i4"), Z, Z, shape=(4, 64)), TypeError, "W_q is int32"),
    ],
)
def test_what_is_not_of_other_projects(call, error, message):
    with pytest.raises(error, match=message):
        call()
