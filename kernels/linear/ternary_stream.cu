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
#include "linear/fragments.cuh"
#include "linear/ternary_operands.cuh"

// Of the host (kbitcupy/products/ternary_stream.py), ahead of this source: STEP, k of 64 bytes of codes; STREAM_THREADS
// of a block, at the most, and FEW_THREADS with more than 16 tokens; STREAM_DEPTH, places in a lane's queue;
// ARRANGE_THREADS, GROUP_THREADS, FLOAT32_BIAS and its like.

// ---- tokens ------------------------------------------------------------------------------------------------------

// Eight neighbours of a token from k on, of which those behind its end are zero; `aligned` where they are loaded at
// once.
__device__ __forceinline__ int2 octet_of(const signed char* row, int k, int depth, bool aligned) {
    int2 octet{0, 0};
    if (k >= depth) return octet;
    if (aligned) return load_written(reinterpret_cast<const int2*>(row + k));
#pragma unroll 1
    for (int e = 0; e < 8; ++e) {
        const int byte = static_cast<unsigned char>(row[k + e]) << e % 4 * 8;
        e < 4 ? octet.x |= byte : octet.y |= byte;
    }
    return octet;
}

// What eight bytes with a sign add up to: without it each is 128 more, and pairs of 16 bits hold the sums of four.
__device__ __forceinline__ int sum_of_bytes(int2 octet) {
    const unsigned words[2] = {octet.x ^ 0x80808080u, octet.y ^ 0x80808080u};
    unsigned both = 0;
    for (const unsigned word : words) both += (word & 0x00ff00ffu) + (word >> 8 & 0x00ff00ffu);
    return static_cast<int>((both & 0xffffu) + (both >> 16)) - 8 * 128;
}

// Tokens that are int8 already, in the order of fragments. A thread block has one, a thread eight neighbours, and more
// of them at once: the product waits. With so few registers blocks find room beside those of the product before.
__global__ void __launch_bounds__(ARRANGE_THREADS, 65536 / (32 * ARRANGE_THREADS)) arrange_tokens(
    const signed char* __restrict__ rows,  // [tokens, pitch]
    unsigned char* __restrict__ a,         // fragments
    int* __restrict__ sums,                // [tokens] of the activations, or as store_group_sums has them
    int groups,
    int group,  // of which there are sums, and fragments in octets; 0 for all of a token
    int depth, int pitch,
    int early) {  // whether the product may start ahead of the wait
    constexpr int AT_ONCE = 4, STRIDE = ARRANGE_THREADS * 8;
    __shared__ int part[ARRANGE_THREADS / WARP];
    if (early != 0) launch_dependents();  // weights are there, see linear/integer_tokens.cu
    wait_for_previous();
    launch_dependents();
    const int m = blockIdx.x, lane = threadIdx.x % WARP;
    const signed char* row = rows + static_cast<long long>(m) * pitch;
    const bool aligned = reinterpret_cast<unsigned long long>(row) % 8 == 0;
    int sum = 0;
    for (int first = threadIdx.x * 8; first - lane * 8 < depth; first += AT_ONCE * STRIDE) {
        int2 octet[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) octet[i] = octet_of(row, first + i * STRIDE, depth, aligned);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int k = first + i * STRIDE, of_octet = sum_of_bytes(octet[i]);
            if (k < depth) *reinterpret_cast<int2*>(a + place_in_fragments(k, m, groups, group != 0)) = octet[i];
            if (group != 0) store_group_sums(sums, of_octet, k, depth, m, groups, group);
            sum += of_octet;
        }
    }
    if (group != 0) return;
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
// thread has four. What is behind the end of a token is zero: codes of 0 stand for -1 there.
template <typename T>
__global__ void __launch_bounds__(ARRANGE_THREADS) arrange_floats(
    const T* __restrict__ x,        // [tokens, depth]
    unsigned char* __restrict__ a,  // [ceil(depth / STEP), 2 FIELDS, groups, FRAGMENT_BYTES]
    int groups, int depth) {
    wait_for_previous();
    launch_dependents();
    const int m = blockIdx.y, k = (blockIdx.x * ARRANGE_THREADS + threadIdx.x) * 4;
    if (k >= (depth + STEP - 1) / STEP * STEP) return;
    const unsigned short* four = reinterpret_cast<const unsigned short*>(x) + static_cast<long long>(m) * depth + k;
    const bool there = k < depth;
    const int at = k % STEP, field = at % 128 / 32, t = at / 128 * 2 + at % 32 / 16, word = at % 16 / 4;
    const long long fragment = static_cast<long long>(k / STEP * 2 * FIELDS + field * 2 + word / 2) * groups + m / 8;
    unsigned char* target = a + fragment * FRAGMENT_BYTES + (m % 8 * 4 + t) * CHUNK + word % 2 * 8;
    *reinterpret_cast<uint2*>(target) =
        there ? make_uint2(four[0] | four[2] << 16, four[1] | four[3] << 16) : make_uint2(0, 0);
}

