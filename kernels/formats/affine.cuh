// Affine integers: int8, uint8, int4, uint4. The contract is that of kbitcupy/formats/affine.
#pragma once
#include "formats/planes.cuh"

// plane   codes, scale, zero_point (null: all have number[3])
// number  row, run, per_row: element i has scale number i / row * per_row + i % row / run; and the zero point of all
template <int BITS, bool SIGNED>
struct Affine {
    static constexpr int TABLE = 0, TOGETHER = 4, APART = 1;
    static constexpr int HALF = SIGNED ? 1 << (BITS - 1) : 0, LOWEST = -HALF, HIGHEST = (1 << BITS) - 1 - HALF;

    // A scale as a factor, and its zero point as what is taken from 2^23 + HALF + code.
    struct Entry {
        float scale, bias;
        __device__ __forceinline__ Entry(const Planes& planes, long long number)
            : scale(usable(planes.at<float>(1)[number])) {
            const int zero = planes.plane[2] ? planes.at<int>(2)[number] : static_cast<int>(planes.number[3]);
            bias = static_cast<float>((1 << 23) + HALF + (zero < LOWEST ? LOWEST : zero > HIGHEST ? HIGHEST : zero));
        }
    };

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        const long long row = planes.number[0], run = planes.number[1], per_row = planes.number[2], first = octet * 8;
        unsigned word[BITS / 4];
        load_words(planes, 0, first * BITS / 8, (planes.size * BITS + 7) / 8, word);
        long long r = divide(first, row), column = first - r * row, block = divide(column, run);
        Entry entry(planes, r * per_row + block);
        if (((row | run) & 7) == 0) {
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = decoded(word[e * BITS / 32], e * BITS % 32, entry);
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
            v[e] = decoded(word[e * BITS / 32], e * BITS % 32, entry);
        }
    }

    // Blocks are mostly whole runs of 32 elements, which then share a scale, and what it takes to find it.
    __device__ __forceinline__ static void decode_together(const Planes& planes, long long octet, float (&v)[4][8]) {
        const long long row = planes.number[0], run = planes.number[1], per_row = planes.number[2], first = octet * 8;
        if (((row | run) & 31) != 0) {
            // Rare, and long: it stands here once, and its octet is chosen without an index into v.
#pragma unroll 1
            for (int j = 0; j < 4; ++j) {
                float one[8];
                decode8(planes, octet + j, one);
#pragma unroll
                for (int i = 0; i < 32; ++i) v[i / 8][i % 8] = i / 8 == j ? one[i % 8] : v[i / 8][i % 8];
            }
            return;
        }
        const unsigned char* from = planes.at<unsigned char>(0) + first * BITS / 8;
        unsigned word[BITS / 4][4];
#pragma unroll
        for (int i = 0; i < BITS / 4; ++i) load_aligned(from + 16 * i, word[i]);
        const long long r = divide(first, row);
        const Entry entry(planes, r * per_row + divide(first - r * row, run));
#pragma unroll
        for (int e = 0; e < 32; ++e) {
            const int bit = e * BITS;
            v[e / 8][e % 8] = decoded(word[bit / 128][bit / 32 % 4], bit % 32, entry);
        }
    }

    // The code from bit `bit` of a word on. With HALF added, which flips its bit, codes are not negative: the low bits
    // of a float from 2^23 on.
    __device__ __forceinline__ static float decoded(unsigned word, int bit, const Entry& entry) {
        const unsigned code = (word >> bit & ((1u << BITS) - 1)) ^ HALF;
        return multiply_ieee(entry.scale, __fsub_rn(__uint_as_float(0x4b000000u | code), entry.bias));
    }
};
