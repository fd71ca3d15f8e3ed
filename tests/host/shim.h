// What decoders of kernels/formats/ need of CUDA, for the host's C++ compiler. Each function here is the meaning of one
// of the GPU's instructions, and nothing of the decoders' own arithmetic.
//
// A thread that is in FLUSHING_MODE rounds as kernels do under -ftz=true: inputs and results below 2^-126 are zero,
// where what is below is found out after rounding to 24 bits, on x86 as on the GPU. (ARM finds it out before: there a
// product that is rounded up to 2^-126 becomes zero.) Compile with -ffp-contract=off.
#pragma once
#define KBIT_HOST

#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "shim.h knows how to flush to zero on x86-64 and on 64-bit ARM"
#endif

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __constant__ const
#define __align__(bytes) __attribute__((aligned(bytes)))

// ---- modes of the processor ------------------------------------------------------------------------------------

#if defined(__x86_64__)
using FloatMode = unsigned;
constexpr FloatMode IEEE_MODE = 0x1f80, FLUSHING_MODE = IEEE_MODE | 0x8040;  // results and inputs to zero
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
#else
using FloatMode = std::uint64_t;
constexpr FloatMode IEEE_MODE = 0, FLUSHING_MODE = 1 << 24;
inline FloatMode float_mode() {
    FloatMode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#endif

// ---- bits ------------------------------------------------------------------------------------------------------

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }

template <typename A>
inline A min(A a, A b) {
    return b < a ? b : a;
}
template <typename A>
inline A max(A a, A b) {
    return a < b ? b : a;
}
template <typename A>
inline A __ldg(const A* from) {
    return *from;
}
template <typename A>
inline A __ldcs(const A* from) {
    return *from;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> 4 * i & 7;  // CUDA's function leaves out the bit that repeats a sign
        result |= (static_cast<unsigned>(both >> choice * 8) & 0xff) << 8 * i;
    }
    return result;
}

// ---- float32 ---------------------------------------------------------------------------------------------------

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
// Toward zero: the sum in double is exact enough for numbers that are not 2^29 apart.
inline float __fadd_rz(float a, float b) {
    const double sum = static_cast<double>(a) + b;
    const float nearest = static_cast<float>(sum);
    return std::fabs(static_cast<double>(nearest)) > std::fabs(sum) ? same_bits<float>(same_bits<unsigned>(nearest) - 1)
                                                                    : nearest;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// To the nearest, half to even; out of range the nearest end, NaN 0.
inline int __float2int_rn(float x) {
    if (!(x == x)) return 0;
    const double rounded = std::nearbyint(static_cast<double>(x));
    return rounded >= 2147483647.0    ? 2147483647
           : rounded <= -2147483648.0 ? -2147483647 - 1
                                      : static_cast<int>(rounded);
}

// The product without flushing, as mul.rn.f32 gives it without .ftz. What is volatile stays between the two modes.
inline float multiply_ieee(float a, float b) {
    const FloatMode mode = float_mode();
    set_float_mode(IEEE_MODE);
    volatile float x = a, y = b;
    volatile float product = x * y;
    set_float_mode(mode);
    return product;
}

// ---- float16 and bfloat16, by their bits -----------------------------------------------------------------------

struct __half {
    unsigned short bits;
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat16 {
    unsigned short bits;
};

inline float __half2float(__half h) {
    const unsigned sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31u, fraction = h.bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    if (fraction == 0) return __uint_as_float(sign);
    const unsigned leading = 31 - __clz(static_cast<int>(fraction));  // the number is 2^(leading - 24) and more
    return __uint_as_float(sign | (leading + 103) << 23 | (fraction << (23 - leading) & 0x7fffffu));
}

// To the nearest, half to even.
inline __half __float2half_rn(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned result = 0;                                  // below 2^-25
    if (magnitude > 0x7f800000u) result = 0x7fffu;        // NaN
    else if (magnitude >= 0x47800000u) result = 0x7c00u;  // 2^16 and more
    else if (magnitude >= 0x38800000u)                    // from 2^-14 on
        result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    else if (magnitude >= 0x33000000u) {
        const unsigned shift = 126 - (magnitude >> 23), fraction = (magnitude & 0x7fffffu) | 0x800000u;
        result = (fraction + (1u << (shift - 1)) - 1 + (fraction >> shift & 1u)) >> shift;
    }
    return {static_cast<unsigned short>(sign | result)};
}

inline unsigned short __half_as_ushort(__half h) { return h.bits; }

// Half to even; no number becomes NaN, nor NaN one.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return __half2float(v.x); }
inline float __high2float(__half2 v) { return __half2float(v.y); }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }
