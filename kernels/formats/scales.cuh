// How the scale of a block is stored: E4M4, float16 or float32.
#pragma once
#include <cuda_fp16.h>

#include "common/scalar.cuh"

enum AbsmaxFormat { E4M4, FLOAT16, FLOAT32 };

// One byte e << 4 | m: 2^(e - bias) * (1 + m / 16), or m * 2^(-bias - 3) where e = 0. Values from 2^(16 - bias) on
// saturate, and the mantissa is clamped at 15 instead of carried, as in bitsandbytes.
__device__ __forceinline__ unsigned char encode_e4m4(float x, int bias) {
    const unsigned bits = __float_as_uint(x);
    const int exponent = int(bits >> 23) - 127 + bias;
    // Normal codes: the exponent and four bits of the fraction, half to even at bit 19. A fraction over 15 / 16 would
    // carry, and is cut to that first.
    const unsigned cut = (bits & 0xff800000u) | min(bits & 0x7fffffu, 0x780000u);
    const int normal = int((cut + 0x3ffffu + (cut >> 19 & 1u)) >> 19) - ((127 - bias) << 4);
    // Codes under 16 count units of 2^(-bias - 3).
    const int small = min(__float2int_rn(__fmul_rn(x, __int_as_float((bias + 3 + 127) << 23))), 15);
    const int code = exponent > 15 ? 0xff : exponent > 0 ? normal : small;
    return static_cast<unsigned char>(x > 0.0f ? code : 0);
}

__device__ __forceinline__ float decode_e4m4(unsigned code, int bias) {
    unsigned exponent = code >> 4, mantissa = code & 15u;
    if (exponent == 0) return __fmul_rn(float(mantissa), __int_as_float((127 - bias - 3) << 23));
    return __uint_as_float((exponent + 127 - bias) << 23 | mantissa << 19);
}

constexpr int E4M4_BIAS = 11;

template <int FORMAT>
struct Absmax;

template <>
struct Absmax<E4M4> {
    using Code = unsigned char;
    static constexpr float LOW = 0.0625f, HIGH = 31.0f;  // the tensor scale is 1 while the largest absmax is in here
    __device__ __forceinline__ static Code encode(float x) { return encode_e4m4(x, E4M4_BIAS); }
    __device__ __forceinline__ static float decode(Code code) { return decode_e4m4(code, E4M4_BIAS); }
    // Exponent of the tensor scale that brings `largest` into (15.5, 31].
    __device__ __forceinline__ static int exponent(unsigned bits) {
        return int(bits >> 23) - 127 - ((bits & 0x7fffffu) <= 0x780000u ? 4 : 3);
    }
};

template <>
struct Absmax<FLOAT16> {
    using Code = __half;
    static constexpr float LOW = 0.0625f, HIGH = 65504.0f;
    __device__ __forceinline__ static Code encode(float x) { return __float2half_rn(x); }
    __device__ __forceinline__ static float decode(Code code) { return __half2float(code); }
    // ... into (2^14, 2^15].
    __device__ __forceinline__ static int exponent(unsigned bits) {
        return int(bits >> 23) - 127 - ((bits & 0x7fffffu) == 0 ? 15 : 14);
    }
};

template <>
struct Absmax<FLOAT32> {
    using Code = float;
    static constexpr float LOW = 0.0f, HIGH = 3.40282347e38f;
    __device__ __forceinline__ static Code encode(float x) { return x; }
    __device__ __forceinline__ static float decode(Code code) { return code; }
    __device__ __forceinline__ static int exponent(unsigned) { return 0; }
};

// The tensor scale for the largest finite absmax of a tensor (0 when it has none).
template <int FORMAT>
__device__ __forceinline__ float tensor_scale_of(float largest) {
    using A = Absmax<FORMAT>;
    if (largest == 0.0f || (largest >= A::LOW && largest <= A::HIGH)) return 1.0f;
    int exponent = max(A::exponent(__float_as_uint(largest)), -126);
    return __int_as_float((exponent + 127) << 23);
}
