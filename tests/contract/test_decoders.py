"""The storey-1 decoder of every registered format, compiled for the host, gives what NumPy gives, to the bit.

A format that is registered with a decoder is in these tests by itself. `tests/host` has the compiler and its shim.
"""

import ctypes
import math
import os

import numpy as np
import pytest
from host import compiled as host

import kbitcupy as kb
from kbitcupy.backend.compile import kernel_folder
from kbitcupy.backend.structs import declarations
from kbitcupy.formats.codebook import scales, search
from kbitcupy.formats.codebook.numpy import pack_words

FORMATS = host.all_formats()
SHAPES = [(1,), (7,), (8,), (45,), (1000,), (3, 33), (5, 96), (2, 3, 40), (3, 256), (4, 256), (2, 2, 512), (3, 4099)]


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def check(format, planes, shape, members=1, decode=None):
    decode = decode or host.compiled(format)
    expected = np.empty((members, *shape), np.float32)
    for member in range(members):
        own = {
            name: plane if name == format.decoder.values else plane.reshape(members, -1)[member]
            for name, plane in planes.items()
        }
        expected[member] = host.decoded_by_numpy(format, own, shape)
    found = decode(planes, shape, members)
    wrong = host.different(expected, found)
    assert not wrong, f"{wrong} of {found.size} numbers of {format} differ for shape {shape}"


@pytest.mark.parametrize("text", FORMATS)
def test_random_planes(text):
    format, rng = kb.get_format(text), np.random.default_rng(0)
    for blocks in (4000,) if text in kb.list_formats() else (500,) * 3:
        shape = host.many_blocks(format, blocks)
        check(format, host.random_planes(rng, format, shape), shape)


@pytest.mark.parametrize("text", FORMATS)
def test_ends(text):
    """Short arrays, whose planes end where memory ends; and stacks."""
    format, rng, walled = kb.get_format(text), np.random.default_rng(1), host.Walled()
    shapes = [shape for shape in SHAPES if host.fits(format, shape)]
    assert shapes
    for shape in shapes:
        planes = host.random_planes(rng, format, shape)
        check(format, {name: walled(plane) for name, plane in planes.items()}, shape)
        members = [host.random_planes(rng, format, shape) for _ in range(3)]
        stack = {name: np.concatenate([member[name] for member in members]) for name in members[0]}
        if format.decoder.values in stack:  # one table for all
            stack[format.decoder.values] = members[0][format.decoder.values]
        check(format, {name: walled(plane) for name, plane in stack.items()}, shape, 3)


@pytest.mark.parametrize("text", [text for text in FORMATS if kb.get_format(text).can_encode])
def test_what_is_quantized(text):
    format, rng = kb.get_format(text), np.random.default_rng(2)
    chosen = {"codebook": np.linspace(-1, 1, 1 << int(format.bits)) ** 3} if "codebook=custom" in text else {}
    options = {**{k: v for k, v in format.options().items() if k not in chosen}, **chosen}
    for shape in [shape for shape in SHAPES if host.fits(format, shape)][-3:]:
        x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-8, 8, (*shape[:-1], 1))).astype(np.float32)
        q = kb.quantize(x, format.name, **options)
        check(q.format, q.planes, shape)


@pytest.mark.parametrize(
    "text", [*(f"kbit{k}" for k in range(1, 9)), "kbit4:absmax=float16", "kbit8:absmax=e4m4", "kbit3:absmax=float16"]
)
def test_every_code_under_every_scale(text):
    format = kb.get_format(text)
    k, size = format.bits, np.dtype(format.planes((32,))["absmax"].dtype).itemsize
    codes = np.arange(max(32, 1 << k), dtype=np.uint8).reshape(-1, 32) & ((1 << k) - 1)
    every = np.arange(1 << 8 * size, dtype=np.uint16)[:: 17 if size == 2 and k == 8 else 1]
    packed = np.empty(len(codes) * k, np.uint32)
    pack_words(codes, k, packed)
    planes = {
        "packed": np.tile(packed, every.size),
        "absmax": np.repeat(every.astype(np.uint8) if size == 1 else every.view(np.float16), len(codes)),
    }
    for scale in (1, 2.0**-126, 2.0**100):
        planes["scale"] = np.array([scale], np.float32)
        check(format, planes, (every.size * codes.size,))


