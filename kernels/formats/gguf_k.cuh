// GGUF's K types, and its types of 4 bits with a table. The contracts are those of kbitcupy/formats/gguf/kquants.py and
// iq4.py. A decoder's planes are the fields of its class, in their order.
//
// Of a block of 256 elements octet `part`, 0 to 31, is meant; part % 4 is which 8 of 32 bytes it lies in.
#pragma once
#include "common/ieee.cuh"
#include "formats/gguf_fields.cuh"

// ---- types with minima -----------------------------------------------------------------------------------------

// 2-bit integers, 256 a block, with a 4-bit scale and minimum for each 16 of them. plane: scales, qs, d and dmin
struct Q2_K : Grouped<Q2_K, 4, 4> {
    // The four octets of eight bytes, or one of them.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31, half = part / 16, within = part % 4;
        unsigned word[2], scales[2], d[1];
        load_words(planes, 1, block * 64 + half * 32 + within * 8, planes.size / 4, word);
        load_words(planes, 0, block * 16 + half * 8, planes.size / 16, scales);
        load_each(planes, 2, block * 4, d);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int s = N == 1 ? part / 4 % 4 : j;
            const unsigned both = (s < 2 ? scales[0] : scales[1]) >> (within / 2 + s % 2 * 2) * 8;
            const float scale = __fmul_rn(half_of(d[0], 0), from_byte(both & 15u, 0));
            const float minimum = __fmul_rn(half_of(d[0], 1), from_byte(both >> 4 & 15u, 0));
            scale_bytes_less(scale, minimum, word[0] >> s * 2 & 0x03030303u, word[1] >> s * 2 & 0x03030303u, v[j]);
        }
    }
};

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

// q4_k with a fifth bit: bit s of byte m is that of element 32 s + m. plane: d and dmin, scales, qh, qs
struct Q5_K : Grouped<Q5_K, 2, 4> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31, pair = part / 8, within = part % 4;
        unsigned word[2], top[2], d[1];
        load_words(planes, 3, block * 128 + pair * 32 + within * 8, planes.size / 2, word);
        load_words(planes, 2, block * 32 + within * 8, planes.size / 8, top);
        load_each(planes, 0, block * 4, d);
        const ScalesOfPair scales(planes, 1, block, pair);
        top[0] >>= pair * 2, top[1] >>= pair * 2;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int sub = N == 1 ? part / 4 % 2 : j;
            const float scale = __fmul_rn(half_of(d[0], 0), from_byte(scales.sc, sub));
            const float minimum = __fmul_rn(half_of(d[0], 1), from_byte(scales.mn, sub));
            unsigned code[2];
#pragma unroll
            for (int w = 0; w < 2; ++w)
                code[w] = (word[w] >> sub * 4 & 0x0f0f0f0fu) | (top[w] << (4 - sub) & 0x10101010u);
            scale_bytes_less(scale, minimum, code[0], code[1], v[j]);
        }
    }
};

// ---- types with scales alone -----------------------------------------------------------------------------------

// 3-bit integers, 256 a block, with a 6-bit scale for each 16 of them; their top bits lie as those of q5_k. plane:
// hmask, qs, scales, d
struct Q3_K : Grouped<Q3_K, 4, 4> {
    // The four octets of eight bytes, or one of them.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31, half = part / 16, within = part % 4;
        unsigned word[2], top[2], packed[3];
        load_words(planes, 1, block * 64 + half * 32 + within * 8, planes.size / 4, word);
        load_words(planes, 0, block * 32 + within * 8, planes.size / 8, top);
        load_each(planes, 2, block * 12, packed);
        const float d = __half2float(planes.at<__half>(3)[block]);
        top[0] >>= half * 4, top[1] >>= half * 4;
        // Sub-block j = 8 half + 2 s + within / 2: 4 bits of byte j % 8, and 2 of byte 8 + j % 4 at 2 (j / 4).
        const int odd = within / 2 * 8;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int s = N == 1 ? part / 4 % 4 : j;
            const unsigned low = (s < 2 ? packed[0] : packed[1]) >> (odd + s % 2 * 16 + half * 4) & 15u;
            const unsigned high = packed[2] >> (odd + s % 2 * 16 + half * 4 + s / 2 * 2) & 3u;
            const float scale = __fmul_rn(d, from_byte(low | high << 4, 0, 32));
            unsigned code[2];
#pragma unroll
            for (int w = 0; w < 2; ++w) code[w] = (word[w] >> s * 2 & 0x03030303u) | (top[w] >> s << 2 & 0x04040404u);
            scale_bytes(scale, code[0], code[1], 4, v[j]);
        }
    }
};

