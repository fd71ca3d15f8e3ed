"""Decoders of the streaming products (kernels/linear/gguf_records.cuh), compiled for the host, beside NumPy."""

import ctypes
import itertools
import os

import numpy as np
import pytest
from host import compiled as host

import kbitcupy as kb
from kbitcupy.backend.structs import declarations
from kbitcupy.products.records import RecordKernel
from kbitcupy.products.routes import Device

RECORDS = {name: found for name in kb.list_formats() if (found := kb.get_format(name).records())}
#: The decoders: some types have another one where tokens are float16.
DECODERS = [(name, way) for name in RECORDS for way in (("Record", "Lanes") if RECORDS[name].lanes else ("Record",))]

SOURCE = """
struct HostRecord {
    const unsigned char* from;
    unsigned narrow;
    unsigned word(int at) const { unsigned v; __builtin_memcpy(&v, from + at, 4); return v; }
    unsigned pair(int at) const { unsigned short v; __builtin_memcpy(&v, from + at, 2); return v; }
    unsigned byte(int at) const { return from[at]; }
    template <int N>
    void words(unsigned (&w)[N], int at) const { __builtin_memcpy(w, from + at, 4 * N); }
};
template <typename R>
struct HostTable {
    int lane;
    unsigned kept[3] = {};
    explicit HostTable(int lane) : lane(lane) {
        if constexpr (R::KEPT) for (int i = 0; i < 3; ++i) kept[i] = R::kept(i);
    }
    template <int COPIES>
    unsigned entry(int first, unsigned i) const {
        const unsigned at = first + i * COPIES + lane % COPIES;
        return at < unsigned(R::TABLE) ? R::table_word(at) : ~0u;
    }
    template <int COPIES, int ENTRIES>
    unsigned word(int first, unsigned v, int right = 0) const {
        return entry<COPIES>(first, v >> right % 32 & (ENTRIES - 1));
    }
};
// As a lane decodes a record of elements of its own.
template <typename R>
void decode_lanes(const HostRecord& record, int t, float* out, int* seen) {
    const HostTable<R> table(5 * t);
    R r;
    r.fetch(record, t);
    for (int s = 0; s < 16; ++s) {
        if (s % 8 == 0) r.look_up(table, s / 8);
        unsigned a[2];
        r.scaled(s, a);
        const int own = R::ORDER == BY_FIELDS ? s / 4 : s * 4 / R::SUB;  // of the lane's sub-blocks
        float minimum = 0.0f;
        if constexpr (R::OFFSETS) minimum = (r.minima(table, own / 2) >> own % 2 * 16 & 127u) * r.dmin;
        for (int e = 0; e < 4; ++e) {
            float times = half_of(a[e % 2], e / 2) * 16777216.0f;
            for (int part = 0; part < R::part(s); ++part) times *= R::UNIT;
            const int k = first_of<R::ORDER>(t, s) + e;
            out[k] = __fsub_rn(__fmul_rn(times, r.d), minimum), seen[k] += 1;
            if (step_of<R::ORDER>(k) != s || lane_of<R::ORDER>(k) != t) seen[k] += 100;
        }
    }
}
// Element k of a record, whose byte less its bias is c.
template <typename R>
float element(const R& r, const HostRecord& record, int k, int c) {
    const int j = k % 128 / R::SUB;
    int whole = c;
    if constexpr (R::WHOLE) whole *= r.whole(j);
    if constexpr (R::APART) {
        // A lane has minima of some sub-blocks: take those of the lane that has this one's.
        typename R::Minima minima;
        const int sub = k / R::SUB;
        minima.load(record, sub % 8 / 2);
        const float minimum = static_cast<float>(minima.two[sub / 8] >> sub % 2 * 8 & 255u);
        return __fadd_rn(__fmul_rn(r.outer(), static_cast<float>(whole)), __fmul_rn(minima.d, minimum));
    } else if constexpr (R::WHOLE) {
        return __fmul_rn(static_cast<float>(whole), r.outer());
    } else {
        return __fmul_rn(__fadd_rn(__fmul_rn(static_cast<float>(c), r.factor(j)), r.offset(j)), r.outer());
    }
}
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
        if constexpr (R::LANES) decode_lanes<R>(record, t, out, seen);
        else for (int half = 0; half < 2; ++half) {
            R r;
            r.load(record, HostTable<R>(5 * t), t, half);
            for (int s = 0; s < 8; ++s)
                for (int e = 0; e < 4; ++e) {
                    const int k = first_of<R::ORDER>(t, 8 * half + s) + e;
                    if (step_of<R::ORDER>(k) != 8 * half + s || lane_of<R::ORDER>(k) != t) seen[k] += 100;
                    int codes[2], kinds = 0;  // as bytes with a bias, as signed ones
                    if constexpr (!R::SIGNED || R::BIAS) codes[kinds++] = int(r.codes(s) >> 8 * e & 255) - R::BIAS;
                    if constexpr (R::SIGNED) codes[kinds++] = static_cast<signed char>(r.signed_codes(s) >> 8 * e);
                    if (codes[0] != codes[kinds - 1]) seen[k] += 100;
                    out[k] = element(r, record, k, codes[0]), seen[k] += 1;
                }
        }
}
"""


