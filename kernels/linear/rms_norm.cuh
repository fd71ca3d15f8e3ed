// RMSNorm ahead of the quantization of tokens: its factor to the bits of kbitcupy/products/activations.py, whatever the
// order in which squares are added up. Of the host, ahead of this source: LANES of the contract's sum of squares.
#pragma once
#include "common/ieee.cuh"
#include "common/types.cuh"
#include "linear/quantize.cuh"

struct RootMeanSquare {
    bool used;
    const float* weight;  // float32 [depth], or null
    double share, eps;    // 1 / depth; what is added to the mean
};

// |x|, finite, in double. Those of 16 bits without the slow unit that converts: 0 becomes 2^-127, and of bfloat16 what
// is below 2^-126 becomes something else below that.
template <typename T>
__device__ __forceinline__ double widened(float x) {
#ifndef KBIT_HOST
    if constexpr (sizeof(T) == 2)
        return __hiloint2double(static_cast<int>((__float_as_uint(fabsf(x)) >> 3) + (896u << 20)), 0);
#endif
    return ieee::widen(x);
}

// About 1 / root, to 20 bits.
__device__ __forceinline__ double rough_root(double a) {
#ifdef KBIT_HOST
    return 1.0 / sqrt(a);
#else
    double root;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(root) : "d"(a));
    return root;
#endif
}

// 1 / root of (mean + eps), rounded to float32, of a sum of squares that were added in another order than the contract
// says. Returns whether it is the contract's number nevertheless. Sums of up to 2^17 squares, in the contract's order
// and in any that adds up no more than 2^9 of them one after the other, are within 2^-43 of each other, and roots of
// them within half of that, so it is unless a number 2^-42 away rounds otherwise; that one of 2^17 does. What `widened`
// makes of zeros counts for nothing where the mean is no smaller than this.
__device__ __forceinline__ bool factor_from(double sum, const RootMeanSquare& norm, float& factor) {
    const double mean = sum * norm.share + norm.eps;
    double root = rough_root(mean);
    const double error = fma(-(mean * root), root, 1.0);
    root = fma(root * error, fma(error, 0.375, 0.5), root);
    constexpr double FAR = 1.0 / (1ll << 42), SMALL = 0x1p-190, LARGE = 0x1p190;
    factor = ieee::narrow(root * (1.0 + FAR));
    return factor == ieee::narrow(root * (1.0 - FAR)) && mean > SMALL && mean < LARGE;
}
