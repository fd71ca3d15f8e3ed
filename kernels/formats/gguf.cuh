// GGUF's types. The contracts are those of kbitcupy/formats/gguf. A decoder's planes are the fields of its class, in
// their order.
#pragma once
#include "common/ieee.cuh"
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

// The same beside the sum of the codes, which no element needs. plane: d and s, qs
struct Q8_1 {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        unsigned word[2];
        load_words(planes, 1, octet * 8, planes.size, word);
        const float d = __half2float(planes.at<__half>(0)[(octet >> 2) * 2]);
        scale_bytes(d, word[0] ^ 0x80808080u, word[1] ^ 0x80808080u, 128, v);  // 128 more, so that none is negative
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

// The same from a minimum on. plane: d and m, qs
struct Q4_1 : Grouped<Q4_1, 2, 2> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        unsigned word[2], pair[1];
        load_words(planes, 1, (octet >> 2) * 16 + (octet & 1) * 8, planes.size / 2, word);
        load_each(planes, 0, (octet >> 2) * 4, pair);
        const float d = half_of(pair[0], 0), m = half_of(pair[0], 1);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int shift = N == 1 ? static_cast<int>(octet >> 1 & 1) * 4 : j * 4;
            scale_bytes_less(d, -m, word[0] >> shift & 0x0f0f0f0fu, word[1] >> shift & 0x0f0f0f0fu, v[j]);
        }
    }
};

// The codes of octets of a block of 5 bits: the low four as Q4_0 has them, in plane 2; bit i of plane 1 is bit 4 of
// element i.
template <int N>
__device__ __forceinline__ void load_five_bits(const Planes& planes, long long octet, unsigned (&code)[N][2]) {
    unsigned word[2], bits[1];
    load_words(planes, 2, (octet >> 2) * 16 + (octet & 1) * 8, planes.size / 2, word);
    load_each(planes, 1, (octet >> 2) * 4, bits);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int part = N == 1 ? static_cast<int>(octet & 3) : static_cast<int>(octet & 1) + 2 * j;
        const int shift = N == 1 ? part / 2 * 4 : j * 4;
        const unsigned eight = bits[0] >> part * 8;
        // Bit i of four goes to bit 8i + 4, by 7i + 4 places.
        code[j][0] = (word[0] >> shift & 0x0f0f0f0fu) | ((eight & 15) * 0x02040810u & 0x10101010u);
        code[j][1] = (word[1] >> shift & 0x0f0f0f0fu) | ((eight >> 4 & 15) * 0x02040810u & 0x10101010u);
    }
}

// 5-bit integers, 32 a block. plane: d, qh, qs
struct Q5_0 : Grouped<Q5_0, 2, 2> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        unsigned code[N][2];
        load_five_bits(planes, octet, code);
        const float d = __half2float(planes.at<__half>(0)[octet >> 2]);
#pragma unroll
        for (int j = 0; j < N; ++j) scale_bytes(d, code[j][0], code[j][1], 16, v[j]);
    }
};

// The same from a minimum on. plane: d and m, qh, qs
struct Q5_1 : Grouped<Q5_1, 2, 2> {
    template <int N>
    __device__ __forceinline__ static void decode(const Planes& planes, long long octet, float (&v)[N][8]) {
        unsigned code[N][2], pair[1];
        load_five_bits(planes, octet, code);
        load_each(planes, 0, (octet >> 2) * 4, pair);
        const float d = half_of(pair[0], 0), m = half_of(pair[0], 1);
#pragma unroll
        for (int j = 0; j < N; ++j) scale_bytes_less(d, -m, code[j][0], code[j][1], v[j]);
    }
};

// -1, 0 and 1 in 2 bits, 256 a block: bits 2s of byte 32p + m are element 128p + 32s + m. plane: qs, d
//
// Four octets share eight bytes, but to write those of a warp next to each other counts for more.
struct TQ2_0 : FourBlocks<TQ2_0> {
    struct Raw {
        unsigned word[2], d;
    };

    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        Raw raw;
        load_words(planes, 0, at.of(64, at.part / 16 * 32 + at.part % 4 * 8), planes.size / 4, raw.word);
        raw.d = __ldg(planes.at<unsigned short>(1) + at.of(1, 0));
        return raw;
    }
    __device__ __forceinline__ static void decode_raw(const Planes&, const Raw& raw, int part, float (&v)[8]) {
        const int shift = part / 4 % 4 * 2;
        scale_bytes(half_of(raw.d, 0), raw.word[0] >> shift & 0x03030303u, raw.word[1] >> shift & 0x03030303u, 1, v);
    }
};

