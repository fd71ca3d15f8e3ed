"""GGUF's types on a GPU: ggml's frozen bytes, and NumPy's on other numbers, subnormal ones among them."""

from pathlib import Path

import numpy as np
import pytest
from make_gguf_data import KINDS, TYPES, numbers

import kbitcupy as kb

pytestmark = pytest.mark.gpu
FROZEN = dict(np.load(Path(__file__).parent.parent / "data" / "gguf_blocks.npz"))


def to_blocks(q):
    return q.format.to_blocks(q.planes).get()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_ggmls_bytes(cupy, name, kind):
    row = list(FROZEN["kinds"]).index(kind)
    assert np.array_equal(to_blocks(kb.quantize(cupy.asarray(FROZEN["x"][row]), name)), FROZEN[name][row])
    x = numbers(kind, 1 << 17, seed=4)
    host = kb.quantize(x, name)
    assert np.array_equal(to_blocks(kb.quantize(cupy.asarray(x), name)), host.format.to_blocks(host.planes))


@pytest.mark.parametrize("name", TYPES)
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
