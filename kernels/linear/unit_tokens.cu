// Up to 64 tokens, quantized by "q8_1" for products of units with q4_0 or q4_k: codes, [token][K], and for every
// UNITS_K = 256 k a record:
//
//     float scale[8 blocks of 32 k][64 tokens]    of tokens 8 j + 2 t + i at 16 (j / 2) + 4 t + 2 (j % 2) + i
//     bfloat16 part[3][64 tokens][8 blocks]       q4_k: the scale times the sum of the codes, in three parts
#include "linear/block_records.cuh"

// Of the host (kbitcupy/products/integer_units.py), ahead of this source: QUANTIZE_THREADS of a block; UNITS_TOKENS =
// 64; UNITS_K.
constexpr int BLOCKS = UNITS_K / BLOCK_K, PARTS_AT = BLOCKS * UNITS_TOKENS * 4;

// Keeps a scale and, times it, a sum of codes, of block `block` of a token.
template <bool INNER>
__device__ __forceinline__ void put_block(unsigned char* records, int block, int token, float scale, int sum) {
    constexpr int RECORD = PARTS_AT + (INNER ? PARTS * UNITS_TOKENS * BLOCKS * 2 : 0);
    unsigned char* const record = records + static_cast<long long>(block / BLOCKS) * RECORD;
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
    const T* __restrict__ x,            // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* __restrict__ codes,  // [tokens, depth]
    unsigned char* __restrict__ records, int depth) {
    quantize_sixteen<INNER>(x, codes, depth, [&](int block, int token, float scale, int sum) {
        put_block<INNER>(records, block, token, scale, sum);
    });
}
