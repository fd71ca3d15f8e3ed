"""GGUF's types on a GPU: ggml's frozen bytes, and NumPy's on other numbers, subnormal ones among them."""

from pathlib import Path

import numpy as np
import pytest
from inputs import DTYPES
from make_gguf_data import KINDS, READ, TYPES, UNDEFINED, numbers

import kbitcupy as kb

pytestmark = pytest.mark.gpu
FROZEN = dict(np.load(Path(__file__).parent.parent / "data" / "gguf_blocks.npz"))


#: The types of kernels/gguf.cu.
SIMPLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q8_k", "mxfp4", "nvfp4", "tq1_0", "tq2_0")


def to_blocks(q):
    return q.format.to_blocks(q.planes).get()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_ggmls_bytes(cupy, name, kind):
    row = list(FROZEN["kinds"]).index(kind)
    found = to_blocks(kb.quantize(cupy.asarray(FROZEN["x"][row]), name))
    assert np.array_equal(found, FROZEN[name][row]) != ((name, kind) in UNDEFINED)
    x = numbers(kind, 1 << 17, seed=4)
    host = kb.quantize(x, name)
    assert np.array_equal(to_blocks(kb.quantize(cupy.asarray(x), name)), host.format.to_blocks(host.planes))


def of_all_kinds(dtype, size):
    """Numbers of every kind, and at the end those that ggml leaves undefined, `size` of each."""
    rows = [numbers(kind, size, seed=11) for kind in KINDS]
    rows += [rows[0] * np.float32(2.0**-122), np.where(rows[-1] > 0, np.float32(0), np.float32(-0.0))]
    wrong = numbers("large", size, seed=12) * np.float32(4)
    wrong[::45], wrong[1::90], wrong[2::110], wrong[3::13] = np.nan, np.inf, -np.inf, -0.0
    with np.errstate(over="ignore"):
        return np.stack([*rows, np.abs(rows[0]) * (rows[1] > 0), wrong]).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIMPLE)
def test_numpys_bytes(cupy, name, dtype):
    """Of many blocks, of few, and at an address that no vector of 16 bytes has."""
    x = of_all_kinds(dtype, 1 << 14)
    room = cupy.empty(x.size + 1, x.dtype)
    for part in (x, x[:, :256], x[:, :1280]):
        expected = kb.quantize(part, name)
        odd = room[1 : part.size + 1].reshape(part.shape)
        odd[...] = cupy.asarray(part)
        for there in (cupy.asarray(part), odd):
            found = kb.quantize(there, name)
            for plane, bytes in expected.planes.items():
                assert np.array_equal(found.planes[plane].view(np.uint8).get(), bytes.view(np.uint8)), plane


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_scale(cupy, dtype):
    x = of_all_kinds(dtype, 1024)
    for scale in (3.7e-5, 0.25):
        expected, found = kb.quantize(x, "nvfp4", scale=scale), kb.quantize(cupy.asarray(x), "nvfp4", scale=scale)
        assert np.array_equal(to_blocks(found), expected.format.to_blocks(expected.planes))


def test_a_tensor_scale_of_any_device(cupy):
    x, out = numbers("student", 1024, seed=13), None
    expected = kb.quantize(x, "nvfp4", scale=0.3)
    for scale in (np.float32(0.3), cupy.asarray([0.3], np.float32), cupy.asarray(np.float32(0.3), np.float64)):
        out = kb.quantize(cupy.asarray(x), "nvfp4", scale=scale, out=out)
        back = kb.quantize(x, "nvfp4", scale=scale)
        for name, plane in expected.planes.items():
            assert np.array_equal(out.planes[name].get(), plane) and np.array_equal(back.planes[name], plane)


@pytest.mark.parametrize("name", [name for name in (*TYPES, *READ) if name != "q8_1"])
def test_ggmls_values(cupy, name):
    blocks, values = FROZEN[f"{name}.bytes"], FROZEN[f"{name}.values"]
    format = kb.get_format(name)
    q = kb.QuantizedArray(format, format.from_blocks(cupy.asarray(blocks)), values.shape, "float32")
    found = q.dequantize().get()
    assert ((found == values) | (np.isnan(found) & np.isnan(values))).all()
    assert np.array_equal(to_blocks(q), blocks)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", TYPES)
def test_products(cupy, name, dtype, tokens):
    """Against float64 of the decoded weights, by whatever route is chosen."""
    rng = np.random.default_rng(tokens)
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in ((tokens, 512), (96, 512)))
    q = kb.quantize(cupy.asarray(w), name)
    exact = x.astype(np.float64) @ q.dequantize(dtype="float32").get().astype(np.float64).T
    found = kb.linear(cupy.asarray(x), q).get().astype(np.float64)
    assert np.abs(found - exact).max() < {"float16": 2.0**-9, "float32": 2.0**-18}[dtype] * np.abs(exact).max() * 2
