// Up to 64 tokens that are quantized by "q8_1" ahead of a product that wants their scales, and what minima are
// multiplied by, in records of many k. The contract of codes and scales stands in
// kbitcupy/products/integer_activations.py.
#pragma once
#include "common/copy.cuh"
#include "common/sync.cuh"
#include "linear/block_activations.cuh"

// Elements that share a scale; numbers of bfloat16 that are together what one of float32 is.
constexpr int BLOCK_K = SIXTEEN * HALVES_OF_BLOCK, PARTS = 3;

// A scale times a sum of codes, in parts that lie `step` numbers apart.
__device__ __forceinline__ void put_parts(unsigned short* part, int step, float scale, int sum) {
    float left = ieee::multiply(static_cast<float>(sum), scale);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
        left = ieee::subtract(left, __bfloat162float(rounded));
        part[i * step] = __bfloat16_as_ushort(rounded);
    }
}

// What a thread does that has sixteen neighbours of a token, K being a multiple of 256: writes their codes, [token][K],
// and calls `put` once for each block with its number, the token, the scale and, if SUMMED, the sum of its codes.
template <bool SUMMED, typename T, typename F>
__device__ __forceinline__ void quantize_sixteen(
    const T* __restrict__ x, unsigned char* __restrict__ codes, int depth, const F& put) {
    wait_for_previous();
    launch_dependents();
    const int token = blockIdx.x, k = (blockIdx.y * QUANTIZE_THREADS + threadIdx.x) * SIXTEEN;
    if (k >= depth) return;  // whole warps: 32 lanes have 512 k, or pairs of lanes
    const long long at = static_cast<long long>(token) * depth + k;
    Numbers<T> numbers;
    numbers.load(x + at);
    const unsigned lanes = __activemask();
    unsigned most = numbers.largest();
    most = max(most, __shfl_xor_sync(lanes, most, 1));
    const BlockRule rule(most);
    float v[SIXTEEN];
    numbers.get(v);
    unsigned word[4];
    rule.codes(v, word);
    int sum = 0;
    if constexpr (SUMMED) {
        sum = sum_of_codes(word);
        sum += __shfl_xor_sync(lanes, sum, 1);
    }
    *reinterpret_cast<uint4*>(codes + at) = make_uint4(word[0], word[1], word[2], word[3]);
    if (k % BLOCK_K == 0) put(k / BLOCK_K, token, rule.scale, sum);
}
