"""The quantizers of GGUF's kernels, in a grid of host threads that flush as the GPU does, write NumPy's bytes."""

import ctypes
import os

import numpy as np
import pytest
from host import compiled as host
from inputs import DTYPES
from make_gguf_data import KINDS, numbers

import kbitcupy as kb
from kbitcupy.backend.compile import kernel_folder, source

#: The types of kernels/gguf.cu; `test_gguf_search_host` has those of kernels/gguf_search.cu.
NAMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q8_k", "mxfp4", "nvfp4", "tq1_0", "tq2_0")

#: Element types of the stand-in for common/types.cuh.
CXX_TYPES = {"float16": "Half", "bfloat16": "Brain", "float32": "float"}
ENTRY = """
extern "C" void {name}_{dtype}(unsigned grid, const {type}* x, long long blocks, unsigned char* a, unsigned char* b,
                               unsigned char* c) {{
    launch(grid, 1, THREADS, [&] {{ {kernel}<{type}, {struct}>(x, blocks, a, b, c, nullptr, nullptr); }});
}}
"""


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def library(name, folders=(), names=NAMES):
    """The quantizers of types, for every dtype; with other headers those for float32."""
    quantizers = {one: kb.get_format(one).quantizer for one in names}
    entries = [
        ENTRY.format(name=n, dtype=dtype, type=type, kernel=q.name, struct=q.struct)
        for n, q in quantizers.items()
        for dtype, type in CXX_TYPES.items()
        if not folders or dtype == "float32"
    ]
    return host.build('#include "grid.h"\n' + source(quantizers[name].templates[0]) + "".join(entries), folders)


