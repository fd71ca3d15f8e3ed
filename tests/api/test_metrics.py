"""Error measures against their formulas."""

import math

import numpy as np
import pytest
from inputs import BFLOAT16

import kbitcupy as kb
from kbitcupy import metrics

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 700))
Y = X + 0.1 * RNG.standard_normal(X.shape)


def test_formulas():
    error = X - Y
    assert metrics.mse(X, Y) == pytest.approx((error**2).mean(), rel=1e-12)
    assert metrics.rmse(X, Y) == pytest.approx(math.sqrt((error**2).mean()), rel=1e-12)
    assert metrics.max_abs(X, Y) == np.abs(error).max()
    assert metrics.sqnr_db(X, Y) == pytest.approx(10 * math.log10((X**2).sum() / (error**2).sum()), rel=1e-12)
    assert metrics.cosine(X, Y) == pytest.approx((X * Y).sum() / np.sqrt((X**2).sum() * (Y**2).sum()), rel=1e-12)


def test_measuring_changes_nothing():
    """The array is frozen: what it shows does not depend on who has measured it."""
    q = kb.quantize(X, "kbit4")
    before = repr(q), q._repr_html_(), dir(q)
    assert metrics.sqnr_db(X, q) == metrics.sqnr_db(X, q.dequantize())
    assert (repr(q), q._repr_html_(), dir(q)) == before
    assert not hasattr(q, "sqnr_db")


@pytest.mark.parametrize("offset", [0.0, -3.0, 290.0, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_centered_sqnr(offset, dtype):
    x = (offset + 5 * X).astype(dtype)
    y = x + (0.5 * (Y - X)).astype(dtype)
    a = x.astype(np.float64)
    wanted = 10 * math.log10(((a - a.mean()) ** 2).sum() / ((a - y) ** 2).sum())
    assert metrics.sqnr_db(x, y, centered=True) == pytest.approx(wanted, rel=1e-9)
    assert metrics.sums(x, y).sqnr_centered_db == metrics.sqnr_db(x, y, centered=True)
    assert metrics.sqnr_db(x, y) >= metrics.sqnr_db(x, y, centered=True)
    assert metrics.sqnr_db(x, y) == metrics.sqnr_db(x, y, centered=False) == metrics.sums(x, y).sqnr_db


def test_the_centered_sqnr_tells_what_an_offset_hides():
    """A field of 290 K +- 5 K in kbit4: most of a block is one value, and the plain number praises it."""
    x = (290 + 5 * np.sin(np.linspace(0, 60, 1 << 16))).astype(np.float32)
    q = kb.quantize(x, "kbit4")
    assert metrics.sqnr_db(x, q) > 25
    assert metrics.sqnr_db(x, q, centered=True) < 0, "the mean alone would have been nearer"


def test_centered_edges():
    zero, one = np.zeros(3), np.ones(3)
    assert metrics.sqnr_db(one, one, centered=True) == math.inf
    assert metrics.sqnr_db(np.full(1000, 0.1), np.zeros(1000), centered=True) == -math.inf
    assert metrics.sqnr_db(zero, one, centered=True) == -math.inf
    for x in (np.empty(0), np.array([np.nan, 1.0]), np.array([np.inf, 1.0])):
        assert math.isnan(metrics.sqnr_db(x, np.zeros(x.shape), centered=True))


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.9, 3.1, 58.0])
def test_an_offset_is_said(ratio):
    x = 0.01 * ((X - X.mean()) / X.std() - ratio)
    note = metrics.offset_note(x)
    assert (note is None) == (ratio < 3)
    assert metrics.offset_note(metrics.sums(x, x)) == note
    if note is not None:
        assert (
            f"the mean is {-0.01 * ratio:.4g} and the standard deviation 0.01" in note and "subtract the mean" in note
        )
        assert f" {10 * math.log10(1 + ratio**2):.0f} dB over" in note


@pytest.mark.parametrize("x", [np.ones(8), np.empty(0), np.array([3.0, np.nan]), np.array([3.0, np.inf]), X])
def test_no_offset_to_speak_of(x):
    assert metrics.offset_note(x) is None


def test_sums_add_up():
    whole = metrics.sums(X, Y)
    parts = metrics.sums(X[:1], Y[:1]) + metrics.sums(X[1:], Y[1:])
    assert parts.count == whole.count and parts.largest == whole.largest
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db) and parts.cosine == pytest.approx(whole.cosine)
    far = [metrics.sums(part, part) for part in (X[:1], X[1:] + 1000, X[:0])]
    for joined in (far[0] + far[1] + far[2], far[2] + far[1] + far[0]):
        both = np.concatenate((X[0], X[1] + 1000, X[2] + 1000))
        assert joined.mean == pytest.approx(both.mean()) and joined.spread == pytest.approx(both.size * both.var())


