"""Codebooks designed for a distribution: against samples, fitted tables, a frozen design and closed forms."""

import functools

import numpy as np
import pytest
from scipy import stats

import kbitcupy as kb
from kbitcupy import tables
from kbitcupy.errors import FormatError
from kbitcupy.explore import design_codebook

DISTRIBUTIONS = {
    "normal": stats.norm(),
    "Laplace": stats.laplace(),
    "Student-t": stats.t(5),
    "one-sided": stats.gamma(2),
    "far from 0": stats.norm(3, 1),
    "infinite density": stats.beta(0.5, 0.5, loc=-0.5),
}


@functools.cache
def sample(name):
    return DISTRIBUTIONS[name].rvs(1 << 18, random_state=1)


def error(x, codebook, block):
    """Mean squared error of a decoded sample, with exact absmax."""
    rows = x.reshape(-1, block)
    absmax = abs(rows).max(1, keepdims=True)
    cuts = (codebook[1:] + codebook[:-1]).astype(np.float64) / 2
    return float(((codebook[np.searchsorted(cuts, rows / absmax)] * absmax - rows) ** 2).mean())


@pytest.mark.parametrize(("k", "block"), [(1, 64), (2, 32), (3, 32), (4, 64), (4, 4096), (6, 32)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_worse_than_a_table_fitted_to_the_sample(name, k, block):
    """The fitted one has seen the very sample, so it may win by what a sample tells of itself: little."""
    x = sample(name)
    own, fitted = design_codebook(DISTRIBUTIONS[name], k, block), kb.fit_table(x, k, block=block)
    assert own.dtype == np.float32 and own.shape == (1 << k,)
    assert (np.diff(own) > 0).all() and abs(own).max() <= 1
    assert error(x, own, block) < 1.02 * error(x, fitted, block)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_value_is_the_centre_of_its_cell(name):
    """By a large sample: the mean of what is nearest to it, weighted with the square of the absmax."""
    x = DISTRIBUTIONS[name].rvs(1 << 21, random_state=2).reshape(-1, 32)
    absmax = abs(x).max(1, keepdims=True)
    codebook = design_codebook(DISTRIBUTIONS[name], 3, 32)
    cell = np.searchsorted((codebook[1:] + codebook[:-1]) / 2, x / absmax).reshape(-1)
    weight = np.broadcast_to(absmax**2, x.shape).reshape(-1)
    centre = np.bincount(cell, weight * (x / absmax).reshape(-1), 8) / np.bincount(cell, weight, 8)
    assert np.abs(centre - codebook).max() < 2e-3


@pytest.mark.parametrize("k", range(1, 9))
def test_the_frozen_normal_codebook(k):
    """bnf is the same design; where its levels had converged it is equal, elsewhere it has no less error."""
    own, frozen = design_codebook(stats.norm(), k, 32), tables.standard_codebook("bnf", k).values
    x = np.random.default_rng(0).standard_normal(1 << 20)
    assert error(x, own, 32) < 1.0006 * error(x, frozen, 32)
    if k in (1, 6, 7, 8):
        assert np.abs(own - frozen).max() < 1e-6
    assert np.array_equal(own, -own[::-1])


def test_uniform_elements_have_equal_steps():
    """Beside the largest one a block's quotients are uniform: all steps are equal but for those at the ends."""
    steps = np.diff(design_codebook(stats.uniform(-1, 2), 4, 4096))
    assert np.ptp(steps[1:-1]) < 1e-4 * steps.mean()


def test_a_scale_has_no_influence():
    wanted = design_codebook(stats.norm(), 4, 32)
    for scale in (1e-30, 1e30):
        assert np.abs(design_codebook(stats.norm(scale=scale), 4, 32) - wanted).max() < 1e-6


def test_values_in_a_narrow_place():
    values = design_codebook(stats.uniform(5, 1e-4), 4, 64)
    assert values[0] > 0.99997 and np.unique(values).size == 16


def test_formats_take_it():
    x = stats.laplace().rvs(1 << 16, random_state=0).astype(np.float32)
    own = kb.quantize(x, "kbit4", codebook=design_codebook(stats.laplace(), 4, 32))
    assert kb.metrics.sqnr_db(x, own) > kb.metrics.sqnr_db(x, kb.quantize(x, "kbit4")) + 0.3


@pytest.mark.parametrize(
    ("distribution", "error", "message"),
    [
        (stats.norm, TypeError, "frozen continuous distribution"),
        (stats.poisson(3), TypeError, "frozen continuous distribution"),
        (np.ones(3), TypeError, "frozen continuous distribution"),
        (stats.t(2), FormatError, "variance inf"),
        (stats.cauchy(), FormatError, "variance nan"),
    ],
)
def test_what_is_no_distribution_to_design_for(distribution, error, message):
    with pytest.raises(error, match=message):
        design_codebook(distribution)


@pytest.mark.parametrize("wrong", [{"k": 9}, {"k": 0}, {"block": 33}, {"block": "64"}])
def test_what_the_formats_do_not_have(wrong):
    with pytest.raises(FormatError, match=next(iter(wrong))):
        design_codebook(stats.norm(), **wrong)
