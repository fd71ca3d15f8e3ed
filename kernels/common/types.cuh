// Element types and arithmetic that every kernel uses.
//
// NumPy computes the same numbers, so nothing here may be contracted or reordered: the host passes --fmad=false, and
// every fused multiply-add is written out. CuPy forces -ftz=true: magnitudes under 2^-126 are zero, but where inline
// PTX says otherwise.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/scalar.cuh"

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

// ---- element types ---------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename A, typename B>
struct SameType {
    static constexpr bool VALUE = false;
};
template <typename A>
struct SameType<A, A> {
    static constexpr bool VALUE = true;
};

// A 32-bit register of elements of T: how many they are, their conversion and arithmetic. Of two magnitudes NaN loses
// in larger_magnitude and wins in largest_or_nan, whose first operand has no signs.
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int COUNT = 1;
    __device__ __forceinline__ static float get(unsigned word, int) { return __uint_as_float(word); }
    __device__ __forceinline__ static float element(unsigned word, int) { return __uint_as_float(word); }
    __device__ __forceinline__ static unsigned pack(const float* v) { return __float_as_uint(v[0]); }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        return __float_as_uint(fmaxf(__uint_as_float(a), fabsf(__uint_as_float(b))));
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        return max(a, b & 0x7fffffffu);
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) { return (word & 0x7fffffffu) < 0x7f800000u; }
    __device__ __forceinline__ static float largest(unsigned word) { return __uint_as_float(word); }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        return __float_as_uint(__fmul_rn(__uint_as_float(word), factor));
    }
};

// What CUDA names differently for its two types of two numbers.
__device__ __forceinline__ __half2 rounded(float low, float high, __half2) { return __floats2half2_rn(low, high); }
__device__ __forceinline__ __nv_bfloat162 rounded(float low, float high, __nv_bfloat162) {
    return __floats2bfloat162_rn(low, high);
}
__device__ __forceinline__ __half low_of(__half2 v) { return __low2half(v); }
__device__ __forceinline__ __half high_of(__half2 v) { return __high2half(v); }
__device__ __forceinline__ __nv_bfloat16 low_of(__nv_bfloat162 v) { return __low2bfloat16(v); }
__device__ __forceinline__ __nv_bfloat16 high_of(__nv_bfloat162 v) { return __high2bfloat16(v); }

// Two elements of T, whose infinity has the bits INFINITE.
template <typename T, typename Two, unsigned INFINITE>
struct HalfWord {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static Two as(unsigned word) { return *reinterpret_cast<Two*>(&word); }
    __device__ __forceinline__ static unsigned bits(Two both) { return *reinterpret_cast<unsigned*>(&both); }
    __device__ __forceinline__ static T element(unsigned word, int i) {
        return i == 0 ? low_of(as(word)) : high_of(as(word));
    }
    __device__ __forceinline__ static unsigned pack(float low, float high) { return bits(rounded(low, high, Two())); }
    __device__ __forceinline__ static unsigned pack(const float* v) { return pack(v[0], v[1]); }
    __device__ __forceinline__ static unsigned multiply(unsigned a, unsigned b) { return bits(__hmul2(as(a), as(b))); }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        return bits(__hmax2(as(a), as(b & 0x7fff7fffu)));
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        return bits(__hmax2_nan(as(a), as(b & 0x7fff7fffu)));
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) {
        return (word & 0x7fffu) < INFINITE && (word >> 16 & 0x7fffu) < INFINITE;
    }
    __device__ __forceinline__ static float largest(unsigned word) {
        return fmaxf(Word<T>::get(word, 0), Word<T>::get(word, 1));
    }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        return pack(__fmul_rn(Word<T>::get(word, 0), factor), __fmul_rn(Word<T>::get(word, 1), factor));
    }
};

template <>
struct Word<__half> : HalfWord<__half, __half2, 0x7c00u> {
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return i == 0 ? __low2float(as(word)) : __high2float(as(word));
    }
};

template <>
struct Word<__nv_bfloat16> : HalfWord<__nv_bfloat16, __nv_bfloat162, 0x7f80u> {
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
    }
};

// ---- arithmetic ------------------------------------------------------------------------------------------------

// IEEE division, subnormals included: -ftz=true turns every other spelling of it into the flushing one.
__device__ __forceinline__ float divide_ieee(float x, float y) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
    return q;
}

// a * b + c clamped to [0, 1], NaN to 0, in one instruction.
__device__ __forceinline__ float fma_saturate(float a, float b, float c) {
    float r;
    asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// The correctly rounded x / divisor from the correctly rounded reciprocal (Markstein): exact while neither the
// residual nor the quotient leaves the normal range, which the caller sees to.
__device__ __forceinline__ float divide_by_reciprocal(float x, float divisor, float reciprocal) {
    float q = __fmul_rn(x, reciprocal);
    return __fmaf_rn(__fmaf_rn(-q, divisor, x), reciprocal, q);
}

// Added to a float, this leaves its nearest integer, half to even, in the low bits of the sum. Beyond 2^22 in magnitude
// it does not, but sums keep the order of what they are sums of.
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23

// This thread's warp; the compiler learns that it is the same for all lanes, and keeps what follows from it once.
__device__ __forceinline__ int warp_number() { return __shfl_sync(FULL_WARP, int(threadIdx.x / WARP), 0); }

// The largest of the warp's 32 numbers, in every lane.
__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// The same number, of which the compiler does not know where it comes from: it stays in a register instead of being
// worked out again wherever it is used.
__device__ __forceinline__ unsigned opaque(unsigned v) {
    asm volatile("" : "+r"(v));
    return v;
}
template <typename P>
__device__ __forceinline__ P* opaque(P* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}
