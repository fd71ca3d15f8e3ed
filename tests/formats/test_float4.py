"""nf4, fp4, table4 and dynamic8 on NumPy, against searches written down one number at a time."""

import hashlib
import itertools

import numpy as np
import pytest
from inputs import BFLOAT16, DTYPES, KINDS, make, same_values

import kbitcupy as kb
from kbitcupy import tables
from kbitcupy.errors import FormatError
from kbitcupy.formats.codebook import numpy as numpy_side, search

F32 = np.float32
SIZES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 257, 4096, 4097]


def nf4_code(y):
    return sum(bool(y > threshold) for threshold in tables.NF4_THRESHOLDS)


def fp4_code(y):
    """The tree of comparisons of magnitudes, from the largest."""
    magnitude, sign = abs(y), 8 if y < 0 else 0
    limits = [(0.8333333, 3), (0.583333, 2), (0.4166667, 5), (0.29166667, 4), (0.20833333, 7), (0.0859375, 6)]
    for limit, code in [*limits, (0.00260417, 1)]:
        if magnitude > F32(limit):
            return sign + code
    return sign


def dynamic_code(y):
    """The nearer of the two neighbours by their float32 midpoint, the even code of a tie."""
    values = tables.dynamic_map()
    if np.isnan(y):
        return 0
    low = max(int(np.searchsorted(values, y, side="right")) - 1, 0)
    if low == 255:
        return 255
    middle = (values[low] + values[low + 1]) * F32(0.5)
    if y == middle:
        return low + low % 2
    return low + bool(y > middle)


CODE = {"nf4": nf4_code, "fp4": fp4_code, "dynamic8": dynamic_code}


def encode_slowly(x, name, block):
    """(codes of whole blocks, absmax) of a flat float32 array without extreme magnitudes."""
    x = np.concatenate((x, np.zeros(-x.size % block, F32))).reshape(-1, block)
    absmax = np.array([max([abs(v) for v in row if not np.isnan(v)], default=0) for row in x], F32)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = x * (F32(1) / absmax)[:, None]
    return np.array([[CODE[name](v) for v in row] for row in y], np.uint8).reshape(x.shape), absmax


def pack(codes, n):
    pairs = codes.reshape(-1)[: n + n % 2].reshape(-1, 2)
    return (pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8)


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("kind", ["normal", "special", "constant", "zeros"])
@pytest.mark.parametrize("block", [16, 64, 256])
def test_codes_and_layout(name, kind, block):
    for size, dtype in itertools.product((0, 1, 63, 64, 65, 1031), DTYPES):
        x = make(kind, size, dtype)
        x[np.isinf(x)] = 3
        with np.errstate(under="ignore"):
            x[np.abs(x.astype(F32)) < 1e-30] = 0
            x[np.abs(x.astype(F32)) > 1e30] = 2
        codes, absmax = encode_slowly(x.astype(F32), name, block)
        q = kb.quantize(x, name, block=block)
        assert q.planes["absmax"].tobytes() == absmax.tobytes()
        if name == "dynamic8":
            assert np.array_equal(q.planes["codes"], codes.reshape(-1)[:size])
            values = tables.dynamic_map()
        else:
            assert np.array_equal(q.planes["packed"], pack(codes, size))
            values = tables.NF4 if name == "nf4" else tables.FP4
        expected = (values[codes] * absmax[:, None]).reshape(-1)[:size]
        assert same_values(q.dequantize(dtype="float32"), expected)
        assert same_values(q.dequantize(), expected.astype(dtype))


@pytest.mark.parametrize("name", CODE)
def test_around_every_threshold(name):
    values = {"nf4": tables.NF4, "fp4": np.sort(tables.FP4), "dynamic8": tables.dynamic_map()}[name]
    middles = tables.midpoints(np.unique(values))
    if name == "fp4":
        middles = np.concatenate((middles, tables.FP4_THRESHOLDS, -tables.FP4_THRESHOLDS))
    points = np.concatenate([np.nextafter(middles, F32(s)) for s in (-2, 2)] + [middles, values, [0, -0.0, np.nan, 1]])
    x = np.zeros((points.size, 16), F32)
    x[:, 0], x[:, 1] = 1, points
    codes, _ = encode_slowly(x.reshape(-1), name, 16)
    q = kb.quantize(x, name, block=16)
    found = q.planes["codes"] if name == "dynamic8" else q.planes["packed"]
    assert np.array_equal(found, codes.reshape(-1) if name == "dynamic8" else pack(codes, x.size))


