"""The kernels of kernels/blocks.cu and what launches them, in a grid of threads of the host: no GPU is needed."""

import ctypes
import types

import numpy as np
import pytest
from host import compiled as host
from inputs import bits_for, same_values

import kbitcupy as kb
from kbitcupy.backend.compile import source
from kbitcupy.formats import decoders

SOURCE = """
#include "grid.h"
{kernels}
template <typename A>
const A& given(const void* bytes) {{ return *static_cast<const A*>(bytes); }}
using F = {struct};
template <typename T>
void dequantize(unsigned width, unsigned height, T* y, long long members, const void* argument) {{
    launch(width, height, THREADS, [&] {{ dequantize_blocks<T, F>(y, members, given<Argument<F>>(argument)); }});
}}
extern "C" void dequantize_blocks_float32(unsigned w, unsigned h, float* y, long long members, const void* argument) {{
    dequantize(w, h, y, members, argument);
}}
extern "C" void dequantize_blocks_float16(unsigned w, unsigned h, Half* y, long long members, const void* argument) {{
    dequantize(w, h, y, members, argument);
}}
extern "C" void take_blocks_float32(
    unsigned width, unsigned, float* y, const void* ids, const void* rows, const void* argument) {{
    launch(width, 1, THREADS, [&] {{
        take_blocks<float, F>(y, ids, given<Rows>(rows), given<Argument<F>>(argument));
    }});
}}
extern "C" void linear_blocks_float32(
    unsigned width, unsigned, const float* x, const float* bias, float* y, long long tokens, long long rows,
    long long columns, const void* argument) {{
    launch(width, 1, THREADS, [&] {{
        linear_blocks<float, F>(x, bias, y, tokens, rows, columns, given<Argument<F>>(argument));
    }});
}}
"""


