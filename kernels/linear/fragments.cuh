// int8 tokens in the order in which the kernels of linear/ternary_stream.cu read them: by fragments of 8 tokens, of
// which lane (g, t), g = lane / 4 and t = lane % 4, has 16 bytes of token g. They are, of each STEP = 256 k,
//
//     in one piece   for every field of the codes: 16 neighbours, at 128 (t / 2) + 16 (t % 2) + 32 * field
//     in octets      for every 128 k and two fields: of each of the two 8 neighbours, at 8 t + 32 * field
#pragma once

constexpr int FRAGMENT_BYTES = 512;

// Where byte k of token m lies. groups: times 8 tokens.
__device__ __forceinline__ long long place_in_fragments(long long k, long long m, int groups, bool octets) {
    const int at = static_cast<int>(k % STEP), field = at % 128 / 32, member = static_cast<int>(m % 8) * 4;
    int fragment, byte;
    if (octets) fragment = at / 128 * 2 + field / 2, byte = (member + at % 32 / 8) * 16 + field % 2 * 8 + at % 8;
    else fragment = field, byte = (member + at / 128 * 2 + at % 32 / 16) * 16 + at % 16;
    return ((k / STEP * 4 + fragment) * groups + m / 8) * FRAGMENT_BYTES + byte;
}