@pytest.mark.parametrize("double_quant", [False, True])
def test_every_byte_of_a_table(double_quant):
    format = kb.get_format("nf4", block=512, double_quant=double_quant)
    packed = np.arange(256, dtype=np.uint8)
    planes = {"packed": np.tile(packed, 256), "absmax": np.arange(256, dtype=np.uint8)}
    if double_quant:
        planes |= {"nested_absmax": np.array([0.7], np.float32), "nested_offset": np.array([0.3], np.float32)}
    else:
        planes["absmax"] = np.exp2(planes["absmax"] - np.float32(140)).astype(np.float32)
    check(format, planes, (512 * 256,))


# Where products are rounded to the bits that a subnormal number has, one just below 2^-126 becomes 2^-126, as in NumPy;
# where they are rounded to 24 bits first, it becomes zero, as on the GPU.
@pytest.mark.parametrize("text", ["nf4", "table4:codebook=custom", "dynamic8", "kbit4:absmax=float32"])
def test_products_around_the_smallest_normal_number(text):
    format, rng = kb.get_format(text), np.random.default_rng(3)
    shape = (4096 * format.block,)
    planes = host.random_planes(rng, format, shape)
    values = np.exp2(rng.uniform(-1, 0, 16)) if "custom" in text else np.abs(format.decoder.table[:16])
    if "custom" in text:
        planes["table"][:] = values
    chosen = rng.choice(values[values > 0], 4096)
    planes["absmax"][:] = 2.0**-126 / chosen.astype(np.float32).astype(np.float64) * (1 - 2.0**-25)
    if "scale" in planes:
        planes["scale"][:] = 1
    assert (np.abs(host.decoded_by_numpy(format, planes, shape)) == 2.0**-126).any()
    check(format, planes, shape)


# ---- scales ----------------------------------------------------------------------------------------------------------

CODECS = """
#include "formats/scales.cuh"
extern "C" void decode_e4m4s(const unsigned char* codes, long long n, int bias, float* out) {
    for (long long i = 0; i < n; ++i) out[i] = decode_e4m4(codes[i], bias);
}
extern "C" void encode_e4m4s(const float* x, long long n, int bias, unsigned char* out) {
    const FloatMode before = float_mode();
    set_float_mode(FLUSHING_MODE);
    for (long long i = 0; i < n; ++i) out[i] = encode_e4m4(x[i], bias);
    set_float_mode(before);
}
extern "C" void halves(const __half* x, long long n, float* out) {
    for (long long i = 0; i < n; ++i) out[i] = Absmax<FLOAT16>::decode(x[i]);
}
extern "C" void to_halves(const float* x, long long n, __half* out) {
    for (long long i = 0; i < n; ++i) out[i] = Absmax<FLOAT16>::encode(x[i]);
}
extern "C" void tensor_scales(const float* x, long long n, int format, float* out) {
    for (long long i = 0; i < n; ++i) out[i] = format ? tensor_scale_of<FLOAT16>(x[i]) : tensor_scale_of<E4M4>(x[i]);
}
"""


def call(name, x, out, *numbers):
    """Have a function of CODECS fill `out` from `x`."""
    function = getattr(host.build(CODECS), name)
    function.restype = None
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, out))
    first, last = pointers
    function(first, ctypes.c_longlong(x.size), *map(ctypes.c_int, numbers), last)
    return out


def edges():
    """Every sign, exponent and four bits of the fraction, with what decides how the rest is rounded."""
    leading = np.arange(1 << 13, dtype=np.uint32) << 19
    rest = np.array([0, 1, 0x3FFFF, 0x40000, 0x40001, 0x7FFFF], np.uint32)
    return (leading[:, None] | rest).reshape(-1).view(np.float32)


@pytest.mark.parametrize("bias", [scales.E4M4_BIAS, 7, *scales.E4M4_BIAS_RANGE])
def test_e4m4(bias):
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(call("decode_e4m4s", codes, np.empty(256, np.float32), bias), scales.decode_e4m4(codes, bias))
    random = np.random.default_rng(4).integers(0, 1 << 32, 1 << 20, np.uint64).astype(np.uint32).view(np.float32)
    for x in (edges(), random, scales.decode_e4m4(codes, bias)):
        x = np.where(np.abs(x) < 2.0**-126, 0, x)  # the GPU takes subnormal numbers for zero
        assert np.array_equal(call("encode_e4m4s", x, np.empty(x.size, np.uint8), bias), scales.encode_e4m4(x, bias))


