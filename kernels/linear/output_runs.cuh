// Some neighbours of a row of outputs, four or eight, in the type that the host names.
#pragma once
#include "linear/int8.cuh"

// Writes those from `row` on of `rows`, which begin at number `at` of y; `aligned`: they begin at a multiple of what
// they take, up to 16 bytes, and none is beyond the last row.
template <int COUNT>
__device__ __forceinline__ void write_run(
    void* __restrict__ y, int y_kind, long long at, const float (&v)[COUNT], int row, int rows, bool aligned) {
    static_assert(COUNT == 4 || COUNT == 8, "one or two stores");
    if (y_kind == FLOAT32_BIAS) {
        float* target = static_cast<float*>(y) + at;
        if (aligned) {
            *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
            if constexpr (COUNT == 8) *reinterpret_cast<float4*>(target + 4) = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            for (int i = 0; i < COUNT; ++i)
                if (row + i < rows) target[i] = v[i];
        }
    } else {
        unsigned word[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i)
            word[i] = y_kind == FLOAT16_BIAS ? Word<__half>::pack(v[2 * i], v[2 * i + 1])
                                             : Word<__nv_bfloat16>::pack(v[2 * i], v[2 * i + 1]);
        unsigned short* target = static_cast<unsigned short*>(y) + at;
        if (aligned) {
            if constexpr (COUNT == 8)
                *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
            else *reinterpret_cast<uint2*>(target) = make_uint2(word[0], word[1]);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (row + i < rows) target[i] = static_cast<unsigned short>(word[i / 2] >> i % 2 * 16);
        }
    }
}
