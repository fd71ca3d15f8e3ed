"""kbitcupy.raw: kernels of one's own that read compressed arrays. They compile without a GPU, and run on one."""

import numpy as np
import pytest
from host import compiled as host
from inputs import same_values

import kbitcupy as kb
from kbitcupy.array import QuantizedArray
from kbitcupy.backend.compile import kernel_folder
from kbitcupy.errors import DeviceError, FormatError

# Writes all elements, three times: by for_each, by octets, and one by one.
READ = """
template <typename F>
__global__ void read(const __grid_constant__ kbit::Array<F> q, long long member, float* y) {
    const kbit::Reader<F> reader(q, member);
    const long long size = reader.size(), step = gridDim.x * blockDim.x;
    reader.for_each([&](long long first, int count, const float (&v)[8]) {
        for (int e = 0; e < count; ++e) y[first + e] = v[e];
        for (int e = count; e < 8; ++e)
            if (v[e] != 0.0f) y[0] = __int_as_float(0x7fc00000);
    });
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < reader.octets(); i += step) {
        float v[8];
        reader.octet(i, v);
        for (int e = 0; e < 8 && i * 8 + e < size; ++e) y[size + i * 8 + e] = v[e];
    }
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) y[2 * size + i] = reader[i];
}
"""
# The inner product of two arrays, whose tables must not be mixed up.
DOT = """
template <typename F, typename G>
__global__ void dot(const __grid_constant__ kbit::Array<F> a, const __grid_constant__ kbit::Array<G> b, double* y) {
    const kbit::Reader<F> first(a);
    const kbit::Reader<G, 1> second(b);
    double sum = 0;
    first.for_each([&](long long i, int count, const float (&v)[8]) {
        float w[8];
        second.octet(i / 8, w);
        for (int e = 0; e < 8; ++e) sum += double(v[e]) * w[e];
    });
    atomicAdd(y, sum);
}
"""


def launch(cupy, source, name, readers, arguments, grid=3, block=96):
    """Compile `source` for the arrays of `readers`, and launch it."""
    expression = f"{name}<{', '.join(reader.type for reader in readers)}>"
    code, options = kb.raw.preamble(*readers) + source, kb.raw.options(*readers)
    module = cupy.RawModule(code=code, options=options, name_expressions=(expression,))
    module.get_function(expression)((grid,), (block,), arguments)


def one_of_each_header():
    """A format text for each header with decoders."""
    return list({kb.get_format(text).decoder.header: text for text in host.all_formats()}.values())


@pytest.mark.parametrize("text", one_of_each_header())
def test_a_kernel_of_ones_own_compiles(nvrtc, text):
    format = kb.get_format(text)
    q = QuantizedArray(format, host.random_planes(np.random.default_rng(0), format, (4, 256)), (4, 256), np.float32)
    decoder = kb.raw.decoder(q)
    program = nvrtc.createProgram(kb.raw.preamble(decoder) + READ, "own.cu", (), ())
    nvrtc.addNameExpression(program, f"read<{decoder.type}>")
    from cuda.pathfinder import find_nvidia_header_directory

    cudart = f"-I{find_nvidia_header_directory('cudart')}"
    nvrtc.compileProgram(program, (*kb.raw.options(decoder), cudart, "-arch=sm_80", "-ftz=true"))
    assert nvrtc.getCUBIN(program)


def test_what_stands_ahead_is_said_once():
    q, other = (kb.quantize(np.ones((4, 256), np.float32), name) for name in ("iq4_nl", "q4_k"))
    decoders = [kb.raw.decoder(each) for each in (q, other, q)]
    text = kb.raw.preamble(*decoders)
    assert text.count('#include "kbitcupy.cuh"') == 1 and text.count(f'#include "{decoders[0].header}"') == 1
    lines = [line for line in text.splitlines() if line]
    assert len(set(lines)) == len(lines)


