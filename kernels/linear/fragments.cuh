// int8 tokens in the order in which the kernels of linear/ternary_stream.cu read them: by fragments of 8 tokens, of
// which lane (g, t), g = lane / 4 and t = lane % 4, has 16 bytes of token g. They are, of each STEP = 256 k,
//
//     in one piece   for every field of the codes: 16 neighbours, at 128 (t / 2) + 16 (t % 2) + 32 * field
//     in octets      for every 128 k and two fields: of each of the two 8 neighbours, at 8 t + 32 * field
#pragma once
#include "common/types.cuh"

constexpr int FRAGMENT_BYTES = 512;

// Where byte k of token m lies. groups: times 8 tokens.
__device__ __forceinline__ long long place_in_fragments(unsigned k, long long m, int groups, bool octets) {
    const unsigned at = k % STEP, field = at % 128 / 32, member = static_cast<unsigned>(m) % 8 * 4;
    unsigned fragment, byte;
    if (octets) fragment = at / 128 * 2 + field / 2, byte = (member + at % 32 / 8) * 16 + field % 2 * 8 + at % 8;
    else fragment = field, byte = (member + at / 128 * 2 + at % 32 / 16) * 16 + at % 16;
    return (static_cast<long long>(k / STEP * 4 + fragment) * groups + m / 8) * FRAGMENT_BYTES + byte;
}

// The sums of groups of 32, 64 or 128 codes, of neighbouring lanes that have eight each: all lanes of a warp call it,
// of which those from k = size on have nothing.
//
// sums  int32[ceil(size / group), groups, 8]
__device__ __forceinline__ void store_group_sums(
    int* sums, int sum, int k, int size, long long m, int groups, int group) {
#pragma unroll 1
    for (int step = 1; step < group / 8; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (k < size && k % group == 0) sums[static_cast<long long>(k / group) * groups * 8 + m] = sum;
}