// ---- products ----------------------------------------------------------------------------------------------------

// Threads of a block, at the most.
template <int TOKENS>
constexpr int THREADS_OF = TOKENS > 16 ? FEW_THREADS : STREAM_THREADS;

// Start to copy a lane's part of a token to shared memory: of `count` steps of its warp those that are there, `piece`
// bytes from load to load there and `between` here.
template <int LOADS>
__device__ __forceinline__ void stage_column(
    unsigned char* target, const unsigned char* column, int count, int steps, int warp, int warps, int piece,
    int between) {
    for (int n = 0; n < count; ++n) {
        const int step = (n / 2 * warps + warp) * 2 + n % 2;
        if (step >= steps) break;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            copy_async<CHUNK>(
                shared_address(target + n * (LOADS * piece) + j * piece),
                column + static_cast<long long>(step * LOADS + j) * between);
    }
}

// The warps of a block share 16 channels: each takes every so manieth step along k, and the sums meet in shared memory.
// A lane fetches its codes itself, 16 bytes of rows g and g + 8 a step, through a queue of its own in shared memory,
// also across the end of the 16 channels: no lane waits for another before the sums are complete.
//
// Tokens are staged in shared memory where there is room, each warp its own steps of them: from L1 they came too late.
//
// between  bytes from fragment to fragment of a group of 8 tokens
// store    gets number of token and channel, and y but for the bias
template <typename Operand, int TOKENS, typename F>
__device__ __forceinline__ void stream(
    const unsigned char* codes, const unsigned char* a, int between, const int* token_sum, const float* token_scale,
    const float* scale, long long channels, int tokens, int depth, int token_step, int scale_step, int staged,
    const F& store) {
    using By = Operand;
    using Sum = typename By::Sum;
    constexpr int GROUPS = TOKENS / 8, WARPS = THREADS_OF<TOKENS> / WARP, DEPTH = STREAM_DEPTH;
    __shared__ uint4 memory[DEPTH][2][2][THREADS_OF<TOKENS>];  // place, step of two that are neighbours, row
    __shared__ Sum partial[WARPS][TOKENS][ROWS + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int g = lane / 4, t = lane % 4;
    const int row_bytes = depth / FIELDS, run = warps * 2 * STEP_BYTES, turns = (row_bytes + run - 1) / run;
    const long long blocks = (channels + ROWS - 1) / ROWS;

    long long fetched = blockIdx.x;
    int fetched_turn = 0, fetched_place = 0;
    const auto policy = passing();
    const int first_byte = warp * 2 * STEP_BYTES + t * CHUNK;
    const auto fetch = [&] {
        if (fetched < blocks) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                // Channels beyond the last one are computed again and not written.
                const unsigned char* of_row = codes + min(fetched * ROWS + 8 * p + g, channels - 1) * row_bytes;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int at = fetched_turn * run + first_byte + h * STEP_BYTES;
                    const int bytes = at < row_bytes ? CHUNK : 0;
                    copy_codes(
                        shared_address(&memory[fetched_place][h][p][threadIdx.x]), of_row + (bytes ? at : 0), bytes,
                        policy);
                }
            }
            if (++fetched_turn == turns) fetched_turn = 0, fetched += gridDim.x;
            if (++fetched_place == DEPTH) fetched_place = 0;
        }
        commit_copies();
    };
    const int own = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
    const auto scale_of = [&](long long block) {
        return load_scale(scale + min(block * ROWS + row, channels - 1) * scale_step);
    };
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) fetch();
    float channel_scale = scale_of(blockIdx.x);
    wait_for_previous();

    launch_dependents();

    // Columns beyond the last token repeat it, or one that is nothing: they are not written. Staged are those that are
    // something: pieces [turn, step, load, token, t].
    const unsigned char* column[GROUPS];
    const int piece = staged ? tokens * 4 * CHUNK : between, of_step = By::LOADS * piece;
    const long long of_turn = staged ? 2 * of_step : 2ll * warps * of_step;
    const int steps = (row_bytes + STEP_BYTES - 1) / STEP_BYTES;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const int m = max(min(g, tokens - 1 - i * 8), 0);
        column[i] = a + i * FRAGMENT_BYTES + (m * 4 + t) * CHUNK;
        if (!staged) {
            column[i] += warp * 2ll * of_step;
            continue;
        }
        unsigned char* target =
            dynamic_memory() + warp * turns * 2 * of_step + (min(i * 8 + g, tokens - 1) * 4 + t) * CHUNK;
        if (i * 8 + g < tokens)
            stage_column<By::LOADS>(target, column[i], 2 * turns, steps, warp, warps, piece, between);
        column[i] = target;
    }
    if (staged) {
        commit_copies();
        wait_copies<0>();
        __syncwarp();
    }
    // Of this thread's first output, for which nobody should have to wait at the end.
    int own_sum = 0;
    float own_scale = 0;
    if (By::QUANTIZED && own < tokens) own_sum = token_sum[own], own_scale = usable(token_scale[own * token_step]);

    int place = 0;
    for (long long block = blockIdx.x; block < blocks; block += gridDim.x) {
        Sum sum[GROUPS][FIELDS][4] = {};
        for (int turn = 0; turn < turns; ++turn) {
            wait_copies<DEPTH - 2>();
            fetch();
#pragma unroll(By::QUANTIZED || TOKENS == 8 ? 2 : 1)
            for (int h = 0; h < 2; ++h) {
                if ((turn * warps + warp) * 2 + h >= steps) break;
                const uint4 u = memory[place][h][0][threadIdx.x], l = memory[place][h][1][threadIdx.x];
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) {
                    const unsigned char* at = column[i] + turn * of_turn + h * of_step;
                    uint4 b[By::LOADS];
#pragma unroll
                    for (int j = 0; j < By::LOADS; ++j) b[j] = *reinterpret_cast<const uint4*>(at + j * piece);
                    By::multiply(sum[i], u, l, b);
                }
            }
            if (++place == DEPTH) place = 0;
        }
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) partial[warp][i * 8 + 2 * t + e % 2][g + e / 2 * 8] = By::total(sum[i], e);
        __syncthreads();
        const long long n = block * ROWS + row;