def test_float16_scales():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert host.different(call("halves", every, np.empty(every.size, np.float32)), every.astype(np.float32)) == 0
    lower = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    x = ((np.arange(1 << 19, dtype=np.uint32) << 13)[:, None] | lower).reshape(-1).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    found = call("to_halves", x, np.empty(x.size, np.float16))
    assert ((found.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(found) & np.isnan(expected))).all()


@pytest.mark.parametrize("absmax", ["e4m4", "float16"])
def test_tensor_scales(absmax):
    from kbitcupy.formats.codebook.scales import tensor_scale

    x = edges()
    x = x[(x >= 2.0**-126) & (x < np.inf)]
    found = call("tensor_scales", x, np.empty(x.size, np.float32), int(absmax == "float16"))
    assert np.array_equal(found, [tensor_scale(number, absmax) for number in x])


DYNAMIC_MAP = """
{ahead}
#include "formats/dynamic_map.cuh"
extern "C" void encode_all(const unsigned* entry, const float* x, long long n, unsigned char* out) {{
    const FloatMode before = float_mode();
    set_float_mode(FLUSHING_MODE);
    for (long long i = 0; i < n; ++i) out[i] = encode_dynamic(x[i], entry);
    set_float_mode(before);
}}
"""


def test_codes_of_the_dynamic_map():
    """All numbers around its thresholds, and random ones."""
    table = search.dynamic_table()
    bits = table.thresholds.view(np.int32)[:, None] + np.arange(-40, 41, dtype=np.int32)
    random = np.random.default_rng(6).uniform(-1, 1, 1 << 18).astype(np.float32)
    x = np.concatenate((bits.view(np.float32).reshape(-1), random, random**9, [0, -0.0, 1, -1, np.nan])).astype(
        np.float32
    )
    x = x[(np.abs(x) >= 2.0**-126) & (np.abs(x) <= 1) | (x == 0) | np.isnan(x)]
    entry = np.ascontiguousarray(search.search8()["entry"])
    out = np.empty(x.size, np.uint8)
    function = host.build(DYNAMIC_MAP.format(ahead=declarations((search.DYNAMIC_SEARCH, search.DYNAMIC)))).encode_all
    function(
        *(ctypes.c_void_p(a.ctypes.data) for a in (entry, x)),
        ctypes.c_longlong(x.size),
        ctypes.c_void_p(out.ctypes.data),
    )
    levels = np.searchsorted(table.thresholds, x, side="left")  # a number on a threshold stays below it
    assert np.array_equal(out, np.where(np.isnan(x), 0, table.codes[np.minimum(levels, 255)]))


# ---- planted faults --------------------------------------------------------------------------------------------------