def test_options_name_folder_and_content_of_the_headers():
    flags = kb.raw.options()
    assert f"-I{kb.raw.get_include()}" in flags and kb.raw.get_include() == str(kernel_folder())
    assert any(flag.startswith("-DKBIT_HEADERS=") for flag in flags)


def test_the_argument_of_an_array_in_host_memory_is_refused():
    decoder = kb.raw.decoder(kb.quantize(np.ones(64, np.float32), "int8"))
    with pytest.raises(DeviceError, match=r"to_device\('cuda:0'\)"):
        _ = decoder.argument


@pytest.mark.parametrize("call", [kb.raw.decoder, kb.raw.preamble, kb.raw.options])
def test_other_things_are_refused(call):
    with pytest.raises(TypeError, match=r"array|must be a QuantizedArray"):
        call(np.ones(8))


def test_a_format_without_a_decoder_is_refused(monkeypatch):
    q = kb.quantize(np.ones(64, np.float32), "nf4")
    monkeypatch.setattr(q.format, "decoder", None)
    with pytest.raises(FormatError, match="no decoder"):
        kb.raw.decoder(q)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", host.all_formats())
def test_reads_what_dequantize_gives(cupy, text):
    format, rng = kb.get_format(text), np.random.default_rng(0)
    for shape in [shape for shape in ((1,), (45,), (3, 33), (40, 256)) if host.fits(format, shape)]:
        planes = host.random_planes(rng, format, shape)
        expected = host.decoded_by_numpy(format, planes, shape).ravel()
        q = QuantizedArray(format, {name: cupy.asarray(plane) for name, plane in planes.items()}, shape, np.float32)
        decoder, y = kb.raw.decoder(q), cupy.zeros(3 * expected.size, np.float32)
        launch(cupy, READ, "read", (decoder,), (decoder.argument, np.int64(0), y))
        for part in y.get().reshape(3, -1):
            assert same_values(part, expected)


@pytest.mark.parametrize(("text", "members"), [("kbit4", 3), ("ternary", 3), ("nf4", 1)])
def test_members_of_a_stack(cupy, text, members):
    """What belongs to blocks alone is read as one array, whose first axis is that of the stack."""
    x = np.random.default_rng(1).standard_normal((3, 8, 96), np.float32)
    q = kb.quantize(cupy.asarray(x), text)
    q = kb.stack([q[i] for i in range(3)])
    decoder, wanted = kb.raw.decoder(q), kb.dequantize(q).get().reshape(members, -1)
    assert decoder.members == members
    for member in range(members):
        y = cupy.zeros((3, wanted.shape[1]), np.float32)
        launch(cupy, READ, "read", (decoder,), (decoder.argument, np.int64(member), y))
        assert all(same_values(part, wanted[member]) for part in y.get())


def test_two_arrays_of_one_format_keep_their_tables_apart(cupy):
    rng = np.random.default_rng(2)
    x = cupy.asarray(rng.standard_normal((64, 128), np.float32))
    a, b = (kb.quantize(x, "table4", codebook=np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)) for _ in range(2))
    readers, y = (kb.raw.decoder(a), kb.raw.decoder(b)), cupy.zeros(1, np.float64)
    launch(cupy, DOT, "dot", readers, (*(reader.argument for reader in readers), y))
    expected = (a.dequantize().astype(np.float64) * b.dequantize().astype(np.float64)).sum()
    assert abs(float(y[0]) - float(expected)) <= 1e-9 * float(cupy.abs(x).sum())


def test_an_argument_keeps_its_planes_alive(cupy):
    x = cupy.asarray(np.random.default_rng(3).standard_normal((256, 128), np.float32))
    q = kb.quantize(x, "kbit4")
    expected, argument = q.dequantize().get().ravel(), kb.raw.decoder(q).argument
    reader = kb.raw.decoder(q)
    del q
    for _ in range(4):
        cupy.full(x.size, np.nan, np.float32)  # takes what the pool had back
    y = cupy.zeros(3 * x.size, np.float32)
    launch(cupy, READ, "read", (reader,), (argument, np.int64(0), y))
    assert same_values(y[: x.size].get(), expected)
