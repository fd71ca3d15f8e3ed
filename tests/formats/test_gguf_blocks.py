"""`kb.gguf`: raw blocks of GGUF, what they become and what is refused."""

import mmap

import numpy as np
import pytest
from inputs import make

import kbitcupy as kb
from kbitcupy.formats.base import format_factory

NAMES = [name for name in kb.list_formats() if getattr(format_factory(name), "family", "") == "gguf"]
MADE = [name for name in NAMES if kb.get_format(name).can_encode]
# Block and bytes of every type, from ggml's structs, and its number there.
SIZES = {
    "q4_0": (32, 18, 2), "q4_1": (32, 20, 3), "q5_0": (32, 22, 6), "q5_1": (32, 24, 7), "q8_0": (32, 34, 8),
    "q8_1": (32, 36, 9), "q2_k": (256, 84, 10), "q3_k": (256, 110, 11), "q4_k": (256, 144, 12),
    "q5_k": (256, 176, 13), "q6_k": (256, 210, 14), "q8_k": (256, 292, 15), "iq2_xxs": (256, 66, 16),
    "iq2_xs": (256, 74, 17), "iq3_xxs": (256, 98, 18), "iq1_s": (256, 50, 19), "iq4_nl": (32, 18, 20),
    "iq3_s": (256, 110, 21), "iq2_s": (256, 82, 22), "iq4_xs": (256, 136, 23), "iq1_m": (256, 56, 29),
    "tq1_0": (256, 54, 34), "tq2_0": (256, 66, 35), "mxfp4": (32, 17, 39), "nvfp4": (64, 36, 40),
}  # fmt: skip


def random_blocks(name, *shape, seed=0):
    """Random bytes of blocks, [..., bytes], and the shape of the numbers."""
    columns = 3 * kb.gguf.block_size(name)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, 3 * kb.gguf.type_size(name)), dtype=np.uint8)
    return raw, (*shape, columns)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    assert (kb.gguf.block_size(name), kb.gguf.type_size(name), kb.gguf.type_id(name)) == SIZES[name]
    assert kb.gguf.type_size(name.upper()) == kb.gguf.type_size(kb.get_format(name)) == SIZES[name][1]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0,), (3, 0, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name, shape):
    raw, lengths = random_blocks(name, *shape)
    q = kb.gguf.from_blocks(raw, name, lengths)
    assert q.shape == lengths and q.dtype == np.float32 and str(q.format) == name
    assert same(kb.gguf.to_blocks(q), raw)
    if raw.size:
        assert not any(np.shares_memory(plane, raw) for plane in q.planes.values())
    values = kb.gguf.dequantize(raw, name)
    assert same(values, q.dequantize()) and same(values, kb.gguf.dequantize(raw, name, shape=lengths))


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("name", NAMES)
def test_any_byte_of_a_longer_buffer(name, offset):
    raw, lengths = random_blocks(name, 5)
    memory = np.concatenate([np.full(offset, 0xEE, np.uint8), raw.reshape(-1), np.full(9, 0xEE, np.uint8)])
    memory.flags.writeable = False
    for buffer in (memory, memory.tobytes(), bytearray(memory), memoryview(memory.tobytes()), memory.reshape(1, -1)):
        q = kb.gguf.from_blocks(buffer, name, list(lengths), offset=offset, dtype="float16")
        assert q.dtype == np.float16 and same(kb.gguf.to_blocks(q), raw)
    values = kb.gguf.dequantize(memory, name, shape=lengths, offset=np.int64(offset))
    assert same(values, kb.gguf.dequantize(raw, name))
    assert same(kb.gguf.dequantize(memory[: memory.size - 9], name, offset=offset), values.reshape(-1))


