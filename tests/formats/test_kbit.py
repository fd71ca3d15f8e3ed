"""The k-bit format against its contract: values, special values, error, size."""

import itertools

import numpy as np
import oracle
import pytest
from hypothesis import given, settings, strategies as st
from inputs import ABSMAX, BFLOAT16, CODEBOOKS, DTYPES, KINDS, SIZES, codebook, make, same_values

import kbitcupy as kb
from kbitcupy.formats.chunks import block_absmax
from kbitcupy.formats.codebook import numpy as numpy_side, scales
from kbitcupy.tables import standard_codebook

FP = {"e4m4": "e4m4", "float16": "fp16", "float32": "fp32"}


def table_of(choice, k):
    return standard_codebook(choice, k).values if isinstance(choice, str) else choice


@pytest.mark.parametrize("absmax", ABSMAX)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "book"), [(1, "bnf"), (2, "nf"), (3, "unsorted"), (4, "bnf"), (5, "asymmetric")])
def test_format_equals_oracle(kind, absmax, k, book):
    for dtype, size in itertools.product(DTYPES, (199, 192)):
        x = make(kind, size, dtype)
        choice = codebook(book, k)
        q = kb.quantize(x, f"kbit{k}", codebook=choice, absmax=absmax)
        words, codes, scale = oracle.quantize_format(x, k, table_of(choice, k), absmax)
        assert q.planes["scale"][0] == scale
        assert q.planes["absmax"].tobytes() == codes.tobytes()
        assert np.array_equal(q.planes["packed"], words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "book"), [(1, "nf"), (2, "bnf"), (3, "nf"), (4, "duplicate"), (4, "nf"), (5, "tiny"), (3, "large"), (6, "nf")]
)
def test_flat_equals_oracle(kind, k, book):
    for dtype in DTYPES:
        x = make(kind, 161, dtype)
        values = table_of(codebook(book, k), k)
        packed, absmax, returned = kb.quantize_kbit(x, k, values, "fp32")
        words, maxima = oracle.quantize_flat(x, k, oracle.flushed(values))
        assert packed.dtype == np.int32 and packed.size == words.size + k and not packed[-k:].any()
        assert np.array_equal(packed.view(np.uint32)[:-k], words)
        assert np.array_equal(absmax[:-1], maxima) and absmax[-1] == 0
        assert np.array_equal(returned, oracle.flushed(values))


@settings(max_examples=60)
@given(st.data())
def test_quantize_equals_oracle_on_any_floats(data):
    k = data.draw(st.integers(1, 4))
    absmax = data.draw(st.sampled_from(ABSMAX))
    book = data.draw(st.sampled_from(CODEBOOKS))
    x = np.array(data.draw(st.lists(st.floats(width=32), max_size=70)), np.float32)
    choice = codebook(book, k)
    q = kb.quantize(x, f"kbit{k}", codebook=choice, absmax=absmax)
    words, codes, scale = oracle.quantize_format(x, k, oracle.flushed(table_of(choice, k)), absmax)
    assert q.planes["scale"][0] == scale
    assert q.planes["absmax"].tobytes() == codes.tobytes()
    assert np.array_equal(q.planes["packed"], words)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("book", ["bnf", "nf"])
def test_thresholds_decide_as_the_full_search(k, book):
    table = standard_codebook(book, k)
    near = [table.thresholds, table.values, np.linspace(-1.6, 1.6, 4001, dtype=np.float32)]
    for direction in (np.inf, -np.inf):
        near += [np.nextafter(v, np.float32(direction)) for v in near[:2]]
    y = np.concatenate([*near, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])])
    wanted = np.argmin(
        np.where(np.isnan(y), 0, np.abs(np.clip(y, table.lowest, table.highest) - table.values[:, None])), 0
    )
    wanted[np.isnan(y)] = 0
    assert np.array_equal(numpy_side.nearest(y.copy(), table, clamp=True), wanted)


@pytest.mark.parametrize("k", range(1, 9))
def test_thresholds_are_the_last_floats_of_their_side(k):
    for book in ("bnf", "nf"):
        table = standard_codebook(book, k)
        low, high, t = table.values[:-1], table.values[1:], table.thresholds
        after = np.nextafter(t, np.float32(np.inf))
        assert (t - low <= high - t).all() and (after - low > high - after).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", range(1, 9))
