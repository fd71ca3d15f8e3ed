// How ternary codes are multiplied where they are read in place, by int8 tokens or by floats of 16 bits: what the
// kernels of linear/ternary_stream.cu and linear/ternary_bulk.cu share. Both have FLOAT32_BIAS and its like of the
// host.
#pragma once
#include "common/ieee.cuh"
#include "linear/ternary_mma.cuh"

constexpr int BLOCK = 128, ROWS = 16, FIELDS = 4, STEP_BYTES = STEP / FIELDS, CHUNK = 16;

__device__ __forceinline__ float bias_of(const void* bias, int kind, long long row) {
    switch (kind) {
        case FLOAT32_BIAS:
            return static_cast<const float*>(bias)[row];
        case FLOAT16_BIAS:
            return to_float(static_cast<const __half*>(bias)[row]);
        case BFLOAT16_BIAS:
            return to_float(static_cast<const __nv_bfloat16*>(bias)[row]);
        default:
            return -0.0f;  // changes no number
    }
}

// How codes are multiplied by int8 tokens.
//     Sum        of a warp's products
//     LOADS      16-byte pieces of 8 tokens that a lane takes in a step
//     QUANTIZED  whether tokens have sums and scales
//     multiply   adds to the sums of fields, for 16 bytes of rows g and g + 8 each
//     total      of the fields
//     scaled     y, but for the bias, from the sum over all warps
template <typename T>
struct Integers {
    using Sum = int;
    static constexpr int LOADS = FIELDS;
    static constexpr bool QUANTIZED = true;

    __device__ __forceinline__ static void multiply(
        Sum (&sum)[FIELDS][4], const uint4& u, const uint4& l, const uint4 (&b)[LOADS]) {
#pragma unroll
        for (int f = 0; f < FIELDS; ++f) {
            const unsigned mask = 0x03030303u << 2 * f;
            mma_bytes<false>(sum[f], {u.x & mask, l.x & mask, u.y & mask, l.y & mask}, b[f].x, b[f].y);
            mma_bytes<false>(sum[f], {u.z & mask, l.z & mask, u.w & mask, l.w & mask}, b[f].z, b[f].w);
        }
    }
    __device__ __forceinline__ static Sum total(const Sum (&sum)[FIELDS][4], int e) {
        return sum[0][e] + (sum[1][e] >> 2) + (sum[2][e] >> 4) + (sum[3][e] >> 6);
    }
    __device__ __forceinline__ static float scaled(Sum total, int of_token, float token_scale, float scale) {
        return ieee::multiply(ieee::multiply(__int2float_rn(total - of_token), token_scale), scale);
    }
};

// ... and by tokens of T, 16 bits. A code c of field f becomes 4^f c in the fraction of a number so large that its last
// bit is 1; less that number and 4^f, it is 4^f t.
template <typename T>
struct Floats {
    using Sum = float;
    static constexpr int LOADS = 2 * FIELDS;
    static constexpr bool QUANTIZED = false;

    // The two numbers in bytes 0 and 2 of a word. The fraction of bfloat16 has no room for field 3, which stands there
    // where field 2 was and counts as that.
    __device__ __forceinline__ static unsigned pair(unsigned word, int f) {
        const int place = min(f, PLACES<T> - 1);
        const unsigned bits = (word >> 2 * (f - place) & 0x00030003u << 2 * place) | LARGE<T>;
        return less_large<T>(bits, place);
    }
    __device__ __forceinline__ static void multiply(
        Sum (&sum)[FIELDS][4], const uint4& u, const uint4& l, const uint4 (&b)[LOADS]) {
        const unsigned upper[4] = {u.x, u.y, u.z, u.w}, lower[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned odd_upper = upper[i] >> 8, odd_lower = lower[i] >> 8;
#pragma unroll
            for (int f = 0; f < FIELDS; ++f) {
                const uint4& four = b[f * 2 + i / 2];
                mma_floats<T>(
                    sum[min(f, PLACES<T> - 1)],
                    {pair(upper[i], f), pair(lower[i], f), pair(odd_upper, f), pair(odd_lower, f)},
                    i % 2 == 0 ? four.x : four.z, i % 2 == 0 ? four.y : four.w);
            }
        }
    }
    __device__ __forceinline__ static Sum total(const Sum (&sum)[FIELDS][4], int e) {
        return (sum[0][e] + sum[1][e] * 0.25f) + (sum[2][e] * 0.0625f + sum[3][e] * 0.015625f);
    }
    __device__ __forceinline__ static float scaled(Sum total, int, float, float scale) { return total * scale; }
};
