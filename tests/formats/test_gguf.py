"""GGUF's types: ggml's bytes and values, frozen in data/gguf_blocks.npz, and the layouts of their blocks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from inputs import DTYPES, make
from make_gguf_data import KINDS, READ, TYPES, UNDEFINED, numbers

import kbitcupy as kb
from kbitcupy.formats.blocks import BlockFormat, Field
from kbitcupy.formats.chunks import CHUNK
from kbitcupy.formats.gguf.arithmetic import round_away

FROZEN = dict(np.load(Path(__file__).parent.parent / "data" / "gguf_blocks.npz"))
FORMATS = {name: kb.get_format(name) for name in (*TYPES, *READ)}


def same_bits(a, b):
    """Equal float32 to the bit, any NaN equal to any NaN."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def test_every_type_has_frozen_bytes():
    found = [name for name in kb.list_formats() if kb.get_format(name).family == "gguf"]
    assert sorted(found) == sorted(FORMATS)
    assert len({format.ggml_type for format in FORMATS.values()}) == len(FORMATS)


def test_halves_go_away_from_zero():
    """Beside every half that an int8 has, and the float32 next to those and to whole numbers."""
    ends = np.arange(0, 127.5, 0.5, dtype=np.float32)
    y = np.concatenate([ends, np.nextafter(ends, np.float32(-1)), np.nextafter(ends, np.float32(200)), ends / 127])
    exact = y.astype(np.float64)
    wanted = np.copysign(np.floor(np.abs(exact) + 0.5), exact).astype(np.int8)
    assert np.array_equal(round_away(y), wanted) and np.array_equal(round_away(-y), -wanted)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_and_planes_hold_the_same_bytes(name):
    """Most types give the bytes of their fields apart, of which blocks and planes are made; some blocks."""
    format, x = FORMATS[name], make("wide", 2048, np.dtype("float32")).clip(-6e4, 6e4)
    planes = kb.quantize(x, name).planes
    with np.errstate(all="ignore"):  # overflow is a part of ggml's rules
        blocks = format.quantize_blocks(x.reshape(-1, format.block))
    assert np.array_equal(blocks, format.to_blocks(planes))


@pytest.mark.parametrize("name", TYPES)
def test_an_array_has_the_bytes_of_its_blocks(name):
    format = FORMATS[name]
    q = kb.quantize(np.zeros((3, 512), np.float32), name.upper())
    assert q.format == format and q.nbytes == 3 * 512 // format.block * format.block_bytes
    assert q.bits_per_element == format.block_bytes * 8 / format.block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_ggmls_bytes(name, kind):
    row = list(FROZEN["kinds"]).index(kind)
    q = kb.quantize(FROZEN["x"][row], name)
    assert np.array_equal(q.format.to_blocks(q.planes), FROZEN[name][row]) != ((name, kind) in UNDEFINED)


def array_of(name, blocks):
    """ggml's blocks as an array, a row each."""
    format = FORMATS[name]
    return kb.QuantizedArray(format, format.from_blocks(blocks), (len(blocks), format.block), "float32")


@pytest.mark.parametrize("name", FORMATS)
def test_ggmls_values(name):
    q = array_of(name, FROZEN[f"{name}.bytes"])
    assert np.array_equal(q.format.to_blocks(q.planes), FROZEN[f"{name}.bytes"])
    if name != "q8_1":  # ggml never decodes it
        assert same_bits(q.dequantize(), FROZEN[f"{name}.values"])


# ---- the layout, one element at a time -------------------------------------------------------------------------------


def half(block, at):
    return float(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0])


def signed(byte):
    return int(byte) - 256 * (int(byte) >> 7)


def split(codes, i):
    """Code i of 32: the low nibbles of 16 bytes, then the high ones."""
    return int(codes[i % 16]) >> i // 16 * 4 & 15


