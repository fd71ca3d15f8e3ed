"""Affine integers: CUDA against NumPy, bit for bit."""

import math
import sys

import numpy as np
import pytest
from affine_inputs import BFLOAT16, CASES, DTYPES, MASKS, block_numbers, numbers
from hypothesis import given, settings, strategies as st
from inputs import assert_repeats, repeated

import kbitcupy as kb
from kbitcupy import affine
from kbitcupy.errors import DeviceError, FormatError
from kbitcupy.formats import affine as family

pytestmark = pytest.mark.gpu
RANGES = [(-128, 127), (0, 255), (-8, 7), (0, 15)]

# Larger than a tile of a thread block, with every walk through the array: units in one block, units across two, rows
# of 64-bit length, scales of a short period.
LARGE = [
    ((70_001,), "tensor"),
    ((37, 2048), "token"),
    ((11, 5003), "token"),
    ((3, 24_000), "token"),
    ((3, 40_000), "token"),
    ((33, 1024), "token"),
    ((70, 384), "token"),
    ((9, 640), "token"),
    ((1, 70_016), "token"),
    ((64, 1100), ("channel", 0)),
    ((64, 1100), ("channel", 1)),
    ((9, 8192), ("channel", 1)),
    ((300, 24), ("channel", 1)),
    ((5, 33, 256), ("channel", 1)),
    ((3, 700, 5), ("channel", 1)),
    ((20, 4096), ("group", 128)),
    ((20, 4096), ("group", 32)),
    ((20, 4096), ("group", 512)),
    ((300, 96), ("group", 48)),
    ((300, 24), ("group", 8)),
    ((20, 4000), ("group", 256)),
    ((20, 1001), ("group", 64)),
    ((700, 60), ("group", 3)),
]
# One for each walk through an array: units in one block and across two, scales of a short period, blocks in registers,
# whole tiles and what is left of one.
SMALL = [
    ((5, 640), "token"),
    ((5, 1040), "token"),
    ((5, 1044), "token"),
    ((3, 50), ("group", 5)),
    ((17, 1024), ("channel", 1)),
    ((5, 72), ("group", 32)),
    ((3, 96), ("group", 48)),
    ((3, 128), ("group", 64)),
    ((1001,), "tensor"),
]


def same(device, host):
    """The same bytes, any NaN equal to any NaN."""
    found = device.get()
    if found.dtype != host.dtype or found.shape != host.shape:
        return False
    if found.tobytes() == host.tobytes():
        return True
    if host.dtype.kind in "iu":
        return False
    nan = np.isnan(host)
    bits = f"u{host.dtype.itemsize}"
    return bool(
        np.array_equal(nan, np.isnan(found))
        and np.array_equal(np.where(nan, 0, found.view(bits)), np.where(nan, 0, host.view(bits)))
    )


def draw_parameters(shape, granularity, dtype, levels, seed):
    rng = np.random.default_rng(seed)
    wanted = block_numbers(shape, granularity)[1] if math.prod(shape) < 1e5 or granularity != "tensor" else (1,)
    scale = np.exp2(rng.uniform(-8, 3, wanted)).astype(np.float64 if dtype == np.float64 else np.float32)
    flat = scale.reshape(-1)
    for step, value in ((5, 0.0), (7, 1e-42), (11, 1e-30), (13, 1e30), (17, 2.0**-60), (19, 3e38)):
        flat[step - 1 :: step] = value
    return scale, rng.integers(levels[0], levels[1] + 1, wanted).astype(np.int32)


def put(cupy, array):
    """An array on the device; CuPy fills one of no axes with its value, and a 0 loses its sign there."""
    return cupy.asarray(array.reshape(-1)).reshape(array.shape)


