"""GGUF's types with searched scales on a GPU: NumPy's bytes, of experts, any dtype, and arrays that begin anywhere.

Millions of numbers are compared by their hashes in test_gguf_hashes.py.
"""

import numpy as np
import pytest
from gguf_numbers import IMPORTANCES, importance
from make_gguf_data import numbers

import kbitcupy as kb

pytestmark = pytest.mark.gpu
TAKE = [name for name in kb.list_formats() if getattr(kb.get_format(name), "weigher", None) is not None]


def to_blocks(q):
    return q.format.to_blocks(q.planes).get()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", TAKE)
def test_experts_of_every_dtype(cupy, name, dtype):
    """Importance of each matrix, an array that begins anywhere, and what ggml leaves open."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 of NumPy")
    of_numpy = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = numbers("student", 10 * 9 * 512 + 3, seed=6).astype(of_numpy)
    x[::77], x[5::99] = np.nan, np.inf
    v = np.stack([importance(kind, 512, seed=2) for kind in IMPORTANCES])
    plain, beside = x[3:].reshape(10, 9, 512), cupy.asarray(x)[3:].reshape(10, 9, 512)
    host, device = kb.quantize(plain, name, importance=v), kb.quantize(beside, name, importance=v)
    assert np.array_equal(host.format.to_blocks(host.planes), to_blocks(device))
    if device.format.quantizer is not None:
        host, device = kb.quantize(plain, name), kb.quantize(beside, name)
        assert np.array_equal(host.format.to_blocks(host.planes), to_blocks(device))


@pytest.mark.parametrize("name", TAKE)
def test_importance_that_makes_no_sense(cupy, name):
    """On a device it is not looked at: blocks of some sort come out, and the device goes on."""
    v = cupy.asarray(np.resize(np.float32([np.nan, -1, np.inf, -np.inf, 1e38, 1e-40, 0, 1]), 512))
    x = cupy.asarray(numbers("student", 64 * 512).reshape(64, 512))
    assert to_blocks(kb.quantize(x, name, importance=v)).any()


@pytest.mark.parametrize("name", TAKE)
def test_nothing(cupy, name):
    q = kb.quantize(cupy.zeros((0, 512), np.float16), name, importance=np.ones(512))
    assert q.shape == (0, 512) and q.nbytes == 0


@pytest.mark.parametrize("name", TAKE)
def test_the_device_is_not_waited_for(cupy, name):
    """A capture refuses whatever waits, or reads a value back."""
    x, v = cupy.asarray(numbers("normal", 4096)).reshape(8, 512), cupy.ones(512, np.float32)
    q = kb.quantize(x, name, importance=v)
    wanted = to_blocks(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        kb.quantize(x, name, importance=v, out=q)  # memory of this stream
        for plane in q.planes.values():
            plane.fill(0)
        stream.begin_capture()
        kb.quantize(x, name, importance=v, out=q)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert np.array_equal(to_blocks(q), wanted)
