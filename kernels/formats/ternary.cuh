// -1, 0 and 1 times a scale. The contract is that of kbitcupy/formats/ternary.py.
#pragma once
#include "formats/planes.cuh"

// The scale of an element, and of those behind it.
struct ScaleWalk {
    const float* scales;
    long long row, run, per_row;
    long long r, column, block, end;  // end: of the block in its row, which may be shorter
    float scale;

    // QUICK: rows are shorter than 2^32, and number[3] holds the bits of 1 / row in float64. A division of 64 bits is a
    // call, for which registers would spill where all of an array is decoded.
    template <bool QUICK>
    __device__ __forceinline__ static ScaleWalk at(const Planes& planes, long long element) {
        ScaleWalk walk{planes.at<float>(1), planes.number[0], planes.number[1], planes.number[2]};
        if constexpr (QUICK) {
            walk.r = quotient(element, walk.row, planes.number[3]);
            walk.column = element - walk.r * walk.row;
            walk.block = static_cast<unsigned>(walk.column) / static_cast<unsigned>(walk.run);
        } else {
            walk.r = divide(element, walk.row);
            walk.column = element - walk.r * walk.row;
            walk.block = divide(walk.column, walk.run);
        }
        walk.end = (walk.block + 1) * walk.run;
        walk.scale = walk.scales[walk.r * walk.per_row + walk.block];
        return walk;
    }
    // a / b, by the bits of 1 / b: the product is off by less than 1.
    __device__ __forceinline__ static long long quotient(long long a, long long b, long long inverse) {
        long long q = static_cast<long long>(static_cast<double>(a) * double_of(inverse));
        q -= q * b > a;
        return q + ((q + 1) * b <= a);
    }
    __device__ __forceinline__ static double double_of(long long bits) {
        double number;
        memcpy(&number, &bits, sizeof(number));
        return number;
    }
    // The element `step` further on, which is in the array; this one is `within` such a step, of which blocks and rows
    // are multiples.
    __device__ __forceinline__ void advance(long long within, int step) {
        column += step;
        if (column - within != end && column - within != row) return;
        if (column - within == row) ++r, column = within, block = 0, end = run;
        else ++block, end += run;
        scale = scales[r * per_row + block];
    }
};

// Code e of two words, less 1: the low bits of a float from 2^23 on, as conversions are slow.
__device__ __forceinline__ float trit_of(const unsigned (&code)[2], int e) {
    return __fsub_rn(__uint_as_float(__byte_perm(code[e / 4], 0x4b000000u, 0x7440u + e % 4)), 8388609.0f);
}
__device__ __forceinline__ void scale_trits(float scale, const unsigned (&code)[2], float (&v)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = multiply_ieee(scale, trit_of(code, e));
}

// The codes of N octets of the same eight bytes, from `octet` on every fourth, or of those `ahead` blocks further on:
// known in advance, it becomes a part of the load.
template <int N>
__device__ __forceinline__ void load_trits(
    const Planes& planes, long long octet, unsigned (&code)[N][2], int ahead = 0) {
    const int part = static_cast<int>(octet) & 15;
    unsigned word[2];
    const long long first = (octet >> 4) * 32 + part % 4 * 8 + ahead * 32;
    load_words(planes, 0, first, (planes.size + 127) / 128 * 32, word);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int shift = N == 1 ? part / 4 * 2 : j * 2;
        code[j][0] = word[0] >> shift & 0x03030303u, code[j][1] = word[1] >> shift & 0x03030303u;
    }
}

// One scale for all, or for rows and groups of multiples of 32. plane: codes, scale
//
// number  of rows and groups: row, run, per_row: element i has scale number i / row * per_row + i % row / run
template <bool ONE>
struct Ternary {
    // Four octets share eight bytes. Those are decoded together where scales are looked up, which is done once for
    // them. Under one scale it counts for more to write octets of a warp next to each other, as tq2_0 does: those at
    // the same place of every second block are decoded together.
    static constexpr int TABLE = 0, TOGETHER = 4, BLOCKS = 2, APART = ONE ? BLOCKS * 16 : 4;

    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        if constexpr (ONE) {
            unsigned code[N][1][2];
#pragma unroll
            for (int j = 0; j < N; ++j) load_trits(planes, octet, code[j], j * BLOCKS);
            const float scale = __ldg(planes.at<float>(1));
#pragma unroll
            for (int j = 0; j < N; ++j) scale_trits(scale, code[j][0], v[j]);
        } else {
            unsigned code[N][2];
            load_trits(planes, octet, code);
            ScaleWalk walk = ScaleWalk::at<true>(planes, octet * 8);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (j > 0) walk.advance(octet % 4 * 8, 32);
                scale_trits(walk.scale, code[j], v[j]);
            }
        }
    }
    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        decode(planes, octet, reinterpret_cast<float (&)[1][8]>(v));
    }
    __device__ __forceinline__ static void decode_together(
        const Planes& planes, long long octet, float (&v)[TOGETHER][8]) {
        decode(planes, octet, v);
    }
};

// Rows and groups of any length. plane and number as above
struct TernaryRows {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        unsigned code[1][2];
        load_trits(planes, octet, code);
        ScaleWalk walk = ScaleWalk::at<false>(planes, octet * 8);
        if (((walk.row | walk.run) & 7) == 0) {
            scale_trits(walk.scale, code[0], v);
            return;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (e > 0 && octet * 8 + e < planes.size) walk.advance(0, 1);
            v[e] = multiply_ieee(walk.scale, trit_of(code[0], e));
        }
    }
};