def check_functions(cupy, x, granularity, levels=(-128, 127), seed=0):
    """Every function, with scales and zero points of every kind, on both libraries."""
    scale, zero = draw_parameters(x.shape, granularity, x.dtype, levels, seed)
    there, scales, zeros = put(cupy, x), cupy.asarray(scale), cupy.asarray(zero)
    options = {"qmin": levels[0], "qmax": levels[1], "granularity": granularity}
    q = affine.quantize(x, scale, zero, **options)
    assert same(affine.quantize(there, scales, zeros, **options), q)
    assert same(affine.fake_quantize(there, scales, zeros, **options), affine.fake_quantize(x, scale, zero, **options))
    assert same(
        affine.dequantize(cupy.asarray(q), scales, zeros, granularity=granularity, dtype=x.dtype),
        affine.dequantize(q, scale, zero, granularity=granularity, dtype=x.dtype),
    )
    dy = numbers("special", x.shape, x.dtype, seed + 1)
    for mask in MASKS:
        for function in (affine.quantize_backward, affine.fake_quantize_backward):
            wanted = function(dy, x, scale, zero, mask=mask, **options)
            assert same(function(put(cupy, dy), there, scales, zeros, mask=mask, **options), wanted), mask
    with np.errstate(all="ignore"):
        wanted = affine.dequantize_backward(dy, scale, granularity=granularity)
    assert same(affine.dequantize_backward(put(cupy, dy), scales, granularity=granularity), wanted)
    # One number on the host goes with every granularity, and needs no array on the device.
    assert same(
        affine.quantize(there, 0.37, levels[0] + 3, **options), affine.quantize(x, 0.37, levels[0] + 3, **options)
    )


def check_ranges(cupy, x, granularity, levels=(-128, 127)):
    there = put(cupy, x)
    options = {"qmin": levels[0], "qmax": levels[1], "granularity": granularity}
    for symmetric in (True, False):
        for function in (affine.choose_qparams, affine.dynamic_range):
            for found, wanted in zip(
                function(there, symmetric=symmetric, **options),
                function(x, symmetric=symmetric, **options),
                strict=True,
            ):
                assert same(found, wanted), (function.__name__, symmetric)


def check_format(cupy, x, name, **options):
    host, device = kb.quantize(x, name, **options), kb.quantize(put(cupy, x), name, **options)
    for plane, wanted in host.planes.items():
        assert same(device.planes[plane], wanted), plane
    for dtype in DTYPES:
        assert same(device.dequantize(dtype=dtype), host.dequantize(dtype=dtype))


