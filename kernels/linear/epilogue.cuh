// The epilogue of products with compressed weights: bias, rounding to the type of y, and whose tokens the sums are.
#pragma once
#include "common/types.cuh"

// Of a bias of x's type or of float32; 0 where there is none.
template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int kind, int row) {
    if (kind == NO_BIAS) return 0.0f;
    return kind == OWN_BIAS ? to_float(static_cast<const T*>(bias)[row]) : static_cast<const float*>(bias)[row];
}

__device__ __forceinline__ void store(__half* y, float v) { *y = __float2half_rn(v); }
__device__ __forceinline__ void store(__nv_bfloat16* y, float v) { *y = __float2bfloat16_rn(v); }
__device__ __forceinline__ void store(float* y, float v) { *y = v; }

// struct Group, which the host declares: the products of one expert that a thread block computes, order[first .. first
// + count] of them; of expert -1, which is none, they are zero.
