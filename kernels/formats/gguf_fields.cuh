// How decoders of GGUF's types read fields of blocks, and make floats of small integers.
#pragma once
#include <cuda_fp16.h>

#include "formats/planes.cuh"

// What a decoder has whose octets share bytes: COUNT of them, DISTANCE apart. It writes one function for all of them
// and for any single one,
//
//     template <int N> static void decode(const Planes&, long long octet, float (&v)[N][8])
//
// which gives octets `octet` + j * APART for j < N, where N is COUNT, and `octet` the first of them, or 1.
template <typename F, int COUNT, int DISTANCE>
struct Grouped {
    static constexpr int TABLE = 0, TOGETHER = COUNT, APART = DISTANCE;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        F::decode(planes, octet, reinterpret_cast<float (&)[1][8]>(v));
    }
    __device__ __forceinline__ static void decode_together(
        const Planes& planes, long long octet, float (&v)[TOGETHER][8]) {
        F::decode(planes, octet, v);
    }
};

// An octet of one of four blocks of 256.
struct Place {
    long long block;  // the first of them
    int ahead, part;  // which, and which of its 32 octets

    // Where entry `within` of a block lies in a plane that has `each` of them a block. What is known in advance comes
    // last, so that it becomes a part of the load.
    __device__ __forceinline__ long long of(int each, int within) const { return block * each + within + ahead * each; }
};

// Octets of blocks of 256 that share no bytes: those at the same place of four blocks are decoded together, since where
// all lies there is worked out once, and all is loaded before the first is looked at. The format writes
//
//     struct Raw                                                                    what it loads of an octet
//     static Raw load(const Planes&, const Place&)
//     static void decode_raw(const Planes&, const Raw&, int part, float (&v)[8])
template <typename F>
struct FourBlocks : Grouped<F, 4, 32> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const int part = static_cast<int>(octet) & 31;
        typename F::Raw raw[N];
#pragma unroll
        for (int j = 0; j < N; ++j) raw[j] = F::load(planes, {octet >> 5, j, part});
#pragma unroll
        for (int j = 0; j < N; ++j) F::decode_raw(planes, raw[j], part, v[j]);
    }
};

// The half in the low or the high 16 bits of a word.
__device__ __forceinline__ float half_of(unsigned word, int i) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16 * i)));
}

// 16 bits of plane i from byte `at`, an even one. They lie in the plane.
__device__ __forceinline__ unsigned load_pair(const Planes& planes, int i, long long at) {
    const unsigned char* from = planes.at<unsigned char>(i) + at;
    if (planes.whole) return __ldg(reinterpret_cast<const unsigned short*>(from));
    return from[0] | from[1] << 8;
}

// N words of plane i from byte `at`, a multiple of 4. They lie in the plane.
template <int N>
__device__ __forceinline__ void load_each(const Planes& planes, int i, long long at, unsigned (&word)[N]) {
#pragma unroll
    for (int w = 0; w < N; ++w) {
        const unsigned char* from = planes.at<unsigned char>(i) + at + 4 * w;
        if (planes.whole) word[w] = __ldg(reinterpret_cast<const unsigned*>(from));
        else word[w] = from[0] | from[1] << 8 | from[2] << 16 | static_cast<unsigned>(from[3]) << 24;
    }
}

// Byte i of a word, less `bias`, as a float: exact, and without a conversion, which the GPU does slowly.
__device__ __forceinline__ float from_byte(unsigned word, int i, int bias = 0) {
    const float raised = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + i));  // 2^23 and the byte
    return __fsub_rn(raised, static_cast<float>((1 << 23) + bias));
}

// Eight elements, each a byte of two words less `bias`, times a scale: exact where the product has 24 bits.
__device__ __forceinline__ void scale_bytes(float scale, unsigned first, unsigned second, int bias, float (&v)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(scale, from_byte(e < 4 ? first : second, e % 4, bias));
}

// The same less an offset, rounded once, as the products are exact.
__device__ __forceinline__ void scale_bytes_less(
    float scale, float offset, unsigned first, unsigned second, float (&v)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = __fmaf_rn(scale, from_byte(e < 4 ? first : second, e % 4), -offset);
}

// The bytes of a table of 16 that the nibbles of a word name: those of its bytes 0 and 1 in found[0], the low nibble of
// a byte first, those of 2 and 3 in found[1].
__device__ __forceinline__ void look_up(const unsigned (&table)[4], unsigned word, unsigned (&found)[2]) {
    // Three bits choose of either half of the table, the fourth of the two.
    const unsigned index = word & 0x77777777u, which = (word >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned low = __byte_perm(table[0], table[1], index >> 16 * i);
        const unsigned high = __byte_perm(table[2], table[3], index >> 16 * i);
        found[i] = __byte_perm(low, high, which >> 16 * i);
    }
}
