// Products of a few tokens, in int8 or floats of 16 bits, and ternary weights, whose codes are read in place, once. The
// contract is that of kbitcupy/products/ternary.py, where the layout of codes is said too.
//
// int8: sums are of codes, t + 1, times activations, less the sum of the activations: exact in int32. Nothing is
// shifted: the two bits of field f of a byte stay where they are, under a mask, count 4^f, and have sums of their own,
// which are divided at the end. Floats: so are the bits in the fractions of floats, less what t = 0 would make of them.
//
//     codes  --16 B a lane of rows g and g + 8, for 64 k each--> 4 masks a word --> a of mma, 4 sums
//     tokens --16 B a lane, in the order of fragments (linear/fragments.cuh)-----> b of mma
//
// Where groups along K have scales, sums are of a group, 8 bytes a lane of 32 k of a row at a time, and their terms are
// added in order, through shared memory.
#include "common/ieee.cuh"
#include "linear/fragments.cuh"
#include "linear/ternary_mma.cuh"

// Of the host (kbitcupy/products/ternary.py), ahead of this source: STEP, k of 64 bytes of codes; MOST_THREADS of a
// block, and FEW_THREADS with more than 8 tokens or floats; ARRANGE_THREADS and GROUP_THREADS; FLOAT32_BIAS and its
// like.
constexpr int BLOCK = 128, ROWS = 16, FIELDS = 4, STEP_BYTES = STEP / FIELDS, CHUNK = 16;

// ---- tokens ------------------------------------------------------------------------------------------------------

// Tokens that are int8 already, in the order of fragments. A thread block has one.
__global__ void __launch_bounds__(ARRANGE_THREADS) arrange_tokens(
    const signed char* __restrict__ rows,  // [tokens, pitch]
    unsigned char* __restrict__ a,         // fragments
    int* __restrict__ sums,                // [tokens] of the activations
    int groups, int octets, int depth, int pitch) {
    __shared__ int part[ARRANGE_THREADS / WARP];
    wait_for_previous();
    launch_dependents();
    const int m = blockIdx.x, lane = threadIdx.x % WARP;
    const signed char* row = rows + static_cast<long long>(m) * pitch;
    int sum = 0;
    for (int k = threadIdx.x; k < depth; k += ARRANGE_THREADS) {
        a[place_in_fragments(k, m, groups, octets != 0)] = static_cast<unsigned char>(row[k]);
        sum += row[k];
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (lane == 0) part[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < ARRANGE_THREADS / WARP; ++i) sum += part[i];
        sums[m] = sum;
    }
}

// Tokens of 16 bits for `Floats`: fragments as of int8, of four neighbours the first and third, then the others. A
// thread has four.
template <typename T>
__global__ void __launch_bounds__(ARRANGE_THREADS) arrange_floats(
    const T* __restrict__ x,        // [tokens, depth]
    unsigned char* __restrict__ a,  // [ceil(depth / STEP), 2 FIELDS, groups, FRAGMENT_BYTES]
    int groups, int depth) {
    wait_for_previous();
    launch_dependents();
    const int m = blockIdx.y, k = (blockIdx.x * ARRANGE_THREADS + threadIdx.x) * 4;
    if (k >= depth) return;
    const unsigned short* four = reinterpret_cast<const unsigned short*>(x) + static_cast<long long>(m) * depth + k;
    const int at = k % STEP, field = at % 128 / 32, t = at / 128 * 2 + at % 32 / 16, word = at % 16 / 4;
    const long long fragment = static_cast<long long>(k / STEP * 2 * FIELDS + field * 2 + word / 2) * groups + m / 8;
    unsigned char* target = a + fragment * FRAGMENT_BYTES + (m % 8 * 4 + t) * CHUNK + word % 2 * 8;
    *reinterpret_cast<uint2*>(target) = make_uint2(four[0] | four[2] << 16, four[1] | four[3] << 16);
}

// ---- products ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bias_of(const void* bias, int kind, long long row) {
    switch (kind) {
        case FLOAT32_BIAS:
            return static_cast<const float*>(bias)[row];
        case FLOAT16_BIAS:
            return to_float(static_cast<const __half*>(bias)[row]);
        case BFLOAT16_BIAS:
            return to_float(static_cast<const __nv_bfloat16*>(bias)[row]);
        default:
            return -0.0f;  // changes no number
    }
}

