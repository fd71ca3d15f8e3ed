// Up to 64 tokens, quantized by "q8_1" for products of units with q4_0 or q4_k: codes, [token][K], and for every
// UNITS_K = 256 k a record:
//
//     float scale[8 blocks of 32 k][64 tokens]    of tokens 8 j + 2 t + i at 16 (j / 2) + 4 t + 2 (j % 2) + i
//     bfloat16 part[3][64 tokens][8 blocks]       q4_k: the scale times the sum of the codes, in three parts
//
// The contract of codes and scales stands in kbitcupy/products/integer_activations.py.
#include "common/copy.cuh"
#include "common/sync.cuh"
#include "linear/block_activations.cuh"

// Of the host (kbitcupy/products/integer_units.py), ahead of this source: QUANTIZE_THREADS of a block; UNITS_TOKENS =
// 64; UNITS_K.
constexpr int BLOCK_K = SIXTEEN * HALVES_OF_BLOCK, BLOCKS = UNITS_K / BLOCK_K, PARTS = 3;
constexpr int PARTS_AT = BLOCKS * UNITS_TOKENS * 4;

// Keeps a scale and, times it, a sum of codes, of block `block` of a token.
template <bool INNER>
__device__ __forceinline__ void put_block(unsigned char* records, int block, int token, float scale, int sum) {
    constexpr int RECORD = PARTS_AT + (INNER ? PARTS * UNITS_TOKENS * BLOCKS * 2 : 0);
    unsigned char* const record = records + static_cast<long long>(block / BLOCKS) * RECORD;
    const int of = block % BLOCKS, j = token / 8;
    const int place = j / 2 * 16 + token % 8 / 2 * 4 + j % 2 * 2 + token % 2;
    reinterpret_cast<float*>(record)[of * UNITS_TOKENS + place] = scale;
    if constexpr (INNER) {
        float left = ieee::multiply(static_cast<float>(sum), scale);
        unsigned short* const part = reinterpret_cast<unsigned short*>(record + PARTS_AT) + token * BLOCKS + of;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
            left = ieee::subtract(left, __bfloat162float(rounded));
            part[i * UNITS_TOKENS * BLOCKS] = __bfloat16_as_ushort(rounded);
        }
    }
}

// A thread has sixteen neighbours of a token; K is a multiple of UNITS_K.
template <typename T, bool INNER>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_unit_tokens(
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
    int sum = 0;
    if constexpr (INNER) {
        sum = sum_of_codes(word);
        sum += __shfl_xor_sync(lanes, sum, 1);
    }
    *reinterpret_cast<uint4*>(codes + at) = make_uint4(word[0], word[1], word[2], word[3]);
    if (k % BLOCK_K == 0) put_block<INNER>(records, k / BLOCK_K, token, rule.scale, sum);
}