def test_every_code_appears_and_is_stable():
    """Each value of a table is its own code, and decodes to itself."""
    for values, name in ((tables.NF4, "nf4"), (tables.FP4, "fp4"), (tables.dynamic_map(), "dynamic8")):
        q = kb.quantize(values, name, block=256 if name == "dynamic8" else 16)
        assert same_values(q.dequantize(), values)
        again = kb.quantize(q.dequantize(), name, block=q.format.block)
        assert all(np.array_equal(again.planes[p], q.planes[p]) for p in q.planes)
    assert kb.quantize(tables.NF4, "nf4", block=16).planes["packed"].tobytes().hex() == "0123456789abcdef"


def test_the_tables():
    assert hashlib.sha256(tables.dynamic_map().tobytes()).hexdigest().startswith("e732639a65f497b4ad684bb166a44677")
    assert tables.NF4.dtype == tables.FP4.dtype == F32
    assert tables.FP4[:8].tobytes() == (-tables.FP4[8:]).tobytes()
    off = tables.NF4_THRESHOLDS.view(np.int32) - tables.midpoints(tables.NF4).view(np.int32)
    assert off.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, -1, 0, -1]


@pytest.mark.parametrize(
    ("name", "block", "error"),
    [
        *zip(["nf4"] * 5, (32, 64, 128, 256, 4096), (0.067746, 0.072798, 0.076831, 0.080337, 0.092547), strict=True),
        *zip(["fp4"] * 5, (32, 64, 128, 256, 4096), (0.088925, 0.096543, 0.102969, 0.108684, 0.129536), strict=True),
    ],
)
def test_mean_error_of_normal_data(name, block, error):
    x = np.random.default_rng(1).standard_normal((1024, 1024)).astype(F32)
    y = kb.quantize(x, name, block=block).dequantize()
    assert np.abs(x - y).mean() == pytest.approx(error, rel=0.004)


def test_zero_blocks_and_odd_tails():
    q = kb.quantize(np.array([0.0, -0.0, np.nan], F32), "nf4")
    assert q.planes["packed"].tolist() == [0, 0] and q.planes["absmax"].tolist() == [0]
    assert kb.quantize(np.ones(3, F32), "nf4").planes["packed"].tolist() == [0xFF, 0xF7]
    assert kb.quantize(np.ones(3, F32), "fp4").planes["packed"].tolist() == [0x33, 0x30]
    assert kb.quantize(np.array([-1e-9, 1, -1], F32), "fp4").planes["packed"].tolist() == [0x83, 0xB0]


def test_infinities_and_extremes():
    x = np.array([np.inf, -np.inf, 1, 0, -5], F32)
    q = kb.quantize(x, "nf4")
    assert q.planes["absmax"].tolist() == [np.inf] and q.planes["packed"].tolist() == [0x00, 0x77, 0x77]
    for exponent in (-100, 0, 100, 127):
        x = (np.random.default_rng(0).uniform(-1, 1, 64) * 0.9).astype(F32)
        x[5] = 1
        codes = kb.quantize(x, "nf4").planes["packed"]
        assert np.array_equal(kb.quantize(np.ldexp(x, exponent), "nf4").planes["packed"], codes), exponent


@pytest.mark.parametrize("values", [None, "permuted", "duplicate", "wide", "close"])
def test_tables_of_ones_own(values):
    rng = np.random.default_rng(5)
    table = {
        None: "bnf",
        "permuted": rng.permutation(np.linspace(-1, 1, 16)).astype(F32),
        "duplicate": np.repeat(np.linspace(-1, 1, 8), 2).astype(F32),
        "wide": np.linspace(-3, 5, 16).astype(F32),
        "close": np.sort(np.concatenate((np.linspace(-1, 1, 12), [1e-4, 2e-4, 3e-4, 0]))).astype(F32),
    }[values]
    x = make("normal", 5000, np.dtype("float32"))
    q = kb.quantize(x, "table4", codebook=table, block=32)
    numbers = tables.standard_codebook("bnf", 4).values if values is None else table
    assert ("table" in q.planes) == (values is not None)
    levels = np.unique(numbers)
    rows = np.concatenate((x, np.zeros(-x.size % 32, F32))).reshape(-1, 32)
    absmax = np.abs(rows).max(1)
    level = np.searchsorted(tables.midpoints(levels), rows * (F32(1) / absmax)[:, None], side="left")
    first = np.array([list(numbers).index(v) for v in levels])
    assert np.array_equal(q.planes["packed"], pack(first[level].astype(np.uint8), x.size))
    assert same_values(q.dequantize(), (levels[level] * absmax[:, None]).reshape(-1)[: x.size])
    assert kb.metrics.error_bound(x, q).violations == 0


