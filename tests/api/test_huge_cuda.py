"""Arrays of more than 2^31 elements: indices, offsets and grids that need 64 bits."""

import numpy as np
import pytest
from inputs import assert_repeats, make, repeated, same_values

import kbitcupy as kb
from kbitcupy import affine

pytestmark = pytest.mark.gpu

COLUMNS = 4096
ROWS = (1 << 31) // COLUMNS + 3
PERIOD = 256  # rows that are repeated


@pytest.fixture
def rows(cupy, large_memory):
    """ROWS x COLUMNS of float16, a repetition of the rows of the second array, which is on the host."""
    large_memory(30)
    piece = make("normal", PERIOD * COLUMNS, np.dtype("float16")).reshape(PERIOD, COLUMNS)
    held = [repeated(cupy, piece, ROWS), piece]
    yield held
    held.clear()  # pytest keeps the list a little longer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {"granularity": ("channel", 1), "symmetric": False}),
        ("int4", {"granularity": ("group", 128)}),
        ("uint4", {"granularity": "tensor"}),
        ("int4", {"granularity": ("group", 128), "zero": "float"}),
    ],
)
def test_affine_formats(cupy, rows, name, options):
    x, piece = rows
    q, host = kb.quantize(x, name, **options), kb.quantize(piece, name, **options)
    assert_repeats(q.planes["codes"].reshape(ROWS, -1), host.planes["codes"].reshape(PERIOD, -1))
    del x
    assert_repeats(q.dequantize(), host.dequantize())


@pytest.mark.parametrize("granularity", ["token", ("channel", 1), ("group", 32), "tensor"])
def test_affine_functions(cupy, rows, granularity):
    x, piece = rows
    blocks = {"token": ROWS, ("channel", 1): COLUMNS, ("group", 32): (ROWS, COLUMNS // 32), "tensor": 1}[granularity]
    host_blocks = {("group", 32): (PERIOD, COLUMNS // 32), "token": PERIOD}.get(granularity, blocks)
    options = {"qmin": -8, "qmax": 7, "granularity": granularity}
    scale, host_scale = cupy.full(blocks, 0.25, np.float32), np.full(host_blocks, 0.25, np.float32)
    assert_repeats(affine.fake_quantize(x, scale, **options), affine.fake_quantize(piece, host_scale, **options))
    assert_repeats(
        affine.fake_quantize_backward(x, x, scale, **options),
        affine.fake_quantize_backward(piece, piece, host_scale, **options),
    )


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "iq4_xs", "tq2_0", "mxfp4", "nvfp4"])
def test_block_formats(cupy, rows, name):
    x, piece = rows
    q, host = kb.quantize(x, name), kb.quantize(piece, name)
    for plane, wanted in host.planes.items():
        assert_repeats(q.planes[plane].reshape(ROWS, -1), wanted.reshape(PERIOD, -1))
    blocks = kb.gguf.to_blocks(q)
    assert_repeats(blocks, kb.gguf.to_blocks(host))
    again = kb.gguf.from_blocks(blocks, name, q.shape, dtype="float16")
    del x, q, blocks
    assert_repeats(again.dequantize(), host.dequantize())


@pytest.mark.parametrize("rule", ["absmax", "absmean"])
@pytest.mark.parametrize("granularity", ["tensor", ("channel", 0), ("group", 128)])
def test_ternary(cupy, rows, granularity, rule):
    x, piece = rows
    # The mean of all is that of the rows that are repeated only where a scale belongs to a row.
    brought = {"scale": np.float32([0.5])} if granularity == "tensor" and rule == "absmean" else {}
    q = kb.quantize(x, "ternary", granularity=granularity, rule=rule, **brought)
    host = kb.quantize(piece, "ternary", granularity=granularity, rule=rule, **brought)
    assert_repeats(q.planes["codes"].reshape(ROWS, -1), host.planes["codes"].reshape(PERIOD, -1))
    del x
    assert_repeats(q.dequantize(), host.dequantize())


def test_ternary_products(cupy, large_memory):
    """Trits of 2^31 elements and more, with a scale for each row and for each group: the last rows."""
    large_memory(12)
    rng = np.random.default_rng(0)
    valid = np.array([byte for byte in range(256) if all(byte >> 2 * f & 3 != 3 for f in range(4))], np.uint8)
    piece = rng.choice(valid, (PERIOD, COLUMNS // 4))
    codes = repeated(cupy, piece, ROWS)
    x = make("normal", 3 * COLUMNS, np.dtype("float16"), 3).reshape(3, COLUMNS)
    for granularity, each in ((("channel", 0), 1), (("group", 512), COLUMNS // 512)):
        scale = rng.random((PERIOD, each)).astype(np.float32)
        scales = repeated(cupy, scale, ROWS)
        format = kb.get_format("ternary", granularity=granularity)
        q = kb.QuantizedArray(
            format, {"codes": codes.reshape(-1), "scale": scales.reshape(-1)}, (ROWS, COLUMNS), "float16"
        )
        host = kb.QuantizedArray(
            format, {"codes": piece.reshape(-1), "scale": scale.reshape(-1)}, (PERIOD, COLUMNS), "float16"
        )
        found = kb.bitnet.linear(cupy.asarray(x), q)
        assert_repeats(cupy.ascontiguousarray(found.T), np.ascontiguousarray(kb.bitnet.linear(x, host).T))


@pytest.mark.parametrize(("name", "options"), [("kbit3", {}), ("nf4", {}), ("int8", {"granularity": "token"})])
def test_rows_and_products(cupy, rows, name, options):
    """The last rows, and the product with all of them."""
    x, piece = rows
    q, host = kb.quantize(x, name, **options), kb.quantize(piece, name, **options)
    del x
    last = np.arange(ROWS - 3, ROWS)
    assert same_values(kb.take(q, cupy.asarray(last)).get(), host.dequantize()[last % PERIOD])
    a = cupy.asarray(make("normal", COLUMNS, np.dtype("float16")).reshape(1, -1))
    y, few = kb.linear(a, q)[0].get(), kb.linear(a, host.to_device("cuda:0"))[0].get()
    limit = np.abs(few).max() * 2.0**-9
    for found, expected in ((y[:PERIOD], few), (y[last], few[last % PERIOD])):
        assert np.abs(found.astype(np.float64) - expected).max() <= limit
