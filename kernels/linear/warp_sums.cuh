// Sums and maxima over a warp, in few steps: those who quantize tokens wait for each of them.
#pragma once
#include "common/types.cuh"

// Of every four lanes each gets the other three's at a time. All lanes have the same sum: they add the same pairs.
__device__ __forceinline__ double sum_of_warp(double v) {
#pragma unroll
    for (int step = 1; step < WARP / 2; step *= 4) {
        const double next = __shfl_xor_sync(FULL_WARP, v, step), across = __shfl_xor_sync(FULL_WARP, v, 2 * step),
                     beside = __shfl_xor_sync(FULL_WARP, v, 3 * step);
        v = (v + next) + (across + beside);
    }
    return v + __shfl_xor_sync(FULL_WARP, v, WARP / 2);
}
__device__ __forceinline__ unsigned most_of_warp(unsigned v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, v);
#else
    return v;
#endif
}
__device__ __forceinline__ unsigned sum_of_warp(unsigned v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL_WARP, v);
#else
    return v;
#endif
}
