"""A format of another package: its kernels lie in a folder of its own, and everything else follows as for ours."""

import numpy as np
import pytest
from cases import Case, numbers
from checks import CHECKS, same_planes
from host import compiled as host
from inputs import same_values

import kbitcupy as kb
from kbitcupy.backend.compile import compile_offline
from kbitcupy.formats.base import kernel_templates, unregister
from kbitcupy.formats.blocks import BlockFormat, Field, Quantizer

DECODER = """
#pragma once
#include "formats/planes.cuh"

// 64 signed bytes and a shift: an element is a byte divided by 2^shift. plane: shift, codes
struct Shifted {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        const int shift = planes.at<unsigned char>(0)[octet / 8] & 15;
        const signed char* codes = planes.at<signed char>(1) + octet * 8;
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(static_cast<float>(codes[e]), __int_as_float((127 - shift) << 23));
    }
};
"""
QUANTIZER = """
#include "common/types.cuh"

struct Shift {};

// x T[blocks * 64]; a thread for each block, whose shift is 4.
template <typename T, typename E>
__global__ void quantize_shifted(const T* x, long long blocks, unsigned char* shift, signed char* codes, void*, void*) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= blocks) return;
    shift[i] = 4;
    for (int e = 0; e < 64; ++e) {
        const float v = to_float(x[i * 64 + e]);
        codes[i * 64 + e] = static_cast<signed char>(rintf(fminf(fmaxf(v == v ? v * 16.0f : 0.0f, -128.0f), 127.0f)));
    }
}
"""


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """The format, registered."""
    kernels = tmp_path_factory.mktemp("kernels")
    (kernels / "shifted.cuh").write_text(DECODER)
    (kernels / "shifted.cu").write_text(QUANTIZER)

    class Format(BlockFormat):
        """Bytes and a shift for 64 of them."""

        name, bits, block = "shifted", 8, 64
        origin, summary = "another package", "bytes and a shift"
        fields = (Field("shift", "uint8", 1), Field("codes", "int8", 64))
        header, struct, folder = "shifted.cuh", "Shifted", kernels
        quantizer = Quantizer("shifted.cu", "quantize_shifted", "Shift", 128, 128, kernels)

        def quantize_blocks(self, rows, importance=None):
            codes = np.rint(np.clip(rows * np.float32(16), -128, 127)).astype(np.int8)
            return np.concatenate([np.full((len(rows), 1), 4, np.uint8), codes.view(np.uint8)], axis=1)

        def dequantize_blocks(self, blocks):
            return np.ldexp(blocks[:, 1:].view(np.int8).astype(np.float32), -(blocks[:, :1] & 15).astype(np.int32))

    kb.register("shifted", Format)
    yield kb.get_format("shifted")
    unregister("shifted")


@pytest.mark.parametrize("check", CHECKS)
def test_the_contract(check, shifted, xp, tmp_path):
    check(Case("shifted"), xp, tmp_path)


def test_the_compile_check_finds_its_kernels(shifted):
    pytest.importorskip("cuda.pathfinder", reason="needs the extra `compile`", exc_type=ImportError)
    pytest.importorskip("cupy.cuda", reason="needs the extra `compile`", exc_type=ImportError)
    found = [template for template in kernel_templates() if template.folder == shifted.folder]
    assert [template.name for template in found][-1] == "quantize_shifted" and len(found) == 4
    for template in found:
        assert "Used" in compile_offline(template, next(template.instances()), 75), template


@pytest.mark.skipif(host.compiler() is None, reason="needs a C++ compiler")
def test_its_decoder_gives_what_numpy_gives(shifted):
    rng = np.random.default_rng(0)
    planes = host.random_planes(rng, shifted, (100, 64))
    found = host.Compiled(shifted.decoder, (shifted.struct,))(planes, (100, 64))
    assert same_values(found[0], host.decoded_by_numpy(shifted, planes, (100, 64)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_its_kernels_give_what_numpy_gives(cupy, shifted, dtype):
    x = numbers("special", (300, 128), dtype)
    found, wanted = kb.quantize(cupy.asarray(x), "shifted"), kb.quantize(x, "shifted")
    assert same_planes(found, wanted)
    assert same_values(found.dequantize().get(), wanted.dequantize())
    assert same_values(kb.take(found, cupy.asarray([7, -1])).get(), wanted.dequantize()[[7, -1]])


OWN = """
template <typename F>
__global__ void halves(const __grid_constant__ kbit::Array<F> q, float* y) {
    const kbit::Reader<F> reader(q);
    reader.for_each([&](long long first, int count, const float (&v)[8]) {
        for (int e = 0; e < count; ++e) y[first + e] = 0.5f * v[e];
    });
}
"""


def test_a_kernel_of_ones_own_reads_it(cupy, shifted):
    x = numbers("normal", (33, 64), "float32")
    q = kb.quantize(cupy.asarray(x), "shifted")
    decoder, y = kb.raw.decoder(q), cupy.empty(x.shape, np.float32)
    module = cupy.RawModule(
        code=kb.raw.preamble(decoder) + OWN, options=kb.raw.options(decoder), name_expressions=("halves<Shifted>",)
    )
    module.get_function("halves<Shifted>")((2,), (64,), (decoder.argument, y))
    assert same_values(2 * y.get(), q.dequantize().get())
