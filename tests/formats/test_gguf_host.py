"""The quantizers of GGUF's kernels, in a grid of host threads that flush as the GPU does, write NumPy's bytes."""

import ctypes
import os

import numpy as np
import pytest
from host import compiled as host
from make_gguf_data import KINDS, TYPES, numbers

import kbitcupy as kb
from kbitcupy.backend.compile import kernel_folder, source

ENTRY = """
extern "C" void {name}(unsigned grid, const float* x, long long blocks, unsigned char* a, unsigned char* b,
                       unsigned char* c) {{
    launch(grid, 1, THREADS, [&] {{ {kernel}<float, {struct}>(x, blocks, a, b, c, nullptr, nullptr); }});
}}
"""


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def library(name, folders=()):
    """The quantizers of the file that has that of a type."""
    quantizers = {one: kb.get_format(one).quantizer for one in TYPES}
    file = quantizers[name].file
    entries = [ENTRY.format(name=n, kernel=q.name, struct=q.struct) for n, q in quantizers.items() if q.file == file]
    return host.build('#include "grid.h"\n' + source(quantizers[name].templates[0]) + "".join(entries), folders)


def quantized(built, name, x, offset=0):
    """The planes that the kernel writes, each `offset` bytes behind an aligned address, as bytes by name."""
    format = kb.get_format(name)
    sizes = {plane: np.dtype(spec.dtype).itemsize * spec.shape[0] for plane, spec in format.planes(x.shape).items()}
    rooms = {plane: np.zeros(size + 64, np.uint8) for plane, size in sizes.items()}
    starts = {plane: -room.ctypes.data % 16 + offset for plane, room in rooms.items()}
    addresses = [ctypes.c_void_p(room.ctypes.data + starts[plane]) for plane, room in rooms.items()]
    addresses += [None] * (3 - len(addresses))
    getattr(built, name)(2, ctypes.c_void_p(x.ctypes.data), ctypes.c_longlong(x.size // format.block), *addresses)
    for plane, room in rooms.items():
        assert not room[: starts[plane]].any() and not room[starts[plane] + sizes[plane] :].any(), "beside a plane"
    return {plane: room[starts[plane] : starts[plane] + sizes[plane]].tobytes() for plane, room in rooms.items()}


def bytes_of(q):
    return {name: plane.tobytes() for name, plane in q.planes.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_the_same_bytes(name, kind):
    x = numbers(kind, 36 * 256, seed=2)  # more blocks of 256 than two thread blocks take at a time
    assert quantized(library(name), name, x) == bytes_of(kb.quantize(x, name))


@pytest.mark.parametrize("offset", [2, 4, 6, 14])
@pytest.mark.parametrize("name", TYPES)
def test_planes_and_arrays_begin_anywhere(name, offset):
    x = np.concatenate((np.zeros(offset, np.float32), numbers("wide", 2048, seed=3)))[offset:]
    assert quantized(library(name), name, x, offset) == bytes_of(kb.quantize(x, name))


@pytest.mark.parametrize("name", TYPES)
def test_what_ggml_leaves_open(name):
    x = numbers("large", 2048, seed=4) * np.float32(4)
    x[::5], x[1::9], x[2::11], x[3::13] = np.nan, np.inf, -np.inf, -0.0
    assert quantized(library(name), name, x) == bytes_of(kb.quantize(x, name))


FAULTS = [  # a header, a text in it, what it becomes, a type, and the kind of numbers that shows it
    ("formats/gguf_numbers.cuh", "rest >= 0.5f", "rest > 0.5f", "q8_0", "ties"),
    ("formats/gguf_encoders.cuh", ", 8.5f", ", 8.0f", "q4_0", "normal"),
    ("formats/gguf_encoders.cuh", "bits > largest", "bits >= largest", "q4_0", "ties"),
    ("formats/gguf_search_encoders.cuh", "LARGEST, 20, true", "LARGEST, 12, true", "q4_k", "normal"),
    ("formats/gguf_encoders.cuh", "i % 4 * 8 + s * 2", "i % 4 * 8 + s", "tq2_0", "normal"),
    ("common/ieee.cuh", "set_float_mode(IEEE_MODE);", "", "q4_k", "smaller"),
]


@pytest.mark.parametrize(("file", "right", "wrong", "name", "kind"), FAULTS)
def test_a_planted_fault_is_found(file, right, wrong, name, kind, tmp_path):
    text = (kernel_folder() / file).read_text()
    assert right in text
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text.replace(right, wrong))
    x = numbers(kind, 1 << 14, seed=5)
    assert quantized(library(name, (tmp_path,)), name, x) != bytes_of(kb.quantize(x, name))
