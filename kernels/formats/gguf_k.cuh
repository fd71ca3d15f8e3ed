// GGUF's K types. The contracts are those of kbitcupy/formats/gguf/kquants.py. A decoder's planes are the fields of its
// class, in their order.
#pragma once
#include "formats/gguf_fields.cuh"

// Scales and minima of 6 bits, as q4_k and q5_k pack them: of sub-blocks `pair` * 2 and the next, a byte each.
struct ScalesOfPair {
    unsigned sc, mn;

    __device__ __forceinline__ ScalesOfPair(const Planes& planes, int i, long long block, int pair) {
        const long long at = block * 12 + pair % 2 * 2;
        const unsigned a = load_pair(planes, i, at), b = load_pair(planes, i, at + 4), c = load_pair(planes, i, at + 8);
        sc = pair < 2 ? a & 0x3f3fu : (c & 0x0f0fu) | (a >> 2 & 0x3030u);
        mn = pair < 2 ? b & 0x3f3fu : (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u);
    }
};

// 4-bit integers, 256 a block, with a 6-bit scale and minimum for each 32 of them. plane: d and dmin, scales, qs
struct Q4_K : Grouped<Q4_K, 2, 4> {
    // Octets of two sub-blocks, which are the nibbles of the same bytes, or one of either.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31, pair = part / 8;
        unsigned word[2], d[1];
        load_words(planes, 2, block * 128 + pair * 32 + part % 4 * 8, planes.size / 2, word);
        load_each(planes, 0, block * 4, d);
        const ScalesOfPair scales(planes, 1, block, pair);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int sub = N == 1 ? part / 4 % 2 : j;
            const float scale = __fmul_rn(half_of(d[0], 0), from_byte(scales.sc, sub));
            const float minimum = __fmul_rn(half_of(d[0], 1), from_byte(scales.mn, sub));
            const unsigned first = word[0] >> sub * 4 & 0x0f0f0f0fu, second = word[1] >> sub * 4 & 0x0f0f0f0fu;
            scale_bytes_less(scale, minimum, first, second, v[j]);
        }
    }
};
