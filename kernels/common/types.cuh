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

// Elements per 32-bit register, their conversion, and the larger magnitude of two registers: NaN loses in
// larger_magnitude and wins in largest_or_nan, whose first operand has no signs.
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

template <>
struct Word<__half> {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static __half2 as(unsigned word) { return *reinterpret_cast<__half2*>(&word); }
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return i == 0 ? __low2float(as(word)) : __high2float(as(word));
    }
    __device__ __forceinline__ static __half element(unsigned word, int i) {
        return i == 0 ? __low2half(as(word)) : __high2half(as(word));
    }
    __device__ __forceinline__ static unsigned pack(const float* v) {
        __half2 both = __floats2half2_rn(v[0], v[1]);
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        __half2 both = __hmax2(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        __half2 both = __hmax2_nan(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) {
        return (word & 0x7fffu) < 0x7c00u && (word >> 16 & 0x7fffu) < 0x7c00u;
    }
    __device__ __forceinline__ static float largest(unsigned word) { return fmaxf(get(word, 0), get(word, 1)); }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        const float v[2] = {__fmul_rn(get(word, 0), factor), __fmul_rn(get(word, 1), factor)};
        return pack(v);
    }
};

template <>
struct Word<__nv_bfloat16> {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static __nv_bfloat162 as(unsigned word) {
        return *reinterpret_cast<__nv_bfloat162*>(&word);
    }
    __device__ __forceinline__ static float get(unsigned word, int i) {
        return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
    }
    __device__ __forceinline__ static __nv_bfloat16 element(unsigned word, int i) {
        return i == 0 ? __low2bfloat16(as(word)) : __high2bfloat16(as(word));
    }
    __device__ __forceinline__ static unsigned pack(const float* v) {
        __nv_bfloat162 both = __floats2bfloat162_rn(v[0], v[1]);
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned larger_magnitude(unsigned a, unsigned b) {
        __nv_bfloat162 both = __hmax2(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned largest_or_nan(unsigned a, unsigned b) {
        __nv_bfloat162 both = __hmax2_nan(as(a), as(b & 0x7fff7fffu));
        return *reinterpret_cast<unsigned*>(&both);
    }
    __device__ __forceinline__ static bool is_finite(unsigned word) {
        return (word & 0x7fffu) < 0x7f80u && (word >> 16 & 0x7fffu) < 0x7f80u;
    }
    __device__ __forceinline__ static float largest(unsigned word) { return fmaxf(get(word, 0), get(word, 1)); }
    __device__ __forceinline__ static unsigned scale(unsigned word, float factor) {
        const float v[2] = {__fmul_rn(get(word, 0), factor), __fmul_rn(get(word, 1), factor)};
        return pack(v);
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

// This thread's warp; the compiler learns that it is the same for all lanes, and keeps what follows from it once.
__device__ __forceinline__ int warp_number() { return __shfl_sync(FULL_WARP, int(threadIdx.x / WARP), 0); }

// The largest of the warp's 32 numbers, in every lane.
__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

__device__ __forceinline__ bool is_aligned(const void* pointer) {
    return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
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
