"""The kernels of the format ternary give NumPy's bytes."""

import math

import numpy as np
import pytest
from inputs import DTYPES, make

import kbitcupy as kb

pytestmark = pytest.mark.gpu


def same(cupy, x, text, **given):
    expected = kb.quantize(x, text, **given)
    found = kb.quantize(cupy.asarray(x), text, **{name: cupy.asarray(value) for name, value in given.items()})
    for name, plane in expected.planes.items():
        assert found.planes[name].get().tobytes() == plane.tobytes(), name
    assert found.dequantize().get().tobytes() == expected.dequantize().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["absmean", "absmax", "fit"])
@pytest.mark.parametrize("size", [1000, 1 << 17, (1 << 17) + 1, 3_000_001])
def test_arrays_that_are_one_block(cupy, size, rule, dtype):
    same(cupy, make("wide", size, dtype, seed=1), f"ternary:rule={rule},eps=0")


@pytest.mark.parametrize("rule", ["absmean", "absmax", "fit"])
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("channel:0", (40, 5000)), ("channel:0", (3, 300_000)), ("group:256", (7, 640)), ("group:300", (5, 1000))],
)
def test_rows_and_groups(cupy, granularity, shape, rule):
    x = make("special", math.prod(shape), np.float32, seed=2).reshape(shape)
    same(cupy, x, f"ternary:granularity={granularity},rule={rule},eps=0")


@pytest.mark.parametrize("rounding", ["even", "away"])
def test_given_scales_of_every_size(cupy, rounding):
    scale = np.abs(make("extreme", 600, np.float32, seed=3))
    scale[::17] = 0
    near = np.maximum((scale * np.float32(0.5)).view(np.int32)[:, None] + np.arange(-8, 8, dtype=np.int32), 0)
    same(cupy, near.view(np.float32), f"ternary:granularity=channel:0,rounding={rounding}", scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", [32, 33, 40, 64, 100, 127, 128, 250, 256])
def test_groups_one_behind_the_other(cupy, run, dtype):
    x = make("special", 700 * run, dtype, seed=run).reshape(700, run)
    same(cupy, x, f"ternary:block={run}")
    scale = np.abs(make("extreme", 700, np.float32, seed=run))
    scale[::17] = 0
    same(cupy, x, f"ternary:block={run}", scale=scale)
    same(cupy, x[1:], f"ternary:block={run}", scale=scale[1:])