def test_a_mapped_file(tmp_path):
    raw, lengths = random_blocks("q4_k", 4)
    (tmp_path / "blocks").write_bytes(b"abc" + raw.tobytes())
    with (tmp_path / "blocks").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    q = kb.gguf.from_blocks(mapped, "q4_k", lengths, offset=3)
    mapped.close()  # nothing refers to it
    assert same(kb.gguf.to_blocks(q), raw)


@pytest.mark.parametrize("name", NAMES)
def test_other_orders_in_memory(name):
    raw, lengths = random_blocks(name, 4, 6)
    values = kb.gguf.dequantize(raw, name)
    assert same(kb.gguf.dequantize(raw[::2, ::-1], name), np.ascontiguousarray(values[::2, ::-1]))
    assert same(kb.gguf.dequantize(np.asfortranarray(raw), name), values)
    wide = np.concatenate([raw, raw], axis=-1)[..., : raw.shape[-1]]
    assert same(kb.gguf.to_blocks(kb.gguf.from_blocks(wide, name, lengths)), raw)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_out(name, dtype):
    raw, lengths = random_blocks(name, 3, seed=1)
    with np.errstate(over="ignore"):
        expected = kb.gguf.dequantize(raw, name).astype(kb.dequantize(kb.quantize(np.zeros(32, dtype), "kbit4")).dtype)
    assert same(kb.gguf.dequantize(raw, name, dtype=dtype), expected)
    out = np.empty(lengths, expected.dtype)
    assert kb.gguf.dequantize(raw, name, out=out) is out and same(out, expected)
    assert kb.gguf.dequantize(raw.tobytes(), name, out=out) is out and same(out, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", MADE)
def test_quantize(name, dtype):
    x = make("normal", 3072, np.dtype(dtype) if dtype != "bfloat16" else None or _bfloat16()).reshape(2, 2, 768)
    blocks = kb.gguf.quantize(x, name)
    assert same(blocks, kb.gguf.to_blocks(kb.quantize(x, name)))
    assert blocks.shape == (2, 2, 768 // SIZES[name][0] * SIZES[name][1]) and blocks.dtype == np.uint8
    assert np.abs(kb.gguf.dequantize(blocks, name) - x.astype(np.float32)).max() < 4
    assert kb.gguf.quantize(x[:, :0], name).shape == (2, 0, blocks.shape[-1])


def _bfloat16():
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def test_stacks_are_arrays():
    experts = [kb.quantize(make("normal", 1024, np.dtype("float32")).reshape(2, 512), "q4_k") for _ in range(3)]
    blocks = kb.gguf.to_blocks(kb.stack(experts))
    assert blocks.shape == (3, 2, 288)
    assert same(blocks[1], kb.gguf.to_blocks(experts[1]))
    assert same(kb.gguf.to_blocks(kb.stack(experts)[1:]), blocks[1:])


def test_known_answers():
    half = np.array([1.0], np.float16).tobytes()
    assert (kb.gguf.dequantize(half + b"\xff" * 16, "q4_0") == np.full(32, 7, np.float32)).all()
    quarter = np.array([0.25], np.float16).tobytes() + bytes(range(1, 33))
    assert (kb.gguf.dequantize(quarter, "q8_0") == np.arange(1, 33, dtype=np.float32) / 4).all()


# ---- what is refused -------------------------------------------------------------------------------------------------

RAW = np.zeros((2, 36), np.uint8)
REFUSED = [
    (lambda: kb.gguf.block_size("q4_9"), ValueError, r"format is 'q4_9'"),
    (lambda: kb.gguf.type_size("kbit4"), ValueError, r"format is kbit4; formats of GGUF are .*q4_k"),
    (lambda: kb.gguf.type_id(4), ValueError, r"format is int; formats of GGUF are"),
    (lambda: kb.gguf.to_blocks(RAW), TypeError, r"q is ndarray; it must be a QuantizedArray"),
    (lambda: kb.gguf.to_blocks(kb.quantize(np.zeros(32, "f4"), "nf4")), ValueError, "format is nf4; formats of GGUF"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (2, 60)), ValueError, r"shape is \(2, 60\); the last axis of q4_0"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", ()), ValueError, r"shape is \(\); the last axis of q4_0"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (-1, 32)), ValueError, r"shape is \(-1, 32\); .* not negative"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (2.5, 32)), ValueError, r"shape is \(2.5, 32\); .* integers"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", 32), ValueError, r"shape is 32; it must be a sequence"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (5, 32)), ValueError, r"raw holds 72 bytes; an array of shape"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (4, 32), offset=1), ValueError, r"4 blocks of 18 bytes, which end"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (1 << 60, 1 << 60)), ValueError, r"raw holds 72 bytes"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (2, 32), offset=-1), ValueError, r"offset is -1; it must not"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (2, 32), offset=1.0), TypeError, r"offset is 1.0; it must be an integer"),
    (lambda: kb.gguf.from_blocks(RAW, "q4_0", (2, 32), dtype="int8"), TypeError, r"dtype is int8; allowed are float16"),
    (lambda: kb.gguf.from_blocks(RAW.view(np.int8), "q4_0", (2, 32)), TypeError, r"raw is int8; blocks are bytes"),
    (lambda: kb.gguf.from_blocks(RAW, "nvfp4:tensor_scale=true", (2, 64)), ValueError, r"do not hold the plane scale"),
    (lambda: kb.gguf.from_blocks("text", "q4_0", (2, 32)), TypeError, r"raw is str; it must be a uint8"),
    (lambda: kb.gguf.from_blocks([1, 2], "q4_0", (2, 32)), TypeError, r"raw is list; it must be a uint8"),
    (lambda: kb.gguf.from_blocks(memoryview(bytes(80))[::2], "q4_0", (2, 32)), TypeError, r"is memoryview; .* contig"),
    (lambda: kb.gguf.dequantize(RAW, "q4_k"), ValueError, r"raw has shape \(2, 36\); without a shape its last axis is"),
    (lambda: kb.gguf.dequantize(RAW, "q4_0", offset=18), ValueError, r"offset is 18 and raw has shape \(2, 36\); with"),
    (lambda: kb.gguf.dequantize(bytes(18), "q4_0", offset=36), ValueError, r"raw has shape \(18,\) and offset is 36"),
    (lambda: kb.gguf.dequantize(RAW, "q4_0", out=np.empty((2, 32), "f4")[:, ::2]), ValueError, r"."),
    (lambda: kb.gguf.dequantize(RAW, "q4_0", shape=(2, 64), out=np.empty((2, 32), "f4")), ValueError, r"out has shape"),
    (lambda: kb.gguf.dequantize(RAW, "q4_0", dtype="float16", out=np.empty((2, 64), "f4")), TypeError, r"out is"),
    (lambda: kb.gguf.dequantize(RAW, "q4_0", out=[1.0]), TypeError, r"out is list"),
    (lambda: kb.gguf.quantize(np.zeros(33, "f4"), "q4_0"), ValueError, r"whole blocks of 32"),
    (lambda: kb.gguf.quantize(np.zeros(32, "i4"), "q4_0"), TypeError, r"x is int32"),
    (lambda: kb.gguf.quantize(np.zeros(32, "f4"), "nf4"), ValueError, r"formats of GGUF are"),
    (lambda: kb.gguf.quantize(np.zeros(32, "f4"), "q8_0", importance=np.ones(32)), ValueError, r"importance"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_array_of_blocks_of_a_gpu_goes_where_it_is():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0x1000, 36, None, 0), 0)
    raw = cupy.ndarray((36,), np.uint8, memory)
    with pytest.raises(ValueError, match="raw holds 36 bytes"):
        kb.gguf.from_blocks(raw, "q4_0", (3, 32))
    with pytest.raises(kb.KbitError, match="out is on cpu; the result is on cuda:0"):
        kb.gguf.dequantize(raw, "q4_0", out=np.empty(64, np.float32))