// What a lane fetches at a time: of rows g and g + 8 two steps.
struct Piece {
    uint4 upper[2], lower[2];
};

// How codes are multiplied by int8 tokens.
//     Sum        of a warp's products
//     LOADS      16-byte pieces of 8 tokens that a lane takes in a step
//     QUANTIZED  whether tokens have sums and scales
//     multiply   adds to the sums of fields, for 16 bytes of rows g and g + 8 each
//     total      of the fields
//     scaled     y, but for the bias, from the sum over all warps
template <typename T>
struct Integers {
    using Sum = int;
    static constexpr int LOADS = FIELDS;
    static constexpr bool QUANTIZED = true;

    __device__ __forceinline__ static void multiply(
        Sum (&sum)[FIELDS][4], const uint4& u, const uint4& l, const uint4 (&b)[LOADS]) {
#pragma unroll
        for (int f = 0; f < FIELDS; ++f) {
            const unsigned mask = 0x03030303u << 2 * f;
            mma_bytes<false>(sum[f], {u.x & mask, l.x & mask, u.y & mask, l.y & mask}, b[f].x, b[f].y);
            mma_bytes<false>(sum[f], {u.z & mask, l.z & mask, u.w & mask, l.w & mask}, b[f].z, b[f].w);
        }
    }
    __device__ __forceinline__ static Sum total(const Sum (&sum)[FIELDS][4], int e) {
        return sum[0][e] + (sum[1][e] >> 2) + (sum[2][e] >> 4) + (sum[3][e] >> 6);
    }
    __device__ __forceinline__ static float scaled(Sum total, int of_token, float token_scale, float scale) {
        return ieee::multiply(ieee::multiply(__int2float_rn(total - of_token), token_scale), scale);
    }
};

// ... and by tokens of T, 16 bits. A code c of field f becomes 4^f c in the fraction of a number so large that its last
// bit is 1; less that number and 4^f, it is 4^f t.
template <typename T>
struct Floats {
    using Sum = float;
    static constexpr int LOADS = 2 * FIELDS;
    static constexpr bool QUANTIZED = false;

    // The two numbers in bytes 0 and 2 of a word. The fraction of bfloat16 has no room for field 3, which stands there
    // where field 2 was and counts as that.
    __device__ __forceinline__ static unsigned pair(unsigned word, int f) {
        const int place = min(f, PLACES<T> - 1);
        const unsigned bits = (word >> 2 * (f - place) & 0x00030003u << 2 * place) | LARGE<T>;
        return less_large<T>(bits, place);
    }
    __device__ __forceinline__ static void multiply(
        Sum (&sum)[FIELDS][4], const uint4& u, const uint4& l, const uint4 (&b)[LOADS]) {
        const unsigned upper[4] = {u.x, u.y, u.z, u.w}, lower[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned odd_upper = upper[i] >> 8, odd_lower = lower[i] >> 8;
#pragma unroll
            for (int f = 0; f < FIELDS; ++f) {
                const uint4& four = b[f * 2 + i / 2];
                mma_floats<T>(
                    sum[min(f, PLACES<T> - 1)],
                    {pair(upper[i], f), pair(lower[i], f), pair(odd_upper, f), pair(odd_lower, f)},
                    i % 2 == 0 ? four.x : four.z, i % 2 == 0 ? four.y : four.w);
            }
        }
    }
    __device__ __forceinline__ static Sum total(const Sum (&sum)[FIELDS][4], int e) {
        return (sum[0][e] + sum[1][e] * 0.25f) + (sum[2][e] * 0.0625f + sum[3][e] * 0.015625f);
    }
    __device__ __forceinline__ static float scaled(Sum total, int, float, float scale) { return total * scale; }
};

// Threads of a block, at the most.
template <int TOKENS, bool QUANTIZED>
constexpr int MOST = TOKENS > 8 || !QUANTIZED ? FEW_THREADS : MOST_THREADS;

