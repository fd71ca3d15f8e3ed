// How BitNet's activations become codes, number by number: what kernels/linear/activations.cu and the products that
// quantize their tokens themselves have in common.
#pragma once
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/types.cuh"

constexpr unsigned LARGEST_FINITE = 0x7f7fffffu, INFINITE = 0x7f800000u;

// x with 0 for NaN, and the largest finite number of its sign for an infinity.
__device__ __forceinline__ float number(float x) {
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > INFINITE) return 0.0f;
    return magnitude == INFINITE ? __uint_as_float((bits & 0x80000000u) | LARGEST_FINITE) : x;
}

constexpr int OCTET = 8;

// Eight neighbours from k on, zeros beyond the end. VECTOR: all are there, and the first is at a multiple of 16 bytes.
template <bool VECTOR, typename T>
__device__ __forceinline__ void load_octet(float (&v)[OCTET], const T* row, int k, int depth) {
    if constexpr (VECTOR) {
        constexpr int WORDS = OCTET / Word<T>::COUNT;
        unsigned word[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) to_words(word + i, reinterpret_cast<const uint4*>(row + k)[i / 4]);
#pragma unroll
        for (int e = 0; e < OCTET; ++e) v[e] = Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
    } else {
#pragma unroll
        for (int e = 0; e < OCTET; ++e) v[e] = k + e < depth ? to_float(row[k + e]) : 0.0f;
    }
}

// The nearest code of a number: half to even, or away from zero.
__device__ __forceinline__ int code_of(float x, float bottom, float top, bool away) {
    float clamped = fminf(fmaxf(x, bottom), top);
    if (away) {
        const float whole = truncf(clamped);
        if (fabsf(clamped - whole) >= 0.5f) clamped = whole + (clamped < 0 ? -1.0f : 1.0f);
        else clamped = whole;
    }
    // In the low bits of this sum is the nearest integer, half to even.
    const int code = static_cast<int>(__float_as_uint(__fadd_rn(clamped, ROUNDER)) - __float_as_uint(ROUNDER));
    return ieee::magnitude_bits(x) > INFINITE ? 0 : code;
}
