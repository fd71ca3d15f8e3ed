"""The kernels of the format ternary, in a grid of host threads that flush as the GPU does, write NumPy's bytes."""

import ctypes
import itertools
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
from host import compiled as host
from inputs import DTYPES, make

import kbitcupy as kb
from kbitcupy.backend import compile
from kbitcupy.backend.compile import kernel_folder, source
from kbitcupy.backend.structs import Struct
from kbitcupy.formats import ternary
from kbitcupy.formats.granularity import blocks_of

#: Element types of the stand-in for common/types.cuh.
CXX_TYPES = {"__half": "Half", "__nv_bfloat16": "Brain", "float": "float", "double": "double"}
C_TYPES = {"i4": "int", "i8": "long long", "u8": "unsigned long long", "f4": "float"}
CTYPES = {"i4": ctypes.c_int, "i8": ctypes.c_longlong, "u8": ctypes.c_ulonglong, "f4": ctypes.c_float}


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def instances():
    """(kernel, template arguments) of everything that this file calls: of float32 every step."""
    for template in ternary._KERNELS:
        for values in itertools.product(*template.axes):
            if not ({"FIRST", "ABOVE"} & set(values) and {"__half", "__nv_bfloat16"} & set(values)):
                yield template, values


def symbol(name, values):
    return "_".join((name, *values))


def entry(template, values):
    """The kernel as a function of C: arrays as pointers, a struct by its address."""
    types = ternary._SIGNATURES[template.name]
    declared = ", ".join(
        f"{'void*' if t == 'p' else f'const {t.name}*' if isinstance(t, Struct) else C_TYPES[t]} a{i}"
        for i, t in enumerate(types)
    )
    given = ", ".join(
        f"Any{{a{i}}}" if t == "p" else f"*a{i}" if isinstance(t, Struct) else f"a{i}" for i, t in enumerate(types)
    )
    arguments = ", ".join(CXX_TYPES.get(value, value) for value in values)
    return (
        f'extern "C" void {symbol(template.name, values)}(unsigned grid, unsigned threads, {declared}) {{\n'
        f"    launch(grid, 1, threads, [&] {{ {template.name}<{arguments}>({given}); }});\n}}\n"
    )


ANY = "struct Any {\n    void* p;\n    template <typename A> operator A*() const { return static_cast<A*>(p); }\n};\n"


def library(names, dtype, planted):
    """Kernels, all of them or some for one type of elements; with a text that becomes another one."""
    chosen = [
        (template, values)
        for template, values in instances()
        if not names or (template.name in names and values[0] == compile.CXX_TYPES[dtype.name])
    ]
    text = "".join(entry(*each) for each in chosen)
    kernels = source(chosen[0][0])
    for right, wrong in planted:
        kernels = kernels.replace(right, wrong)
    return host.build(f'#include "grid.h"\n{kernels}\n{ANY}{text}')


class Room:
    def __init__(self, size):
        self.array = np.full(size, 0xAA, np.uint8)
        self.ptr = self.array.ctypes.data


@pytest.fixture
def device(monkeypatch):
    """What launches kernels has arrays of the host, and no GPU."""
    use(monkeypatch)


def use(monkeypatch, names=(), dtype=None, planted=()):
    built = library(names, dtype, planted)

    def kernel(name, *values, threads=256):
        function = getattr(built, symbol(name, values))

        def call(array, units, arguments):
            given = [
                ctypes.c_void_p(a if isinstance(a, int) else a.ctypes.data)
                if t == "p"
                else ctypes.c_char_p(a)
                if isinstance(t, Struct)
                else CTYPES[t](a)
                for a, t in zip(arguments, ternary._SIGNATURES[name], strict=True)
            ]
            function(ctypes.c_uint(units), ctypes.c_uint(threads), *given)

        return call

    monkeypatch.setattr(ternary, "_kernel", kernel)
    monkeypatch.setattr(ternary, "namespace", lambda x: SimpleNamespace(cuda=SimpleNamespace(alloc=Room)))


