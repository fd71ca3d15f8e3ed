"""Where bitsandbytes' CPU backend has rules of its own: `pip install '.[oracle]'`, else skipped.

The contract is its CUDA kernels (see test_bitsandbytes_oracle, and the frozen results of test_io_bitsandbytes). What
the README says of the other backend is shown here.
"""

import warnings

import numpy as np
import pytest
from bitsandbytes_rules import unpack

import kbitcupy as kb
from kbitcupy import tables

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it says about the machine is not about us
    bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def both(x, kind):
    """The codes of a float32 array in blocks of 64: theirs and ours; absmax is equal."""
    packed, state = bnb.functional.quantize_4bit(torch.from_numpy(x), blocksize=64, quant_type=kind)
    q = kb.quantize(x, kind)
    assert q.planes["absmax"].tobytes() == state.absmax.numpy().tobytes()
    return unpack(packed.numpy().ravel(), x.size), unpack(q.planes["packed"], x.size)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_normal_numbers_have_the_same_values(kind):
    theirs, ours = both(np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32), kind)
    values = tables.NF4 if kind == "nf4" else tables.FP4
    assert np.array_equal(values[theirs], values[ours])
    assert np.array_equal(theirs, ours) == (kind == "nf4")


def test_a_negative_number_that_becomes_zero_in_fp4():
    x = np.zeros(64, np.float32)
    x[:2] = 1, -1e-4
    theirs, ours = both(x, "fp4")
    assert (theirs[1], ours[1]) == (0, 8)


def test_a_block_of_zeros_in_nf4():
    packed, _ = bnb.functional.quantize_4bit(torch.zeros(64), blocksize=64, quant_type="nf4")
    assert (packed == 0x77).all() and not kb.quantize(np.zeros(64, np.float32), "nf4").planes["packed"].any()


def test_a_short_last_block_is_divided():
    """Of numbers on a threshold of NF4 one is found whose quotient and product with the reciprocal differ."""
    middles = (tables.NF4[1:] + tables.NF4[:-1]) * np.float32(0.5)
    code = np.flatnonzero((middles == tables.NF4_THRESHOLDS) & (middles > 0))[0]  # not all are the kernels' numbers
    middle = middles[code]
    a = np.random.default_rng(0).uniform(1, 2, 100_000).astype(np.float32)
    x = middle * a
    here = np.flatnonzero((x / a > middle) != (x * (np.float32(1) / a) > middle))[0]
    theirs, ours = both(np.array([a[here], x[here]]), "nf4")
    assert {int(theirs[1]), int(ours[1])} == {int(code), int(code) + 1}
    theirs, ours = both(np.resize([a[here], x[here]], 64), "nf4")
    assert np.array_equal(theirs, ours)
