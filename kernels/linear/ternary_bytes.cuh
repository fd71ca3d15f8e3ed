// Products of a few tokens that are int8 already and ternary weights, in one launch: the copy engine brings codes as in
// linear/ternary_rows.cuh, and every thread block reads the tokens where they are given. They lie in shared memory by
// blocks of 128 k, of each token eight pieces of 16 bytes, which are exchanged so that neither lanes that write
// neighbours of a row nor those that read a field of two tokens meet in a bank:
//
//     piece p of token m in block b at [b][m][p ^ 2 (b % 2) ^ 4 (m % 2)]
#pragma once
#include "linear/ternary_rows.cuh"

// How tokens that lie so are multiplied.
template <typename T>
struct InPlace : Integers<T> {};
template <typename T>
struct PiecesOf<InPlace<T>> {
    // A field is a pair of pieces, of which a lane has one.
    __device__ __forceinline__ static unsigned at(unsigned first, int step, int load, int of_load) {
        return (first + step * FIELDS * of_load) ^ load * 2 * CHUNK;
    }
};

// Where a piece of a token begins.
__device__ __forceinline__ unsigned piece_at(unsigned staged, int block, int m, int tokens, int piece) {
    return staged + (block * tokens + m) * BLOCK + (piece ^ block % 2 * 2 ^ m % 2 * 4) * CHUNK;
}

// Bring tokens to shared memory, by all threads, and add what their bytes add up to to `sums`. A warp has 512
// neighbours of all tokens at a time.
//
// asked  called when the first bytes have been asked for, with 0, and when they have come, with 1
template <typename F>
__device__ __forceinline__ void stage_tokens_in_place(
    unsigned staged, const signed char* x, int tokens, int depth, int (&sums)[TOKENS], const F& asked) {
#if __CUDA_ARCH__ >= 800
    constexpr int OF_WARP = WARP * CHUNK, HELD = 16 / ROW_WARPS, RUN_BYTES = ROW_WARPS * OF_WARP;
    const int lane = threadIdx.x % WARP, warp = warp_number(), own = warp * OF_WARP + lane * CHUNK;
    int sum[TOKENS] = {};
#pragma unroll 1
    for (int first = 0; first < depth; first += HELD * RUN_BYTES) {
        uint4 v[HELD][TOKENS];
#pragma unroll
        for (int i = 0; i < HELD; ++i)
#pragma unroll
            for (int m = 0; m < TOKENS; ++m) {
                const int k = first + i * RUN_BYTES + own;
                v[i][m] = NOTHING;
                if (m < tokens && k < depth)
                    v[i][m] = load_written(reinterpret_cast<const uint4*>(x + static_cast<long long>(m) * depth + k));
            }
        if (first == 0) asked(0);
#pragma unroll
        for (int i = 0; i < HELD; ++i)
#pragma unroll
            for (int m = 0; m < TOKENS; ++m) {
                const int k = first + i * RUN_BYTES + own;
                int word[4];
                word[0] = v[i][m].x, word[1] = v[i][m].y, word[2] = v[i][m].z, word[3] = v[i][m].w;
#pragma unroll
                for (int w = 0; w < 4; ++w) sum[m] = __dp4a(word[w], 0x01010101, sum[m]);
                if (m < tokens && k < depth) store_shared(piece_at(staged, k / BLOCK, m, tokens, lane % 8), word);
            }
        if (first == 0) asked(1);
    }
    int of_lane = 0;
#pragma unroll
    for (int m = 0; m < TOKENS; ++m) {
        const int of_warp = __reduce_add_sync(FULL_WARP, sum[m]);
        if (lane == m) of_lane = of_warp;
    }
    if (lane < tokens) atomicAdd(&sums[lane], of_lane);
#endif
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_bytes(
    const signed char* x,             // [tokens, depth], from a multiple of 16 bytes on
    const float* token_scale,         // [tokens], or [1] if they share it
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int scale_step, int bias_kind, int share, int stages,
    int of_pass, int ahead,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ int sums[TOKENS];
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    if (threadIdx.x < TOKENS) sums[threadIdx.x] = 0;
    __syncthreads();
    int own_sum[2];
    float own_scale[2];
    multiply_int8<InPlace<T>>(
        &map, scale, bias, y, channels, tokens, depth, scale_step, bias_kind, Cut{share, stages, of_pass, ahead}, true,
        own_sum, own_scale, [&](unsigned staged, Staged& all, const Start<0>& start) {
            // Columns beyond the last token repeat it: they are not written.
            all.column = piece_at(staged, t / 2, min(g, tokens - 1), tokens, t % 2);
#pragma unroll
            for (int e = 0; e < 2; ++e) own_scale[e] = token_scale[min(2 * t + e, tokens - 1) * token_step];
            // Tokens come sooner where the codes of one stage alone are ahead of them.
            stage_tokens_in_place(staged, x, tokens, depth, sums, [&](int come) { start(come == 0 ? 1 : stages - 1); });
            __syncthreads();
#pragma unroll
            for (int e = 0; e < 2; ++e)
                own_sum[e] = sums[min(2 * t + e, tokens - 1)], own_scale[e] = usable(own_scale[e]);
        });
#endif
}
