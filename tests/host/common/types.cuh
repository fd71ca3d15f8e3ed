// Stands in for kernels/common/types.cuh where a kernel runs on the host: what it needs of it.
#pragma once
#include "common/scalar.cuh"

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

inline float to_float(float x) { return x; }
inline float to_float(__half x) { return __half2float(x); }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
struct Word;
template <>
struct Word<float> {
    static constexpr int COUNT = 1;
    static float get(unsigned word, int) { return __uint_as_float(word); }
    static float element(unsigned word, int) { return __uint_as_float(word); }
    static unsigned pack(const float* v) { return __float_as_uint(v[0]); }
};

// float16 and bfloat16 as kernels have them in arrays: their bits.
template <bool BRAIN>
struct Short {
    unsigned short bits;

    Short() = default;
    explicit Short(float) : bits(0) {}  // of 0 only
};
using Half = Short<false>;
using Brain = Short<true>;

inline float to_float(Half x) { return __half2float({x.bits}); }
inline float to_float(Brain x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

template <bool BRAIN>
struct Shorts {
    unsigned short x, y;
};

// NaN where one is; by their bits, as zeros may have any sign, and nothing is flushed.
template <bool BRAIN>
unsigned short extreme_or_nan(unsigned short a, unsigned short b, bool largest) {
    const int infinite = BRAIN ? 0x7f80 : 0x7c00;
    if ((a & 0x7fff) > infinite || (b & 0x7fff) > infinite) return 0x7fff;
    const int x = a & 0x8000 ? -(a & 0x7fff) : a, y = b & 0x8000 ? -(b & 0x7fff) : b;
    return (x < y) == largest ? b : a;
}
template <bool BRAIN>
Shorts<BRAIN> __hmax2_nan(Shorts<BRAIN> a, Shorts<BRAIN> b) {
    return {extreme_or_nan<BRAIN>(a.x, b.x, true), extreme_or_nan<BRAIN>(a.y, b.y, true)};
}
template <bool BRAIN>
Shorts<BRAIN> __hmin2_nan(Shorts<BRAIN> a, Shorts<BRAIN> b) {
    return {extreme_or_nan<BRAIN>(a.x, b.x, false), extreme_or_nan<BRAIN>(a.y, b.y, false)};
}

template <bool BRAIN>
struct Word<Short<BRAIN>> {
    static constexpr int COUNT = 2;
    static Shorts<BRAIN> as(unsigned word) { return same_bits<Shorts<BRAIN>>(word); }
    static unsigned bits(Shorts<BRAIN> both) { return same_bits<unsigned>(both); }
    static Short<BRAIN> element(unsigned word, int i) {
        Short<BRAIN> one;
        one.bits = static_cast<unsigned short>(word >> 16 * i);
        return one;
    }
    static float get(unsigned word, int i) { return to_float(element(word, i)); }
    static unsigned pack(const float* v) {
        static_assert(!BRAIN, "no kernel that runs here writes bfloat16");
        return __float2half_rn(v[0]).bits | static_cast<unsigned>(__float2half_rn(v[1]).bits) << 16;
    }
};

inline int warp_number() { return static_cast<int>(threadIdx.x) / WARP; }