#pragma unroll 1
        for (int m = own; m < tokens && n < channels; m += blockDim.x / ROWS) {
            Sum total = partial[0][m][row];
#pragma unroll
            for (int of = 1; of < WARPS; ++of)
                if (of < warps) total += partial[of][m][row];
            const bool first_one = m == own || !By::QUANTIZED;
            const float scaled = By::scaled(
                total, first_one ? own_sum : token_sum[m], first_one ? own_scale : usable(token_scale[m * token_step]),
                usable(channel_scale));
            store(m, n, scaled);
        }
        if (block + gridDim.x < blocks) channel_scale = scale_of(block + gridDim.x);
        __syncthreads();  // the sums have been read
    }
}

template <typename T, int TOKENS, template <typename> class Operand>
__global__ void __launch_bounds__(THREADS_OF<TOKENS>, TOKENS > 16 ? 1 : 2) stream_ternary(
    const unsigned char* __restrict__ codes,  // [channels, depth / 4]
    const unsigned char* a,                   // fragments of TOKENS tokens
    const int* token_sum,                     // [tokens] of the activations; this and the next of int8 alone
    const float* token_scale,                 // [tokens], or [1] if they share it
    const float* __restrict__ scale,          // [channels], or [1] if they share it
    const void* __restrict__ bias,            // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                        // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int scale_step, int staged, int bias_kind) {
    stream<Operand<T>, TOKENS>(
        codes, a, TOKENS / 8 * FRAGMENT_BYTES, token_sum, token_scale, scale, channels, tokens, depth, token_step,
        scale_step, staged, [&](int m, long long n, float scaled) {
            from_float(y[m * channels + n], ieee::add(scaled, bias_of(bias, bias_kind, n)));
        });
}

