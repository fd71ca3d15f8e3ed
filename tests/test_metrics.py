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


def test_a_compressed_array_keeps_its_sqnr():
    q = kb.quantize(X, "kbit4")
    assert q.sqnr_db is None and "SQNR" not in q._repr_html_()
    wanted = metrics.sqnr_db(X, q.dequantize())
    assert q.sqnr_db is None, "only what was measured on q itself is kept"
    assert metrics.sqnr_db(X, q) == q.sqnr_db == wanted
    assert f"{wanted:.2f} dB" in q._repr_html_()
    kb.quantize(Y, "kbit4", out=q)
    assert q.sqnr_db is None


def test_sums_add_up():
    whole = metrics.sums(X, Y)
    parts = metrics.sums(X[:1], Y[:1]) + metrics.sums(X[1:], Y[1:])
    assert parts.count == whole.count and parts.largest == whole.largest
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db) and parts.cosine == pytest.approx(whole.cosine)


def test_pieces_do_not_show(monkeypatch):
    wanted = metrics.sums(X, Y)
    monkeypatch.setattr(metrics, "_CHUNK", 100)
    pieces = metrics.sums(X, Y)
    assert pieces.count == wanted.count and pieces.noise == pytest.approx(wanted.noise)


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
