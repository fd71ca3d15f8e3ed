"""The cells by which two trees are compared on a GPU: each of them calls what it names, here on NumPy and small."""

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

FILE = Path(__file__).resolve().parent.parent.parent / ".ci" / "time_cells.py"
SPEC = importlib.util.spec_from_file_location("time_cells", FILE)
time_cells = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(time_cells)

SMALL = {
    "28672x8192": "64x128",
    "4096x4096": "64x64",
    "65536x4096": "600x128",
    "16384x4096": "300x128",
    "128x768x2048": "4x32x64",
    "/512": "/5",
}


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(time_cells, "ELEMENTS", 1 << 12)
    monkeypatch.setattr(time_cells, "EXPERTS", (4, 32, 64, 2))
    found = time_cells.Worker.__new__(time_cells.Worker)
    found.cp = found.np = np
    pool = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    found.pools = {name: pool.astype(name) for name in ("float32", "float16")}
    found.pools["bfloat16"] = pool.astype(ml_dtypes.bfloat16)
    return found


@pytest.mark.parametrize("cell", time_cells.CELLS)
def test_each_cell_runs(worker, cell):
    for large, small in SMALL.items():
        cell = cell.replace(large, small)
    made = worker.calls(cell)
    for _ in range(2):  # the calls of a pass have inputs of their own
        call, nbytes = next(made)
        result = call()
        assert nbytes > 0 and (result is None or result.size)


def test_cells_are_named_once():
    assert len(set(time_cells.CELLS)) == len(time_cells.CELLS) >= 20


def test_a_cell_of_no_list_is_timed_when_its_whole_name_is_given():
    cells = time_cells.chosen_cells(["linear/fp4/4096x4096/3", "linear/nf4/4096x4096/*", "linear/nf4/4096x4096/1"])
    assert cells == ["linear/nf4/4096x4096/1", "linear/nf4/4096x4096/8", "linear/fp4/4096x4096/3"]
