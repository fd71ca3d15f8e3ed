"""What random products are held against (tests/fuzz_products.py): right ones pass, wrong ones do not."""

import ml_dtypes
import numpy as np
import pytest
from fuzz_products import allowed, as_multiplied, factor_of, in_float32, random_weight, rounded, with_scales

import kbitcupy as kb

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", ["kbit2", "kbit3", "kbit4", "kbit5"])
def test_weights_of_scales_that_are_rounded(name):
    """Also where a scale is halfway between two bfloat16, which one of eight halves is: few outputs have few scales."""
    q = random_weight(kb.get_format(name, absmax="float16"), (3, 4096), np.random.default_rng(0), np)
    w, eps = q.dequantize(dtype="float32").astype(np.float64), 2.0**-7
    scales = np.repeat(q.planes["absmax"].astype(np.float64).reshape(3, -1), 32, axis=1)
    assert (np.abs(scales / rounded(scales, 2 * eps) - 1) == 0).mean() < 0.5  # they have more bits
    factor = factor_of(q, BFLOAT16)
    values = rounded(with_scales(q, 1.0, False) * factor, eps)
    exact = rounded(values * scales.astype(BFLOAT16).astype(np.float64), eps) / factor
    assert any((found == exact).all() for found in as_multiplied(q, w, "small_batch", BFLOAT16))
    x = np.random.default_rng(1).standard_normal((1, 4096)).astype(BFLOAT16).astype(np.float64)
    wanted = x @ w.T
    limit = allowed(q, x, w, wanted, np.ones_like(wanted, bool), "small_batch", BFLOAT16)
    assert np.sqrt(np.mean(np.square(x @ exact.T - wanted))) <= limit


@pytest.mark.parametrize("mean", [0, 1])
def test_sums_in_float32(mean):
    """One term after the other; numbers of 11 bits are too short."""
    rng = np.random.default_rng(mean)
    x, w = (rng.standard_normal((20, 1024)).astype(np.float32) + np.float32(mean) for _ in range(2))
    exact, size = x.astype(np.float64) @ w.astype(np.float64).T, np.abs(x).astype(np.float64) @ np.abs(w).T
    total = np.zeros((20, 20), np.float32)
    for k in range(1024):
        total += np.outer(x[:, k], w[:, k])
    off, short = np.abs(total - exact), np.abs(rounded(x, 2.0**-10) @ rounded(w, 2.0**-10).T - exact)
    assert (off <= in_float32(size, 1024)).all()
    assert (short > in_float32(size, 1024)).any()