def same(x, text, offset=0, **given):
    """Whether the kernels make the planes that NumPy makes."""
    format = kb.get_format(text)
    expected = kb.quantize(x, format, **given)
    planes = {}
    for name, plane in expected.planes.items():
        room = np.full(plane.nbytes + 48, 0x55, np.uint8)
        start = -room.ctypes.data % 16 + offset * plane.itemsize
        planes[name] = room[start : start + plane.nbytes].view(plane.dtype)
    format.encode_cuda(x, planes, {name: np.asarray(value) for name, value in given.items()})
    return all(planes[name].tobytes() == plane.tobytes() for name, plane in expected.planes.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "rounding"), [("absmean", "even"), ("absmax", "away")])
@pytest.mark.parametrize("granularity", ["tensor", "channel:0", "group:64", "group:20", "group:300", "group:33"])
def test_the_same_bytes(granularity, rule, rounding, dtype, device):
    text = f"ternary:granularity={granularity},rule={rule},rounding={rounding},eps=0"
    for kind, shape in (("normal", (3, 640)), ("special", (2, 300)), ("extreme", (2, 3, 33))):
        assert same(make(kind, math.prod(shape), dtype, seed=1).reshape(shape), text), kind


@pytest.mark.parametrize("granularity", ["tensor", "channel:0", "group:64", "group:20"])
@pytest.mark.parametrize("kind", ["normal", "special", "subnormal", "zeros"])
def test_fits(granularity, kind, device):
    assert same(make(kind, 3 * 300, np.float32, seed=2).reshape(3, 300), f"ternary:granularity={granularity},rule=fit")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_scale(dtype, device):
    """Thresholds of scales of all sizes, beside numbers near half of them."""
    rng = np.random.default_rng(3)
    scale = rng.integers(1, 0x7F800000, 1024).astype(np.uint32).view(np.float32)
    scale[:8] = [0, 1e-45, 3e-45, 2.0**-128, 2.0**-126, 2.0**126, np.finfo(np.float32).max, 1]
    half = np.maximum((scale * np.float32(0.5)).view(np.int32)[:, None] + np.arange(-4, 4, dtype=np.int32), 0)
    with np.errstate(all="ignore"):
        near = half.view(np.float32).astype(dtype)
        unsigned = near.view(f"u{near.itemsize}")
        x = np.concatenate([near, (unsigned + 1).view(dtype), (unsigned - 1).view(dtype), -near], axis=1)
    blocks, codes = blocks_of(x.shape, ("channel", 0)), np.zeros(x.size // 4, np.uint8)
    for rounding in ("even", "away"):
        expected = kb.quantize(x, "ternary", granularity=("channel", 0), rounding=rounding, scale=scale)
        ternary._quantize_on_device(x, codes, scale, blocks, rounding)
        assert codes.tobytes() == expected.planes["codes"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", [32, 33, 40, 64, 201, 256])
def test_groups_one_behind_the_other(run, dtype, device, monkeypatch):
    """Groups that end anywhere in a warp's elements, of arrays that end anywhere; scales that are found and given."""
    rows = 2 * 1024 // run + 3
    x = make("special", rows * run, dtype, seed=run).reshape(rows, run)
    text = f"ternary:block={run}"
    for part in (x, x[1:], x[: 1024 // run]):
        assert same(part, text)
    monkeypatch.setattr(ternary, "is_cupy", lambda a: isinstance(a, np.ndarray))
    scale = np.abs(make("extreme", rows, np.float32, seed=run))
    scale[::5] = 0
    expected = kb.quantize(x, text, scale=scale)
    scale[::5] = [np.nan, np.inf, -1, 0][run % 4]
    for given in (scale, scale.astype(np.float64)):
        planes = {name: np.full_like(plane, 7) for name, plane in expected.planes.items()}
        expected.format.encode_cuda(x, planes, {"scale": given})
        assert all(planes[name].tobytes() == plane.tobytes() for name, plane in expected.planes.items())


@pytest.mark.parametrize("size", [1, 127, 129, 257, 70_000, (1 << 17) + 777])
def test_arrays_that_are_one_block(size, device):
    x = make("wide", size, np.float32, seed=4)
    for rule in ("absmean", "fit"):
        assert same(x, f"ternary:rule={rule}")


def test_the_order_of_sums(device):
    """In float64, of numbers so different that every addition rounds."""
    x, sums = make("extreme", 10 * 256 + 33, np.float32, seed=9), np.zeros(11)
    ternary._kernel("sums_ternary", "float", "MEAN")(x, 1, (x, x.size, 0, sums, 0))
    assert sums.tobytes() == ternary._first_sums(np.abs(x)[None]).tobytes()
    many, lanes = np.abs(make("extreme", 3000, np.float32, seed=10)).astype(np.float64), np.zeros(1024)
    ternary._kernel("lanes_ternary", "MEAN", threads=32)(x, 32, (many, 0, many.size, lanes, 0))
    scale, size = np.zeros(1, np.float32), 1 << 30
    ternary._kernel("finish_ternary", "MEAN", threads=1024)(x, 1, (lanes, 0, size, 0.0, scale, 0))
    assert scale[0] == np.float32(ternary._lane_sums(many[None])[0] / size)


def test_planes_and_arrays_begin_anywhere(device):
    x = make("normal", 1001, np.float32, seed=5)
    for part in (x[1:], x[2:700], x[4:]):
        assert same(part, "ternary", offset=1) and same(part, "ternary:block=64", offset=2)


def test_given_scales(device, monkeypatch):
    x = make("normal", 4 * 100, np.float32, seed=6).reshape(4, 100)
    assert same(x, "ternary", scale=0.3)
    monkeypatch.setattr(ternary, "is_cupy", lambda a: isinstance(a, np.ndarray))
    for dtype in (np.float32, np.float64):
        scale = np.array([0.3, -1, np.inf, np.nan], dtype)
        found = np.zeros(4, np.float32)
        ternary._give_on_device(scale, found, x)
        assert found.tolist() == [np.float32(0.3), 0, 0, 0]


def with_nan(x):
    x[::7] = np.nan
    return x


FAULTS = {  # a text of the kernel, what it becomes, options and numbers that show it
    "ties": ("quotient >= 0.5f :", "quotient > 0.5f :", "rounding=away", np.float32([0.75, 0.375, 0.375, 1.5] * 80)),
    "subnormal halves": ("(bits), 0x1p24f)", "(bits), 0x1p25f)", "eps=0", make("small", 320, np.float16)),
    "count": ("static_cast<double>(size)", "static_cast<double>(size + 1)", "eps=0", make("normal", 320, np.float32)),
    "nan": ("bits > 0x7f800000u ? 0u : ", "", "rule=absmax", with_nan(make("normal", 320, np.float32))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    right, wrong, options, x = FAULTS[fault]
    text = f"ternary:granularity=channel:0,{options}"
    x = x.reshape(-1, 80)
    use(monkeypatch, ("quantize_groups_ternary", "short_scales_ternary"), x.dtype)
    assert same(x, text)
    assert right in (kernel_folder() / "ternary.cu").read_text()
    use(monkeypatch, ("quantize_groups_ternary", "short_scales_ternary"), x.dtype, ((right, wrong),))
    assert not same(x, text)


@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (40, 160), (3, 1024), (2, 3, 64), (7, 11008)])
@pytest.mark.parametrize("granularity", [("channel", 0), ("group", 32), ("group", 64), ("group", 96)])
def test_the_quick_decoder(granularity, shape):
    """For rows and groups of multiples of 32, on their own and in stacks."""
    decoder = ternary._quick_decoder(granularity)
    q = kb.quantize(
        make("normal", math.prod(shape), np.float32, seed=8).reshape(shape), "ternary", granularity=granularity
    )
    blocks = blocks_of(shape, granularity)
    if (blocks.row | blocks.run) % 32:
        pytest.skip("not what it is for")
    decode = host.Compiled(decoder, ("Ternary<false>",))
    assert decode(q.planes, shape)[0].tobytes() == q.dequantize().tobytes()
    planes = {name: np.tile(plane, 3) for name, plane in q.planes.items()}
    assert decode(planes, shape, 3).tobytes() == np.stack([q.dequantize()] * 3).tobytes()
