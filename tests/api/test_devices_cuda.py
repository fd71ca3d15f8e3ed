"""Arrays on a device that is not the current one."""

import numpy as np
import pytest
from inputs import make, same_values

import kbitcupy as kb

pytestmark = pytest.mark.gpu


@pytest.fixture
def second(cupy):
    """The second device; the first stays the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device")
    return cupy.cuda.Device(1)


def sample(shape, seed=0):
    return make("normal", int(np.prod(shape)), np.dtype("float16"), seed).reshape(shape)


def put(cupy, device, *arrays):
    with device:
        return [cupy.asarray(a) for a in arrays]


def assert_on(device, *arrays):
    assert all(a.device.id == device.id for a in arrays)


@pytest.mark.parametrize("name", [name for name in kb.list_formats() if kb.get_format(name).can_encode])
def test_every_format(cupy, second, name):
    x = sample((24, 512))
    (there,) = put(cupy, second, x)
    q, host = kb.quantize(there, name), kb.quantize(x, name)
    assert q.device == "cuda:1" and cupy.cuda.Device().id == 0
    assert all(np.array_equal(q.planes[p].get(), host.planes[p]) for p in host.planes)
    kb.quantize(there, name, out=q)
    y, rows = q.dequantize(), kb.take(q, [3, 0, 3])
    assert_on(second, y, rows)
    assert same_values(y.get(), host.dequantize()) and same_values(rows.get(), host.dequantize()[[3, 0, 3]])
    assert kb.metrics.sqnr_db(there, y) == pytest.approx(kb.metrics.sqnr_db(x, host.dequantize()), abs=1e-6)
    assert same_values(q.to_device("cuda:0").dequantize().get(), host.dequantize())
    if q.format.rows_are_blocks(q.shape):
        picked = [q[3:9], q[[3, 0]], kb.stack([q, q])[1]]
        wanted = [host[3:9], host[[3, 0]], host]
        assert all(a.device == "cuda:1" for a in picked)
        assert all(same_values(a.dequantize().get(), b.dequantize()) for a, b in zip(picked, wanted, strict=True))


def test_raw_blocks(cupy, second):
    raw = np.random.default_rng(0).integers(0, 256, 1 + 6 * 288, dtype=np.uint8)
    (there,) = put(cupy, second, raw)
    q = kb.gguf.from_blocks(there, "q4_k", (6, 512), offset=1)
    assert q.device == "cuda:1" and cupy.cuda.Device().id == 0
    blocks = kb.gguf.to_blocks(q)
    assert_on(second, blocks, kb.gguf.dequantize(blocks, "q4_k"), kb.gguf.quantize(q.dequantize(), "q4_k"))
    assert np.array_equal(blocks.get().reshape(-1), raw[1:])


@pytest.mark.parametrize("name", ["kbit4", "kbit3", "nf4", "kbit8", "int8"])
@pytest.mark.parametrize("tokens", [1, 16, 40, 200])
def test_products(cupy, second, name, tokens):
    x, w = sample((tokens, 512)), sample((96, 512), seed=1)
    here = kb.linear(cupy.asarray(x), kb.quantize(cupy.asarray(w), name))
    there_x, there_w = put(cupy, second, x, w)
    y = kb.linear(there_x, kb.quantize(there_w, name))
    assert_on(second, y)
    assert same_values(y.get(), here.get())


def test_experts(cupy, second):
    x, w, ids = sample((10, 256)), sample((4, 40, 256), seed=1), np.arange(20).reshape(10, 2) % 4
    here = kb.linear_grouped(cupy.asarray(x), kb.quantize(cupy.asarray(w), "kbit4"), cupy.asarray(ids))
    there_x, there_w, there_ids = put(cupy, second, x, w, ids)
    y = kb.linear_grouped(there_x, kb.quantize(there_w, "kbit4"), there_ids)
    assert_on(second, y)
    assert same_values(y.get(), here.get())


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_integer_products(cupy, second, tokens):
    x, w = sample((tokens, 512)), sample((96, 512), seed=1)
    here = kb.affine.linear_w8a8(cupy.asarray(x), kb.quantize(cupy.asarray(w), "int8", granularity=("channel", 0)))
    there_x, there_w = put(cupy, second, x, w)
    y = kb.affine.linear_w8a8(there_x, kb.quantize(there_w, "int8", granularity=("channel", 0)))
    assert_on(second, y)
    assert same_values(y.get(), here.get())


def test_affine_functions(cupy, second):
    x, scale = sample((24, 512)), np.full(24, 0.02, np.float32)
    there_x, there_scale = put(cupy, second, x, scale)
    options = {"qmin": -8, "qmax": 7, "granularity": "token"}
    y = kb.affine.fake_quantize(there_x, there_scale, **options)
    dx = kb.affine.fake_quantize_backward(there_x, there_x, there_scale, **options)
    assert_on(second, y, dx)
    assert same_values(y.get(), kb.affine.fake_quantize(x, scale, **options))
    assert same_values(dx.get(), kb.affine.fake_quantize_backward(x, x, scale, **options))


def test_smoothquant(cupy, second):
    x, w = sample((40, 512)), sample((96, 512), seed=1)
    there_x, there_w = put(cupy, second, x, w)

    def product(x, w):
        calibration = kb.affine.Calibration().update(x)
        s = kb.affine.smooth_scales(calibration.absmax, w)
        q = kb.quantize(kb.affine.smooth_weight(w, s), "int8", granularity=("channel", 0))
        return kb.affine.linear_smoothquant(x, q, s)

    y = product(there_x, there_w)
    assert_on(second, y)
    assert same_values(y.get(), product(cupy.asarray(x), cupy.asarray(w)).get())


def test_fitted_tables(cupy, second):
    x = sample(5000)
    (there,) = put(cupy, second, x)
    assert np.array_equal(kb.fit_table(there, 4), kb.fit_table(cupy.asarray(x), 4))


def test_flat_functions(cupy, second):
    x = sample(5000)
    (there,) = put(cupy, second, x)
    planes, host = kb.quantize_kbit(there, k=4), kb.quantize_kbit(x, k=4)
    assert_on(second, *planes)
    assert all(np.array_equal(a.get(), b) for a, b in zip(planes, host, strict=True))
    y = kb.dequantize_kbit(*planes, k=4, n=5000)
    assert_on(second, y)
    assert same_values(y.get(), kb.dequantize_kbit(*host, k=4, n=5000))