// ---- groups ------------------------------------------------------------------------------------------------------

// How the fields of 128 k become sums: which sum has a field, in what units, and whether the field is moved to the
// place of the one below.
template <int GROUP>
struct Sums {
    static constexpr int COUNT = GROUP == 32 ? 4 : 2;
    __device__ __forceinline__ static constexpr int of(int field) { return GROUP == 32 ? field : field / 2; }
    __device__ __forceinline__ static constexpr bool moves(int field) { return GROUP != 32 && field % 2; }
    __device__ __forceinline__ static constexpr int unit(int sum) { return 1 << (GROUP == 32 ? 2 : 4) * sum; }
    // The bits of 1.5 * 2^23 / unit: the last one counts 1 / unit, and the sum is below 2^22.
    __device__ __forceinline__ static constexpr int base(int sum) {
        return 0x4b400000 - ((GROUP == 32 ? 2 : 4) * sum << 23);
    }
};

// What a lane fetches at a time: of rows g and g + 8 some times 128 k, and the scales of their groups.
template <int GROUP>
struct GroupPiece {
    static constexpr int BLOCKS = GROUP == 32 ? 1 : 2, PER_BLOCK = BLOCK / GROUP;
    uint2 codes[2][BLOCKS];
    float scale[2][BLOCKS][PER_BLOCK];
};

// The sums over 128 k of rows g (u) and g + 8 (l), times a unit each, as the bits of floats that became larger by them.
// `less` is what the codes of two tokens add up to, which the sums have too much of.
template <int GROUP>
__device__ __forceinline__ void group_sums(
    uint2 u, uint2 l, const uint4 (&b)[2], const int2 (&less)[GroupPiece<GROUP>::PER_BLOCK],
    int (&sum)[Sums<GROUP>::COUNT][4]) {
    using Part = GroupPiece<GROUP>;
    using Of = Sums<GROUP>;
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) {
        // A float that becomes larger by the sum, in units of its last bit.
        const int unit = Of::unit(i);
        const int base = i < Part::PER_BLOCK ? static_cast<int>(Of::base(i)) : 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int2 both = less[min(i, Part::PER_BLOCK - 1)];
            sum[i][e] = base - (i < Part::PER_BLOCK ? unit * (e % 2 ? both.y : both.x) : 0);
        }
    }
#pragma unroll
    for (int f = 0; f < FIELDS; ++f) {
        const int place = Of::moves(f) ? f - 1 : f, by = 2 * (f - place);
        const unsigned mask = 0x03030303u << 2 * place;
        const uint4 four = b[f / 2];
        mma_bytes<false>(
            sum[Of::of(f)], {u.x >> by & mask, l.x >> by & mask, u.y >> by & mask, l.y >> by & mask},
            f % 2 ? four.z : four.x, f % 2 ? four.w : four.y);
    }
}

