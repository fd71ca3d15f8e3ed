// What becomes of sums: bias, rounding to the type of y, and whose tokens they are.
#pragma once
#include "common/types.cuh"

// Of a bias of x's type (kind 1) or of float32 (kind 2); 0 where there is none.
template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int kind, int row) {
    if (kind == 0) return 0.0f;
    return kind == 1 ? to_float(static_cast<const T*>(bias)[row]) : static_cast<const float*>(bias)[row];
}

__device__ __forceinline__ void store(__half* y, float v) { *y = __float2half_rn(v); }
__device__ __forceinline__ void store(__nv_bfloat16* y, float v) { *y = __float2bfloat16_rn(v); }
__device__ __forceinline__ void store(float* y, float v) { *y = v; }

// The tokens that one expert multiplies in one thread block: order[first .. first + count] of them.
struct Group {
    int expert;  // -1: none, the products are zero
    int first, count, unused;
};
