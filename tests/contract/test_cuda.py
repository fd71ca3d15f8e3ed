"""CUDA against NumPy on one GPU: every registered format and option set has the same planes and the same values.

Arrays of any size, dtype and kind of numbers, that begin at any element, on any stream.
"""

import numpy as np
import pytest
from cases import CASES, KINDS, SHAPES, numbers
from checks import same_planes
from inputs import same_values

import kbitcupy as kb

pytestmark = pytest.mark.gpu
DTYPES = ["float16", "bfloat16", "float32"]


def compare(found, wanted):
    """Planes, and what they decode to in every dtype."""
    assert same_planes(found, wanted)
    for dtype in DTYPES:
        assert same_values(found.dequantize(dtype=dtype).get(), wanted.dequantize(dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(cupy, case, kind, dtype):
    for shape in dict.fromkeys(case.shape(shape) for shape in SHAPES):
        x = numbers(kind, shape, dtype)
        compare(case.quantize(cupy.asarray(x)), case.quantize(x))


@pytest.mark.parametrize("kind", ["subnormal", "huge"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_is_rounded_as_on_the_host(cupy, case, kind):
    """Numbers that are subnormal in float32, or beyond its largest, there and back; CuPy's own cast flushes them."""
    with np.errstate(over="ignore"):
        x = numbers(kind, case.matrix(64), "float64") * (1 + 2.0**-26)
        wanted = case.quantize(x)
    found = case.quantize(cupy.asarray(x))
    assert same_planes(found, wanted)
    y = wanted.dequantize(dtype="float64")
    assert same_values(found.dequantize().get(), y)
    if found.format.rows_are_blocks(found.shape):
        assert same_values(kb.take(found, [1, 0], dtype="float64").get(), y[[1, 0]])


def shifted(cupy, array, offset):
    """A copy that begins so many elements behind an aligned address, and the room around it."""
    room = cupy.zeros(array.size + offset + 64, array.dtype)
    view = room[offset : offset + array.size]
    view[...] = cupy.asarray(array).reshape(-1)
    return view, room


@pytest.mark.parametrize("offset", range(1, 16))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_arrays_begin_anywhere(cupy, case, offset):
    """Input, planes and output; nothing before or behind them is touched."""
    for dtype in DTYPES:
        x = numbers("normal", case.shape("many"), dtype)
        wanted = case.quantize(x)
        places = {name: shifted(cupy, np.zeros_like(plane), offset) for name, plane in wanted.planes.items()}
        planes = {name: view.reshape(wanted.planes[name].shape) for name, (view, _) in places.items()}
        found = kb.QuantizedArray(wanted.format, planes, x.shape, x.dtype)
        case.quantize(shifted(cupy, x, offset)[0].reshape(x.shape), out=found)
        assert same_planes(found, wanted)
        y, room = shifted(cupy, np.zeros_like(x), offset)
        kb.dequantize(found, out=y.reshape(x.shape))
        assert same_values(y.get().reshape(x.shape), wanted.dequantize())
        for view, around in (*places.values(), (y, room)):
            assert not around[:offset].any() and not around[offset + view.size :].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_stream(cupy, case):
    x = numbers("normal", case.matrix(64))
    wanted, there = case.quantize(x), cupy.asarray(x)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(3):
            found = case.quantize(there)
            y = found.dequantize()
    stream.synchronize()
    assert same_planes(found, wanted) and same_values(y.get(), wanted.dequantize())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large(cupy, case):
    """More blocks than fit on the device at a time."""
    x = numbers("wide", case.matrix(1 << 12, 1 << 10))
    compare(case.quantize(cupy.asarray(x)), case.quantize(x))