def test_pieces_do_not_show(monkeypatch):
    wanted = metrics.sums(X, Y)
    monkeypatch.setattr(metrics, "_HOST_CHUNK", 100)
    pieces = metrics.sums(X, Y)
    assert pieces.count == wanted.count and pieces.noise == pytest.approx(wanted.noise)
    assert pieces.mean == pytest.approx(wanted.mean) and pieces.spread == pytest.approx(wanted.spread)


def test_edges():
    zero, one = np.zeros(3), np.ones(3)
    assert metrics.sqnr_db(one, one) == math.inf and metrics.sqnr_db(zero, zero) == math.inf
    assert metrics.sqnr_db(zero, one) == -math.inf and math.isnan(metrics.cosine(zero, one))
    assert math.isnan(metrics.mse(np.empty(0), np.empty(0))) and metrics.max_abs(np.empty(0), np.empty(0)) == 0
    nan = np.array([np.nan, 1, 1])
    assert math.isnan(metrics.mse(nan, one)) and math.isnan(metrics.max_abs(nan, one))
    assert math.isnan(metrics.sqnr_db(nan, one)) and math.isnan(metrics.sqnr_db(one, nan))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"x has shape \(3, 700\) and y \(2, 700\)"):
        metrics.mse(X, Y[:2])
    with pytest.raises(TypeError, match=r"x is QuantizedArray; .*call \.dequantize\(\)"):
        metrics.mse(kb.quantize(X, "kbit4"), X)
    with pytest.raises(TypeError, match="x is list"):
        metrics.mse([1.0], np.ones(1))
    with pytest.raises(ValueError, match="they must be equal"):
        metrics.error_bound(X[0], kb.quantize(X, "kbit4"))


def test_storage():
    q = kb.quantize(np.ones(1024, np.float16), "kbit2")
    assert metrics.bits_per_element(q) == q.nbytes * 8 / 1024
    assert metrics.compression_ratio(q) == 2048 / q.nbytes
    assert metrics.compression_ratio(q, "float32") == 4096 / q.nbytes
    assert math.isnan(metrics.bits_per_element(kb.quantize(np.empty(0, BFLOAT16), "kbit2")))


# ---- the bound -------------------------------------------------------------------------------------------------------

BOUND_FORMATS = [
    *(f"kbit{k}:absmax={absmax}" for k in range(1, 9) for absmax in ("e4m4", "float16", "float32")),
    *(f"table4:block={block},double_quant={nested}" for block in (16, 64, 4096) for nested in ("false", "true")),
]


