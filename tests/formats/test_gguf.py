"""GGUF's types: bytes of ggml and gguf-py, frozen in data/gguf_blocks.npz, and of gguf-py itself where it is there."""

import json
from pathlib import Path

import numpy as np
import pytest
from inputs import DTYPES, make
from make_gguf_data import KINDS, TYPES, numbers

import kbitcupy as kb
from kbitcupy.formats.blocks import BlockFormat, Field
from kbitcupy.formats.chunks import CHUNK

FROZEN = dict(np.load(Path(__file__).parent.parent / "data" / "gguf_blocks.npz"))
FORMATS = {name: kb.get_format(name) for name in TYPES}
SIZES = {"q8_0": (32, 34), "q4_0": (32, 18), "q4_k": (256, 144), "tq2_0": (256, 66)}


def same_bits(a, b):
    """Equal float32 to the bit, any NaN equal to any NaN."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_as_large_as_ggufs(name):
    format = FORMATS[name]
    assert (format.block, format.block_bytes) == SIZES[name]
    q = kb.quantize(np.zeros((3, 512), np.float32), name)
    assert q.nbytes == 3 * 512 // format.block * format.block_bytes
    assert q.bits_per_element == format.block_bytes * 8 / format.block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_ggmls_bytes(name, kind):
    row = list(FROZEN["kinds"]).index(kind)
    q = kb.quantize(FROZEN["x"][row], name)
    assert np.array_equal(q.format.to_blocks(q.planes), FROZEN[name][row])


def array_of(name, blocks):
    """ggml's blocks as an array, a row each."""
    format = FORMATS[name]
    return kb.QuantizedArray(format, format.from_blocks(blocks), (len(blocks), format.block), "float32")


