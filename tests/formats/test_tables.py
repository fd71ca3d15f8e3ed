"""The frozen codebooks against their definitions."""

import numpy as np
import pytest
from scipy import special

import kbitcupy as kb
from kbitcupy.tables import Codebook, direct_thresholds, standard_codebook

# Positive halves as bitsandbytes computes them, float32 bits.
NF_BITS = {
    2: "3e8dd21a 3f800000",
    3: "3dd20129 3ea32005 3f1409f5 3f800000",
    4: "3d2c6c36 3e0265ad 3e5d2107 3e9f2ee8 3ed56949 3f0ace38 3f35233b 3f800000",
    5: "3c950060 3d5ff631 3dbb691d 3e04052d 3e2b36ba 3e539bdb 3e7d9849 3e94d4a9 "
    "3eac39a3 3ec56bf3 3ee10f82 3f001198 3f122cf2 3f288359 3f4731dc 3f800000",
}
BNF = {
    2: [0.1964, 0.6642],
    3: [0.1018, 0.3141, 0.5583, 0.8827],
    4: [0.0499, 0.1509, 0.2551, 0.3652, 0.4846, 0.6179, 0.7739, 0.9686],
    5: [0.0239, 0.0718, 0.1201, 0.1692, 0.2193, 0.2707, 0.3239, 0.3791]
    + [0.4369, 0.4977, 0.5625, 0.6321, 0.7078, 0.7913, 0.8850, 0.9920],
}


@pytest.mark.parametrize("k", NF_BITS)
def test_nf_has_the_bits_of_bitsandbytes(k):
    half = standard_codebook("nf", k).values[1 << (k - 1) :]
    assert half.astype(">f4").tobytes().hex(" ", 4) == NF_BITS[k]


@pytest.mark.parametrize("k", range(1, 9))
def test_nf_is_the_normalised_quantile(k):
    quantile = special.ndtri((2 * np.arange(1 << k) + 1) / 2.0 ** (k + 1)).astype(np.float32)
    assert np.array_equal(kb.create_normal_float_codebook(k), quantile / np.abs(quantile).max())
    assert kb.create_normal_float_codebook(k) is kb.create_normal_float_codebook(k)


@pytest.mark.parametrize("k", BNF)
def test_bnf_has_the_published_levels(k):
    assert np.array_equal(standard_codebook("bnf", k).values[1 << (k - 1) :], np.float32(BNF[k]))


def lloyd_max_step(levels, block=32, points=1 << 17):
    """One Lloyd step for |x| / absmax of normal blocks, error weighted by absmax^2, by numerical integration."""
    nodes, weights = np.polynomial.legendre.leggauss(300)
    a, w = (nodes + 1) * 6, weights * 6
    density = np.exp(-a * a / 2) / np.sqrt(2 * np.pi)
    inside = 2 * special.ndtr(a) - 1
    # An element that is not the largest: another one is a, it is y * a; and the one that is, at y = 1.
    factor = w * (block - 1) * 2 * density * inside ** (block - 2) * a**3
    y = (np.arange(points) + 0.5) / points
    mass = sum(f * np.exp(-((y * s) ** 2) / 2) for f, s in zip(factor, a, strict=True)) / np.sqrt(2 * np.pi) / points
    top = float((w * a**2 * 2 * density * inside ** (block - 1)).sum()) / 2
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, y)
    total = np.bincount(cell, mass, levels.size)
    moment = np.bincount(cell, mass * y, levels.size)
    total[-1] += top
    moment[-1] += top
    return moment / total


@pytest.mark.parametrize("k", [1, 6, 7, 8])
def test_designed_bnf_levels_are_fixed_points(k):
    half = standard_codebook("bnf", k).values[1 << (k - 1) :].astype(np.float64)
    assert np.abs(lloyd_max_step(half) - half).max() < 2e-5


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("name", ["bnf", "nf"])
def test_standard_codebooks_are_symmetric_and_frozen(k, name):
    values = standard_codebook(name, k).values
    assert values.dtype == np.float32 and values.size == 1 << k
    assert np.array_equal(values, -values[::-1]) and (np.diff(values) > 0).all()
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 0


@pytest.mark.parametrize("values", [[0, 1e-12, 0.5, 1], [-(2.0**-100), 2.0**-100], [-3e38, 3e38], [1e-20, 0]])
def test_irregular_codebooks_take_the_full_search(values):
    assert Codebook(np.float32(values)).thresholds is None


def test_levels_of_unsorted_and_duplicate_values():
    table = Codebook(np.float32([0.5, -1, 0.5, 1]))
    assert table.index.tolist() == [1, 0, 3] and not table.ordered
    assert table.thresholds.tolist() == pytest.approx([-0.25, 0.75], abs=1e-7)
    # A tie goes to the value that stands first: 0.5 stands before -1 and before 1.
    assert table.thresholds[0] < -0.25 and table.thresholds[1] == 0.75


@pytest.mark.parametrize("k", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("name", ["bnf", "nf"])
def test_direct_thresholds_decide_as_the_quotient(k, name):
    """Random pairs of every exponent distance, and the pairs next to every threshold."""
    thresholds = standard_codebook(name, k).thresholds
    rng = np.random.default_rng(k)
    for bits in (8, 11):
        direct = direct_thresholds(thresholds, bits)
        d = (rng.integers(1 << (bits - 1), 1 << bits, 20_000) / 2.0 ** (bits - 1)).astype(np.float32)
        aim = np.resize(np.append(thresholds, rng.uniform(-1, 1, 500)), d.size) * d.astype(np.float64)
        unit = np.exp2(np.floor(np.log2(np.abs(aim))) - bits + 1)
        r = (1 / d.astype(np.float64)).astype(np.float32).astype(np.float64)
        for offset in (-1, 0, 1, 2):
            x = (np.floor(aim / unit) + offset) * unit
            quotient = x.astype(np.float32) / d
            assert np.array_equal(
                np.searchsorted(thresholds, quotient), np.searchsorted(direct.astype(np.float64), x * r)
            )


def test_edge_is_the_largest_distance_inside_the_unit_interval():
    grid = np.linspace(-1, 1, 20001)
    for values in ([-1, 1], [-0.5, 0.25], [0, 0.1, 0.9, 1.5]):
        table = Codebook(np.float32(values))
        wanted = np.abs(grid[:, None] - table.values).min(1).max()
        assert wanted <= table.edge + 1e-7
