// Up to 64 tokens that are quantized by "q8_1" for products with q4_k: codes, [token][K], and for every BATCH_K = 256 k
// a record of BATCH_RECORD bytes:
//
//     float scale[8 blocks of 32 k][64 tokens]
//     bfloat16 part[3][64 tokens][8 blocks]       the scale times the sum of the codes, in three parts
//
// The contract of codes and scales stands in kbitcupy/products/integer_activations.py.
#include "common/copy.cuh"
#include "common/sync.cuh"
#include "linear/block_activations.cuh"

// Of the host (kbitcupy/products/integer_batch.py), ahead of this source: QUANTIZE_THREADS of a block; BATCH_TOKENS =
// 64; BATCH_K and BATCH_RECORD.
constexpr int BLOCK_K = SIXTEEN * HALVES_OF_BLOCK, BLOCKS = BATCH_K / BLOCK_K, PARTS = 3;
constexpr int PARTS_AT = BLOCKS * BATCH_TOKENS * 4;
static_assert(BATCH_RECORD == PARTS_AT + PARTS * BATCH_TOKENS * BLOCKS * 2, "the host reckons with the same record");

// Keeps a scale and, times it, a sum of codes, of block `block` of a token.
__device__ __forceinline__ void put_block(unsigned char* records, int block, int token, float scale, int sum) {
    unsigned char* const record = records + static_cast<long long>(block / BLOCKS) * BATCH_RECORD;
    const int of = block % BLOCKS;
    reinterpret_cast<float*>(record)[of * BATCH_TOKENS + token] = scale;
    float left = ieee::multiply(static_cast<float>(sum), scale);
    unsigned short* const part = reinterpret_cast<unsigned short*>(record + PARTS_AT) + token * BLOCKS + of;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
        left = ieee::subtract(left, __bfloat162float(rounded));
        part[i * BATCH_TOKENS * BLOCKS] = __bfloat16_as_ushort(rounded);
    }
}

// A thread has sixteen neighbours of a token; K is a multiple of BATCH_K.
template <typename T>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_batch_tokens(
    const T* __restrict__ x,            // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* __restrict__ codes,  // [tokens, depth]
    unsigned char* __restrict__ records, int depth) {
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
    int sum = sum_of_codes(word);
    sum += __shfl_xor_sync(lanes, sum, 1);
    *reinterpret_cast<uint4*>(codes + at) = make_uint4(word[0], word[1], word[2], word[3]);
    if (k % BLOCK_K == 0) put_block(records, k / BLOCK_K, token, rule.scale, sum);
}
