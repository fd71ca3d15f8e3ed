// Tokens that are quantized by one scale each, "int8", to rows of codes: a thread block has one token. Codes and scales
// are those of linear/integer_activations.cu, bit for bit, in fewer instructions; no sums of codes.
#include "common/sync.cuh"
#include "linear/block_activations.cuh"

// Of the host (kbitcupy/products/integer_activations.py), ahead of this source: ROW_THREADS, the most of a block.
constexpr int ROW_HELD = 2;  // times sixteen numbers that a thread keeps

// SPLIT: of every 32 k the even ones stand first, then the odd ones. K is a multiple of 16.
template <typename T, bool SPLIT>
__global__ void __launch_bounds__(ROW_THREADS) quantize_row_tokens(
    const T* __restrict__ x,            // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* __restrict__ codes,  // [tokens, pitch], zeros from depth on; a multiple of 128
    float* __restrict__ scales,         // [tokens + zeros], from `tokens` on zeros
    int depth, int pitch, int zeros) {
    __shared__ unsigned exchange[2 * ROW_THREADS / WARP];
    wait_for_previous();
    launch_dependents();
    const long long token = blockIdx.x;
    if (token == 0)
        for (int i = threadIdx.x; i < zeros; i += blockDim.x) scales[gridDim.x + i] = 0.0f;
    unsigned char* const row = codes + token * pitch;
    quantize_by_tokens<false, ROW_HELD>(
        x + token * depth, 1, depth, pitch, exchange, Int8Rule(),
        [&](int, int k, const unsigned (&word)[4], bool) {
            if (k >= pitch) return 0;
            if constexpr (SPLIT) {
                uint2 half[2];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const unsigned selector = odd ? 0x7531 : 0x6420;
                    half[odd] =
                        make_uint2(__byte_perm(word[0], word[1], selector), __byte_perm(word[2], word[3], selector));
                }
                uint2* const to = reinterpret_cast<uint2*>(row + k / 32 * 32 + k % 32 / 2);
                to[0] = half[0], to[2] = half[1];
            } else {
                *reinterpret_cast<uint4*>(row + k) = make_uint4(word[0], word[1], word[2], word[3]);
            }
            return 0;
        },
        [&](int, float scale, int) { scales[token] = scale; }, [](unsigned) {});
}
