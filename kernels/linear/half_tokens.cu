// Tokens that are quantized by "q8_1" for products with q4_k: codes, [token][K], as bytes or as halves, of these of
// every 16 k the even ones ahead of the odd ones; and for every RECORD_K = 256 k a record, with halves of RECORD_BYTES:
//
//     float scale[8 blocks of 32 k][64 tokens]    halves: of tokens 8 j + 2 t + i at 16 (j / 2) + 4 t + 2 (j % 2) + i
//     bfloat16 part[3][64 tokens][8 blocks]       the scale times the sum of the codes, in three parts
//     bfloat16 zero[64 tokens][8 blocks]          halves: zeros
//
// The contract of codes and scales stands in kbitcupy/products/integer_activations.py.
#include "common/copy.cuh"
#include "common/sync.cuh"
#include "linear/block_activations.cuh"

// Of the host (kbitcupy/products/integer_halves.py), ahead of this source: QUANTIZE_THREADS of a block; HALVES_TOKENS =
// 64; RECORD_K and RECORD_BYTES.
constexpr int BLOCK_K = SIXTEEN * HALVES_OF_BLOCK, BLOCKS = RECORD_K / BLOCK_K, PARTS = 3;
constexpr int PARTS_AT = BLOCKS * HALVES_TOKENS * 4;
constexpr int PART_BYTES = HALVES_TOKENS * BLOCKS * 2;
static_assert(RECORD_BYTES == PARTS_AT + (PARTS + 1) * PART_BYTES, "the host reckons with the same record");

// The bytes EVEN, or those beside them, of two words as four halves: what they are in two's complement.
template <int ODD>
__device__ __forceinline__ uint2 halves_of(unsigned first, unsigned second) {
    constexpr unsigned SELECTOR = ODD ? 0x4341 : 0x4240;
    const unsigned raised[2] = {first ^ 0x80808080u, second ^ 0x80808080u};
    unsigned pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)  // 1024 + 128 and the code, less 1152
        pair[i] = Word<__half>::bits(
            __hadd2(Word<__half>::as(__byte_perm(raised[i], 0x64646464u, SELECTOR)), Word<__half>::as(0xe480e480u)));
    return make_uint2(pair[0], pair[1]);
}

// Keeps a scale and, times it, a sum of codes, of block `block` of a token.
template <bool BYTES>
__device__ __forceinline__ void put_block(unsigned char* records, int block, int token, float scale, int sum) {
    constexpr int RECORD = RECORD_BYTES - (BYTES ? PART_BYTES : 0);
    unsigned char* const record = records + static_cast<long long>(block / BLOCKS) * RECORD;
    const int of = block % BLOCKS, j = token / 8;
    const int place = BYTES ? token : j / 2 * 16 + token % 8 / 2 * 4 + j % 2 * 2 + token % 2;
    reinterpret_cast<float*>(record)[of * HALVES_TOKENS + place] = scale;
    float left = ieee::multiply(static_cast<float>(sum), scale);
    unsigned short* const part = reinterpret_cast<unsigned short*>(record + PARTS_AT) + token * BLOCKS + of;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
        left = ieee::subtract(left, __bfloat162float(rounded));
        part[i * HALVES_TOKENS * BLOCKS] = __bfloat16_as_ushort(rounded);
    }
    if constexpr (!BYTES) part[PARTS * HALVES_TOKENS * BLOCKS] = 0;
}

// A thread has sixteen neighbours of a token; K is a multiple of RECORD_K.
template <typename T, bool BYTES>
__global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_half_tokens(
    const T* __restrict__ x,   // [tokens, depth], rows at multiples of 16 bytes
    void* __restrict__ codes,  // [tokens, depth]
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
    uint4* const to = static_cast<uint4*>(codes) + at / (BYTES ? 16 : 8);
    if constexpr (BYTES) {
        to[0] = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
        uint2 low = halves_of<0>(word[0], word[1]), high = halves_of<0>(word[2], word[3]);
        to[0] = make_uint4(low.x, low.y, high.x, high.y);
        low = halves_of<1>(word[0], word[1]), high = halves_of<1>(word[2], word[3]);
        to[1] = make_uint4(low.x, low.y, high.x, high.y);
    }
    if (k % BLOCK_K == 0) put_block<BYTES>(records, k / BLOCK_K, token, rule.scale, sum);
}