def test_double_quantization():
    x = make("normal", 300 * 64 + 7, np.dtype("float32"))
    plain, q = kb.quantize(x, "nf4"), kb.quantize(x, "nf4", double_quant=True)
    assert np.array_equal(plain.planes["packed"], q.planes["packed"])
    absmax, offset = plain.planes["absmax"], q.planes["nested_offset"][0]
    assert offset == pytest.approx(absmax.mean(dtype=np.float64), rel=1e-7)
    codes, nested = encode_slowly(absmax - offset, "dynamic8", 256)
    assert np.array_equal(q.planes["absmax"], codes.reshape(-1)[: absmax.size])
    assert q.planes["nested_absmax"].tobytes() == nested.tobytes()
    decoded = tables.dynamic_map()[codes] * nested[:, None] + offset
    assert same_values(numpy_side.host_absmax(q.planes), decoded.reshape(-1)[: absmax.size])
    assert kb.metrics.sqnr_db(x, q.dequantize()) > kb.metrics.sqnr_db(x, plain.dequantize()) - 0.05
    assert kb.metrics.error_bound(x, q).violations == 0
    assert q.bits_per_element < 4.15


def test_rows_of_double_quantization():
    x = make("normal", 512 * 1024, np.dtype("float32")).reshape(512, 1024)  # 16 blocks a row: cut every 16 rows
    q = kb.quantize(x, "nf4", double_quant=True)
    y = q.dequantize()
    for rows in (slice(16, 48), slice(0, 16), slice(496, None), slice(0, None), slice(5, 5)):
        assert np.array_equal(q[rows].dequantize(), y[rows])
    for rows in (slice(8, 16), slice(0, 8), slice(0, 32, 2), [0, 1], 3):
        with pytest.raises(FormatError, match="cut only where 256 blocks end"):
            q[rows]
    wide = kb.quantize(x.reshape(32, 16384), "nf4", double_quant=True)  # 256 blocks a row
    assert np.array_equal(wide[[3, 30, 3]].dequantize(), y.reshape(32, 16384)[[3, 30, 3]])
    plain = kb.quantize(x, "fp4")
    assert np.array_equal(plain[[7, 2]].dequantize(), plain.dequantize()[[7, 2]])


