"""Decoders of the streaming products (kernels/linear/gguf_records.cuh), compiled for the host, beside NumPy."""

import ctypes
import os

import numpy as np
import pytest
from host import compiled as host

import kbitcupy as kb
from kbitcupy.backend.structs import declarations

RECORDS = {name: found for name in kb.list_formats() if (found := kb.get_format(name).records())}
#: The decoders: those of some types are others where tokens are float16.
DECODERS = [
    (name, half) for name in RECORDS for half in (("true", "false") if "{half}" in RECORDS[name].struct else ("true",))
]

SOURCE = """
struct HostRecord {
    const unsigned char* from;
    unsigned narrow;
    unsigned word(int at) const { unsigned v; __builtin_memcpy(&v, from + at, 4); return v; }
};
template <typename R>
struct HostTable {
    unsigned word(unsigned i) const { return R::table_word(i); }
    unsigned pair(unsigned i) const { return R::table_word(i / 2) >> i % 2 * 16 & 0xffffu; }
};
template <typename R>
void decode_record(const unsigned char* const* fields, float* out, int* seen) {
    using Layout = RecordLayout<R>;
    unsigned char bytes[512] = {};
    HostRecord record{bytes, 0};
    int narrow = 0;
    for (int i = 0; i < R::FIELDS; ++i) {
        if (Layout::piece(i)) __builtin_memcpy(bytes + Layout::at(i), fields[i], R::bytes(i));
        else record.narrow |= (fields[i][0] | fields[i][1] << 8) << 16 * narrow++;
    }
    for (int t = 0; t < 4; ++t)
        for (int half = 0; half < 2; ++half) {
            R r;
            r.load(record, HostTable<R>{}, t, half);
            for (int s = 0; s < 8; ++s)
                for (int e = 0; e < 4; ++e) {
                    const int k = first_of<R::ORDER>(t, 8 * half + s) + e, code = r.codes(s) >> 8 * e & 255;
                    const bool minus = R::FLIPS && r.flips(s, e % 2) >> (15 + e / 2 * 16) & 1;
                    const int c = (code - R::BIAS) * (minus ? -1 : 1), j = s * 16 / R::SUB;
                    const float scaled = __fmul_rn(static_cast<float>(c), r.factor(j));
                    out[k] = __fmul_rn(__fadd_rn(scaled, R::OFFSETS ? r.offset(j) : 0.0f), r.outer());
                    seen[k] += 1 + (!R::WIDE && code > 127) * 100;
                }
        }
}
"""


@pytest.fixture(scope="module")
def library():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    declared = kb.get_format("iq2_xs").declared
    functions = [
        f'extern "C" void record_{name}_{half}(const unsigned char* const* fields, float* out, int* seen) '
        f"{{ decode_record<{RECORDS[name].struct.format(half=half)}>(fields, out, seen); }}\n"
        f'extern "C" int bytes_{name}_{half}(int i) {{ using R = {RECORDS[name].struct.format(half=half)}; '
        "return i < 0 ? RecordLayout<R>::stride() : R::bytes(i); }"
        for name, half in DECODERS
    ]
    header = '#include "linear/gguf_grid_records.cuh"\n'
    return host.build(f"{declarations(declared)}\n{header}{SOURCE}" + "\n".join(functions))


@pytest.mark.parametrize(("name", "half"), DECODERS)
def test_every_record_is_what_numpy_decodes(library, name, half):
    format, rng = kb.get_format(name), np.random.default_rng(0)
    count, records = 300, RECORDS[name]
    planes = host.random_planes(rng, format, (count, 256))
    planes.pop("scale", None)  # of all: the epilogue's
    expected = host.decoded_by_numpy(format, planes, (count, 256))
    fields = [planes[field.name].reshape(count, -1).view(np.uint8) for field in format.fields]
    size = getattr(library, f"bytes_{name}_{half}")
    assert [size(i) for i in range(len(fields))] == [field.shape[1] for field in fields]
    assert size(-1) == records.stride
    assert records.stride % 32 == 16
    found, seen = np.empty((count, 256), np.float32), np.zeros((count, 256), np.int32)
    decode = getattr(library, f"record_{name}_{half}")
    for i in range(count):
        own = (ctypes.c_void_p * len(fields))(*(field[i].ctypes.data for field in fields))
        decode(own, found[i].ctypes.data_as(ctypes.c_void_p), seen[i].ctypes.data_as(ctypes.c_void_p))
    assert (seen == 1).all(), "each element once, of codes below 128 unless the decoder says otherwise"
    assert not host.different(expected, found)
