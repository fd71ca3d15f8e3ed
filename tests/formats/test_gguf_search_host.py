"""The searches of GGUF's kernels, in a grid of host threads that flush as the GPU does, write NumPy's bytes."""

import ctypes
import os

import numpy as np
import pytest
from gguf_numbers import IMPORTANCES, importance
from host import compiled as host
from make_gguf_data import KINDS, numbers
from make_gguf_importance import FEW, RANGED, few

import kbitcupy as kb
from kbitcupy.backend.compile import kernel_folder, source

FORMATS = {name: kb.get_format(name) for name in kb.list_formats() if kb.get_format(name).family == "gguf"}
SEARCHED = [name for name, f in FORMATS.items() if f.quantizer is not None and f.quantizer.file == "gguf_search.cu"]
WEIGHED = [name for name, f in FORMATS.items() if f.weigher is not None]

PLANES = ", ".join(f"unsigned char* {field}" for field in "abcde")
PLAIN = """
extern "C" void {name}(unsigned grid, const float* x, long long blocks, {planes}) {{
    launch(grid, 1, THREADS, [&] {{ {kernel}<float, {struct}>(x, blocks, a, b, c, d, e); }});
}}
"""
WITH_IMPORTANCE = """
extern "C" void {name}_weighed(unsigned grid, const float* x, long long blocks, {planes}, const float* importance,
                               const float* means, long long blocks_of_row, long long rows_of_matrix) {{
    launch(grid, 1, THREADS, [&] {{
        {kernel}<float, {struct}>(x, blocks, a, b, c, d, e, importance, means, blocks_of_row, rows_of_matrix);
    }});
}}
"""
MEANS = """
extern "C" void row_means_of(const float* x, long long rows, long long columns, float* means) {
    launch(2, 1, MEANS_THREADS, [&] { row_means<float>(x, rows, columns, means); });
}
"""


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def library(names=None, folders=()):
    """The kernels of `names`, by default of all types."""
    entries = [MEANS]
    for name in names or dict.fromkeys((*SEARCHED, *WEIGHED)):
        for text, quantizer in ((PLAIN, FORMATS[name].quantizer), (WITH_IMPORTANCE, FORMATS[name].weigher)):
            if quantizer is not None and quantizer.file == "gguf_search.cu":
                entries.append(text.format(name=name, planes=PLANES, kernel=quantizer.name, struct=quantizer.struct))
    return host.build(
        '#include "grid.h"\n' + source(FORMATS["q4_k"].quantizer.templates[0]) + "".join(entries), folders
    )


def address(array):
    return ctypes.c_void_p(array.ctypes.data)


