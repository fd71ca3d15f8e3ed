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


class FakeTree:
    """Answers as a tree's process does, with times that a round's places make longer for both trees."""

    def __init__(self, us):
        self.us, self.places, self.has = us, [], None

    def ask(self, word, *arguments):
        if word == "prepare":
            self.places.append(arguments[1])
            self.has = self.us * (1 + arguments[1] * 2.0**-28)
        self.said = [self.has, 3.0] if word == "sample" else None

    def answer(self):
        return self.said


def test_each_round_has_its_arrays_at_new_places():
    trees = FakeTree(10.0), FakeTree(9.0)
    (old, old_cpu), (new, new_cpu), ratio, error = time_cells.compare(trees, "linear/nf4/4096x4096/1", 5)
    assert trees[0].places == trees[1].places and len(set(trees[0].places)) == 5
    assert old > 10 and new == pytest.approx(0.9 * old) and (old_cpu, new_cpu) == (3.0, 3.0)
    assert ratio == pytest.approx(0.9) and error < 1e-9