@pytest.mark.parametrize("name", TYPES)
def test_ggmls_values(name):
    q = array_of(name, FROZEN[f"{name}.bytes"])
    assert same_bits(q.dequantize(), FROZEN[f"{name}.values"])
    assert np.array_equal(q.format.to_blocks(q.planes), FROZEN[f"{name}.bytes"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_gguf_py(name, kind):
    """Other numbers than the frozen ones; q4_k it decodes only."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is an oracle, and not installed")
    number = gguf.GGMLQuantizationType[TYPES[name]]
    x = numbers(kind, 1 << 15, seed=1)
    x[x == 0] = 0  # of a block of zeros that begins with -0 gguf-py's q4_0 has another sign than ggml
    q = kb.quantize(x, name)
    blocks = q.format.to_blocks(q.planes)
    with np.errstate(all="ignore"):
        if name != "q4_k":
            assert np.array_equal(gguf.quants.quantize(x, number), blocks.reshape(-1))
        assert same_bits(q.dequantize(), gguf.quants.dequantize(blocks.reshape(-1), number))
        random = np.random.default_rng(len(kind)).integers(0, 256, (500, q.format.block_bytes), dtype=np.uint8)
        values = gguf.quants.dequantize(random.reshape(-1), number)
    assert same_bits(array_of(name, random).dequantize().reshape(-1), values)


# ---- the layout, one element at a time -------------------------------------------------------------------------------


def half(block, at):
    return float(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0])


def element(name, block, i):
    """Element i of a block, in exact arithmetic, from the text of the format."""
    if name == "q8_0":
        return half(block, 0) * int(np.int8(block[2 + i : 3 + i].view(np.int8)[0]))
    if name == "q4_0":
        return half(block, 0) * ((int(block[2 + i % 16]) >> (4 if i >= 16 else 0) & 15) - 8)
    if name == "tq2_0":
        return half(block, 64) * ((int(block[i // 128 * 32 + i % 32]) >> i % 128 // 32 * 2 & 3) - 1)
    j, s = i // 32, [int(b) for b in block[4:16]]
    sc = s[j] & 63 if j < 4 else s[j + 4] & 15 | s[j - 4] >> 6 << 4
    mn = s[j + 4] & 63 if j < 4 else s[j + 4] >> 4 | s[j] >> 6 << 4
    q = int(block[16 + i // 64 * 32 + i % 32]) >> (4 if j % 2 else 0) & 15
    return half(block, 0) * sc * q - half(block, 2) * mn


@pytest.mark.parametrize("name", TYPES)
def test_layout(name):
    blocks = FROZEN[f"{name}.bytes"]
    for block, decoded in zip(blocks, array_of(name, blocks).dequantize(), strict=True):
        wanted = [element(name, block, i) for i in range(len(decoded))]
        assert np.array_equal(decoded, np.float32(wanted), equal_nan=True)


# ---- what ggml leaves open -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_nan_is_zero_and_infinities_are_the_largest_half(name, dtype):
    x = make("normal", 2048, dtype)
    plain = x.copy()
    x[::7], plain[::7] = np.nan, 0
    if dtype != np.float16:
        x[:256:5], plain[:256:5] = 1e30, 65504
    x[1024:1300:3], plain[1024:1300:3] = np.inf, 65504
    x[1025:1300:3], plain[1025:1300:3] = -np.inf, -65504
    found = kb.quantize(x, name)
    wanted = kb.quantize(plain.astype(np.float32).clip(-65504, 65504), name)  # bfloat16 rounds 65504 up
    for plane, values in wanted.planes.items():
        assert np.array_equal(found.planes[plane], values), plane
    assert np.isfinite(found.dequantize(dtype="float32")).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_every_dtype_goes_through_float32(name, dtype):
    x = make("wide", 1024, dtype)
    a, b = kb.quantize(x, name), kb.quantize(x.astype(np.float32), name)
    assert all(np.array_equal(a.planes[plane], b.planes[plane]) for plane in a.planes)
    with np.errstate(over="ignore"):
        assert np.array_equal(a.dequantize(), b.dequantize().astype(dtype))


@pytest.mark.parametrize("name", TYPES)
def test_chunks_do_not_show(name):
    x = make("wide", CHUNK + 4 * 256, np.dtype("float32"))
    whole = kb.quantize(x, name)
    parts = [kb.quantize(part, name) for part in (x[:CHUNK], x[CHUNK:])]
    for plane, values in whole.planes.items():
        assert np.array_equal(values, np.concatenate([part.planes[plane] for part in parts]))
    assert np.array_equal(whole.dequantize(), np.concatenate([part.dequantize() for part in parts]))


@pytest.mark.parametrize("shape", [(), (31,), (33,), (2, 16), (512, 1), (256, 8)])
@pytest.mark.parametrize("name", TYPES)
def test_rows_are_whole_blocks(name, shape):
    with pytest.raises(kb.KbitError, match=r"the last axis of .* is whole blocks of (32|256) elements: pad it"):
        kb.quantize(np.zeros(shape, np.float32), name)


@pytest.mark.parametrize("name", TYPES)
def test_a_reshape_keeps_rows_whole(name):
    q = kb.quantize(make("normal", 4096, np.dtype("float32")).reshape(4, 1024), name)
    assert np.array_equal(q.reshape(16, 256).dequantize(), q.dequantize().reshape(16, 256))
    with pytest.raises(kb.KbitError, match="whole blocks"):
        q.reshape(1024, 4)


@pytest.mark.parametrize("name", TYPES)
def test_a_config_is_the_name(name):
    assert json.loads(json.dumps(FORMATS[name].config())) == {"name": name}


# ---- a block format of somebody else ---------------------------------------------------------------------------------


class Sixteenths(BlockFormat):
    """Four numbers as sixteenths, one byte each, behind a byte that says nothing: NumPy alone, and no quantizer."""

    name, bits, block, origin, summary = "sixteenths", 8, 4, "this test", "bytes"
    fields = (Field("mark", "uint8", 1), Field("codes", "uint8", 4))

    def dequantize_blocks(self, blocks):
        return blocks[:, 1:].astype(np.float32) / 16


def test_a_format_that_is_only_read():
    format = Sixteenths()
    blocks = np.arange(15, dtype=np.uint8).reshape(3, 5)
    q = kb.QuantizedArray(format, format.from_blocks(blocks), (3, 4), "float16")
    assert q.planes["mark"].tolist() == [0, 5, 10] and q.planes["codes"].tolist()[:4] == [1, 2, 3, 4]
    assert q.dequantize().tolist()[0] == [1 / 16, 2 / 16, 3 / 16, 4 / 16]
    assert not format.can_encode and kb.get_format("q8_0").can_encode
    with pytest.raises(kb.KbitError, match="sixteenths can be decoded but not made: quantize to another format"):
        kb.quantize(np.zeros(4, np.float32), format)