def test_sizes_and_bits(k, size, dtype):
    x = make("normal", size, dtype)
    q = kb.quantize(x, f"kbit{k}", absmax="e4m4")
    blocks = -(-size // 32)
    assert q.planes["packed"].shape == (blocks * k,)
    assert q.nbytes == blocks * (4 * k + 1) + 4
    y = kb.dequantize(q)
    assert y.dtype == dtype and y.shape == x.shape
    if size:
        assert kb.metrics.error_bound(x, q, y).violations == 0


SQNR = {
    "e4m4": [4.30, 9.46, 15.47, 21.76, 27.92, 33.79, 39.14, 43.48],
    "float16": [4.30, 9.46, 15.48, 21.78, 28.02, 34.17, 40.26, 46.31],
    "float32": [4.30, 9.46, 15.48, 21.78, 28.02, 34.17, 40.26, 46.31],
}
NORMAL = np.random.default_rng(7).standard_normal(1 << 20).astype(np.float32)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("absmax", ABSMAX)
def test_sqnr_of_normal_data(k, absmax):
    q = kb.quantize(NORMAL, f"kbit{k}", absmax=absmax)
    assert kb.metrics.sqnr_db(NORMAL, q.dequantize()) == pytest.approx(SQNR[absmax][k - 1], abs=0.05)


@pytest.mark.parametrize("k", range(1, 9))
def test_sqnr_does_not_depend_on_the_magnitude(k):
    normal = NORMAL[: 1 << 19]
    wanted = kb.metrics.sqnr_db(normal, kb.quantize(normal, f"kbit{k}").dequantize())
    for factor in (1e6, 1e-6, 1e20):
        x = normal * np.float32(factor)
        assert kb.metrics.sqnr_db(x, kb.quantize(x, f"kbit{k}").dequantize()) == pytest.approx(wanted, abs=0.1)


FLAT_SQNR = {
    ("nf", "fp32"): [7.42, 15.01, 21.20, 26.32],
    ("nf", "e4m4"): [7.42, 14.99, 21.09, 25.95],
    ("bnf", "fp32"): [9.46, 15.48, 21.78, 28.02],
    ("bnf", "e4m4"): [9.45, 15.44, 21.64, 27.49],
}


@pytest.mark.parametrize("k", range(2, 6))
@pytest.mark.parametrize(("book", "absmax"), FLAT_SQNR)
def test_sqnr_of_the_flat_rule(k, book, absmax):
    packed, maxima, values = kb.quantize_kbit(NORMAL, k, standard_codebook(book, k).values, absmax)
    y = kb.dequantize_kbit(packed, maxima, values, k, NORMAL.size, "float32")
    assert kb.metrics.sqnr_db(NORMAL, y) == pytest.approx(FLAT_SQNR[book, absmax][k - 2], abs=0.05)


@pytest.mark.parametrize("absmax", ABSMAX)
@pytest.mark.parametrize("k", [2, 3, 4, 5, 8])
def test_no_element_violates_the_bound(k, absmax):
    for dtype in DTYPES:
        x = NORMAL[: 1 << 18].astype(dtype)
        for book in ("bnf", "nf"):
            q = kb.quantize(x, f"kbit{k}", codebook=book, absmax=absmax)
            check = kb.metrics.error_bound(x, q)
            assert check.violations == 0 and 0 < check.error <= check.bound


def test_the_bound_can_be_violated():
    q = kb.quantize(NORMAL[:4096], "kbit4")
    y = q.dequantize()
    y[17] += 2
    assert kb.metrics.error_bound(NORMAL[:4096], q, y).violations == 1


def test_mse_falls_with_every_bit():
    for book in ("bnf", "nf"):
        errors = [
            kb.metrics.mse(NORMAL, kb.quantize(NORMAL, f"kbit{k}", codebook=book).dequantize()) for k in range(1, 9)
        ]
        assert all(high > low for high, low in zip(errors, errors[1:], strict=False))


NF4 = np.float32(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
    + [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)


def nf4(x, block):
    """bitsandbytes' NF4 with a float32 absmax, decoded."""
    rows = x.reshape(-1, block)
    absmax = np.abs(rows).max(1, keepdims=True)
    return (NF4[np.abs(rows[..., None] / absmax[..., None] - NF4).argmin(-1)] * absmax).reshape(x.shape)


def test_kbit4_beside_nf4():
    x = NORMAL[: 1 << 16]
    packed, absmax, values = kb.quantize_kbit(x, 4)
    mse = kb.metrics.mse(x, kb.dequantize_kbit(packed, absmax, values, 4, x.size, "float32"))
    assert mse < 2 * kb.metrics.mse(x, nf4(x, 64))
    assert np.abs(standard_codebook("nf", 4).values - NF4).max() < 0.15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_the_values_of_nf4_it_is_nf4(dtype):
    x = NORMAL[: 1 << 15].astype(dtype)
    packed, absmax, values = kb.quantize_kbit(x, 4, NF4, "fp32")
    y = kb.dequantize_kbit(packed, absmax, values, 4, x.size, dtype)
    wanted = nf4(x.astype(np.float32), 32).astype(dtype).astype(np.float32)
    assert np.abs(y.astype(np.float32) - wanted).max() <= 1e-4


@pytest.mark.parametrize(("k", "ratio"), [(2, 7.1), (3, 4.9), (4, 3.8), (5, 3.0)])
def test_storage_against_float16(k, ratio):
    q = kb.quantize(NORMAL.astype(np.float16), f"kbit{k}")
    assert kb.metrics.compression_ratio(q) == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize("k", range(1, 9))
def test_decoding_every_index_and_scale(k):
    """All codes of a format: each index under each E4M4 scale."""
    values = standard_codebook("bnf", k).values
    index = np.resize(np.arange(1 << k, dtype=np.uint8), (256, max(32, 1 << k)))
    packed = kb.pack_kbit(index, k).view(np.uint32)
    codes = np.repeat(np.arange(256, dtype=np.uint8), index.shape[1] // 32)
    q = kb.QuantizedArray(
        kb.get_format(f"kbit{k}", absmax="e4m4"),
        {"packed": packed, "absmax": codes, "scale": np.float32([0.5])},
        index.shape,
        "float32",
    )
    scale = np.array([oracle.e4m4_value(code) for code in range(256)])
    assert np.array_equal(q.dequantize(), values[index] * np.float32(scale / 2)[:, None])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exceptional_inputs_have_defined_results(dtype):
    x = np.zeros(96, np.float32)
    x[:32] = np.nan
    x[32:36] = [np.inf, -np.inf, 1.0, np.nan]
    x[64:66] = [1.0, -0.0]
    q = kb.quantize(x.astype(BFLOAT16 if dtype == "bfloat16" else dtype), "kbit4")
    y = q.dequantize().astype(np.float32)
    values = standard_codebook("bnf", 4).values
    assert q.planes["absmax"].tolist()[:2] == [0, 0xFF]
    assert not y[:32].any()
    index = kb.unpack_kbit(q.planes["packed"], 4, 96)
    assert index[32:36].tolist() == [15, 0, 8, 0]  # inf, -inf, about 0.03 of the saturated scale, NaN
    assert index[64] == 15 and y[64] == pytest.approx(values[15], rel=2.0**-8)


def test_float64_is_rounded_once_and_returned_as_float64():
    x = np.linspace(-3, 3, 777)
    q = kb.quantize(x, "kbit5")
    single = kb.quantize(x.astype(np.float32), "kbit5")
    assert q.dtype == np.float64 and all(np.array_equal(q.planes[p], single.planes[p]) for p in q.planes)
    assert q.dequantize().dtype == np.float64 and np.array_equal(q.dequantize(), single.dequantize())


@pytest.mark.parametrize("book", CODEBOOKS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_custom_codebooks_travel_with_the_array(k, book):
    choice = codebook(book, k)
    x = NORMAL[:1000]
    q = kb.quantize(x, f"kbit{k}", codebook=choice)
    assert ("codebook" in q.planes) == (not isinstance(choice, str))
    again = kb.QuantizedArray.from_config(q.config(), q.planes)
    assert same_values(again.dequantize(), q.dequantize()) and again.format == q.format


def test_layouts_of_the_input_do_not_matter():
    base = NORMAL[: 64 * 48].reshape(64, 48)
    wanted = kb.quantize(np.ascontiguousarray(base.T), "kbit4").planes["packed"]
    frozen = np.ascontiguousarray(base.T)
    frozen.setflags(write=False)
    unaligned = np.frombuffer(b"x" + frozen.tobytes(), np.uint8)[1:].view(np.float32).reshape(48, 64)
    for x in (
        base.T,
        np.asfortranarray(base.T),
        frozen,
        unaligned,
        frozen.astype(">f4"),
        np.repeat(frozen, 2, 1)[:, ::2],
    ):
        assert np.array_equal(kb.quantize(x, "kbit4").planes["packed"], wanted)
    assert kb.quantize(np.float32(2.0), "kbit4").shape == ()
    assert kb.quantize(np.float32(2.0), "kbit4").dequantize() == pytest.approx(2.0, rel=0.05)


def test_a_hundred_million_elements_keep_the_bound():
    """In pieces: one tensor of that size would only need more memory."""
    rng = np.random.default_rng(3)
    violations = 0
    for k in (2, 3, 4, 5):
        for _ in range(2):
            x = rng.standard_normal(12_500_000, np.float32)
            violations += kb.metrics.error_bound(x, kb.quantize(x, f"kbit{k}")).violations
    assert violations == 0


@pytest.mark.parametrize("block", [32, 64, 4096])
@pytest.mark.parametrize("size", [0, 1, 31, 4096, 3 * 4096 + 5, 3 * 65536 + 17, 5 * 65536 + 32])
def test_float16_has_the_absmax_of_its_float32(block, size):
    """It is found among the bits of float16; every one of them occurs."""
    every = np.resize(np.arange(1 << 16, dtype=np.uint16).view(np.float16), size)
    for x in (every, np.random.default_rng(size).permutation(every), np.minimum(every, np.float16(1))):
        assert block_absmax(x, block).tobytes() == block_absmax(x.astype(np.float32), block).tobytes()


@pytest.mark.parametrize("absmax", ["e4m4", "float16"])
@pytest.mark.parametrize("largest", [2.0**-149, 1e-38, 2.0**-15 * 1.5, 0.06, 1.0, 31.0, 31.5, 65504.0, 65520.0, 3.4e38])
def test_quotients_by_stored_scales(absmax, largest):
    """On what finite numbers are searched for in place: none is more than half as large again as its scale."""
    rng, largest = np.random.default_rng(0), np.float32(largest)
    maxima = largest * np.exp2(rng.uniform(-30, 0, 1 << 16)).astype(np.float32)
    maxima[: 1 << 12] = largest * np.exp2(-np.arange(1 << 12) // 16 / 16).astype(np.float32)
    ties = np.ldexp(np.float32(np.arange(32) + 0.5), -15) * numpy_side.tensor_scale(largest, absmax)
    maxima = np.concatenate(([largest], np.minimum(maxima, largest), np.minimum(ties, largest))).astype(np.float32)
    stored = np.empty(maxima.size, scales.ABSMAX[absmax].dtype)
    with np.errstate(all="ignore"):
        divisors = numpy_side._divisors(maxima, absmax, numpy_side.tensor_scale(largest, absmax), stored)
        assert (maxima / divisors).max() <= numpy_side._LARGEST_QUOTIENT


@pytest.mark.parametrize("book", ["bnf", "nf", "tiny", "large", "unsorted"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_changes_its_block_alone(dtype, book):
    """Without one numbers are searched for in place, with one they are not: also zeros, which lie at a threshold."""
    x = np.random.default_rng(0).standard_normal((128, 96)).astype(np.float32)
    x[::7] *= np.float32(2.0**-12)
    x[::5, ::3] = 0
    x = x.astype(dtype)
    for k, absmax, rest in itertools.product((4, 6), ABSMAX, (0, 5)):
        format = kb.get_format(f"kbit{k}", codebook="custom", absmax=absmax)
        part = x.reshape(-1)[: x.size - rest]
        finite, other = part.copy(), part.copy()
        other[70] = np.nan
        q, r = (kb.quantize(y, format, codebook=table_of(codebook(book, k), k)) for y in (finite, other))
        assert np.delete(q.planes["absmax"], 2).tobytes() == np.delete(r.planes["absmax"], 2).tobytes()
        words, others = (each.planes["packed"].reshape(-1, k) for each in (q, r))
        assert np.array_equal(np.delete(words, 2, axis=0), np.delete(others, 2, axis=0))