// A block has 16 channels and 8 tokens. In a turn its warps take neighbouring pieces; the terms of their groups wait in
// shared memory, one turn behind the other, for the threads that add them up, from the first to the last.
template <typename T, int GROUP>
__global__ void __launch_bounds__(GROUP_THREADS, 2) stream_ternary_groups(
    const unsigned char* __restrict__ codes,  // [channels, depth / 4]
    const unsigned char* a,                   // fragments in octets, of gridDim.y times 8 tokens
    const int* sums,                          // of groups of their codes, see store_group_sums
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
    const unsigned char* next_codes[2];
    const float* next_scales[2];
    const auto fetch = [&](Part& piece) {
        const int first_at = fetched_turn * TURN + warp * Part::BLOCKS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (fetched_turn == 0) {
                // Channels beyond the last one are computed again and not written.
                const long long n = min(fetched * ROWS + g + 8 * half, channels - 1);
                next_codes[half] = codes + n * row_bytes + first_at * 32 + t * 8;
                next_scales[half] = scale + (n * along + first_at) * Part::PER_BLOCK;
            }
#pragma unroll
            for (int s = 0; s < Part::BLOCKS; ++s) {
                piece.codes[half][s] = make_uint2(0, 0);
                if (fetched < tiles && first_at + s < along) {
                    piece.codes[half][s] = load_codes8(next_codes[half] + s * 32);
                    load_scales(piece.scale[half][s], next_scales[half] + s * Part::PER_BLOCK);
                }
            }
            next_codes[half] += TURN * 32, next_scales[half] += TERMS;
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
    const int* of_tokens = sums + first_token + 2 * t;
    const int between = gridDim.y * FRAGMENT_BYTES, between_sums = gridDim.y * 8;
    float of_token[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) of_token[e] = usable(token_scale[(first_token + min(2 * t + e, last)) * token_step]);

    long long tile = blockIdx.x;
    int turn = 0, buffer = 0;
    const int row = threadIdx.x % ROWS, token = threadIdx.x / ROWS;
    float total = -0.0f;  // added to a number it changes nothing
    const auto multiply = [&](Part& piece) {
        const int first_at = turn * TURN + warp * Part::BLOCKS;
        if (first_at < along) {  // what is beyond the end of the rows has codes of 0, and terms that nobody adds
            uint4 b[Part::BLOCKS][2];
            int2 less[Part::BLOCKS][Part::PER_BLOCK];  // what the codes of tokens 2 t and 2 t + 1 add up to
#pragma unroll
            for (int s = 0; s < Part::BLOCKS; ++s) {
                const long long at = first_at + s;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    b[s][i] = load_written(reinterpret_cast<const uint4*>(column + (at * 2 + i) * between));
#pragma unroll
                for (int i = 0; i < Part::PER_BLOCK; ++i)
                    less[s][i] = load_written(
                        reinterpret_cast<const int2*>(of_tokens + (at * Part::PER_BLOCK + i) * between_sums));
            }
#pragma unroll
            for (int s = 0; s < Part::BLOCKS; ++s) {
                int sum[Of::COUNT][4];
                group_sums<GROUP>(piece.codes[0][s], piece.codes[1][s], b[s], less[s], sum);
                float of_group[2][Part::PER_BLOCK];
#pragma unroll
                for (int i = 0; i < 2 * Part::PER_BLOCK; ++i)
                    of_group[i % 2][i / 2] = usable(piece.scale[i % 2][s][i / 2]);
                const int in_turn = warp * Part::BLOCKS + s;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float* target = &terms[buffer][in_turn * Part::PER_BLOCK][2 * t + e % 2][g + e / 2 * 8];
#pragma unroll
                    for (int i = 0; i < Part::PER_BLOCK; ++i) {
                        const int bits = GROUP == 128 ? sum[0][e] + (sum[1][e] >> 4) : sum[i][e];
                        const float number = __fsub_rn(__int_as_float(bits), __int_as_float(Of::base(i)));
                        target[i * 8 * PITCH] =
                            ieee::multiply(ieee::multiply(number, of_token[e % 2]), of_group[e / 2][i]);
                    }
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
