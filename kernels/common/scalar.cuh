// Arithmetic on single numbers, for kernels and decoders. Like all that decoders include it compiles for the host, too:
// tests/host/shim.h stands in for what CUDA brings.
//
// The host passes -ftz=true and --fmad=false: every float operation takes and gives zero for magnitudes under 2^-126,
// and rounds once.
#pragma once

constexpr float SMALLEST_NORMAL = 1.17549435e-38f;  // 2^-126

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float flush(float x) { return fabsf(x) < SMALLEST_NORMAL ? 0.0f : x; }

#ifndef KBIT_HOST  // the shim has its own
// IEEE multiplication, subnormals included: -ftz=true turns every other spelling of it into the flushing one.
__device__ __forceinline__ float multiply_ieee(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
#endif

// A scale that is not a positive finite number counts as 0.
__device__ __forceinline__ float usable(float s) { return __float_as_uint(s) - 1u < 0x7f7fffffu ? s : 0.0f; }

// Whether it is a multiple of 16 bytes, as the largest loads and stores need.
__device__ __forceinline__ bool is_aligned(const void* pointer) {
    return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

// a / b, neither of them negative, b not 0. A power of two is a shift, and 32 bits take a third of the time of 64.
__device__ __forceinline__ long long divide(long long a, long long b) {
    if ((b & (b - 1)) == 0) return a >> (63 - __clzll(b));
    return (a | b) >> 32 ? a / b : static_cast<long long>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}