class TestSmall:
    """Every kernel at its smallest; compute-sanitizer runs this."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("shape", "granularity"), SMALL, ids=str)
    def test_every_kernel(self, cupy, shape, granularity, dtype):
        x = numbers("special", shape, dtype)
        check_functions(cupy, x, granularity)
        check_ranges(cupy, x, granularity)
        for name in ("uint8", "int4"):
            check_format(cupy, x, name, granularity=granularity, symmetric=False)
            check_format(cupy, x, name, granularity=granularity, percentile=90)
            check_format(cupy, x, name, granularity=granularity, symmetric=False, scale=0.3, zero_point=3)
            check_format(cupy, x, name, granularity=granularity, zero="float")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), CASES, ids=str)
def test_every_function(cupy, shape, granularity, dtype):
    for seed, (kind, levels) in enumerate(zip(["normal", "special", "wide", "extreme"], RANGES, strict=True)):
        x = numbers(kind, shape, dtype, seed)
        check_functions(cupy, x, granularity, levels, seed)
        check_ranges(cupy, x, granularity, levels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8", "uint4"])
@pytest.mark.parametrize(("shape", "granularity"), CASES[::2], ids=str)
def test_every_format(cupy, shape, granularity, name, dtype):
    for symmetric in (True, False):
        x = numbers("special", shape, dtype)
        check_format(cupy, x, name, granularity=granularity, symmetric=symmetric)
        check_format(cupy, x, name, granularity=granularity, symmetric=symmetric, percentile=90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), CASES + LARGE[::3], ids=str)
def test_given_scales(cupy, shape, granularity, dtype):
    """Numbers, arrays and arrays of one number; what is used goes into the planes."""
    x = numbers("special", shape, dtype)
    for name, levels in (("uint8", (0, 255)), ("int4", (-8, 7))):
        scale, zero = draw_parameters(shape, granularity, np.dtype("float32"), levels, 0)
        for options in (
            {"scale": scale},
            {"scale": scale, "zero_point": zero, "symmetric": False},
            {"scale": 0.3, "zero_point": 5, "symmetric": False},
            {"scale": np.float32([0.3]), "zero_point": zero, "symmetric": False},
            {"scale": scale, "zero_point": np.int32([4]), "symmetric": False},
        ):
            there = {
                option: cupy.asarray(value) if isinstance(value, np.ndarray) else value
                for option, value in options.items()
            }
            host = kb.quantize(x, name, granularity=granularity, **options)
            device = kb.quantize(put(cupy, x), name, granularity=granularity, **there)
            for plane, wanted in host.planes.items():
                assert same(device.planes[plane], wanted), (plane, options)
    single = cupy.asarray(np.float32([0.3]))
    found = affine.fake_quantize(put(cupy, x), single, qmin=-8, qmax=7, granularity=granularity)
    assert same(found, affine.fake_quantize(x, np.float32(0.3), qmin=-8, qmax=7, granularity=granularity))


def test_shapes_of_given_scales(cupy):
    x = numbers("normal", (4, 24), np.dtype("float16"))
    scale = np.exp2(np.arange(12, dtype=np.float32) / 4).reshape(4, 3)
    wanted, there = affine.quantize(x, scale, granularity=("group", 8)), put(cupy, x)
    for shape in ((4, 3), (4, 3, 1), (12,)):
        scales = cupy.asarray(scale.reshape(shape))
        assert same(affine.quantize(there, scales, granularity=("group", 8)), wanted)
        q = kb.quantize(there, "int8", granularity=("group", 8), scale=scales)
        assert same(q.planes["codes"], wanted.reshape(-1))
    with pytest.raises(FormatError, match=r"scale has shape \(3, 4\).*transpose it"):
        affine.quantize(there, cupy.asarray(scale).T.copy(), granularity=("group", 8))


def test_stacks(cupy):
    """Members keep their scales, without a look at the values."""
    w = numbers("normal", (3, 24, 32), np.dtype("float32")) * np.float32([1, 30, 0.01]).reshape(3, 1, 1)
    for granularity in ("tensor", "token", ("channel", 0), ("group", 16)):
        members = [kb.quantize(put(cupy, part), "int8", granularity=granularity) for part in w]
        stack = kb.stack(members)
        for i, member in enumerate(members):
            assert same(stack[i].dequantize(), member.dequantize().get())
            assert same(stack.dequantize()[i], member.dequantize().get())
        x, ids = numbers("normal", (5, 32), np.dtype("float32"), seed=1), [[0, 2], [1, 0], [2, 2], [1, 1], [0, 1]]
        wanted = kb.linear_grouped(x, stack.get(), ids)
        assert np.allclose(kb.linear_grouped(put(cupy, x), stack, ids).get(), wanted, rtol=1e-4, atol=1e-4)


def near(kind, shape, dtype, seed=0):
    """Numbers of one kind; the normal ones lie far from 0."""
    x = numbers(kind, shape, dtype, seed)
    if kind == "normal" and x.ndim:
        x += dtype.type(290)
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), CASES + LARGE, ids=str)
def test_offsets(cupy, shape, granularity, dtype):
    """Every walk and every search for ranges, given scales and offsets among them."""
    for i, kind in enumerate(
        ["normal", "special", "extreme", "subnormal", "wide"][: 5 if math.prod(shape) < 5000 else 2]
    ):
        x = near(kind, shape, dtype, i)
        for name in ("uint8", "int4") if i % 2 else ("int8", "uint4"):
            check_format(cupy, x, name, granularity=granularity, zero="float")
        if math.prod(shape) < 5000:
            check_format(cupy, x, "int4", granularity=granularity, zero="float", percentile=90)
    scale, _ = draw_parameters(shape, granularity, np.dtype("float32"), (0, 255), 0)
    offset = (290 * np.random.default_rng(1).standard_normal(scale.shape)).astype(np.float32)
    offset.reshape(-1)[2::9] = 3e38
    x = near("special", shape, dtype)
    for s, o in ((scale, offset), (0.3, offset), (scale, 288.5), (0.3, -2.5)):
        there = [cupy.asarray(value) if isinstance(value, np.ndarray) else value for value in (s, o)]
        host = kb.quantize(x, "int8", granularity=granularity, zero="float", scale=s, offset=o)
        device = kb.quantize(
            put(cupy, x), "int8", granularity=granularity, zero="float", scale=there[0], offset=there[1]
        )
        for plane, wanted in host.planes.items():
            assert same(device.planes[plane], wanted), plane
        assert same(device.dequantize(), host.dequantize())


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), CASES + LARGE[::6], ids=str)
def test_scales_of_16_bits(cupy, shape, granularity, dtype, scale_dtype):
    kinds = ["normal", "special", "extreme", "subnormal", "wide", "constant", "zeros"]
    first = len(shape) + math.prod(shape)
    for i in range(3):
        x = near(kinds[(first + 3 * i) % 7], shape, dtype, i)
        for name, zero in (("int8", "none"), ("uint4", "int"), ("int4", "float"), ("uint8", "float")):
            options = {"granularity": granularity, "zero": zero, "scale_dtype": scale_dtype}
            options |= {"zero_dtype": "uint8"} if zero == "int" else {}
            check_format(cupy, x, name, **options)
            check_format(cupy, x, name, percentile=90, **options)
            given = {"scale": 0.3} | ({"offset": 290.3} if zero == "float" else {})
            check_format(cupy, x, name, **options, **given)
        check_format(cupy, x, "int4", granularity=granularity, zero="int", zero_dtype="int8")
    scale, _ = draw_parameters(shape, granularity, np.dtype("float32"), (0, 255), 0)
    scale = np.minimum(scale, np.float32(6e4))
    options = {"granularity": granularity, "zero": "float", "scale_dtype": scale_dtype}
    host = kb.quantize(x, "int8", scale=scale, offset=-scale, **options)
    device = kb.quantize(put(cupy, x), "int8", scale=cupy.asarray(scale), offset=cupy.asarray(-scale), **options)
    for plane, wanted in host.planes.items():
        assert same(device.planes[plane], wanted), plane
    assert same(device.dequantize(), host.dequantize())


@pytest.mark.parametrize("scale_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block", [32, 48])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_offsets_of_ranges_of_any_width(cupy, dtype, block, scale_dtype):
    """Ends of ranges whose difference float32 holds, and those that only float64 does."""
    rng = np.random.default_rng(block)
    shape = (2000, 2)
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
    ends = [
        np.where(np.isfinite(bits.astype(np.float32)), bits, dtype.type(1)),
        np.ldexp(rng.standard_normal(shape), rng.integers(-14, 15, shape)),
        np.ldexp(rng.standard_normal(shape), rng.integers(-14, 15, (len(bits), 1))),
        rng.standard_normal(shape) * np.exp2(rng.uniform(-8, 3, (len(bits), 1))) + 290,
        rng.integers(-300, 300, shape),
        abs(rng.standard_normal(shape)) * [1, 0],
    ]
    end = np.concatenate([each.astype(dtype) for each in ends])
    x = np.where(rng.random((len(end), block)) < 0.5, end[:, :1], end[:, 1:])
    for name in ("int4", "uint4", "int8", "uint8"):
        check_format(cupy, x, name, block=block, zero="float", scale_dtype=scale_dtype)


def test_planes_with_offsets_of_any_kind(cupy):
    """Scales of either sign, and what is not finite."""
    rng = np.random.default_rng(0)
    for shape, granularity in SMALL:
        format = kb.get_format("int8", granularity=granularity, zero="float")
        planes = {}
        for name, spec in format.planes(shape).items():
            bits = rng.integers(0, 256, (*spec.shape, np.dtype(spec.dtype).itemsize), np.uint8)
            planes[name] = bits.view(spec.dtype).reshape(spec.shape)
            if name != "codes":
                ordinary = rng.standard_normal(spec.shape).astype(np.float32) * 300
                planes[name] = np.where(rng.random(spec.shape) < 0.7, ordinary, planes[name])
        host = kb.QuantizedArray(format, planes, shape, "float32")
        for dtype in DTYPES:
            with np.errstate(all="ignore"):
                assert same(host.to_device("cuda:0").dequantize(dtype=dtype), host.dequantize(dtype=dtype))


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7, 8])
def test_unaligned_arrays(cupy, offset):
    """Inputs and outputs may start at any element; nothing before or behind them is touched."""
    for dtype in DTYPES:
        for shape, granularity in (((3, 40), "token"), ((5, 27), ("channel", 1)), ((2, 128), ("group", 64))):
            x, size = numbers("special", shape, dtype), math.prod(shape)

            def shifted(array, shape=shape, size=size):
                room = cupy.zeros(size + offset + 32, array.dtype)
                room[offset : offset + size] = cupy.asarray(array).reshape(-1)
                return room[offset : offset + size].reshape(shape), room

            there, _ = shifted(x)
            codes, room = shifted(np.zeros(shape, np.int8))
            q, scale, zero = affine.dynamic_range(x, granularity=granularity, symmetric=False)
            found = affine.dynamic_range(there, granularity=granularity, symmetric=False, out=codes)
            assert all(map(same, found, (q, scale, zero)))
            assert not room[:offset].any() and not room[offset + size :].any()
            affine.quantize(there, found[1], found[2], granularity=granularity, out=codes)
            assert same(codes, q)
            y, room = shifted(np.zeros(shape, dtype))
            affine.dequantize(codes, found[1], found[2], granularity=granularity, out=y)
            wanted = affine.dequantize(q, scale, zero, granularity=granularity, dtype=dtype)
            assert same(y, wanted)
            assert not room[:offset].any() and not room[offset + size :].any()
            options = {"qmin": -128, "qmax": 127, "granularity": granularity}
            affine.fake_quantize(there, found[1], found[2], out=y, **options)
            assert same(y, wanted)
            affine.fake_quantize_backward(there, there, found[1], found[2], out=y, **options)
            assert same(y, affine.fake_quantize_backward(x, x, scale, zero, **options))
            for name, zero in (("int8", "none"), ("int4", "none"), ("uint8", "float"), ("int4", "float")):
                host = kb.quantize(x, name, granularity=granularity, zero=zero)
                planes = {}
                for plane, array in host.planes.items():
                    planes[plane] = cupy.zeros(array.size + offset, array.dtype)[offset:]
                out = kb.QuantizedArray(host.format, planes, shape, dtype)
                kb.quantize(there, name, granularity=granularity, zero=zero, out=out)
                assert all(same(out.planes[plane], array) for plane, array in host.planes.items())
                assert same(out.dequantize(), host.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), LARGE, ids=str)
def test_large_arrays(cupy, shape, granularity, dtype):
    for seed, (kind, levels) in enumerate(zip(["normal", "special"], RANGES[:2], strict=True)):
        x = numbers(kind, shape, dtype, seed)
        check_functions(cupy, x, granularity, levels, seed)
        check_ranges(cupy, x, granularity, levels)
        for name in ("uint8", "int4"):
            check_format(cupy, x, name, granularity=granularity, symmetric=bool(seed))
            check_format(cupy, x, name, granularity=granularity, symmetric=bool(seed), percentile=99.5)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_16_bit_number(cupy, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    there, ones = cupy.asarray(x), np.ones(1 << 16, dtype)
    rng = np.random.default_rng(0)
    scales = [1.0, 0.1, 1 / 3, 2.0**-7, 3.7e-6, 1e-42, 0.0, 700.0, 65504.0, 2.0**-61, 2.0**61]
    for scale in [*scales, *np.exp2(rng.uniform(-20, 8, 40))]:
        for (qmin, qmax), zero in zip(RANGES, (0, 128, -3, 9), strict=True):
            options = {"qmin": qmin, "qmax": qmax}
            assert same(affine.quantize(there, scale, zero, **options), affine.quantize(x, scale, zero, **options))
            wanted = affine.fake_quantize(x, scale, zero, **options)
            assert same(affine.fake_quantize(there, scale, zero, **options), wanted)
            for mask in MASKS[:2]:
                wanted = affine.quantize_backward(x, x, scale, zero, mask=mask, **options)
                assert same(affine.quantize_backward(there, there, scale, zero, mask=mask, **options), wanted)
                wanted = affine.fake_quantize_backward(ones, x, scale, zero, mask=mask, **options)
                found = affine.fake_quantize_backward(cupy.asarray(ones), there, scale, zero, mask=mask, **options)
                assert same(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "granularity"), SMALL + LARGE[::4], ids=str)
def test_numbers_at_the_end_of_a_dtype(cupy, shape, granularity, dtype):
    """Where half a step more than the largest number would be infinite: by every kernel that finds ranges."""
    end = float(np.nextafter(dtype.type(np.inf), dtype.type(0)))
    rng = np.random.default_rng(0)
    x = (rng.uniform(-1, 1, shape) * end).astype(dtype)
    flat = x.reshape(-1)
    flat[::3], flat[1::7], flat[5::11] = end, -end, rng.uniform(-1e-3, 1e-3, flat[5::11].shape)
    for levels in RANGES:
        check_ranges(cupy, x, granularity, levels)
    for name in ("int8", "uint4"):
        for symmetric in (True, False):
            check_format(cupy, x, name, granularity=granularity, symmetric=symmetric)
            check_format(cupy, x, name, granularity=granularity, symmetric=symmetric, percentile=99)
            q = kb.quantize(put(cupy, x), name, granularity=granularity, symmetric=symmetric)
            assert bool(cupy.isfinite(q.dequantize().astype("f8")).all())
    flat[::13] = -np.inf
    check_ranges(cupy, x, granularity)


def test_the_short_division_is_the_division(cupy):
    """Quotients at and beside every tie between two steps, for scales of any mantissa."""
    rng = np.random.default_rng(0)
    ties = np.arange(-130, 130, dtype=np.float32) + np.float32(0.5)
    scale = np.exp2(rng.uniform(-55, 55, 4000)).astype(np.float32)
    x = ties * scale[:, None]
    beside = [x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))]
    for values in (*beside, x.astype(BFLOAT16)):
        found = affine.quantize(cupy.asarray(values), cupy.asarray(scale), granularity="token")
        assert same(found, affine.quantize(values, scale, granularity="token"))
    # The reciprocal's own worst cases: mantissas of all ones and next to powers of two.
    scale = np.concatenate(
        [np.nextafter(np.exp2(np.arange(-50, 50, dtype=np.float32)), np.float32(s)) for s in (0, 9e37)]
    )
    x = (rng.uniform(-130, 130, (scale.size, 4096)) * scale[:, None]).astype(np.float32)
    found = affine.quantize(cupy.asarray(x), cupy.asarray(scale), granularity="token")
    assert same(found, affine.quantize(x, scale, granularity="token"))


@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize(
    ("block", "scale_dtype"), [(64, "float32"), (48, "float32"), (2048, "float32"), (32, "float16")]
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_levels_at_and_beside_ties(cupy, dtype, block, scale_dtype, zero):
    """Halves of steps, and what is next to them, in some blocks; few or none in others."""
    rng = np.random.default_rng(block)
    steps = rng.integers(0, 31, (400, block)) * np.where(rng.random((400, 1)) < 0.8, 0.5, 0.493)
    steps[:, :2] = 0, 15  # the ends
    x = (steps * np.exp2(rng.uniform(-8, 8, (400, 1)))).astype(np.float32)
    x = np.where(rng.random(x.shape) < 0.5, x, np.nextafter(x, rng.choice(np.float32([-9e9, 9e9]), x.shape)))
    for name, shift in (("int4", 0), ("uint4", 0), ("int4", 31)):
        check_format(cupy, (x + shift).astype(dtype), name, block=block, zero=zero, scale_dtype=scale_dtype)


@settings(max_examples=150)
@given(st.data())
def test_any_shape_and_granularity(cupy, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    group = data.draw(st.integers(1, 48))
    granularity = data.draw(st.sampled_from(["tensor", "token", ("channel", axis), ("group", group)]))
    dtype = data.draw(st.sampled_from(DTYPES))
    levels = data.draw(st.sampled_from(RANGES))
    kind = data.draw(st.sampled_from(["normal", "special", "wide", "extreme", "subnormal"]))
    seed = data.draw(st.integers(0, 1000))
    x = numbers(kind, shape, dtype, seed)
    check_functions(cupy, x, granularity, levels, seed)
    check_ranges(cupy, x, granularity, levels)
    name = data.draw(st.sampled_from(["int8", "uint8", "int4", "uint4"]))
    check_format(cupy, x, name, granularity=granularity, symmetric=data.draw(st.booleans()))


def test_bad_scales_on_a_device_have_a_defined_result(cupy):
    x = numbers("normal", (9, 24), np.dtype("float16"))
    scale = np.float32([-1, np.nan, np.inf, -np.inf, 0, -0.0, 0.1, 1e-45, 3e38])
    zero = np.int32([-1000, 1000, 5, 2**31 - 1, -(2**31), 0, 4, 300, 0])
    there, scales, zeros = cupy.asarray(x), cupy.asarray(scale), cupy.asarray(zero)
    blocks = family.blocks_of(x.shape, "token")
    q = np.empty(x.shape, np.int8)
    family.quantize(x, q, scale, zero, blocks, family.SIGNED8)
    found = affine.quantize(there, scales, zeros, granularity="token")
    assert same(found, q)
    assert np.array_equal(q[:6], np.clip(zero, -128, 127)[:6, None].repeat(24, 1))
    y = affine.dequantize(found, scales, zeros, granularity="token", dtype="float16")
    assert not y[:6].any()
    with pytest.raises(DeviceError, match="scale is on cpu and the data on cuda:0"):
        affine.quantize(there, scale, granularity="token")
    with pytest.raises(DeviceError, match="arrays on different devices"):
        affine.quantize_backward(x, there, 1.0)
    with pytest.raises(DeviceError, match="out is on cpu"):
        affine.quantize(there, 1.0, out=q)


def test_layouts_of_the_input(cupy):
    base = cupy.asarray(numbers("normal", (48, 64), np.dtype("float32")))
    for x in (base.T, base[::-1, ::3], base[5:, 1:], cupy.asfortranarray(base)):
        q, scale, zero = affine.dynamic_range(x, granularity="token")
        assert all(map(same, (q, scale, zero), affine.dynamic_range(x.get(), granularity="token")))
        y = affine.dequantize(q[::2], scale[::2], granularity="token")
        assert same(y, affine.dequantize(q.get()[::2], scale.get()[::2], granularity="token"))


@pytest.mark.parametrize("granularity", ["tensor", "token", ("channel", 1), ("group", 64)], ids=str)
def test_graph_capture(cupy, granularity):
    x, y = cupy.ones((64, 256), "f2"), cupy.empty((64, 256), "f2")
    options = {"granularity": granularity}
    q = kb.quantize(x, "int8", **options)
    kb.dequantize(q, out=y)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kb.quantize(x, "int8", out=q, **options)
        kb.dequantize(q, out=y)
        graph = stream.end_capture()
    for seed in range(3):
        data = numbers("normal", x.shape, np.dtype("float16"), seed)
        x.set(data)
        cupy.cuda.Device().synchronize()
        with stream:
            graph.launch()
        stream.synchronize()
        assert same(y, kb.quantize(data, "int8", **options).dequantize())


def test_work_goes_to_the_current_stream(cupy):
    x = cupy.asarray(numbers("normal", (1024, 1024), np.dtype("float32")))
    affine.dynamic_range(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.random.standard_normal((8192, 8192), dtype="f4")
    cupy.cuda.Device().synchronize()
    with stream:
        late = x * 1
        for _ in range(20):
            busy = busy @ busy * 1e-4
        late *= 3
        q, scale, _ = affine.dynamic_range(late)
        y = affine.dequantize(q, scale)
        assert not stream.done  # nothing above has waited for the device
    stream.synchronize()
    q, scale, _ = affine.dynamic_range(x.get() * np.float32(3))
    assert same(y, affine.dequantize(q, scale))


def test_a_call_costs_little_beside_its_launches(cupy):
    """Counted in calls of Python functions, of which one takes a fraction of a microsecond."""
    x, scale, zero = cupy.ones((64, 64), "f2"), cupy.ones(64, "f4"), cupy.zeros(64, "i4")
    codes, token, levels = cupy.ones((64, 64), "i1"), {"granularity": "token"}, {"qmin": -8, "qmax": 7}
    q = kb.quantize(x, "int8", **token)
    calls = {
        "quantize": lambda: affine.quantize(x, scale, zero, **token),
        "quantize, out": lambda: affine.quantize(x, scale, zero, out=codes, **token),
        "dequantize": lambda: affine.dequantize(codes, scale, zero, **token),
        "fake_quantize": lambda: affine.fake_quantize(x, scale, zero, **token, **levels),
        "backward": lambda: affine.fake_quantize_backward(x, x, scale, zero, **token, **levels),
        "dequantize_backward": lambda: affine.dequantize_backward(x, scale, **token),
        "dynamic_range, token": lambda: affine.dynamic_range(x, **token),
        "dynamic_range, tensor": lambda: affine.dynamic_range(x[:, :63].copy()),
        "kb.quantize": lambda: kb.quantize(x, "int8", granularity=("group", 32)),
        "kb.quantize, out": lambda: kb.quantize(x, "int8", out=q, **token),
        "kb.dequantize": lambda: kb.dequantize(q),
    }
    for name, call in calls.items():
        call(), call()
        counts = []
        for _ in range(3):  # the garbage collector may call functions, too
            seen = []

            def note(frame, event, argument, seen=seen):
                if event == "call":
                    seen.append(frame.f_code.co_qualname)

            with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):  # the tests' own is Python, too
                sys.setprofile(note)
                call()
                sys.setprofile(None)
            counts.append(len(seen))
        assert min(counts) <= 48, (name, counts, seen)


@pytest.mark.parametrize("granularity", ["tensor", "token", ("channel", 0), ("channel", 1), ("group", 128)], ids=str)
def test_more_than_two_to_the_31_elements(cupy, large_memory, granularity):
    large_memory(30)
    piece = numbers("normal", (256, 4096), np.dtype("float16"))
    x = repeated(cupy, piece, (1 << 19) + 256)
    q, wanted = (kb.quantize(each, "int8", granularity=granularity) for each in (x, piece))
    for name in ("codes", "scale"):
        assert_repeats(q.planes[name], wanted.planes[name])
    kb.dequantize(q, out=x)
    assert_repeats(x, wanted.dequantize())