@pytest.mark.parametrize("name", ["nf4", "fp4", "table4", "dynamic8"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds(name, kind):
    for size, dtype in itertools.product(SIZES, DTYPES):
        x = make(kind, size, dtype)
        finite = np.nan_to_num(x.astype(F32), posinf=1, neginf=-1).astype(dtype)
        for options in ({}, {"block": 4096}, *([] if name == "dynamic8" else [{"double_quant": True}])):
            q = kb.quantize(finite, name, **options)
            with np.errstate(over="ignore"):
                assert kb.metrics.error_bound(finite, q).violations == 0, (size, dtype, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 48}, "block is 48; allowed are the powers of two from 16 to 4096"),
        ({"block": 8}, "block is 8"),
        ({"block": 8192}, "block is 8192"),
        ({"block": True}, "block is True"),
        ({"block": "64"}, "block is '64'"),
        ({"double_quant": 1}, "double_quant is 1; allowed are True and False"),
        ({"codebook": "gauss"}, "codebook is 'gauss'; allowed are 'bnf', 'nf' or an array of 16 numbers"),
        (
            {"codebook": np.zeros(15)},
            r"codebook is of shape \(15,\); it must be a one-dimensional sequence of 16 numbers",
        ),
        ({"codebook": [1j] * 16}, "codebook is not numeric"),
        ({"codebook": [np.nan] * 16}, "codebook holds values that are not finite"),
        ({"codebook": "custom"}, "names no values: pass the array itself as codebook="),
        ({"table": "gauss"}, "codebook is 'gauss'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(FormatError, match=message):
        kb.quantize(np.ones(4, F32), "table4", **options)
    if "table" in options or "codebook" in options:
        with pytest.raises(FormatError, match="has no option '(table|codebook)'|nf4 takes no codebook"):
            kb.quantize(np.ones(4, F32), "nf4", **options)


def test_flat_functions():
    x = np.random.default_rng(0).standard_normal((33, 7)).astype(np.float16)
    packed, absmax = kb.quantize_nf4(x, 64, 4)  # the second size changes nothing
    q = kb.quantize(x, "nf4", block=64)
    assert np.array_equal(packed, q.planes["packed"]) and np.array_equal(absmax, q.planes["absmax"])
    y = kb.dequantize_nf4(packed, absmax, x.size, 64, 32)
    assert y.dtype == np.float16 and y.shape == (x.size,) and same_values(y, q.dequantize().reshape(-1))
    assert kb.dequantize_nf4(packed, absmax, x.size, 64, dtype="bfloat16").dtype == BFLOAT16
    out = np.empty(x.size, F32)
    assert kb.dequantize_nf4(packed.reshape(-1, 1), absmax, x.size, 64, out=out) is out
    with pytest.raises(FormatError, match="block_size_outer is 48; allowed are the powers of two from 16 to 4096"):
        kb.quantize_nf4(x, 48)
    with pytest.raises(FormatError, match="block_size_inner is 0; it must be a positive integer"):
        kb.quantize_nf4(x, 64, 0)
    assert kb.quantize_nf4(np.ones(512, np.float32), 128, 32)[1].shape == (4,)
    with pytest.raises(TypeError, match="out is float32 but dtype says float16"):
        kb.dequantize_nf4(packed, absmax, x.size, dtype="float16", out=np.empty(x.size, np.float32))
    assert kb.dequantize_nf4(packed, absmax, x.size).dtype == np.float16
    with pytest.raises(FormatError, match="packed is"):
        kb.dequantize_nf4(packed[:-1], absmax, x.size)
    with pytest.raises(FormatError, match="absmax is"):
        kb.dequantize_nf4(packed, absmax[:-1], x.size)
    with pytest.raises(FormatError, match="absmax is"):
        kb.dequantize_nf4(packed, absmax.astype(np.float64), x.size)
    with pytest.raises(FormatError, match="n is -1"):
        kb.dequantize_nf4(packed, absmax, -1)


@pytest.mark.parametrize("name", ["nf4", "fp4", "table4"])
def test_search_table_of_the_kernels(name):
    """One comparison in the bucket of a number gives its level."""
    table = kb.get_format(name)._table
    struct = search.search4(table)[1]
    near = table.thresholds.view(np.int32) + np.arange(-3, 4)[:, None].astype(np.int32)
    y = np.concatenate((near.view(np.float32).ravel(), np.linspace(-1, 1, 4001), [0.0, -0.0])).astype(np.float32)
    y = tables.flush(y[np.abs(y) <= 1])
    # Rounded down, as the kernel adds: what is just below 0 stays in the bucket below.
    bucket = np.where((y < 0) & (y > -(2.0**-20)), 15, np.floor((y.astype(np.float64) + 1) * 16)).astype(int)
    level = struct["level"][bucket] + (y > struct["threshold"][bucket])
    assert (level == np.searchsorted(table.thresholds, y)).all()


def test_search_table_of_the_dynamic_map():
    """Entry and bits give the level."""
    entry = search.search8()["entry"]
    thresholds = search.dynamic_table().thresholds[127:]
    near = (thresholds.view(np.int32) + np.arange(-40, 41)[:, None].astype(np.int32)).view(np.float32).ravel()
    y = np.concatenate((near, np.geomspace(2.0**-126, 1, 100_001), [0.0, 1.0])).astype(np.float32)
    searched = y + search.DYNAMIC_OFFSET
    level = (searched.view(np.uint32) + entry[search.dynamic_bucket(searched)]) >> 24
    assert (level == np.searchsorted(thresholds, y)).all()


@pytest.mark.parametrize("name", ["nf4", "fp4", "table4"])
@pytest.mark.parametrize("shape", [(4, 64), (16, 1024), (3, 16, 16)], ids=str)
def test_a_stack_of_double_quantization(xp, name, shape):
    """Every member keeps the offset of its scales, and its own blocks of them."""
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    x *= np.float32([1, 30, 0.01]).reshape(3, *[1] * len(shape))
    members = [kb.quantize(xp.asarray(part), name, block=16, double_quant=True) for part in x]
    stack = kb.stack(members)
    assert stack.members == 3 and stack.planes["nested_offset"].size == 3
    wanted = xp.stack([member.dequantize() for member in members])
    assert bool((stack.dequantize() == wanted).all())
    again = kb.QuantizedArray.from_config(stack.config(), stack.planes)
    assert again.members == 3 and bool((again[1:].dequantize() == wanted[1:]).all())
    assert bool((kb.take(stack, [2, 0]) == wanted[[2, 0]]).all())
    for plane in members[1].planes:
        assert bool((stack[1].planes[plane] == members[1].planes[plane]).all())
    if len(shape) == 2:
        tokens = xp.asarray(np.random.default_rng(1).standard_normal((2, shape[1])).astype(np.float16))
        found = kb.linear_grouped(tokens, stack, [[0, 2], [1, 1]])
        for i, experts in enumerate(((0, 2), (1, 1))):
            for j, expert in enumerate(experts):
                # Kernels round scales and values to float16, each in another place: noise of a few 2^-12 of every term.
                terms = wanted[expert].astype("f8") * tokens[i].astype("f8")
                bound = 2.0**-9 * xp.sqrt((terms**2).sum(axis=1)) + 2.0**-10 * abs(terms.sum(axis=1)) + 1e-6
                assert bool((abs(found[i, j].astype("f8") - terms.sum(axis=1)) <= bound).all())
