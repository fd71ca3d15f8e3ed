// Eight neighbours of a row of outputs, in the type that the host names.
#pragma once
#include "linear/int8.cuh"

// Writes those from `row` on of `rows`, which begin at number `at` of y; `aligned`: they begin at a multiple of 16
// bytes, and none is beyond the last row.
__device__ __forceinline__ void write_eight(
    void* __restrict__ y, int y_kind, long long at, const float (&v)[8], int row, int rows, bool aligned) {
    if (y_kind == FLOAT32_BIAS) {
        float* target = static_cast<float*>(y) + at;
        if (aligned) {
            *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
            *reinterpret_cast<float4*>(target + 4) = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            for (int i = 0; i < 8; ++i)
                if (row + i < rows) target[i] = v[i];
        }
    } else {
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word[i] = y_kind == FLOAT16_BIAS ? Word<__half>::pack(v[2 * i], v[2 * i + 1])
                                             : Word<__nv_bfloat16>::pack(v[2 * i], v[2 * i + 1]);
        unsigned short* target = static_cast<unsigned short*>(y) + at;
        if (aligned) {
            *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (row + i < rows) target[i] = static_cast<unsigned short>(word[i / 2] >> i % 2 * 16);
        }
    }
}