def quantized(built, name, x, offset=0, scale=None):
    """The planes that the kernel writes, each `offset` bytes behind an aligned address, as bytes by name."""
    format = kb.get_format(name)
    sizes = {plane: np.dtype(spec.dtype).itemsize * spec.shape[0] for plane, spec in format.planes(x.shape).items()}
    rooms = {plane: np.zeros(size + 64, np.uint8) for plane, size in sizes.items()}
    starts = {plane: -room.ctypes.data % 16 + offset for plane, room in rooms.items()}
    addresses = [ctypes.c_void_p(room.ctypes.data + starts[plane]) for plane, room in rooms.items()]
    addresses += [scale and ctypes.byref(ctypes.c_float(scale))]
    addresses += [None] * (3 - len(addresses))
    blocks = x.size // format.block
    grid = -(-blocks // format.quantizer.blocks)
    getattr(built, f"{name}_{x.dtype.name}")(
        grid, ctypes.c_void_p(x.ctypes.data), ctypes.c_longlong(blocks), *addresses
    )
    for plane, room in rooms.items():
        assert not room[: starts[plane]].any() and not room[starts[plane] + sizes[plane] :].any(), "beside a plane"
    return {plane: room[starts[plane] : starts[plane] + sizes[plane]].tobytes() for plane, room in rooms.items()}


def zeros(size):
    """Few numbers, none of them negative, and zeros of both signs."""
    x = np.abs(numbers("sparse", size, seed=8))
    return np.where(x == 0, np.copysign(x, numbers("normal", size, seed=9)), x)


def lowest(size):
    """About the least normal number."""
    return numbers("wide", size, seed=10) * np.float32(2.0**-122)


MORE = {"zeros": zeros, "lowest": lowest}


def bytes_of(q):
    return {name: plane.tobytes() for name, plane in q.planes.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes(name, dtype):
    """Of every kind: more than two thread blocks take, and no whole number of theirs."""
    rows = [numbers(kind, 9 * 256, seed=2) for kind in KINDS] + [make(9 * 256) for make in MORE.values()]
    kinds, x = [*KINDS, *MORE], np.stack(rows).astype(dtype)
    expected, found = bytes_of(kb.quantize(x, name)), quantized(library(name), name, x)
    for row, kind in enumerate(kinds):
        for plane, bytes in expected.items():
            size = len(bytes) // len(kinds)
            part = slice(row * size, (row + 1) * size)
            assert found[plane][part] == bytes[part], f"{plane} of {kind} numbers"


@pytest.mark.parametrize("offset", [2, 4, 6, 14])
@pytest.mark.parametrize("name", NAMES)
def test_planes_and_arrays_begin_anywhere(name, offset):
    x = np.concatenate((np.zeros(offset, np.float32), numbers("wide", 2048, seed=3)))[offset:]
    assert quantized(library(name), name, x, offset) == bytes_of(kb.quantize(x, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_ggml_leaves_open(name, dtype):
    x = numbers("large", 2048, seed=4) * np.float32(4)
    x[::5], x[1::9], x[2::11], x[3::13] = np.nan, np.inf, -np.inf, -0.0
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    assert quantized(library(name), name, x) == bytes_of(kb.quantize(x, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [3.7e-5, 0.25, 3e38])
def test_a_tensor_scale(scale, dtype):
    x = numbers("student", 2048, seed=6).astype(dtype)
    x[::7], x[1::9] = np.nan, np.inf
    expected = kb.quantize(x, "nvfp4", scale=scale)
    assert quantized(library("nvfp4"), "nvfp4", x, scale=scale).items() <= bytes_of(expected).items()


@pytest.mark.parametrize("blocks", [1, 3, 33, 129])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_blocks(name, blocks):
    x = numbers("normal", blocks * kb.get_format(name).block, seed=7)
    assert quantized(library(name), name, x) == bytes_of(kb.quantize(x, name))


# Numbers about the middles between two codes, and powers of two; the first of a block gives its scale.
NEAR = [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 15.5]


@pytest.mark.parametrize("exponent", [-149, -137, -130, -127, -126, -125, -100, -20, -3, -2, -1, 0, 1, 2, 3, 11])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_numbers_between_codes(name, exponent):
    rows = []
    for largest in (8, 9, 11, 11.999, 13, 15, 15.9999, np.nextafter(np.float32(16), np.float32(0))):
        for steps in range(-3, 4):
            near = np.float32(NEAR).view(np.int32) + steps
            rows.append(np.minimum(near.view(np.float32), np.float32(largest)) * np.float32([1, -1] * 8))
            rows[-1][0] = largest
    x = np.ldexp(np.concatenate(rows), exponent).astype(np.float32)
    assert x.size % 64 == 0
    assert quantized(library(name), name, x) == bytes_of(kb.quantize(x, name))


def test_the_last_floats_below_a_power_of_two():
    """Whose logarithm is rounded to that of the power."""
    powers = np.exp2(np.arange(-126, 16, dtype=np.float64)).astype(np.float32)
    x = (powers.view(np.int32)[:, None] - np.arange(64, dtype=np.int32)).view(np.float32)
    blocks = np.zeros((x.size, 32), np.float32)
    blocks[:, 5] = x.reshape(-1)
    assert quantized(library("mxfp4"), "mxfp4", blocks) == bytes_of(kb.quantize(blocks, "mxfp4"))


FAULTS = [  # a header, a text in it, what it becomes, a type, and the kind of numbers that shows it
    ("formats/gguf_encoders.cuh", "MIDDLE + 0.5f", "MIDDLE + 0.25f", "q5_0", "normal"),
    ("formats/gguf_encoders.cuh", "high == low && __float_as_uint", "false && __float_as_uint", "q4_0", "ties"),
    ("formats/gguf_encoders.cuh", "factor.overflows ? 0.0f", "false ? 0.0f", "q4_0", "subnormal"),
    ("formats/gguf_encoders.cuh", "if (ieee::is_zero(found))", "if (false)", "q4_1", "zeros"),
    ("formats/gguf_encoders.cuh", "| 0x3f000000u", "| 0x3effffffu", "q8_0", "ties"),
    ("formats/gguf_encoders.cuh", "i / 8 * 2)", "i / 8)", "tq2_0", "normal"),
    ("formats/gguf_encoders.cuh", "byte[7] * 3;", "byte[7];", "tq1_0", "normal"),
    ("formats/gguf_encoders.cuh", "(HALF - 1)", "HALF", "mxfp4", "ties"),
    ("formats/gguf_encoders.cuh", "code >= 0x78 ?", "code >= 0x7e ?", "nvfp4", "wide"),
    ("common/ieee.cuh", "set_float_mode(IEEE_MODE);", "", "mxfp4", "lowest"),
]


@pytest.mark.parametrize(("file", "right", "wrong", "name", "kind"), FAULTS)
def test_a_planted_fault_is_found(file, right, wrong, name, kind, tmp_path):
    text = (kernel_folder() / file).read_text()
    assert right in text
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text.replace(right, wrong))
    x = MORE[kind](1 << 14) if kind in MORE else numbers(kind, 1 << 14, seed=5)
    assert quantized(library(name, (tmp_path,), (name,)), name, x) != bytes_of(kb.quantize(x, name))