class OnDevice(np.ndarray):
    """A NumPy array that says where it lies as CuPy's do."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def on_device(array):
    return np.ascontiguousarray(array).view(OnDevice)


class HostKernel:
    """What `decoders` launches, on a device that holds two thread blocks at a time."""

    rounds = 2
    fault = ("", "")  # what the text of the kernels has, and what it becomes

    def __init__(self, name, decoder, dtype):
        (template,) = decoders.templates(decoder.header, decoder.struct, kernels=(name,), declared=decoder.declared)
        kernels = source(template)
        assert self.fault[0] in kernels
        library = host.build(SOURCE.format(kernels=kernels.replace(*self.fault), struct=decoder.struct))
        self._run = getattr(library, f"{name}_{dtype.name}")

    def ready(self, device):
        return types.SimpleNamespace(resident=2)

    def launch(self, array, grid, arguments):
        assert array.data.device_id == 0
        width, height = (*grid, 1)[:2]
        given = (ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_longlong(a) for a in arguments)
        self._run(ctypes.c_uint(width), ctypes.c_uint(height), *given)

    def __call__(self, array, units, arguments):
        self.launch(array, (min(units, 3),), arguments)


@pytest.fixture
def on_host(monkeypatch):
    """Launches go to the host."""
    if host.compiler() is None:
        pytest.skip("needs a C++ compiler, which test_decoders.py asks for")
    monkeypatch.setattr(decoders, "_kernel", HostKernel)


# One with a table that may be in a plane, one whose scales lie across octets, three of whole blocks that decode octets
# together, of which the last has a table that lies with the kernel.
FORMATS = ["kbit3:codebook=custom", "int4:block=3,symmetric=false", "q4_0", "tq2_0", "iq3_s"]


def stack_of(format, shape, members, seed):
    """Planes of a stack, and what NumPy decodes."""
    rng = np.random.default_rng(seed)
    each = [host.random_planes(rng, format, shape) for _ in range(members)]
    for planes in each:
        if format.decoder.values in planes:  # one table for all
            planes[format.decoder.values] = each[0][format.decoder.values]
    planes = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    if format.decoder.values in planes:
        planes[format.decoder.values] = each[0][format.decoder.values]
    return planes, np.stack([host.decoded_by_numpy(format, one, shape) for one in each])


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    ("shape", "members"), [((45,), 1), ((3, 4096), 1), ((7, 96), 5), ((33,), 3), ((2, 2112), 2), ((3, 8192), 2)]
)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_elements(on_host, text, shape, members, shift, dtype):
    format = kb.get_format(text)
    if not host.fits(format, shape):
        return
    planes, expected = stack_of(format, shape, members, 0)
    memory = np.full(expected.size + shift + 8, 7, dtype)
    out = memory[shift : shift + expected.size].view(OnDevice)  # it may begin at any element
    decoders.dequantize(format.decoder, planes, shape, out, members)
    with np.errstate(over="ignore"):
        assert same_values(np.asarray(out), expected.reshape(-1).astype(dtype))
    assert (memory[shift + expected.size :] == 7).all() and (memory[:shift] == 7).all()


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("shape", "lead"),
    [
        ((40, 64), 0),
        ((5, 3, 32), 0),
        ((10, 33), 0),
        ((6, 4, 96), 1),
        ((3, 2, 512), 1),
        ((2, 3, 4, 64), 2),
        ((3, 2, 5, 33), 2),
    ],
)
def test_rows(on_host, text, wide, shape, lead):
    format = kb.get_format(text)
    member = shape[lead:]
    if not host.fits(format, member):
        return
    if not lead and not format.rows_are_blocks(shape):
        assert shape == (10, 33)
        return
    planes, expected = stack_of(format, member, int(np.prod(shape[:lead])), 1)
    expected = expected.reshape(shape)
    ids = np.array([0, shape[0] - 1, -1, 1, shape[0], -shape[0] - 2, 0, 1, 1], wide)
    out = on_device(np.full((ids.size, *shape[1:]), np.float32(7)))
    decoders.take(format.decoder, planes, shape, on_device(ids), out, lead)
    assert host.different(expected[ids % shape[0]], np.asarray(out)) == 0


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(5, 32), (9, 544), (3, 1056), (9, 37), (5, 768)])
def test_products(on_host, text, rows, columns):
    format, rng = kb.get_format(text), np.random.default_rng(2)
    if not host.fits(format, (rows, columns)):
        return
    options = {name: value for name, value in format.options().items() if value != "custom"}
    given = {"codebook": np.linspace(-1, 1, 8)} if "custom" in text else {}
    weights = rng.standard_normal((rows, columns), np.float32)
    if format.can_encode:
        q = kb.quantize(weights, format.name, **options, **given)
    else:
        q = kb.QuantizedArray(format, bits_for(format, weights), weights.shape, np.float32)
    weights = q.dequantize().astype(np.float64)
    for tokens in (1, 11):
        x, bias = rng.standard_normal((tokens, columns), np.float32), rng.standard_normal(rows, np.float32)
        for added in (None, bias):
            out = [on_device(np.full((tokens, rows), np.float32(7))) for _ in range(2)]
            for y in out:
                decoders.multiply(
                    q.format.decoder,
                    q.planes,
                    (rows, columns),
                    on_device(x),
                    None if added is None else on_device(added),
                    y,
                )
            expected = x @ weights.T + (0 if added is None else added)
            assert np.abs(np.asarray(out[0]) - expected).max() <= 1e-5 * np.abs(expected).max()
            assert np.array_equal(out[0], out[1])


FAULTS = [
    (test_all_elements, ((7, 96), 5), "y + member * size", "y + member * (size + 1)"),
    (test_all_elements, ((3, 4096), 1), "octet + u * THREADS, v[u]", "octet + u * WARP, v[u]"),
    (test_rows, ((2, 3, 4, 64), 2), "row * rows.runs + to", "row + to"),
    (test_rows, ((10, 33), 0), "octet * 8 - begin", "octet * 8 - begin / 8 * 8"),
    (test_products, (9, 544), "begin / 8;", "begin / 16;"),
]


@pytest.mark.parametrize(("test", "shape", "right", "wrong"), FAULTS)
def test_a_planted_fault_is_found(on_host, monkeypatch, test, shape, right, wrong):
    monkeypatch.setattr(HostKernel, "fault", (right, wrong))
    if test is test_all_elements:
        arguments = (*shape, 0, "float32")
    else:
        arguments = (np.int32, *shape) if test is test_rows else shape
    with pytest.raises(AssertionError, match=r"assert"):
        test(None, "int4:block=3,symmetric=false" if shape != ((10, 33), 0) else "int8:block=3", *arguments)
