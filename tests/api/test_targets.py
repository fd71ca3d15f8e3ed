"""The cells of .ci/targets.py: each of them multiplies what it names, here on NumPy and small."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).resolve().parent.parent.parent / ".ci" / "targets.py"
SPEC = importlib.util.spec_from_file_location("targets", FILE)
targets = importlib.util.module_from_spec(SPEC)
sys.modules["targets"] = targets  # dataclasses look there
SPEC.loader.exec_module(targets)

CELLS = {(cell.format, cell.activations, len(cell.shape)): cell for group in targets.GROUPS.values() for cell in group}


@pytest.mark.parametrize("key", CELLS, ids=str)
def test_each_cell_multiplies(key):
    cell = CELLS[key]
    small = replace(cell, shape=(4, 32, 512) if len(cell.shape) == 3 else (32, 512))
    weight = targets.weight_of(small, np)
    call, nbytes = targets.product(small, 2, np)(targets.products.Rotated(weight, np)(0))
    with np.errstate(over="ignore"):  # weights are random bits
        found = call()
    assert found.shape[-1] == 32 and 0 < nbytes <= weight.nbytes


@pytest.mark.parametrize("what", targets.CONVERSIONS)
def test_each_conversion_runs(what):
    call, nbytes = targets.conversion(what, np.linspace(-2, 2, 4096, dtype=np.float16))
    call()
    assert nbytes > 2 * 4096


def test_no_cell_is_there_twice():
    cells = [
        (cell.format, cell.shape, cell.activations, m)
        for g in targets.GROUPS.values()
        for cell in g
        for m in cell.targets
    ]
    assert len(set(cells)) == len(cells) >= 150


@pytest.mark.parametrize(
    ("target", "missed", "met"),
    [
        (0.8, (10.0, 0.79, None), (10.0, 0.8, None)),
        (targets.Times(2.0), (10.0, 0.9, 19.0), (10.0, 0.1, 20.0)),
        (targets.Microseconds(36), (36.5, 0.9, None), (35.0, 0.1, None)),
        (targets.Beyond(2), (10.0, 0.9, 7.9), (10.0, 0.1, 8.1)),
    ],
)
def test_what_falls_short(target, missed, met):
    assert targets.short_of(target, *missed) and not targets.short_of(target, *met)
    assert not targets.short_of(None, *missed)
