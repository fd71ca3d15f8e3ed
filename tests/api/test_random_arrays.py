"""Random chains of steps on compressed arrays (see fuzz_arrays), a few seconds of them."""

import os

import fuzz_arrays
import numpy as np
import pytest

import kbitcupy as kb
from kbitcupy.formats.base import Format
from kbitcupy.formats.codebook.kbit import KBit


def test_random_chains(xp):
    # In CI every run draws the same chains, so a failure is the change's own; elsewhere each run draws new ones.
    seed = 0 if "CI" in os.environ else int(np.random.default_rng().integers(10**9))
    chains = 1000 if xp is np else 500  # each new kernel is compiled first
    outcomes, failures = fuzz_arrays.run(seed, chains, xp)
    assert not failures, "\n".join(failures[:5])
    done = ["index", "take", "reshape", "stack", "concatenate", "again", "overwrite"]
    done += ["linear", "q @ x", "x @ q", "linear_grouped"]
    assert min(outcomes[name] for name in done) > chains // 100, outcomes
    assert min(outcomes[f"{name} refused by both"] for name in ("index", "take", "reshape")) > chains // 500, outcomes


def wrong_row(self, planes, shape, key, lead=0):
    chosen = Format.select(self, planes, shape, key, lead)
    return {**chosen, "absmax": np.roll(chosen["absmax"], 1)}


def wrong_shape(self, *shape):
    return kb.QuantizedArray._wrap(self.format, self.planes, (*self.shape, 1), self.dtype)


def crash(*_):
    raise KeyError("scale")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "said"),
    [
        (KBit, "select", wrong_row, "other values than NumPy's"),
        (kb.QuantizedArray, "reshape", wrong_shape, "NumPy has"),
        (kb.QuantizedArray, "copy", crash, "KeyError: 'scale'"),
        (kb.QuantizedArray, "__getitem__", lambda self, key: self, "NumPy refuses this step"),
    ],
)
def test_it_notices(monkeypatch, owner, name, fault, said):
    monkeypatch.setattr(owner, name, fault, raising=False)
    found = []
    for seed in range(30):
        found += fuzz_arrays.run(seed, 10)[1]
        if any(said in failure for failure in found):
            return
    pytest.fail("\n".join(["nothing was noticed", *found[:5]]))
