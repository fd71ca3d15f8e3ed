"""Fitted tables: against known optima, against neighbours, and in the formats."""

import numpy as np
import pytest
from inputs import BFLOAT16

import kbitcupy as kb
from kbitcupy import tables
from kbitcupy.errors import FormatError


def normal(shape=(1 << 20,), seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_normal_blocks_give_bnf(k):
    """The frozen codebook is the same design, rounded and not quite converged."""
    x = normal()
    fitted, frozen = kb.fit_table(x, k, block=32), tables.standard_codebook("bnf", k).values
    assert fitted.dtype == np.float32 and fitted.shape == (1 << k,)
    assert np.abs(fitted - frozen).max() < 0.02
    own, bnf = (kb.quantize(x, f"kbit{k}", codebook=c, absmax="float32").dequantize() for c in (fitted, frozen))
    assert 0 <= kb.metrics.sqnr_db(x, own) - kb.metrics.sqnr_db(x, bnf) < 0.05


@pytest.mark.parametrize(("name", "block"), [("nf4", 64), ("table4", 128)])
@pytest.mark.parametrize("draw", ["normal", "laplace", "skewed"])
def test_never_worse_than_a_fixed_table(name, block, draw):
    rng = np.random.default_rng(1)
    x = {
        "normal": rng.standard_normal(1 << 18),
        "laplace": rng.laplace(size=1 << 18),
        "skewed": rng.gamma(2, size=1 << 18),
    }[draw].astype(np.float32)
    table = kb.fit_table(x, 4, block=block)
    own = kb.quantize(x, "table4", codebook=table, block=block).dequantize()
    fixed = kb.quantize(x, name, block=block).dequantize()
    assert kb.metrics.mse(x, own) < kb.metrics.mse(x, fixed)
    for step in (-0.01, 0.01):  # and no neighbour is better
        moved = table.copy()
        moved[7] += step
        y = kb.quantize(x, "table4", codebook=moved, block=block).dequantize()
        assert kb.metrics.mse(x, own) < kb.metrics.mse(x, y)


def test_kbit_takes_fitted_tables():
    x = np.random.default_rng(2).laplace(size=1 << 18).astype(np.float32)
    for k in (2, 3, 5):
        y = kb.quantize(x, f"kbit{k}", codebook=kb.fit_table(x, k, block=32)).dequantize()
        assert kb.metrics.sqnr_db(x, y) > kb.metrics.sqnr_db(x, kb.quantize(x, f"kbit{k}").dequantize())


def test_inputs():
    x = normal((100, 41))
    wanted = kb.fit_table(x, 3)
    assert np.array_equal(kb.fit_table(x.reshape(-1), 3), wanted)
    assert np.array_equal(kb.fit_table(x.astype(np.float64), 3), wanted)
    assert np.abs(kb.fit_table(x.astype(BFLOAT16), 3) - wanted).max() < 0.01
    holes = np.concatenate((x.reshape(-1), [np.nan, np.inf, -np.inf]))
    assert np.abs(kb.fit_table(holes, 3) - wanted).max() < 0.01
    exact = kb.fit_table(np.array([-1, -0.5, 0.25, 1] * 16), 2)
    assert exact.tolist() == [-1, -0.5, 0.25, 1]


def test_bad_input():
    for k in (0, 9, 2.5, True):
        with pytest.raises(FormatError, match="k is"):
            kb.fit_table(normal((64,)), k)
    with pytest.raises(FormatError, match="block is 40"):
        kb.fit_table(normal((64,)), 4, block=40)
    with pytest.raises(FormatError, match="x holds 1 different quotients"):
        kb.fit_table(np.ones(640, np.float32), 4)
    with pytest.raises(TypeError, match="x is int64"):
        kb.fit_table(np.arange(64), 4)


def test_on_a_gpu(cupy):
    x = normal((1 << 18,), 3)
    assert np.abs(kb.fit_table(cupy.asarray(x), 4) - kb.fit_table(x, 4)).max() < 1e-6
