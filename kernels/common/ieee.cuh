// Float arithmetic that keeps subnormal numbers: -ftz=true, which CuPy forces, turns every other spelling of it into
// the flushing one. None of it is contracted.
#pragma once

namespace ieee {
#ifdef KBIT_HOST
// The shim's processor flushes as kernels do. What is volatile stays between the two modes.
template <typename F>
inline auto unflushed(float a, float b, F operation) {
    const FloatMode mode = float_mode();
    set_float_mode(IEEE_MODE);
    volatile float x = a, y = b;
    volatile auto result = operation(x, y);
    set_float_mode(mode);
    return +result;
}
inline float multiply(float a, float b) {
    return unflushed(a, b, [](float x, float y) { return x * y; });
}
inline float add(float a, float b) {
    return unflushed(a, b, [](float x, float y) { return x + y; });
}
inline float subtract(float a, float b) {
    return unflushed(a, b, [](float x, float y) { return x - y; });
}
inline float divide(float a, float b) {
    return unflushed(a, b, [](float x, float y) { return x / y; });
}
inline double widen(float a) {
    const FloatMode mode = float_mode();
    set_float_mode(IEEE_MODE);
    volatile float x = a;
    volatile double wide = x;
    set_float_mode(mode);
    return wide;
}
// To the nearest.
inline float narrow(double a) {
    const FloatMode mode = float_mode();
    set_float_mode(IEEE_MODE);
    volatile double x = a;
    volatile float single = static_cast<float>(x);
    set_float_mode(mode);
    return single;
}
inline float square_root(float a) {
    return unflushed(a, a, [](float x, float) { return std::sqrt(x); });
}
inline bool less(float a, float b) {
    return unflushed(a, b, [](float x, float y) { return x < y; }) != 0;
}
// a + b, rounded down.
inline float add_down(float a, float b) {
    return unflushed(a, b, [](float x, float y) {
        const volatile float nearest = x + y;
        const bool beyond = static_cast<double>(nearest) - y > x;
        return beyond ? std::nextafter(+nearest, -INFINITY) : +nearest;
    });
}
// |a| * b, which is not negative, rounded up.
inline float multiply_up(float a, float b) {
    return unflushed(std::fabs(a), b, [](float x, float y) {
        const volatile float nearest = x * y;
        const bool less = nearest < static_cast<double>(x) * y;
        return less ? __uint_as_float(__float_as_uint(nearest) + 1) : +nearest;
    });
}
// x where its magnitude is this one, else `other`. Neither of the two is NaN.
inline float if_magnitude(float x, float magnitude, float other) {
    return (__float_as_uint(x) & 0x7fffffffu) == __float_as_uint(magnitude) ? x : other;
}
// The larger and the smaller one, NaN where one is; -0 is below 0.
inline float larger_or_nan(float a, float b) {
    if (a != a || b != b) return a + b;
    if (__float_as_uint(a) << 1 == 0 && __float_as_uint(b) << 1 == 0)
        return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
    return less(a, b) ? b : a;
}
inline float smaller_or_nan(float a, float b) {
    const float r = larger_or_nan(-a, -b);
    return -r;
}
#else
__device__ __forceinline__ float multiply(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float add(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float subtract(float a, float b) {
    float r;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float divide(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ double widen(float a) {
    double r;
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(a));
    return r;
}
__device__ __forceinline__ float narrow(double a) {
    float r;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(a));
    return r;
}
__device__ __forceinline__ float square_root(float a) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
__device__ __forceinline__ bool less(float a, float b) {
    int r;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(r) : "f"(a), "f"(b));
    return r != 0;
}
__device__ __forceinline__ float add_down(float a, float b) {
    float r;
    asm("add.rm.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float multiply_up(float a, float b) {
    float r;
    asm("{ .reg .f32 t; abs.f32 t, %1; mul.rp.f32 %0, t, %2; }" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float if_magnitude(float x, float magnitude, float other) {
    float r;
    asm("{ .reg .pred p; .reg .f32 t; abs.f32 t, %1; setp.eq.f32 p, t, %2; selp.f32 %0, %1, %3, p; }"
        : "=f"(r)
        : "f"(x), "f"(magnitude), "f"(other));
    return r;
}
__device__ __forceinline__ float larger_or_nan(float a, float b) {
    float r;
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
#else
    asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    if (a != a || b != b) r = __int_as_float(0x7fffffff);
#endif
    return r;
}
__device__ __forceinline__ float smaller_or_nan(float a, float b) {
    float r;
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
#else
    asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    if (a != a || b != b) r = __int_as_float(0x7fffffff);
#endif
    return r;
}
#endif

// By their bits, which nothing flushes.
__device__ __forceinline__ unsigned magnitude_bits(float a) { return __float_as_uint(a) & 0x7fffffffu; }
#ifdef KBIT_HOST
inline float magnitude(float a) { return __uint_as_float(magnitude_bits(a)); }
#else
__device__ __forceinline__ float magnitude(float a) {  // as a part of the instruction that takes it
    float r;
    asm("abs.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
#endif
__device__ __forceinline__ float negative(float a) { return __uint_as_float(__float_as_uint(a) ^ 0x80000000u); }
__device__ __forceinline__ bool is_zero(float a) { return magnitude_bits(a) == 0; }
// The number, or 0 where it is NaN or infinite.
__device__ __forceinline__ float finite(float a) { return magnitude_bits(a) < 0x7f800000u ? a : 0.0f; }
// 1 / a, and 0 for 0.
__device__ __forceinline__ float reciprocal(float a) { return is_zero(a) ? 0.0f : divide(1.0f, a); }
}  // namespace ieee