// -1, 0 and 1, five to a byte, 256 a block. plane: qs, qh, d
//
// Octets 0 to 19 of a block are digits 0 to 4 of bytes 0 to 31, four octets a digit; 20 to 29 those of bytes 32 to 47,
// two a digit; 30 and 31 two digits each of the four bytes of qh.
struct TQ1_0 : FourBlocks<TQ1_0> {
    struct Raw {
        unsigned word[2], d;
    };

    // Without branches: all octets of a block are decoded by one warp.
    __device__ __forceinline__ static Raw load(const Planes& planes, const Place& at) {
        const bool last = at.part >= 30;
        const int first = at.part < 20 ? at.part % 4 * 8 : 32 + at.part % 2 * 8;
        const unsigned char* from = planes.at<unsigned char>(0) + at.block * 48 + first;
        from = (last ? planes.at<unsigned char>(1) + at.block * 4 : from) + at.ahead * (last ? 4 : 48);
        return {
            {load_word(planes, from), load_word(planes, last ? from : from + 4)},
            __ldg(planes.at<unsigned short>(2) + at.of(1, 0))};
    }
    __device__ __forceinline__ static void decode_raw(const Planes&, const Raw& raw, int part, float (&v)[8]) {
        const bool last = part >= 30;
        const int digit = last ? part % 2 * 2 : part < 20 ? part / 4 : (part - 20) / 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // (byte * 3^digit mod 256) * 3 / 256 of bytes 0 and 2 in bytes 1 and 3, and of bytes 1 and 3.
            const unsigned power = POWERS >> 8 * (digit + (half && last)) & 0xff, bytes = 0x00ff00ffu;
            const unsigned even = ((raw.word[half] & bytes) * power & bytes) * 3;
            const unsigned odd = ((raw.word[half] >> 8 & bytes) * power & bytes) * 3;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                v[half * 4 + e] = __fmul_rn(half_of(raw.d, 0), from_byte(e % 2 ? odd : even, e / 2 * 2 + 1, 1));
        }
    }

  private:
    static constexpr unsigned long long POWERS = 0x511b090301ull;  // 3^4 to 3^0

    __device__ __forceinline__ static unsigned load_word(const Planes& planes, const unsigned char* from) {
        if (planes.whole) return __ldg(reinterpret_cast<const unsigned*>(from));
        return from[0] | from[1] << 8 | from[2] << 16 | static_cast<unsigned>(from[3]) << 24;
    }
};

// ---- 4-bit floats ----------------------------------------------------------------------------------------------

// What the eight codes of an octet stand for, F of kbitcupy/formats/gguf/fp4.py: neighbours in a byte of plane 1.
__device__ __forceinline__ void load_fp4(const Planes& planes, long long octet, float (&v)[8]) {
    unsigned codes[1];
    load_words(planes, 1, octet * 4, planes.size / 2, codes);
    // A byte of either table is 128 more than the value of one of eight codes; bit 3 of a code chooses the table.
    const unsigned index = codes[0] & 0x77777777u, choice = (codes[0] >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned four = index >> 16 * half;
        const unsigned positive = __byte_perm(0x83828180u, 0x8c888684u, four);
        const unsigned negative = __byte_perm(0x7d7e7f80u, 0x74787a7cu, four);
        const unsigned value = __byte_perm(positive, negative, choice >> 16 * half);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[half * 4 + e] = from_byte(value, e, 128);
    }
}

// A power of two as the scale of 32. plane: scales, qs
struct MXFP4 {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        load_fp4(planes, octet, v);
        const unsigned exponent =
            planes.at<unsigned char>(0)[octet >> 2];  // 2^(exponent - 128), which may be subnormal
        const float scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : exponent - 1 << 23);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = ieee::multiply(v[e], scale);
    }
};

// An 8-bit float as the scale of 16, and one number for all where it is there. plane: scales, qs, scale
struct NVFP4 {
    static constexpr int TABLE = 0;

    __device__ __forceinline__ static void decode8(const Planes& planes, long long octet, float (&v)[8]) {
        load_fp4(planes, octet, v);
        const float scale = half_of_ue4m3(planes.at<unsigned char>(0)[octet >> 1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(v[e], scale);
        if (const float* all = planes.at<float>(2)) {
            const float factor = __ldg(all);
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = ieee::multiply(v[e], factor);
        }
    }

    // Half of what a byte stands for: exponent and mantissa are those of a half that is 2^7 times smaller.
    __device__ __forceinline__ static float half_of_ue4m3(unsigned byte) {
        const __half small = __ushort_as_half(static_cast<unsigned short>((byte & 0x7f) << 7));
        return byte != 0x7f ? __fmul_rn(__half2float(small), 128.0f) : 0.0f;
    }
};