// The warps of a block share 16 channels: each takes every so manieth step along k, and the sums meet in shared memory.
// The steps of a warp come two at a time, of which the next two are under way, also across the end of the 16 channels.
template <typename T, int TOKENS, template <typename> class Operand>
__global__ void __launch_bounds__(
    MOST<TOKENS, Operand<T>::QUANTIZED>, TOKENS > (Operand<T>::QUANTIZED ? 16 : 8) ? 1 : 2)
    stream_ternary(
        const unsigned char* __restrict__ codes,  // [channels, depth / 4]
        const unsigned char* a,                   // fragments of TOKENS tokens
        const int* token_sum,                     // [tokens] of the activations
        const float* token_scale,                 // [tokens], or [1] if they share it
        const float* __restrict__ scale,          // [channels], or [1] if they share it
        const void* __restrict__ bias,            // [channels] of the type that bias_kind names, or null
        T* __restrict__ y,                        // [tokens, channels]
        long long channels, int tokens, int depth, int token_step, int scale_step, int bias_kind) {
    using By = Operand<T>;
    using Sum = typename By::Sum;
    constexpr int GROUPS = TOKENS / 8;
    __shared__ Sum partial[2][MOST<TOKENS, By::QUANTIZED> / WARP][TOKENS][ROWS + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int g = lane / 4, t = lane % 4;
    const int row_bytes = depth / FIELDS, steps = (row_bytes + STEP_BYTES - 1) / STEP_BYTES;
    const int turns = (steps + 2 * warps - 1) / (2 * warps);
    const long long blocks = (channels + ROWS - 1) / ROWS;

    long long fetched = blockIdx.x;
    int fetched_turn = 0;
    const auto fetch = [&](Piece& piece) {
        // Channels beyond the last one are computed again and not written.
        const long long n = fetched * ROWS + g;
        const unsigned char* upper = codes + min(n, channels - 1) * row_bytes + t * CHUNK;
        const unsigned char* lower = codes + min(n + 8, channels - 1) * row_bytes + t * CHUNK;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int at = ((fetched_turn * 2 + s) * warps + warp) * STEP_BYTES;
            piece.upper[s] = piece.lower[s] = make_uint4(0, 0, 0, 0);
            if (fetched < blocks && at + t * CHUNK < row_bytes) {
                piece.upper[s] = load_codes(upper + at);
                piece.lower[s] = load_codes(lower + at);
            }
        }
        if (++fetched_turn == turns) fetched_turn = 0, fetched += gridDim.x;
    };
    const auto scale_of = [&](long long block) {
        return load_scale(scale + min(block * ROWS + threadIdx.x % ROWS, channels - 1) * scale_step);
    };
    Piece first, second;
    fetch(first);
    fetch(second);
    float channel_scale = scale_of(blockIdx.x);
    wait_for_previous();

    // Columns beyond the last token repeat it, or one that is nothing: they are not written.
    int column[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
        column[i] = i * FRAGMENT_BYTES + (max(min(g, tokens - 1 - i * 8), 0) * 4 + t) * CHUNK;
    // Of this thread's first output, for which nobody should have to wait at the end.
    const int own = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
    int own_sum = 0;
    float own_scale = 0;
    if (By::QUANTIZED && own < tokens) own_sum = token_sum[own], own_scale = usable(token_scale[own * token_step]);

    Sum sum[GROUPS][FIELDS][4] = {};
    long long block = blockIdx.x;
    int turn = 0, half = 0;
    const auto multiply = [&](Piece& piece) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int step = (turn * 2 + s) * warps + warp;
            if (step >= steps) continue;
            const uint4 u = piece.upper[s], l = piece.lower[s];
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                const unsigned char* at = a + (column[i] + step * (By::LOADS * GROUPS * FRAGMENT_BYTES));
                uint4 b[By::LOADS];
#pragma unroll
                for (int j = 0; j < By::LOADS; ++j)
                    b[j] = load_written(reinterpret_cast<const uint4*>(at + j * GROUPS * FRAGMENT_BYTES));
                By::multiply(sum[i], u, l, b);
            }
        }
        fetch(piece);
        if (++turn < turns) return;
        turn = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                partial[half][warp][i * 8 + 2 * t + e % 2][g + e / 2 * 8] = By::total(sum[i], e);
