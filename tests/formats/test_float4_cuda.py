"""nf4, fp4, table4 and dynamic8: CUDA against NumPy, bit for bit. `TestSmall` is what compute-sanitizer runs."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from inputs import BFLOAT16, DTYPES, KINDS, make, same_values

import kbitcupy as kb
from kbitcupy import tables

pytestmark = pytest.mark.gpu

PERMUTED = np.random.default_rng(3).permutation(np.linspace(-1, 1, 16)).astype(np.float32)
CLOSE = np.sort(np.concatenate((np.linspace(-1, 1, 12), [1e-4, 2e-4, 3e-4, 0]))).astype(np.float32)
NAMED = [
    ("nf4", {}),
    ("fp4", {}),
    ("table4", {}),
    ("table4", {"codebook": PERMUTED}),
    ("table4", {"codebook": CLOSE}),
    ("table4", {"codebook": np.linspace(-3, 5, 16)}),
    ("nf4", {"double_quant": True}),
    ("table4", {"codebook": PERMUTED, "double_quant": True}),
    ("dynamic8", {}),
]


def check(cupy, x, name, **options):
    """Planes and every output dtype, between the two libraries."""
    host = kb.quantize(x, name, **options)
    device = kb.quantize(cupy.asarray(x), name, **options)
    for plane, wanted in host.planes.items():
        found = device.planes[plane].get()
        if found.dtype == np.float32:
            assert same_values(found, wanted), plane
        else:
            assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes(), plane
    for dtype in DTYPES:
        assert same_values(kb.dequantize(device, dtype=dtype).get(), kb.dequantize(host, dtype=dtype))


class TestSmall:
    """Every instantiation once, at sizes around a block and a tile."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("name", "options"), NAMED)
    def test_every_kernel(self, cupy, name, options, dtype):
        for block in (16, 64, 4096):
            for size in (0, 1, 33, 1500, 9001):
                check(cupy, make("special", size, dtype), name, **{**options, "block": block})

    @pytest.mark.parametrize("offset", range(1, 16))
    def test_unaligned_arrays(self, cupy, offset):
        """Input, planes and output may start at any element."""

        def shifted(array):
            room = cupy.zeros(array.size + offset + 64, array.dtype)
            view = room[offset : offset + array.size]
            view[...] = cupy.asarray(array)
            return view

        for dtype in DTYPES:
            x = make("normal", 3000, dtype)
            for name, options in (("nf4", {}), ("nf4", {"double_quant": True}), ("dynamic8", {})):
                host = kb.quantize(x, name, **options)
                planes = {plane: shifted(np.zeros_like(values)) for plane, values in host.planes.items()}
                out = kb.QuantizedArray(host.format, planes, host.shape, dtype)
                kb.quantize(shifted(x), name, out=out, **options)
                for plane, values in host.planes.items():  # and nothing before or behind it was touched
                    room = planes[plane].base
                    assert planes[plane].get().tobytes() == values.tobytes(), plane
                    assert not room[:offset].any() and not room[offset + values.size :].any(), plane
                y = shifted(np.zeros(x.size, dtype))
                kb.dequantize(out, out=y)
                assert same_values(y.get(), host.dequantize()) and not y.base[offset + y.size :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "options"), NAMED)