def nib64(codes, i):
    """Code i of 256: the low nibbles of 32 bytes, then the high ones, then the next 32."""
    return int(codes[i // 64 * 32 + i % 32]) >> i % 64 // 32 * 4 & 15


def two(codes, i):
    """Code i of 256, of 2 bits: the lowest of 32 bytes, and so on, then the next 32."""
    return int(codes[i // 128 * 32 + i % 32]) >> i % 128 // 32 * 2 & 3


def bit(packed, i):
    return int(packed[i % 32]) >> i // 32 & 1


def scale_and_minimum(s, j):
    """The 6-bit numbers of sub-block j of 8."""
    s = [int(b) for b in s]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def trit(block, i):
    """Number i of 256, five to a byte, but four to the last four bytes."""
    if i < 160:
        byte, n = block[i % 32], i // 32
    elif i < 240:
        byte, n = block[32 + (i - 160) % 16], (i - 160) // 16
    else:
        byte, n = block[48 + (i - 240) % 4], (i - 240) // 4
    return (int(byte) * 3**n % 256) * 3 // 256


def ue4m3(byte):
    e, m = byte >> 3 & 15, byte & 7
    return 0.0 if byte == 0x7F else math.ldexp(m, -9) if e == 0 else math.ldexp(8 + m, e - 10)


def q3_k_scale(s, j):
    low, high = int(s[j % 8]) >> (4 if j >= 8 else 0) & 15, int(s[8 + j % 4]) >> j // 4 * 2 & 3
    return (low | high << 4) - 32


def iq4_xs_scale(block, j):
    low, high = int(block[4 + j // 2]) >> j % 2 * 4 & 15, (int(block[2]) | int(block[3]) << 8) >> 2 * j & 3
    return (low | high << 4) - 32


def q2_k(b, i):
    s = int(b[i // 16])
    return half(b, 80) * (s & 15) * two(b[16:80], i) - half(b, 82) * (s >> 4)


def q4_k(b, i, q=None):
    sc, mn = scale_and_minimum(b[4:16], i // 32)
    return half(b, 0) * sc * (nib64(b[16:], i) if q is None else q) - half(b, 2) * mn


def q6_k(b, i):
    low = int(b[i // 128 * 64 + i % 64]) >> i % 128 // 64 * 4 & 15
    return half(b, 208) * signed(b[192 + i // 16]) * ((low | two(b[128:192], i) << 4) - 32)


T = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
F = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
#: Element i of a block, in exact arithmetic, from the text of the format. `test_gguf_grids` has those with grids.
LAYOUTS = {
    "q8_0": lambda b, i: half(b, 0) * signed(b[2 + i]),
    "q8_1": lambda b, i: half(b, 0) * signed(b[4 + i]),
    "q4_0": lambda b, i: half(b, 0) * (split(b[2:], i) - 8),
    "q4_1": lambda b, i: half(b, 0) * split(b[4:], i) + half(b, 2),
    "q5_0": lambda b, i: half(b, 0) * ((split(b[6:], i) | (int(b[2 + i // 8]) >> i % 8 & 1) << 4) - 16),
    "q5_1": lambda b, i: half(b, 0) * (split(b[8:], i) | (int(b[4 + i // 8]) >> i % 8 & 1) << 4) + half(b, 2),
    "q2_k": q2_k,
    "q3_k": lambda b, i: half(b, 108) * q3_k_scale(b[96:108], i // 16) * (two(b[32:96], i) + 4 * bit(b, i) - 4),
    "q4_k": q4_k,
    "q5_k": lambda b, i: q4_k(b, i, nib64(b[48:], i) + 16 * bit(b[16:48], i)),
    "q6_k": q6_k,
    "q8_k": lambda b, i: float(b[:4].view(np.float32)[0]) * signed(b[4 + i]),
    "iq4_nl": lambda b, i: half(b, 0) * T[split(b[2:], i)],
    "iq4_xs": lambda b, i: half(b, 0) * iq4_xs_scale(b, i // 32) * T[split(b[8 + i // 32 * 16 :], i % 32)],
    "mxfp4": lambda b, i: math.ldexp(F[split(b[1:], i)], int(b[0]) - 128),
    "nvfp4": lambda b, i: ue4m3(int(b[i // 16])) / 2 * F[int(b[4 + i // 16 * 8 + i % 8]) >> i % 16 // 8 * 4 & 15],
    "tq1_0": lambda b, i: half(b, 52) * (trit(b, i) - 1),
    "tq2_0": lambda b, i: half(b, 64) * (two(b, i) - 1),
}


@pytest.mark.parametrize("name", TYPES)
def test_layout(name):
    blocks = FROZEN[f"{name}.bytes"]
    for block, decoded in zip(blocks, array_of(name, blocks).dequantize(), strict=True):
        with np.errstate(over="ignore"):
            wanted = np.float32([LAYOUTS[name](block, i) for i in range(len(decoded))])
        assert np.array_equal(decoded, wanted, equal_nan=True)


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
    with pytest.raises(kb.KbitError, match=r"the last axis of .* is whole blocks of (32|64|256) elements: pad it"):
        kb.quantize(np.zeros(shape, np.float32), name)


@pytest.mark.parametrize("name", TYPES)
def test_a_reshape_keeps_rows_whole(name):
    q = kb.quantize(make("normal", 4096, np.dtype("float32")).reshape(4, 1024), name)
    assert np.array_equal(q.reshape(16, 256).dequantize(), q.dequantize().reshape(16, 256))
    with pytest.raises(kb.KbitError, match="whole blocks"):
        q.reshape(1024, 4)


@pytest.mark.parametrize("name", TYPES)
def test_a_config_is_the_name(name):
    options = {"tensor_scale": False} if name == "nvfp4" else {}
    assert json.loads(json.dumps(FORMATS[name].config())) == {"name": name, **options}


# ---- 4-bit floats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(-125, 17))
def test_the_last_floats_below_a_power_of_two_have_its_exponent(k):
    """Those whose logarithm, rounded to float32, is the power: it is computed here in more digits."""
    power = np.float32(2.0**k)
    near = (power.view(np.int32) + np.arange(-12, 3, dtype=np.int32)).view(np.float32)
    near = near[near <= 65504]
    x = np.zeros((len(near), 32), np.float32)
    x[:, 5] = near
    found = kb.quantize(x, "mxfp4").planes["scales"]
    # log2(1 - t) is -(t + t^2 / 2) / ln 2, which no k beside it hides.
    t = 1 - near.astype(np.float64) / 2.0**k
    below = (t + t * t / 2) / math.log(2)
    gap = k - float(np.nextafter(np.float32(k), np.float32(-np.inf)))
    exponent = np.where(below <= gap / 2, k, k - 1)
    assert np.array_equal(found, np.maximum(exponent + 125, 0))


def nearest_by_errors(x, scale):
    """The first of 16 codes with the least error, each computed."""
    errors = np.abs(scale[:, None, None] * np.float32(F) - x[..., None])
    return errors.argmin(axis=-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_codes_have_the_least_error(name, kind):
    x = numbers(kind, 1 << 12, seed=5)
    x[::64] = np.where(x[::64] < 0, -np.float32(65504), x[::64])  # one far beyond the others
    q = kb.quantize(x, name)
    if name == "mxfp4":
        scale, rows = np.ldexp(np.float32(1), q.planes["scales"].astype(int) - 128), x.reshape(-1, 32)
    else:
        scale, rows = np.float32([ue4m3(int(s)) / 2 for s in q.planes["scales"]]), x.reshape(-1, 16)
    codes = np.stack([q.planes["qs"] & 15, q.planes["qs"] >> 4], axis=1).reshape(rows.shape)  # neighbours in a byte
    assert np.array_equal(codes, nearest_by_errors(rows, scale))


def test_scales_of_8_bits():
    """Every half from 0 to 448 and the floats beside it."""
    halves = np.arange(0x5F01, dtype=np.uint16).view(np.float16).astype(np.float32)
    v = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(448))])
    x = np.zeros((-(-v.size // 4), 64), np.float32)
    largest = (v * np.float32(6)).clip(0, 65504)
    x.reshape(-1, 16)[: v.size, 3] = largest
    found = kb.quantize(x, "nvfp4").planes["scales"][: v.size]
    for number, byte in zip((largest / np.float32(6)).tolist(), found.tolist(), strict=True):
        e = math.frexp(number)[1] + 6 if number else 0
        if e >= 15:
            wanted = 0x7E
        elif e <= 0:
            wanted = min(7, int(np.float32(number) * np.float32(512) + np.float32(0.5)))
        else:
            wanted = min((e << 3) + int(math.ldexp(number, 11 - e) - 16 + 1) // 2, 0x7E)
            wanted = 0x7E if wanted >= 0x78 else wanted
        assert byte == wanted, number


def test_a_tensor_scale():
    x = make("normal", 1024, np.dtype("float32")).reshape(4, 256)
    plain = kb.quantize(x, "nvfp4")
    assert list(plain.planes) == ["scales", "qs"]
    scale = np.float32(3.7e-5)
    for given in (float(scale), scale, np.array([scale]), [float(scale)]):
        q = kb.quantize(x, "NVFP4", scale=given)
        assert q.format == kb.get_format("nvfp4", tensor_scale=True) and q.planes["scale"].tolist() == [scale]
        wanted = kb.quantize(x * (1 / scale), "nvfp4")
        assert all(np.array_equal(q.planes[name], wanted.planes[name]) for name in wanted.planes)
        assert same_bits(q.dequantize(), wanted.dequantize() * scale)
        assert np.array_equal(q.format.to_blocks(q.planes), wanted.format.to_blocks(wanted.planes))
    one = kb.quantize(x, "nvfp4:tensor_scale=true")
    assert one.planes["scale"].tolist() == [1] and same_bits(one.dequantize(), plain.dequantize())


def test_a_tensor_scale_brings_what_is_too_large_or_too_small_into_range():
    x = make("normal", 1024, np.dtype("float32"))
    for factor in (np.float32(1e30), np.float32(1e-30)):
        q = kb.quantize(x * factor, "nvfp4", scale=factor)
        assert kb.metrics.sqnr_db(x.astype(np.float64), q.dequantize().astype(np.float64) / factor) > 15


def test_each_member_of_a_stack_has_its_tensor_scale():
    x = make("normal", 2048, np.dtype("float32")).reshape(2, 4, 256)
    members = [kb.quantize(part, "nvfp4", scale=0.5**i) for i, part in enumerate(x)]
    stack = kb.stack(members)
    assert stack.planes["scale"].tolist() == [1, 0.5] and stack.members == 2
    assert same_bits(stack.dequantize(), np.stack([q.dequantize() for q in members]))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0.0, kb.KbitError, "scale is 0.0; it must be positive and finite in float32"),
        (-1.0, kb.KbitError, "scale is -1.0; it must be positive and finite"),
        (math.nan, kb.KbitError, "scale is nan; it must be positive and finite"),
        (1e39, kb.KbitError, "scale is 1e.39; it must be positive and finite in float32"),
        (1e-50, kb.KbitError, "scale is 1e-50; it must be positive and finite in float32"),
        (2e-39, kb.KbitError, "scale is 2e-39; .* as must be 1 / scale"),
        ([1.0, 2.0], kb.KbitError, r"scale has shape \(2,\); nvfp4 takes one number"),
        ("1", TypeError, "scale"),
        (True, TypeError, "scale is bool; it must be a number"),
        (1j, TypeError, "scale is complex128; it must be a number"),
    ],
)
def test_bad_tensor_scales(given, error, message):
    x, out = np.ones((2, 64), np.float32), kb.quantize(np.full((2, 64), 6, np.float32), "nvfp4", scale=1.0)
    with pytest.raises(error, match=message):
        kb.quantize(x, "nvfp4", scale=given, out=out)
    assert out.planes["scale"].tolist() == [1] and (out.dequantize() == 6).all()


def test_a_tensor_scale_where_there_is_none():
    x = np.ones((2, 64), np.float32)
    with pytest.raises(kb.KbitError, match="nvfp4 has no tensor scale: use nvfp4:tensor_scale=true"):
        kb.quantize(x, "nvfp4:tensor_scale=false", scale=1.0)
    with pytest.raises(kb.KbitError, match="tensor_scale is 1; allowed are True and False"):
        kb.get_format("nvfp4", tensor_scale=1)
    with pytest.raises(kb.KbitError, match="mxfp4 takes no scale"):
        kb.quantize(x, "mxfp4", scale=1.0)


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