// 6-bit integers, 256 a block, with an 8-bit scale for each 16 of them: four bits in ql, where byte 64 p + m has
// element 128 p + m in its low nibble and 128 p + 64 + m in the high one, and two in qh. plane: ql, qh, scales, d
struct Q6_K : Grouped<Q6_K, 4, 4> {
    // The four octets of eight bytes of qh, or one of them.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31, half = part / 16, within = part % 4;
        const int first = N == 1 ? part / 4 % 2 : 0;
        unsigned low[N == 1 ? 1 : 2][2], top[2], scales[2];
#pragma unroll
        for (int i = 0; i < (N == 1 ? 1 : 2); ++i)
            load_words(planes, 0, block * 128 + half * 64 + (first + i) * 32 + within * 8, planes.size / 2, low[i]);
        load_words(planes, 1, block * 64 + half * 32 + within * 8, planes.size / 4, top);
        load_words(planes, 2, block * 16 + half * 8, planes.size / 16, scales);
        const float d = __half2float(planes.at<__half>(3)[block]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int s = N == 1 ? part / 4 % 4 : j;
            // A sign bit that is flipped adds 128.
            const unsigned own = (s < 2 ? scales[0] : scales[1]) ^ 0x80808080u;
            const float scale = __fmul_rn(d, from_byte(own, within / 2 + s % 2 * 2, 128));
            unsigned code[2];
#pragma unroll
            for (int w = 0; w < 2; ++w)
                code[w] = (low[j % 2][w] >> s / 2 * 4 & 0x0f0f0f0fu) | (top[w] >> s * 2 << 4 & 0x30303030u);
            scale_bytes(scale, code[0], code[1], 32, v[j]);
        }
    }
};

// 8-bit integers, 256 a block, with a float32 scale: the product rounds, and may be subnormal. plane: d, qs, bsums
struct Q8_K {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        unsigned word[2];
        load_words(planes, 1, octet * 8, planes.size, word);
        const float d = planes.at<float>(0)[octet >> 5];
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = ieee::multiply(d, from_byte(word[e / 4] ^ 0x80808080u, e % 4, 128));
    }
};

// ---- types with a table ----------------------------------------------------------------------------------------

// The numbers of a nibble, plus 128: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
constexpr unsigned IQ4_VALUES[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};

// Octets of both halves of 32 elements, element i of which is the low nibble of byte i or the high one of byte i - 16;
// or the one of either.
template <int N>
__device__ __forceinline__ void scale_iq4(float scale, const unsigned (&word)[2], int high, float (&v)[N][8]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        unsigned found[2];  // of two bytes each, the low nibble of a byte first
        look_up(IQ4_VALUES, word[w], found);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int nibble = N == 1 ? high : j;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                v[j][w * 4 + e] = __fmul_rn(scale, from_byte(found[e / 2], e % 2 * 2 + nibble, 128));
        }
    }
}

// A table of 16 values, 32 elements a block. plane: d, qs
struct IQ4_NL : Grouped<IQ4_NL, 2, 2> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        unsigned word[2];
        load_words(planes, 1, (octet >> 2) * 16 + (octet & 1) * 8, planes.size / 2, word);
        scale_iq4(__half2float(planes.at<__half>(0)[octet >> 2]), word, static_cast<int>(octet >> 1 & 1), v);
    }
};

// The same table, 256 elements a block, with a 6-bit scale for each 32 of them. plane: d, scales_h, scales_l, qs
struct IQ4_XS : Grouped<IQ4_XS, 2, 2> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31, sub = part / 4;
        unsigned word[2], low[1];
        load_words(planes, 3, (octet >> 2) * 16 + (octet & 1) * 8, planes.size / 2, word);
        load_each(planes, 2, block * 4, low);
        const unsigned high = planes.at<unsigned short>(1)[block];
        const unsigned ls = (low[0] >> sub * 4 & 15u) | (high >> sub * 2 & 3u) << 4;
        const float scale = __fmul_rn(__half2float(planes.at<__half>(0)[block]), from_byte(ls, 0, 32));
        scale_iq4(scale, word, part / 2 % 2, v);
    }
};
