// GGUF's types. The contracts are those of kbitcupy/formats/gguf. A decoder's planes are the fields of its class, in
// their order.
#pragma once
#include "formats/gguf_fields.cuh"

// 8-bit integers, 32 a block. plane: d, qs
struct Q8_0 {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        unsigned word[2];
        load_words(planes, 1, octet * 8, planes.size, word);
        const float d = __half2float(planes.at<__half>(0)[octet >> 2]);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const signed char q = static_cast<signed char>(word[e / 4] >> e % 4 * 8);
            v[e] = __fmul_rn(d, static_cast<float>(q));
        }
    }
};

// 4-bit integers, 32 a block: element i in the low nibble of byte i, or the high one of byte i - 16. plane: d, qs
struct Q4_0 : Grouped<Q4_0, 2, 2> {
    // Octets of both halves of a block, or the one of either.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        unsigned word[2];
        load_words(planes, 1, (octet >> 2) * 16 + (octet & 1) * 8, planes.size / 2, word);
        const float d = __half2float(planes.at<__half>(0)[octet >> 2]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int shift = N == 1 ? static_cast<int>(octet >> 1 & 1) * 4 : j * 4;
            scale_bytes(d, word[0] >> shift & 0x0f0f0f0fu, word[1] >> shift & 0x0f0f0f0fu, 8, v[j]);
        }
    }
};

// -1, 0 and 1 in 2 bits, 256 a block: bits 2s of byte 32p + m are element 128p + 32s + m. plane: qs, d
struct TQ2_0 : Grouped<TQ2_0, 4, 4> {
    // The four octets of eight bytes, or one of them.
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        const long long block = octet >> 5;
        const int part = static_cast<int>(octet) & 31;
        unsigned word[2];
        load_words(planes, 0, block * 64 + part / 16 * 32 + part % 4 * 8, planes.size / 4, word);
        const float d = __half2float(planes.at<__half>(1)[block]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int shift = N == 1 ? part / 4 % 4 * 2 : j * 2;
            scale_bytes(d, word[0] >> shift & 0x03030303u, word[1] >> shift & 0x03030303u, 1, v[j]);
        }
    }
};