def test_kinds_sizes_and_blocks(cupy, name, options, kind, dtype):
    for block in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        for size in (1, 15, 16, 17, block - 1, block, block + 1, 5 * 4096 + 1):
            check(cupy, make(kind, size, dtype), name, **{**options, "block": block})
    check(cupy, make(kind, 300_001, dtype), name, **options)


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
@pytest.mark.parametrize("name", ["nf4", "fp4", "dynamic8"])
def test_every_16_bit_number_under_several_scales(cupy, name, dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for largest in (1.0, 0.37, 3e-5, 41.0, 60000.0):
            limited = np.where(np.abs(every.astype(np.float32)) <= largest, every, dtype.type(0))
            x = np.zeros((1 << 16, 16), dtype)
            x[:, 0], x[:, 5] = dtype.type(largest), limited
            check(cupy, x, name, block=16)
        check(cupy, every, name, block=64)


@pytest.mark.parametrize("name", ["nf4", "fp4", "dynamic8", "table4"])
def test_around_every_threshold(cupy, name):
    values = {"nf4": tables.NF4, "fp4": np.sort(tables.FP4), "dynamic8": tables.dynamic_map(), "table4": PERMUTED}[name]
    middles = tables.midpoints(np.unique(values))
    if name == "fp4":
        middles = np.concatenate((middles, tables.FP4_THRESHOLDS, -tables.FP4_THRESHOLDS))
    options = {"codebook": PERMUTED} if name == "table4" else {}
    bits = middles.view(np.int32)
    for a in (1.0, 0.7, 1.3e-5, 2.9e30):
        near = np.concatenate([(bits + step).view(np.float32) for step in range(-8, 9)])
        x = np.zeros((near.size, 16), np.float32)
        x[:, 0], x[:, 3] = a, near * np.float32(a)
        check(cupy, x, name, block=16, **options)


@given(data=st.data())
def test_any_floats(cupy, data):
    width = data.draw(st.sampled_from([16, 32]))
    raw = data.draw(st.lists(st.integers(0, (1 << width) - 1), min_size=1, max_size=200))
    dtype = np.dtype("float32") if width == 32 else data.draw(st.sampled_from([np.dtype("float16"), BFLOAT16]))
    x = np.array(raw, np.uint32 if width == 32 else np.uint16).view(dtype)
    name, options = data.draw(st.sampled_from(NAMED))
    check(cupy, x, name, block=data.draw(st.sampled_from([16, 64, 128])), **options)


def test_layouts_of_the_input(cupy):
    x = make("normal", 64 * 96, np.dtype("float32")).reshape(64, 96)
    for view in (x.T, x[::2], x[:, ::3], x.astype(np.float64)):
        for name in ("nf4", "dynamic8"):
            host = kb.quantize(view, name)
            device = kb.quantize(cupy.asarray(x, view.dtype) if view.shape == x.shape else cupy.asarray(view), name)
            assert same_values(device.dequantize().get(), host.dequantize())
    device = kb.quantize(cupy.asarray(x).T, "nf4")
    assert same_values(device.dequantize().get(), kb.quantize(x.T, "nf4").dequantize())


@pytest.mark.parametrize("options", [{}, {"double_quant": True}])
def test_graph_capture(cupy, options):
    x = cupy.asarray(make("normal", 100_000, np.dtype("float16")))
    q = kb.quantize(x, "nf4", **options)
    y = kb.dequantize(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kb.quantize(x, "nf4", out=q, **options)
        kb.dequantize(q, out=y)
        graph = stream.end_capture()
    for seed in (1, 2):
        fresh = make("normal", 100_000, np.dtype("float16"), seed)
        x.set(fresh)
        cupy.cuda.Device().synchronize()
        taken = [cupy.full(100_000, np.nan, np.float32) for _ in range(4)]  # what would overwrite borrowed memory
        graph.launch(stream)
        stream.synchronize()
        assert same_values(y.get(), kb.quantize(fresh, "nf4", **options).dequantize())
        assert all(bool(cupy.isnan(t).all()) for t in taken)


@pytest.mark.parametrize("name", ["nf4", "dynamic8"])
def test_more_than_two_to_the_31_elements(cupy, large_memory, name):
    large_memory(11)
    n = (1 << 31) + 64 * 3 + 1
    pattern = make("normal", 1 << 20, np.dtype("float16"))
    x = cupy.resize(cupy.asarray(pattern), n)
    q = kb.quantize(x, name)
    y = kb.dequantize(q)
    for part in (slice(0, 1 << 20), slice(2047 << 20, n)):
        host = kb.quantize(x[part].get(), name)
        assert same_values(y[part].get(), host.dequantize())
