// Stands in for kernels/common/types.cuh where a kernel runs on the host: what it needs of it, for float32.
#pragma once
#include "common/scalar.cuh"

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

inline float to_float(float x) { return x; }

template <typename A, typename B>
struct SameType {
    static constexpr bool VALUE = false;
};
template <typename A>
struct SameType<A, A> {
    static constexpr bool VALUE = true;
};

template <typename T>
struct Word;
template <>
struct Word<float> {
    static constexpr int COUNT = 1;
    static float get(unsigned word, int) { return __uint_as_float(word); }
    static float element(unsigned word, int) { return __uint_as_float(word); }
    static unsigned pack(const float* v) { return __float_as_uint(v[0]); }
};

inline int warp_number() { return static_cast<int>(threadIdx.x) / WARP; }