#pragma unroll
                for (int f = 0; f < FIELDS; ++f) sum[i][f][e] = 0;
            }
        __syncthreads();
        const long long n = block * ROWS + row;
        for (int m = own; m < tokens && n < channels; m += blockDim.x / ROWS) {
            Sum total = partial[half][0][m][row];
            for (int of = 1; of < warps; ++of) total += partial[half][of][m][row];
            const bool first_one = m == own || !By::QUANTIZED;
            const float scaled = By::scaled(
                total, first_one ? own_sum : token_sum[m], first_one ? own_scale : usable(token_scale[m * token_step]),
                usable(channel_scale));
            from_float(y[m * channels + n], ieee::add(scaled, bias_of(bias, bias_kind, n)));
        }
        half ^= 1;  // the next sums meet elsewhere: none of these is overwritten before all have been read
        block += gridDim.x;
        if (block < blocks) channel_scale = scale_of(block);
    };
    while (block < blocks) {
        multiply(first);
        if (block < blocks) multiply(second);
    }
}

// ---- groups ------------------------------------------------------------------------------------------------------

// A number n, of which `sum` is unit times, exactly: |sum| is below 2^22, and so low in the bits of a float that one is
// n.
template <int UNIT>
__device__ __forceinline__ float number_of(int sum) {
    constexpr float BASE = 12582912.0f / UNIT;  // 1.5 * 2^23
    return __fsub_rn(__uint_as_float(__float_as_uint(BASE) + sum), BASE);
}

// How the fields of 128 k become sums: which sum has a field, in what units, and whether the field is moved to the
// place of the one below.
template <int GROUP>
struct Sums;
template <>
struct Sums<32> {
    static constexpr int COUNT = 4;
    __device__ __forceinline__ static constexpr int of(int field) { return field; }
    __device__ __forceinline__ static constexpr bool moves(int) { return false; }
};
template <>
struct Sums<64> {
    static constexpr int COUNT = 2;
    __device__ __forceinline__ static constexpr int of(int field) { return field / 2; }
    __device__ __forceinline__ static constexpr bool moves(int field) { return field % 2; }
};
template <>
struct Sums<128> : Sums<64> {};

// What a lane fetches at a time: of rows g and g + 8 some times 128 k, and the scales of their groups.
template <int GROUP>
struct GroupPiece {
    static constexpr int BLOCKS = GROUP == 32 ? 1 : 2, PER_BLOCK = BLOCK / GROUP;
    uint2 codes[2][BLOCKS];
    float scale[2][BLOCKS][PER_BLOCK];
};