@pytest.mark.parametrize("name", ["q2_k", "q6_k", "iq3_s", "iq1_m"])
def test_cuts(name):
    """All tiles have a team, no warp of which is without a record of each, and what they need is there."""
    gpu = Device(0, 90, 132, 227 << 10, True, True)
    for n, each, tokens in itertools.product((16, 1000, 8192, 28672), (1, 3, 10, 16, 32, 112), (1, 5, 8, 40)):
        for grouped, staged in ((False, False), (True, False), (False, True)):
            cut = RecordKernel(RECORDS[name], (n, each * 256), np.dtype("float16"), gpu, tokens, grouped, staged)
            if not cut.fits:
                assert grouped and each == 112
                continue
            warps, resident, _, shared = cut._cut(
                each, cut._splits, min(tokens, cut.tokens) if not grouped else 8, 227 << 10
            )
            assert shared <= 227 << 10 and warps * resident <= 16
            assert warps % cut._teams == 0 and warps // cut._teams <= each // cut._splits
            tiles = -(-n // 16)
            passes = -(-tiles // (cut._blocks * cut._teams))
            assert cut._blocks == 1 or (cut._blocks - 1) * cut._teams * passes < tiles, "no thread block is idle"
    large = name == "q6_k"  # one team then reads enough of a row side by side
    assert RecordKernel(RECORDS[name], (28672, 8192), np.dtype("float16"), gpu, 8)._teams == 2 - large
    assert RecordKernel(RECORDS[name], (14336, 4096), np.dtype("float16"), gpu, 8)._teams == 1


@pytest.fixture(scope="module")
def library():
    if host.compiler() is None:
        missing = "needs a C++ compiler: c++, g++ or clang++ on the PATH, or CXX"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    declared = kb.get_format("iq2_xs").declared
    functions = [
        f'extern "C" void record_{name}_{way}(const unsigned char* const* fields, float* out, int* seen) '
        f"{{ decode_record<{RECORDS[name].struct.format(way=way)}>(fields, out, seen); }}\n"
        f'extern "C" int bytes_{name}_{way}(int i) {{ using R = {RECORDS[name].struct.format(way=way)}; '
        "return i < 0 ? RecordLayout<R>::stride() : R::bytes(i); }"
        for name, way in DECODERS
    ]
    header = '#include "linear/gguf_grid_lanes.cuh"\n'
    return host.build(f"{declarations(declared)}\n{header}{SOURCE}" + "\n".join(functions))


@pytest.mark.parametrize(("name", "way"), DECODERS)
def test_every_record_is_what_numpy_decodes(library, name, way):
    format, rng = kb.get_format(name), np.random.default_rng(0)
    count, records = 300, RECORDS[name]
    planes = host.random_planes(rng, format, (count, 256))
    planes.pop("scale", None)  # of all: the epilogue's
    expected = host.decoded_by_numpy(format, planes, (count, 256))
    fields = [planes[field.name].reshape(count, -1).view(np.uint8) for field in format.fields]
    size = getattr(library, f"bytes_{name}_{way}")
    assert [size(i) for i in range(len(fields))] == [field.shape[1] for field in fields]
    assert size(-1) == records.stride
    assert records.stride % 32 == 16
    found, seen = np.empty((count, 256), np.float32), np.zeros((count, 256), np.int32)
    decode = getattr(library, f"record_{name}_{way}")
    for i in range(count):
        own = (ctypes.c_void_p * len(fields))(*(field[i].ctypes.data for field in fields))
        decode(own, found[i].ctypes.data_as(ctypes.c_void_p), seen[i].ctypes.data_as(ctypes.c_void_p))
    assert (seen == 1).all(), "each element once, the same in both ways"
    assert not host.different(expected, found)
