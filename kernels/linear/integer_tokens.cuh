// Tokens as fragments (linear/integer_activations.cuh), quantized by a thread block: with what products of few tokens
// need beside the codes.
#pragma once
#include "linear/block_activations.cuh"
#include "linear/integer_activations.cuh"

// Of the host, ahead of this source: numbers of codes (see linear/integer_stream.cu).

// Where codes of tokens lie beside such codes of weights.
__device__ __forceinline__ constexpr int layout_of(int codes, int unit) {
    if (codes == BYTES8 && unit != 32) return OWN_BYTES;
    if (codes == NEIGHBOURS4) return unit == 32 || unit == 64 ? NIBBLES : OWN_NIBBLES;
    if (codes == TABLE_HALVES4) return HALVES_IN_TURN;
    return codes == HALVES4 || codes == MINIMA4 ? HALVES : IN_TURN;
}

// Where the block puts its tokens, in shared or in global memory. Token m and element k of its own are token first + m
// and element begin + k of all; a whole token begins at 0.
//
//     LAYOUT  of codes
//     UNIT    elements whose codes have a sum; 0 for all of a token
//     Q8      whether scales are those of blocks of 32, [block, padded]; else of tokens
template <int LAYOUT, int UNIT, bool Q8>
struct Fragments {
    unsigned char* codes;
    float* scales;
    int* sums;           // [unit, padded], or of tokens
    unsigned* exchange;  // of quantize_by_tokens
    int padded;          // tokens of which fragments are
    int first = 0, begin = 0;

    // Sixteen bytes of a lane in a fragment at a time: four neighbouring threads, which have 64 k, exchange words.
    __device__ __forceinline__ void put(int m, int k, bool there, const unsigned (&word)[4]) const {
        const int j = k / SIXTEEN % 4;
        unsigned w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            w[i] = evens_first(LAYOUT) ? __byte_perm(word[i & 2], word[i | 1], i % 2 ? 0x7531 : 0x6420) : word[i];
        int piece = j;
        if constexpr (LAYOUT == OWN_NIBBLES || LAYOUT == OWN_BYTES) {
            const Place place = place_in_fragment(LAYOUT, k);
            if (there) store(place.fragment, m, place.at, w);
            return;
        }
        // Threads 0 and 1 have the first mma, and get of threads 2 and 3 what the second one has at the same place.
        unsigned from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) from[i] = __shfl_xor_sync(FULL_WARP, j < 2 ? w[2 + i] : w[i], 2);
        unsigned v[4] = {
            j < 2 ? w[0] : from[0], j < 2 ? w[1] : from[1], j < 2 ? from[0] : w[2], j < 2 ? from[1] : w[3]};
        if constexpr (LAYOUT == HALVES || LAYOUT == HALVES_IN_TURN) {
            // ... and of each the words of one lane.
            unsigned other[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) other[i] = __shfl_xor_sync(FULL_WARP, j % 2 ? v[2 * i] : v[2 * i + 1], 1);
            const unsigned own[2] = {j % 2 ? v[1] : v[0], j % 2 ? v[3] : v[2]};
            v[0] = j % 2 ? other[0] : own[0], v[1] = j % 2 ? own[0] : other[0];
            v[2] = j % 2 ? other[1] : own[1], v[3] = j % 2 ? own[1] : other[1];
            if constexpr (LAYOUT == HALVES_IN_TURN)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const unsigned low = v[i], high = v[i + 1];
                    v[i] = __byte_perm(low, high, 0x5140), v[i + 1] = __byte_perm(low, high, 0x7362);
                }
        } else {
            piece = j % 2 * 2 + j / 2;
        }
        if (there) store(k / FRAGMENT_K, m, piece * 16, v);
    }
    __device__ __forceinline__ void store(int fragment, int m, int at, const unsigned (&v)[4]) const {
        *reinterpret_cast<uint4*>(codes + (fragment * padded + m) * MEMBER_BYTES + at) =
            make_uint4(v[0], v[1], v[2], v[3]);
    }

    // Whole tokens, or blocks of them, of which a warp has its `share`; a thread has HELD times sixteen numbers at a
    // time. All threads of the block call it; `arrived` is called by warps whose first numbers are there.
    template <int HELD, typename T, typename S, typename A>
    __device__ __forceinline__ void quantize(
        const T* x, const S& share, int tokens, int depth, const A& arrived) const {
        const int reach = (depth + 127) / 128 * 128;  // fragments have whole 128 k
        if constexpr (Q8) {
            quantize_by_blocks<HELD>(
                x, share, tokens, depth, reach,
                [&](int m, int k, const unsigned (&word)[4]) { put(first + m, begin + k, k < reach, word); },
                [&](int m, int block, float scale, int sum) {
                    const int at = (begin / Q8_BLOCK + block) * padded + first + m;
                    scales[at] = scale, sums[at] = sum;
                },
                arrived);
        } else {
            quantize_by_tokens<UNIT == 0, HELD>(
                x, tokens, depth, reach, exchange, Int8Rule(),
                [&](int m, int k, const unsigned (&word)[4], bool there) {
                    const int own = sum_of_codes(word);
                    put(first + m, k, k < reach, word);
                    if constexpr (UNIT != 0) {
                        int sum = own;
#pragma unroll
                        for (int step = 1; step < UNIT / SIXTEEN; step *= 2)
                            sum += __shfl_xor_sync(FULL_WARP, sum, step);
                        if (there && k % UNIT == 0) sums[k / UNIT * padded + first + m] = sum;
                    }
                    return own;
                },
                [&](int m, float scale, int sum) {
                    scales[first + m] = scale;
                    if (UNIT == 0) sums[first + m] = sum;
                },
                arrived);
        }
    }
};