def values_of(rng, size):
    """Codebooks of every kind up to +-1e4, some of them on one side of 0."""
    kind = rng.integers(6)
    values = [
        rng.uniform(-1, 1, size),
        rng.standard_normal(size) * 10 ** rng.uniform(-2, 3.3),
        rng.uniform(1, 1e4) + rng.random(size),
        -np.exp(rng.uniform(0, math.log(1e4), size)),
        np.repeat(rng.uniform(-1e4, 1e4, max(1, size // 2)), 2)[:size],
        np.append(rng.uniform(-1e-3, 1e-3, size - 1), rng.choice([-1e4, 1e4])),
    ][kind]
    return np.clip(values, -1e4, 1e4).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("text", BOUND_FORMATS)
def test_the_bound_holds_for_any_codebook(text, dtype):
    rng = np.random.default_rng([len(dtype), *text.encode()])
    name = text.partition(":")[0]
    size = 16 if name == "table4" else 1 << int(name[4:])
    for scale in (1.0, 1e-4, "rows"):
        values = values_of(rng, size)
        x = np.clip(rng.standard_normal(1500), -5, 5)
        x *= np.exp2(rng.integers(-12, 1, 1500) // 100 * 100 / 10) if scale == "rows" else scale
        x = x.astype(BFLOAT16 if dtype == "bfloat16" else dtype)
        q = kb.quantize(x, text, codebook=values)
        found = metrics.error_bound(x, q)
        assert found.violations == 0, (values, scale, found)
        assert 0 < found.error < math.inf and found.error <= found.bound


@pytest.mark.parametrize(
    ("text", "options", "size"),
    [
        ("kbit2:absmax=float16", {"codebook": [3, 5, 7, 9]}, 2048),
        ("kbit4", {"codebook": np.linspace(-1e6, 1e6, 16)}, 16384),
        ("table4:double_quant=true", {"codebook": np.linspace(-3000, 3000, 16)}, 16384),
    ],
)
def test_the_bound_holds_beyond_1(text, options, size):
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    assert metrics.error_bound(x, kb.quantize(x, text, **options)).violations == 0


LOSSY = [
    "kbit1",
    "kbit4",
    "kbit8:absmax=float32",
    "nf4",
    "nf4:double_quant=true",
    "fp4",
    "dynamic8",
    "int8",
    "int4:block=32",
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("text", LOSSY)
def test_a_lost_nan_is_a_violation(text, dtype):
    x = X.reshape(-1)[:640].astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    clean = metrics.error_bound(x, kb.quantize(x, text))
    x[[5, 600]] = np.nan
    q = kb.quantize(x, text)
    found = metrics.error_bound(x, q)
    assert found.violations == 2 and found.error == math.inf
    assert 0 < found.bound <= clean.bound * 1.5, "that of the finite elements"
    kept = q.dequantize()
    kept[[5, 600]] = np.nan
    assert metrics.error_bound(x, q, kept).violations == 0


@pytest.mark.parametrize("text", LOSSY)
def test_a_lost_infinity_is_a_violation(text):
    x = X.reshape(-1)[:640].astype(np.float32)
    x[5] = np.inf
    q = kb.quantize(x, text)
    y = q.dequantize()
    found = metrics.error_bound(x, q)
    lost = np.isnan(y) | (np.isinf(x) & (x != y))
    assert found.violations == lost.sum() and (found.error == math.inf) == lost.any()
    assert lost[5] or text == "int8", "whose one scale lets the largest code overflow"
    y[5] = -np.inf
    assert metrics.error_bound(x, q, y).violations >= 1, "the sign counts"
    y[:] = x
    assert metrics.error_bound(x, q, y) == metrics.BoundCheck(found.bound, 0.0, 0)


def test_only_nan():
    x = np.full(64, np.nan, np.float32)
    assert metrics.error_bound(x, kb.quantize(x, "kbit4")) == metrics.BoundCheck(0.0, math.inf, 64)


def test_numbers_that_come_back_as_nan_or_infinite():
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    q = kb.quantize(x, "kbit4")
    y = q.dequantize()
    y[3], y[4] = np.nan, np.inf
    assert metrics.error_bound(x, q, y).violations == 2


def test_float64_beyond_float32_is_infinite():
    x = np.linspace(-1, 1, 64)
    x[3] = 1e300
    assert metrics.error_bound(x, kb.quantize(x, "kbit4")).violations == 1
    x[3] = 1e30
    assert metrics.error_bound(x, kb.quantize(x, "int8")).violations == 0


def test_signaling_nan():
    """Its conversion would warn."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    x.view(np.uint32)[7] = 0x7F800001
    assert metrics.error_bound(x, kb.quantize(x, "nf4")).violations == 1
    assert math.isnan(metrics.sqnr_db(x, x)) and metrics.offset_note(x) is None


def test_what_the_bound_does_not_take():
    x = X.astype(np.float32)
    q = kb.quantize(x, "kbit4")
    for arguments, message in [
        ((x.tolist(), q), "x is list; it must be a NumPy or CuPy array"),
        ((x, x), "q is ndarray; it must be a QuantizedArray"),
        ((x, q, x.tolist()), "y is list; it must be a NumPy or CuPy array"),
        ((q, q), r"x is QuantizedArray; .* call \.dequantize\(\)"),
        ((x.astype(int), q), "x is int64; allowed are"),
        ((x, q, x.astype(int)), "y is int64; allowed are"),
        ((np.ma.masked_less(x, 0), q), "x is a masked array"),
        ((x, q, np.ma.masked_less(x, 0)), "y is a masked array"),
    ]:
        with pytest.raises(TypeError, match=message):
            metrics.error_bound(*arguments)
    for call in (metrics.sums, metrics.sqnr_db, metrics.mse):
        with pytest.raises(TypeError, match="y is a masked array"):
            call(x, np.ma.masked_less(x, 0))
    with pytest.raises(TypeError, match="x is list"):
        metrics.offset_note([1.0])


@pytest.mark.parametrize(
    "text", ["kbit4", "kbit8", "nf4:double_quant=true,block=16", "int8", "int8:granularity=channel:1"]
)
def test_the_bound_of_a_stack(text):
    """Every member has scales of its own."""
    x = np.random.default_rng(0).standard_normal((3, 16, 64)).astype(np.float32)
    x *= np.float32([1, 1e-4, 1e3]).reshape(3, 1, 1)
    stack = kb.stack([kb.quantize(part, text) for part in x])
    assert stack.members == 3
    found = metrics.error_bound(x, stack)
    assert found.violations == 0 and found.error > 0
    assert metrics.error_bound(x[::-1].copy(), stack).violations > 0