#: For one decoder of each header a constant, a shift and a mask, and what each becomes.
FAULTS = {
    "kbit4": {"octet / 4": "octet / 8", "index >> 8 * e": "index >> 4 * e", "octet % 4": "octet % 2"},
    "nf4": {"planes.size + 1": "planes.size", "4 * (e ^ 1)": "4 * e", "& 15": "& 7"},
    "dynamic8": {"octet * 8": "octet * 4", "e % 4 * 8": "e % 4 * 4", "& 0xff": "& 0x7f"},
    "int4:block=32": {"(BITS - 1) :": "(BITS - 2) :", "e * BITS % 32": "e * BITS % 16", "<< BITS) - 1": "<< BITS) - 2"},
    "uint8:block=32,zero=float,scale_dtype=bfloat16": {
        "ieee::finite(scale)": "usable(scale)", "bits) << 16": "bits) << 15", "ieee::add(": "ieee::subtract(",
    },
    "int4:block=32,zero=int,scale_dtype=bfloat16,zero_dtype=int8": {
        "kinds & 4": "kinds & 8", "at<signed char>": "at<unsigned char>", "kinds & 3": "kinds & 1",
    },
    "int8:block=32,scale_dtype=float16": {"kind == 1": "kind == 2", "kind == 0": "kind <= 1"},
    "q4_0": {"octet & 1": "octet & 3", "j * 4": "j * 2", "0x0f0f0f0fu, 8": "0x0f0f0f0fu, 7"},
    "q5_1": {"(octet >> 2) * 4": "(octet >> 2) * 8", "0x10101010u": "0x10101000u", "0x02040810u": "0x02040410u"},
    "tq1_0": {"block * 48": "block * 52", "0x511b": "0x511a", ">> 8 & bytes": ">> 9 & bytes", "part % 4": "part % 2"},
    "nvfp4:tensor_scale=true": {"octet >> 1": "octet >> 2", "0x8c888684u": "0x8c888685u", "!= 0x7f": "!= 0xff"},
    "iq1_m": {"0x00877f77u": "0x00877f76u", "& 0xf00u": "& 0x700u"},
    "iq2_xxs": {"within * 7": "within * 6", "0x00204081u": "0x00204080u", "& 1u) << 7": "& 1u) << 6"},
    "iq3_s": {"(high & 2u) << 7": "(high & 2u) << 6", "0x0f0d0b09u": "0x0f0d0b08u", "at.part / 8": "at.part / 4"},
    "q4_k": {"block * 12": "block * 8", "0x3030u": "0x3010u", "0x3f3fu": "0x1f3fu"},
    "ternary": {"(octet >> 4) * 32": "(octet >> 4) * 16", "8388609.0f": "8388608.0f", "part / 4 * 2": "part / 4"},
    "ternary:block=40": {"scales[r * per_row + block]": "scales[r * per_row]", "advance(0, 1)": "advance(0, 2)"},
}  # fmt: skip
#: The same of what they include.
SHARED_FAULTS = [
    ("kbit4", "scales.cuh", "mantissa << 19", "mantissa << 18"),
    ("kbit4", "scales.cuh", "code & 15u", "code & 7u"),
    ("kbit4", "scales.cuh", "E4M4_BIAS = 11", "E4M4_BIAS = 12"),
    ("kbit5", "planes.cuh", "0x0000cccc0000cccc", "0x0000cccc0000ccce"),
    ("int8:granularity=token", "planes.cuh", "first + b < end", "first + b <= end"),
    ("q4_k", "gguf_fields.cuh", "0x7440u + i", "0x7440u"),
    ("q4_k", "gguf_fields.cuh", "from[1] << 8", "from[1] << 7"),
    ("iq2_xs", "planes.cuh", "F::entries()[i]", "F::entries()[i / 2 * 2]"),
]


def planted():
    for text, faults in FAULTS.items():
        file = kb.get_format(text).decoder.header.removeprefix("formats/")
        yield from ((text, file, right, wrong) for right, wrong in faults.items())
    yield from SHARED_FAULTS


@pytest.mark.parametrize(("text", "file", "right", "wrong"), [*planted()])
def test_a_planted_fault_is_found(text, file, right, wrong, tmp_path):
    format = kb.get_format(text)
    source = (kernel_folder() / "formats" / file).read_text()
    assert source.count(right) >= 1
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / file).write_text(source.replace(right, wrong))
    faulty = host.Compiled(format.decoder, (format.decoder.struct,), (tmp_path,))
    rng, walled = np.random.default_rng(5), host.Walled()
    with pytest.raises(AssertionError, match=r"numbers of .* differ|reads past a plane"):
        for shape in [shape for shape in SHAPES if host.fits(format, shape)]:
            planes = {name: walled(plane) for name, plane in host.random_planes(rng, format, shape).items()}
            check(format, planes, shape, decode=faulty)


def test_every_decoder_has_faults_to_be_found():
    ours = {kb.get_format(text).decoder.header for text in FORMATS if kb.get_format(text).decoder.folder is None}
    assert ours == {kb.get_format(text).decoder.header for text in FAULTS}


def test_a_decoder_says_what_is_true_of_its_planes():
    for text in FORMATS:
        format = kb.get_format(text)
        decoder, shape = format.decoder, next(shape for shape in SHAPES if host.fits(format, shape))
        assert format.decoder is decoder, "the same object every time"
        assert set(format.planes(shape)) <= {*decoder.planes, decoder.values}
        assert len(decoder.planes) <= 6 and len(decoder.numbers(shape)) <= 4
        assert any(struct == decoder.struct for struct in host.structs_of(decoder.header))
        assert math.prod(shape) > 0
