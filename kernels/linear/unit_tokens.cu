// Tokens, quantized by "q8_1" for products of units with q4_0 or q4_k: codes, [token][K], and of 64 tokens, for every
// UNITS_K = 256 k a record:
//
//     float scale[8 blocks of 32 k][64 tokens]    of tokens 8 j + 2 t + i at 16 (j / 2) + 4 t + 2 (j % 2) + i
//     bfloat16 part[3][64 tokens][8 blocks]       q4_k: the scale times the sum of the codes, in three parts
#include "linear/block_records.cuh"

// Of the host (kbitcupy/products/integer_units.py), ahead of this source: QUANTIZE_THREADS of a block; UNITS_TOKENS =
// 64; UNITS_K.
constexpr int BLOCKS = UNITS_K / BLOCK_K, PARTS_AT = BLOCKS * UNITS_TOKENS * 4;

// Keeps a scale and, times it, a sum of codes, of block `block` of one of 64 tokens.
template <bool INNER>
constexpr int RECORD = PARTS_AT + (INNER ? PARTS * UNITS_TOKENS * BLOCKS * 2 : 0);
template <bool INNER>
__device__ __forceinline__ void put_block(unsigned char* records, int block, int token, float scale, int sum) {
    unsigned char* const record = records + static_cast<long long>(block / BLOCKS) * RECORD<INNER>;
    const int of = block % BLOCKS, j = token / 8;
    const int place = j / 2 * 16 + token % 8 / 2 * 4 + j % 2 * 2 + token % 2;
    reinterpret_cast<float*>(record)[of * UNITS_TOKENS + place] = scale;
    if constexpr (INNER)
        put_parts(
            reinterpret_cast<unsigned short*>(record + PARTS_AT) + token * BLOCKS + of, UNITS_TOKENS * BLOCKS, scale,
            sum);
}

template <typename T, bool INNER>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_unit_tokens(
    const T* __restrict__ x,              // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* __restrict__ codes,    // [tokens, depth]
    unsigned char* __restrict__ records,  // of 64 tokens, then of the next ones
    unsigned* __restrict__ flags,         // so many words that are to be 0
    int depth, int words) {
    quantize_sixteen<INNER>(x, codes, depth, [&](int block, int token, float scale, int sum) {
        const long long before = static_cast<long long>(token / UNITS_TOKENS) * (depth / UNITS_K) * RECORD<INNER>;
        put_block<INNER>(records + before, block, token % UNITS_TOKENS, scale, sum);
    });
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int i = threadIdx.x; i < words; i += QUANTIZE_THREADS) flags[i] = 0;
}
