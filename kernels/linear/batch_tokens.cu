// Up to 64 tokens that are quantized by "q8_1" for products with q4_k: codes, [token][K], and for every BATCH_K = 256 k
// a record of BATCH_RECORD bytes:
//
//     float scale[8 blocks of 32 k][64 tokens]
//     bfloat16 part[3][64 tokens][8 blocks]       the scale times the sum of the codes, in three parts
#include "linear/block_records.cuh"

// Of the host (kbitcupy/products/integer_batch.py), ahead of this source: QUANTIZE_THREADS of a block; BATCH_TOKENS =
// 64; BATCH_K and BATCH_RECORD.
constexpr int BLOCKS = BATCH_K / BLOCK_K, PARTS_AT = BLOCKS * BATCH_TOKENS * 4;
static_assert(BATCH_RECORD == PARTS_AT + PARTS * BATCH_TOKENS * BLOCKS * 2, "the host reckons with the same record");

// Keeps a scale and, times it, a sum of codes, of block `block` of a token.
__device__ __forceinline__ void put_block(unsigned char* records, int block, int token, float scale, int sum) {
    unsigned char* const record = records + static_cast<long long>(block / BLOCKS) * BATCH_RECORD;
    const int of = block % BLOCKS;
    reinterpret_cast<float*>(record)[of * BATCH_TOKENS + token] = scale;
    put_parts(
        reinterpret_cast<unsigned short*>(record + PARTS_AT) + token * BLOCKS + of, BATCH_TOKENS * BLOCKS, scale, sum);
}

template <typename T>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_batch_tokens(
    const T* __restrict__ x,            // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* __restrict__ codes,  // [tokens, depth]
    unsigned char* __restrict__ records, int depth) {
    quantize_sixteen<true>(x, codes, depth, [&](int block, int token, float scale, int sum) {
        put_block(records, block, token, scale, sum);
    });
}