def quantized(built, name, x, v=None, offset=0):
    """The planes that a kernel writes, each `offset` bytes behind an aligned address, as bytes by name."""
    format = FORMATS[name]
    sizes = {plane: np.dtype(spec.dtype).itemsize * spec.shape[0] for plane, spec in format.planes(x.shape).items()}
    rooms = {plane: np.zeros(size + 64, np.uint8) for plane, size in sizes.items()}
    starts = {plane: -room.ctypes.data % 16 + offset for plane, room in rooms.items()}
    planes = [ctypes.c_void_p(room.ctypes.data + starts[plane]) for plane, room in rooms.items()]
    arguments = 2, address(x), ctypes.c_longlong(x.size // format.block), *planes, *[None] * (5 - len(planes))
    if v is None:
        getattr(built, name)(*arguments)
    else:
        rows, columns = x.size // x.shape[-1], x.shape[-1]
        means = np.full(rows, np.float32(np.nan))
        built.row_means_of(address(x), ctypes.c_longlong(rows), ctypes.c_longlong(columns), address(means))
        counts = ctypes.c_longlong(columns // format.block), ctypes.c_longlong(rows * columns // v.size)
        means = address(means) if format.weigher.means else None
        getattr(built, f"{name}_weighed")(*arguments, address(v), means, *counts)
    for plane, room in rooms.items():
        assert not room[: starts[plane]].any() and not room[starts[plane] + sizes[plane] :].any(), "beside a plane"
    return {plane: room[starts[plane] : starts[plane] + sizes[plane]].tobytes() for plane, room in rooms.items()}


def expected(name, x, v=None):
    """What NumPy writes."""
    return {plane: values.tobytes() for plane, values in kb.quantize(x, name, importance=v).planes.items()}


@pytest.mark.parametrize("name", SEARCHED)
def test_the_same_bytes(name):
    """Of every kind of numbers, more blocks than two thread blocks take at a time."""
    x = np.concatenate([numbers(kind, 1280, seed=2) for kind in KINDS])
    assert quantized(library(), name, x) == expected(name, x)


@pytest.mark.parametrize("offset", [2, 6])
@pytest.mark.parametrize("name", SEARCHED)
def test_planes_and_arrays_begin_anywhere(name, offset):
    x = np.concatenate((np.zeros(offset, np.float32), numbers("wide", 2048, seed=3)))[offset:]
    assert quantized(library(), name, x, offset=offset) == expected(name, x)


@pytest.mark.parametrize("name", SEARCHED)
def test_what_ggml_leaves_open(name):
    x = numbers("large", 2048, seed=4) * np.float32(4)
    x[::5], x[1::9], x[2::11], x[3::13] = np.nan, np.inf, -np.inf, -0.0
    assert quantized(library(), name, x) == expected(name, x)


@pytest.mark.parametrize("name", SEARCHED)
def test_all_numbers_far_below_one_that_is_tiny(name):
    """Steps of the wrong sign that overflow: the minimum has passed the largest number."""
    x = np.full((4, 256), np.float32(-1e-33))
    x[:, ::7], x[1, ::3], x[2, ::2], x[3, 1::5] = -65504, -1e-40, -3e-38, -2
    assert quantized(library(), name, x) == expected(name, x)


@pytest.mark.parametrize("name", WEIGHED)
def test_the_same_bytes_with_importance(name):
    """An importance for each of some matrices, of more rows than a warp sums."""
    x = np.concatenate([numbers(kind, 4 * 512, seed=5) for kind in KINDS[-len(IMPORTANCES) :]])
    x[1::97] = np.nan
    x, v = x.reshape(-1, 4, 512), np.stack([importance(kind, 512) for kind in IMPORTANCES])
    v[::3, 64:128], v[1::3, 256:] = 0, 0  # sub-blocks, and blocks, that do not count
    assert quantized(library(), name, x, v) == expected(name, x, v)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", WEIGHED)
def test_rows_of_any_length(name, blocks):
    columns = blocks * FORMATS[name].block
    x = numbers("student", 35 * columns, seed=6).reshape(5, 7, columns)
    v = np.stack([importance(kind, 768) for kind in list(IMPORTANCES)[:5]])[:, :columns].copy()
    assert quantized(library(), name, x, v) == expected(name, x, v)


SEARCH, ENCODERS = "formats/gguf_search.cuh", "formats/gguf_search_encoders.cuh"
FAULTS = [  # a header, a text in it, what it becomes, a type, the kind of numbers that shows it, and of importance
    (SEARCH, "subtract(high, found.low)", "subtract(high, low)", "q5_k", "normal", None),
    (SEARCH, "t <= static_cast<float>(LAST)", "t < static_cast<float>(LAST)", "q2_k", "normal", None),
    (SEARCH, "t = -9.0f; t <= -6.0f", "t = -7.0f; t <= -6.0f", "q6_k", "normal", None),
    (SEARCH, "round < 5", "round < 2", "q3_k", "normal", None),
    (SEARCH, "LOWEST >= values", "LOWEST > values", "iq4_nl", "normal", None),
    (SEARCH, "t = -8; t <= 7", "t = -8; t <= 6", "iq4_xs", "normal", None),
    (SEARCH, "number <= 8 &&", "number <= 6 &&", "q4_k", "normal", "uniform"),
    (ENCODERS, "SUB == 16 ? 1.0f", "SUB == 16 ? 2.0f", "q2_k", "normal", "heavy"),
    (ENCODERS, "b == a && (lane & step)", "b == a", "q6_k", "ties", None),
    ("common/ieee.cuh", "set_float_mode(IEEE_MODE);", "", "q3_k", "small", None),
]


@pytest.mark.parametrize(("file", "right", "wrong", "name", "kind", "weights"), FAULTS)
def test_a_planted_fault_is_found(file, right, wrong, name, kind, weights, tmp_path):
    text = (kernel_folder() / file).read_text()
    assert right in text
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text.replace(right, wrong))
    x = numbers(kind, 1 << 13, seed=5).reshape(-1, 512)
    v = None if weights is None else importance(weights, 512)
    assert quantized(library((name,), (tmp_path,)), name, x, v) != expected(name, x, v)


# ---- columns without importance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANGED)
def test_scales_that_are_negative(name):
    for seed in FEW:
        x, v = few(seed)
        assert quantized(library(), name, x, v) == expected(name, x, v)


@pytest.mark.parametrize("name", WEIGHED)
def test_importance_of_subnormal_numbers_alone(name):
    x, v = numbers("subnormal", 4096, seed=8).reshape(4, -1), importance("uniform", 1024)
    large = np.arange(1024) % 37 == 0
    x[:, ::5] = 0
    x[:, large], v[large] = numbers("normal", 1024, seed=8)[large], 0
    assert quantized(library(), name, x, v) == expected(name, x, v)
