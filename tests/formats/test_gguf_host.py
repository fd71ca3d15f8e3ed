"""The quantizers of kernels/formats/gguf_encoders.cuh, compiled for the host, write the bytes that NumPy writes."""

import ctypes
import os

import numpy as np
import pytest
from host import compiled as host
from make_gguf_data import KINDS, TYPES, numbers

import kbitcupy as kb

SOURCE = """
#include "formats/gguf_encoders.cuh"

struct Source {
    const float* x;
    void load(int first, float (&v)[32]) const { std::memcpy(v, x + first, sizeof v); }
};

template <typename E>
void encode_all(const float* x, long long blocks, const Fields& fields) {
    for (long long i = 0; i < blocks; ++i) E::encode(Source{x + i * E::BLOCK}, fields, i);
}

// What eight lanes of kernels/gguf.cu do together.
void encode_q4_k(const float* x, long long blocks, const Fields& fields) {
    for (long long i = 0; i < blocks; ++i) {
        Q4_KEncoder lane[8];
        float scale = 0, minimum = 0;
        for (int j = 0; j < 8; ++j) {
            Source{x + i * 256}.load(j * 32, lane[j].x);
            lane[j].search();
            if (lane[j].scale > scale) scale = lane[j].scale;
            if (lane[j].minimum > minimum) minimum = lane[j].minimum;
        }
        for (int j = 0; j < 8; ++j) lane[j].finish(scale, minimum);
        for (int j = 0; j < 8; ++j) lane[j].store(j, lane[j ^ 1].codes, lane[j ^ 4].sc, lane[j ^ 4].mn, fields, i);
        fields.put_half(0, i * 2, scale / 63);
        fields.put_half(0, i * 2 + 1, minimum / 63);
    }
}

#define ENTRY(name, function)                                                                                   \\
    extern "C" void name(const float* x, long long n, unsigned char* a, unsigned char* b, unsigned char* c) {   \\
        set_float_mode(IEEE_MODE);                                                                              \\
        function(x, n, Fields{{a, b, c, nullptr}});                                                             \\
    }
ENTRY(q8_0, encode_all<Q8_0Encoder>)
ENTRY(q4_0, encode_all<Q4_0Encoder>)
ENTRY(tq2_0, encode_all<TQ2_0Encoder>)
ENTRY(q4_k, encode_q4_k)
"""


@pytest.fixture(scope="module")
def library():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    return host.build(SOURCE)


def encoded(library, name, x, planes, offset=0):
    """The planes that the device code writes, each `offset` bytes behind an aligned address."""
    found = {key: np.zeros(plane.nbytes + 64, np.uint8) for key, plane in planes.items()}
    starts = {key: -room.ctypes.data % 16 + offset for key, room in found.items()}
    addresses = [ctypes.c_void_p(room.ctypes.data + starts[key]) for key, room in found.items()]
    blocks = ctypes.c_longlong(x.size // kb.get_format(name).block)
    getattr(library, name)(ctypes.c_void_p(x.ctypes.data), blocks, *addresses, *[None] * (3 - len(addresses)))
    return {key: room[starts[key] : starts[key] + planes[key].nbytes] for key, room in found.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TYPES)
def test_the_same_bytes(library, name, kind):
    x = numbers(kind, 1 << 14, seed=2)
    q = kb.quantize(x, name)
    for key, found in encoded(library, name, x, q.planes, offset=2).items():
        assert found.tobytes() == q.planes[key].tobytes(), key


@pytest.mark.parametrize("offset", [0, 4, 6, 14])
@pytest.mark.parametrize("name", TYPES)
def test_planes_begin_anywhere(library, name, offset):
    x = numbers("wide", 2048, seed=3)
    q = kb.quantize(x, name)
    for key, found in encoded(library, name, x, q.planes, offset).items():
        assert found.tobytes() == q.planes[key].tobytes(), key
