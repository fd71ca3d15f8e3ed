// Affine integers: int8, uint8, int4, uint4. The contract is that of kbitcupy/formats/affine.
#pragma once
#include <cuda_fp16.h>

#include "common/ieee.cuh"
#include "formats/planes.cuh"

// Codes of BITS bits as numbers that are not negative, with 2^(BITS - 1) added, which flips a bit, where they are
// SIGNED: the low bits of a float from 2^23 on.
template <int BITS, bool SIGNED>
struct AffineCodes {
    static constexpr int HALF = SIGNED ? 1 << (BITS - 1) : 0, LOWEST = -HALF, HIGHEST = (1 << BITS) - 1 - HALF;

    // What is taken from such a float to leave the code less a zero point.
    __device__ __forceinline__ static float bias_of(int zero) {
        return static_cast<float>((1 << 23) + HALF + (zero < LOWEST ? LOWEST : zero > HIGHEST ? HIGHEST : zero));
    }
    // The code from bit `bit` of a word on, less a zero point. MANY: all codes of the word are wanted, so that bytes
    // share the flip, and a permutation puts one of them below the exponent.
    template <bool MANY>
    __device__ __forceinline__ static float steps(unsigned word, int bit, float bias) {
        unsigned bits = 0x4b000000u;
        if constexpr (MANY && BITS == 8) bits = __byte_perm(word ^ HALF * 0x01010101u, bits, 0x7650 | bit / 8);
        else bits |= (word >> bit & ((1u << BITS) - 1)) ^ HALF;
        return __fsub_rn(__uint_as_float(bits), bias);
    }
};

// A decoder of integers of BITS bits. Entry(planes, i) is what block i multiplies and adds, and decoded<MANY>(word,
// bit) is the element whose code begins with that bit of a word.
//
// number  row, run, per_row: element i has block number i / row * per_row + i % row / run; the last is Entry's
template <int BITS, typename Entry>
struct AffineOctets {
    static constexpr int TABLE = 0, TOGETHER = 4, APART = 1;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        const long long row = planes.number[0], run = planes.number[1], per_row = planes.number[2], first = octet * 8;
        unsigned word[BITS / 4];
        load_words(planes, 0, first * BITS / 8, (planes.size * BITS + 7) / 8, word);
        long long r = divide(first, row), column = first - r * row, block = divide(column, run);
        Entry entry(planes, r * per_row + block);
        if (((row | run) & 7) == 0) {
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = entry.template decoded<false>(word[e * BITS / 32], e * BITS % 32);
            return;
        }
        long long end = (block + 1) * run;  // of the block in its row, which may be shorter
#pragma unroll
        for (int e = 0; e < 8; ++e, ++column) {
            if (e > 0 && (column == end || column == row) && first + e < planes.size) {
                if (column == row) ++r, column = 0, block = 0, end = run;
                else ++block, end += run;
                entry = Entry(planes, r * per_row + block);
            }
            v[e] = entry.template decoded<false>(word[e * BITS / 32], e * BITS % 32);
        }
    }

    // Where blocks are whole runs of 32 elements, these share a scale, and what it takes to find it.
    __device__ __forceinline__ static bool together(const Planes& planes) {
        return ((planes.number[0] | planes.number[1]) & 31) == 0;
    }

    __device__ __forceinline__ static void decode_together(const Planes& planes, long long octet, float (&v)[4][8]) {
        const long long row = planes.number[0], run = planes.number[1], per_row = planes.number[2], first = octet * 8;
        const unsigned char* from = planes.at<unsigned char>(0) + first * BITS / 8;
        unsigned word[BITS / 4][4];
#pragma unroll
        for (int i = 0; i < BITS / 4; ++i) load_aligned(from + 16 * i, word[i]);
        const long long r = divide(first, row);
        const Entry entry(planes, r * per_row + divide(first - r * row, run));
#pragma unroll
        for (int e = 0; e < 32; ++e) {
            const int bit = e * BITS;
            v[e / 8][e % 8] = entry.template decoded<true>(word[bit / 128][bit / 32 % 4], bit % 32);
        }
    }
};

// A scale as a factor, and its zero point.
template <int BITS, bool SIGNED>
struct AffineEntry {
    using Codes = AffineCodes<BITS, SIGNED>;
    float scale, bias;
    __device__ __forceinline__ AffineEntry(const Planes& planes, long long number)
        : scale(usable(planes.at<float>(1)[number])) {
        bias = Codes::bias_of(planes.plane[2] ? planes.at<int>(2)[number] : static_cast<int>(planes.number[3]));
    }
    template <bool MANY>
    __device__ __forceinline__ float decoded(unsigned word, int bit) const {
        return multiply_ieee(scale, Codes::template steps<MANY>(word, bit, bias));
    }
};

// plane   codes, scale, zero_point (null: all have number[3])
// number  of AffineOctets; the zero point of all
template <int BITS, bool SIGNED>
struct Affine : AffineOctets<BITS, AffineEntry<BITS, SIGNED>> {};

// The same where scales may have 16 bits, zero points one byte, and blocks offsets.
template <int BITS, bool SIGNED>
struct AffineStoredEntry {
    using Codes = AffineCodes<BITS, SIGNED>;
    float scale, bias, offset;

    __device__ __forceinline__ AffineStoredEntry(const Planes& planes, long long number) {
        const int kinds = static_cast<int>(planes.number[3] >> 32);
        scale = number_at(planes, 1, kinds & 3, number);
        if (planes.plane[3]) {  // negative scales count there
            scale = ieee::finite(scale), bias = Codes::bias_of(0), offset = number_at(planes, 3, kinds & 3, number);
        } else {
            scale = usable(scale), bias = Codes::bias_of(zero_at(planes, kinds, number)), offset = -0.0f;
        }
    }
    // -0 changes nothing: the sum is that of all.
    template <bool MANY>
    __device__ __forceinline__ float decoded(unsigned word, int bit) const {
        return ieee::add(multiply_ieee(scale, Codes::template steps<MANY>(word, bit, bias)), offset);
    }
    __device__ __forceinline__ static float number_at(const Planes& planes, int plane, int kind, long long number) {
        if (kind == 0) return planes.at<float>(plane)[number];
        const unsigned short bits = planes.at<unsigned short>(plane)[number];
        return kind == 1 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
    __device__ __forceinline__ static int zero_at(const Planes& planes, int kinds, long long number) {
        if (!planes.plane[2]) return static_cast<int>(planes.number[3]);
        if ((kinds & 4) == 0) return planes.at<int>(2)[number];
        return SIGNED ? planes.at<signed char>(2)[number] : planes.at<unsigned char>(2)[number];
    }
};

// plane   codes, scale, zero_point (null: all have the same), offset, which is stored as scales are (null: none)
// number  of AffineOctets; the zero point of all in the low half of the last, and in the high half
//         bits 0 and 1: scales are 0: float32, 1: float16, 2: bfloat16; bit 2: zero points have one byte
template <int BITS, bool SIGNED>
struct AffineStored : AffineOctets<BITS, AffineStoredEntry<BITS, SIGNED>> {};