// A block has 16 channels and 8 tokens. In a turn its warps take neighbouring pieces; the terms of their groups wait in
// shared memory, one turn behind the other, for the threads that add them up, from the first to the last.
template <typename T, int GROUP>
__global__ void __launch_bounds__(GROUP_THREADS, 2) stream_ternary_groups(
    const unsigned char* __restrict__ codes,  // [channels, depth / 4]
    const unsigned char* a,                   // fragments in octets, of gridDim.y times 8 tokens
    const float* token_scale,                 // [tokens], or [1] if they share it
    const float* __restrict__ scale,          // [channels, depth / GROUP]
    const void* __restrict__ bias,            // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                        // [tokens, channels]
    long long channels, long long tokens, int depth, int token_step, int bias_kind) {
    using Part = GroupPiece<GROUP>;
    using Of = Sums<GROUP>;
    constexpr int WARPS = GROUP_THREADS / WARP, TURN = WARPS * Part::BLOCKS, TERMS = TURN * Part::PER_BLOCK;
    constexpr int PITCH = ROWS + 4;  // lanes (g, t) that write tokens 2 t then have banks of their own
    __shared__ float terms[2][TERMS][8][PITCH];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int along = depth / BLOCK, turns = (along + TURN - 1) / TURN, row_bytes = depth / FIELDS;
    const long long tiles = (channels + ROWS - 1) / ROWS, first_token = blockIdx.y * 8ll;

    long long fetched = blockIdx.x;
    int fetched_turn = 0;
    const auto fetch = [&](Part& piece) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Channels beyond the last one are computed again and not written.
            const long long n = min(fetched * ROWS + g + 8 * half, channels - 1);
#pragma unroll
            for (int s = 0; s < Part::BLOCKS; ++s) {
                const int at = fetched_turn * TURN + warp * Part::BLOCKS + s;
                piece.codes[half][s] = make_uint2(0, 0);
                if (fetched < tiles && at < along) {
                    piece.codes[half][s] = load_codes8(codes + n * row_bytes + at * 32 + t * 8);
                    load_scales(piece.scale[half][s], scale + (n * along + at) * Part::PER_BLOCK);
                }
            }
        }
        if (++fetched_turn == turns) fetched_turn = 0, fetched += gridDim.x;
    };
    Part first, second;
    fetch(first);
    fetch(second);
    wait_for_previous();

    // Columns beyond the last token repeat it: they are not written.
    const int last = static_cast<int>(min(tokens - first_token, 8ll)) - 1;
    const unsigned char* column = a + blockIdx.y * FRAGMENT_BYTES + (min(g, last) * 4 + t) * CHUNK;
    const long long along_groups = static_cast<long long>(gridDim.y) * FRAGMENT_BYTES;
    float of_token[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) of_token[e] = usable(token_scale[(first_token + min(2 * t + e, last)) * token_step]);

    long long tile = blockIdx.x;
    int turn = 0, buffer = 0;
    const int row = threadIdx.x % ROWS, token = threadIdx.x / ROWS;
    float total = -0.0f;  // added to a number it changes nothing
    const auto multiply = [&](Part& piece) {
#pragma unroll
        for (int s = 0; s < Part::BLOCKS; ++s) {
            const int in_turn = warp * Part::BLOCKS + s, at = turn * TURN + in_turn;
            if (at >= along) continue;
            const uint4 low = load_written(reinterpret_cast<const uint4*>(column + at * 2 * along_groups));
            const uint4 high = load_written(reinterpret_cast<const uint4*>(column + (at * 2 + 1) * along_groups));
            const uint2 b[FIELDS] = {
                make_uint2(low.x, low.y), make_uint2(low.z, low.w), make_uint2(high.x, high.y),
                make_uint2(high.z, high.w)};
            const uint2 u = piece.codes[0][s], l = piece.codes[1][s];
            int sum[Of::COUNT][4] = {};
#pragma unroll
            for (int f = 0; f < FIELDS; ++f) {
                const int place = Of::moves(f) ? f - 1 : f, less = f - place;
                const unsigned mask = 0x03030303u << 2 * place;
                int (&of)[4] = sum[Of::of(f)];
                mma_bytes<false>(
                    of,
                    {u.x >> 2 * less & mask, l.x >> 2 * less & mask, u.y >> 2 * less & mask, l.y >> 2 * less & mask},
                    b[f].x, b[f].y);
                // What codes are too large by, 1 in the same units.
                const unsigned one = 0x01010101u * (0x100u - (1u << 2 * place));
                mma_bytes<true>(of, {one, one, one, one}, b[f].x, b[f].y);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float* target = &terms[buffer][in_turn * Part::PER_BLOCK][2 * t + e % 2][g + e / 2 * 8];
#pragma unroll
                for (int i = 0; i < Part::PER_BLOCK; ++i) {
                    float v;
                    if constexpr (GROUP == 128) v = number_of<1>(sum[0][e] + (sum[1][e] >> 4));
                    else if constexpr (GROUP == 64) v = i == 0 ? number_of<1>(sum[0][e]) : number_of<16>(sum[1][e]);
                    else
                        v = i == 0   ? number_of<1>(sum[0][e])
                            : i == 1 ? number_of<4>(sum[1][e])
                            : i == 2 ? number_of<16>(sum[2][e])
                                     : number_of<64>(sum[3][e]);
                    const float of_group = usable(piece.scale[e / 2][s][i]);
                    target[i * 8 * PITCH] = ieee::multiply(ieee::multiply(v, of_token[e % 2]), of_group);
                }
            }
        }
        fetch(piece);
        __syncthreads();
        if (token <= last) {
            const int there = min(TERMS, (along - turn * TURN) * Part::PER_BLOCK);
#pragma unroll 8
            for (int i = 0; i < there; ++i) total = ieee::add(total, terms[buffer][i][token][row]);
        }
        buffer ^= 1;  // the next terms wait elsewhere: none of these is overwritten before it has been read
        if (++turn < turns) return;
        const long long n = tile * ROWS + row;
        if (token <= last && n < channels)
            from_float(y[(first_token + token) * channels + n], ieee::add(total, bias_of(bias, bias_kind, n)));
        turn = 0, total = -0.0f, tile += gridDim.x;
    };
    while (tile < tiles) {
        multiply(first);
        if (tile < tiles) multiply(second);
    }
}
