// -1, 0 and 1 times a scale. The contract is that of kbitcupy/formats/ternary.py.
#pragma once
#include "formats/planes.cuh"

// plane   codes, scale
// number  row, run, per_row: element i has scale number i / row * per_row + i % row / run
struct Ternary {
    // The four octets of eight bytes are decoded together, as those of tq2_0.
    static constexpr int TABLE = 0, TOGETHER = 4, APART = 4;

    __device__ __forceinline__ static float scale_of(const Planes& planes, long long element) {
        const long long row = planes.number[0], r = divide(element, row);
        return planes.at<float>(1)[r * planes.number[2] + divide(element - r * row, planes.number[1])];
    }
    // Code e of a word, less 1: the low bits of a float from 2^23 on, as conversions are slow.
    __device__ __forceinline__ static float trit(unsigned word, int e) {
        return __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + e)), 8388609.0f);
    }

    // An octet in which blocks end anywhere.
    __device__ __forceinline__ static void decode_ragged(
        const Planes& planes, long long first, const unsigned (&code)[2], float (&v)[8]) {
        const long long row = planes.number[0], run = planes.number[1];
        long long r = divide(first, row), column = first - r * row, block = divide(column, run);
        long long end = (block + 1) * run;  // of the block in its row, which may be shorter
        float scale = planes.at<float>(1)[r * planes.number[2] + block];
#pragma unroll
        for (int e = 0; e < 8; ++e, ++column) {
            if (e > 0 && (column == end || column == row) && first + e < planes.size) {
                if (column == row) ++r, column = 0, block = 0, end = run;
                else ++block, end += run;
                scale = planes.at<float>(1)[r * planes.number[2] + block];
            }
            v[e] = multiply_ieee(scale, trit(code[e / 4], e % 4));
        }
    }

    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long lengths = planes.number[0] | planes.number[1];
        const int part = static_cast<int>(octet) & 15;
        unsigned word[2];
        load_words(planes, 0, (octet >> 4) * 32 + part % 4 * 8, (planes.size + 127) / 128 * 32, word);
        float scale = lengths & 7 ? 0.0f : scale_of(planes, octet * 8);  // of all four where they are in one block
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const long long first = octet * 8 + j * 32;
            const int shift = N == 1 ? part / 4 * 2 : j * 2;
            const unsigned code[2] = {word[0] >> shift & 0x03030303u, word[1] >> shift & 0x03030303u};
            if (lengths & 7) {
                decode_ragged(planes, first, code, v[j]);
                continue;
            }
            if (j > 0 && lengths & 127) scale = scale_of(planes, first);
#pragma unroll
            for (int e = 0; e < 8; ++e) v[j][e] = multiply_ieee(scale, trit(code[e / 4], e % 4));
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
