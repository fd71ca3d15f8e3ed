// Products of up to 8 tokens, in int8 or floats of 16 bits, and ternary weights, whose codes are read in place, once,
// by the copy engine (from Hopper on). How codes are multiplied is said in linear/ternary_stream.cu; what differs is
// who has what: a warp has rows of its own and goes along them, so that it waits for no other warp, and the tokens are
// in shared memory for all warps of a block.
//
//     codes  --TMA, boxes of rows x 128 bytes, two at a time--> stages of the warp --16 B a lane--> mma
//     tokens --once--> pieces [step, load, token, t] of 16 bytes -----------------------------------> mma
//
// Two neighbouring boxes at a time, as memory gives lines that follow each other faster: 28672 x 8192 took 20 us by
// pieces of 64 bytes of a row, 17.3 by 128, 15.5 by 256. Where rows are few, a team of warps shares them, each has a
// part of the boxes, and their sums meet at the end.
//
// Where groups along K have scales, a lane takes 8 bytes of each 128 k, so that the four lanes of a row have the same
// group, and adds up the terms of its own outputs, from the first to the last.
#include "linear/fragments.cuh"
#include "linear/quantize.cuh"
#include "linear/ternary_operands.cuh"

// Of the host (kbitcupy/products/ternary_rows.py), ahead of this source: STEP, k of 64 bytes of codes; ROW_THREADS of a
// block; MOST_ROW_STAGES; OWN_OCTETS, times 8 numbers of a token that a thread quantizes; LANES of the sum of squares
// of linear/activations.cu; FLOAT32_BIAS and its like.
constexpr int TOKENS = 8, ROW_WARPS = ROW_THREADS / WARP, MEMBER_BYTES = FRAGMENT_BYTES / TOKENS;
constexpr int LINE = 128, SWIZZLE_UNIT = 1024, BOX_BYTES = ROWS * LINE, BOXES = 2, STAGE_BYTES = BOXES * BOX_BYTES,
              LINE_STEPS = LINE / STEP_BYTES;

// Of 128 k with groups: how fields become sums. Which sum has a field, in what units, and whether the field is moved to
// the place of the one below.
template <int GROUP>
struct Sums {
    static constexpr int COUNT = GROUP == 32 ? 4 : 2, GROUPS = BLOCK / GROUP;
    __device__ __forceinline__ static constexpr int of(int field) { return GROUP == 32 ? field : field / 2; }
    __device__ __forceinline__ static constexpr bool moves(int field) { return GROUP != 32 && field % 2; }
    __device__ __forceinline__ static constexpr int unit(int sum) { return 1 << (GROUP == 32 ? 2 : 4) * sum; }
    // The bits of 1.5 * 2^23 / unit: the last one counts 1 / unit, and the sum is below 2^22.
    __device__ __forceinline__ static constexpr int base(int sum) {
        return 0x4b400000 - ((GROUP == 32 ? 2 : 4) * sum << 23);
    }
};

// The sums of the groups of 128 k, which become terms and are added to the totals.
//
// u, l  codes of rows g and g + 8       b      their tokens, of two fields each
// less  what the codes of tokens 2 t and 2 t + 1 of each group add up to
template <int GROUP>
__device__ __forceinline__ void add_groups(
    float (&total)[4], const uint2& u, const uint2& l, const uint4 (&b)[2], const int2 (&less)[BLOCK / GROUP],
    const float (&of_token)[2], const float (&upper)[BLOCK / GROUP], const float (&lower)[BLOCK / GROUP]) {
    using Of = Sums<GROUP>;
    int sum[Of::COUNT][4];
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) {
        // A float that becomes larger by the sum, in units of its last bit.
        const int unit = Of::unit(i), base = i < Of::GROUPS ? static_cast<int>(Of::base(i)) : 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int2 both = less[min(i, Of::GROUPS - 1)];
            sum[i][e] = base - (i < Of::GROUPS ? unit * (e % 2 ? both.y : both.x) : 0);
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
#pragma unroll
    for (int i = 0; i < Of::GROUPS; ++i) {
        const float of_group[2] = {usable(upper[i]), usable(lower[i])};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int bits = GROUP == 128 ? sum[0][e] + (sum[1][e] >> 4) : sum[i][e];
            const float number = __fsub_rn(__int_as_float(bits), __int_as_float(Of::base(i)));
            total[e] = ieee::add(total[e], ieee::multiply(ieee::multiply(number, of_token[e % 2]), of_group[e / 2]));
        }
    }
}

// Lines of a row. Tokens have room for as many, though what is behind their end counts for nothing: codes there are 0.
__device__ __forceinline__ int lines_of(int depth) { return (depth / FIELDS + LINE - 1) / LINE; }

// Wait for this lane's copies, except those of the last `pending` groups.
__device__ __forceinline__ void wait_copies_but(int pending) {
    if (pending == 0) wait_copies<0>();
    else if (pending == 1) wait_copies<1>();
    else if (pending == 2) wait_copies<2>();
    else wait_copies<3>();
}

// What a block multiplies.
struct Rows {
    long long first;  // of the matrix that the tensor map describes
    int count;        // rows
    int tokens, depth;
    int share, stages;  // warps of a team, at most as many as rows have lines; stages of a warp
    int of_pass;        // rows of a team at a time, those of a box; where teams have several warps, all of its rows
    bool waits;         // whether weights may have been written by the kernel ahead
};

// Products of some rows and up to TOKENS tokens.
//
// scales  GROUP: of the first row, [rows, depth / GROUP]
// stage   called by all threads when the first codes are on their way: brings the tokens to an address
// sums    GROUP: of groups of tokens in shared memory, [depth / GROUP, TOKENS]
// of_row  the scale and the bias of a row
// store   gets which of the lane's two tokens it is, its number, that of the row, the sum or total, scale and bias
template <typename Operand, int GROUP, typename G, typename R, typename F>
__device__ __forceinline__ void multiply_rows(
    const TensorMap* map, const Rows& all, const float* scales, const G& stage, const R& of_row, const F& store) {
    using By = Operand;
    using Sum = typename By::Sum;
    constexpr int PER_BLOCK = GROUP == 0 ? 0 : BLOCK / (GROUP == 0 ? 1 : GROUP);  // scales
    constexpr int BLOCKS = BOXES * LINE_STEPS * 2, SCALE_BYTES = ROWS * BLOCKS * PER_BLOCK * 4;
    __shared__ alignas(8) unsigned long long barriers[ROW_WARPS * MOST_ROW_STAGES];
    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4;
    const int lines = lines_of(all.depth);
    const int teams = ROW_WARPS / all.share, team = warp / all.share, mate = warp % all.share;
    const int my_first = all.count * team / teams, mine = all.count * (team + 1) / teams - my_first;
    const int first_line = lines * mate / all.share, my_lines = lines * (mate + 1) / all.share - first_line;
    const int pieces = (my_lines + BOXES - 1) / BOXES, of_pass = all.of_pass, passes = (mine + of_pass - 1) / of_pass;
    const unsigned memory = (shared_address(dynamic_memory()) + SWIZZLE_UNIT - 1) / SWIZZLE_UNIT * SWIZZLE_UNIT;
    const unsigned stages = memory + warp * all.stages * STAGE_BYTES;
    const unsigned scale_stages = memory + ROW_WARPS * all.stages * STAGE_BYTES + warp * all.stages * SCALE_BYTES;
    const unsigned staged = memory + ROW_WARPS * all.stages * (STAGE_BYTES + SCALE_BYTES);
    const unsigned full = shared_address(barriers) + warp * MOST_ROW_STAGES * 8;
    if (lane == 0) {
        for (int i = 0; i < all.stages; ++i) barrier_init(full + 8 * i, 1);
        fence_barrier_init();
    }
    __syncwarp();

    // What is fetched next.
    int pass = 0, piece = 0, to = 0;
    const unsigned zero = all.tokens >> 16;
    const auto fetch = [&](unsigned read) {
        if (pass < passes) {
            const int there = min(BOXES, my_lines - piece * BOXES);
            const int row = my_first + pass * of_pass, line = first_line + piece * BOXES;
            if (elect_lane()) {
                const unsigned target = stages + to * STAGE_BYTES, barrier = full + 8 * to;
                barrier_expect(barrier, there * of_pass * LINE + zero_after(read, zero));
                for (int i = 0; i < there; ++i)
                    copy_box(
                        target + i * BOX_BYTES, map, (line + i) * LINE, static_cast<int>(all.first) + row, barrier);
            }
            if constexpr (GROUP != 0) {
                constexpr int BYTES = PER_BLOCK * 4;
                const int blocks = all.depth / BLOCK, last = min(mine, (pass + 1) * of_pass) + my_first - 1;
#pragma unroll
                for (int i = 0; i < ROWS * BLOCKS / WARP; ++i) {
                    const int unit = i * WARP + lane, block = line * (BLOCKS / BOXES) + unit % BLOCKS;
                    const int bytes = block < blocks ? BYTES : 0;
                    const float* from =
                        scales + (static_cast<long long>(min(row + unit / BLOCKS, last)) * blocks + block) * PER_BLOCK;
                    copy_async_or_zero<BYTES>(
                        scale_stages + to * SCALE_BYTES + unit * BYTES, bytes ? from : scales, bytes);
                }
            }
            if (++piece == pieces) piece = 0, ++pass;
            if (++to == all.stages) to = 0;
        }
        if constexpr (GROUP != 0) commit_copies();
    };
    if (!all.waits)
        for (int i = 0; i < all.stages; ++i) fetch(0);
    else if (elect_lane())
        for (int i = 0; i < min(my_lines, all.stages * BOXES); ++i)
            if (passes > 0) prefetch_box(map, (first_line + i) * LINE, static_cast<int>(all.first) + my_first);
    wait_for_previous();
    launch_dependents();
    if (all.waits)
        for (int i = 0; i < all.stages; ++i) fetch(0);
    float of_token[2];
    const unsigned sums = stage(staged, of_token);

    // Rows are exchanged so that those which are read together meet in no bank.
    const int own = GROUP == 0 ? g % 2 * 4 + g / 2 : g % 4 * 2 + g / 4;
    const unsigned own_line = stages + own * LINE;
    // Columns beyond the last token repeat it: they are not written.
    const int of_load = all.tokens * MEMBER_BYTES, of_line = LINE_STEPS * By::LOADS * of_load;
    const unsigned column = staged + min(g, all.tokens - 1) * MEMBER_BYTES + t * CHUNK + first_line * of_line;
    int from = 0;
    unsigned phase = 0;
    for (int of = 0; of < passes; ++of) {
        const int first = of * of_pass, last = min(mine, first + of_pass);
        float scale[2], bias[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            of_row(my_first + min(first + own + 8 * half, last - 1), scale[half], bias[half]);
        Sum sum[FIELDS][4] = {};
        float total[4] = {-0.0f, -0.0f, -0.0f, -0.0f};  // added to a number they change nothing
#pragma unroll 1
        for (int p = 0; p < pieces; ++p) {
            const int there = min(BOXES, my_lines - p * BOXES);
            barrier_wait(full + 8 * from, phase);
            const unsigned here = own_line + from * STAGE_BYTES;
            unsigned b_at = column + p * BOXES * of_line, read = 0;
            if constexpr (GROUP == 0) {
                uint4 u[BOXES * LINE_STEPS], l[BOXES * LINE_STEPS];
#pragma unroll
                for (int s = 0; s < BOXES * LINE_STEPS; ++s) {
                    const unsigned at = here + s / LINE_STEPS * BOX_BYTES + ((s % LINE_STEPS * 4 + t) ^ own) * CHUNK;
                    u[s] = shared_at<uint4>(at), l[s] = shared_at<uint4>(at + 8 * LINE);
                    read |= u[s].w | l[s].w;
                }
                __syncwarp();
                fetch(read);
#pragma unroll
                for (int s = 0; s < BOXES * LINE_STEPS; ++s) {
                    if (s / LINE_STEPS >= there) break;
                    uint4 b[By::LOADS];
#pragma unroll
                    for (int j = 0; j < By::LOADS; ++j) b[j] = shared_at<uint4>(b_at + (s * By::LOADS + j) * of_load);
                    By::multiply(sum, u[s], l[s], b);
                }
            } else {
                wait_copies_but(all.stages - 1);
                __syncwarp();
                constexpr int LINE_BLOCKS = BLOCKS / BOXES;
#pragma unroll
                for (int line = 0; line < BOXES; ++line) {
                    uint2 u[LINE_BLOCKS], l[LINE_BLOCKS];
                    float upper[LINE_BLOCKS][PER_BLOCK], lower[LINE_BLOCKS][PER_BLOCK];
#pragma unroll
                    for (int i = 0; i < LINE_BLOCKS; ++i) {
                        const unsigned at = here + line * BOX_BYTES + ((i * 2 + t / 2) ^ own) * CHUNK + t % 2 * 8;
                        u[i] = shared_at<uint2>(at), l[i] = shared_at<uint2>(at + 8 * LINE);
                        read |= u[i].y | l[i].y;
                        const unsigned scale_at =
                            scale_stages + from * SCALE_BYTES + (own * BLOCKS + line * LINE_BLOCKS + i) * PER_BLOCK * 4;
#pragma unroll
                        for (int j = 0; j < PER_BLOCK; ++j) {
                            upper[i][j] = shared_at<float>(scale_at + j * 4);
                            lower[i][j] = shared_at<float>(scale_at + (8 * BLOCKS * PER_BLOCK + j) * 4);
                            read |= __float_as_uint(upper[i][j]) | __float_as_uint(lower[i][j]);
                        }
                    }
                    if (line == BOXES - 1) {
                        __syncwarp();
                        fetch(read);
                    }
                    const int block = (p * BOXES + line) * LINE_BLOCKS, blocks = all.depth / BLOCK - block;
                    const auto add = [&](int i) {
                        const unsigned b_of = b_at + (line * LINE_BLOCKS + i) * 2 * of_load;
                        const uint4 b[2] = {shared_at<uint4>(b_of), shared_at<uint4>(b_of + of_load)};
                        int2 less[PER_BLOCK];
#pragma unroll
                        for (int j = 0; j < PER_BLOCK; ++j)
                            less[j] = shared_at<int2>(sums + (((block + i) * PER_BLOCK + j) * TOKENS + 2 * t) * 4);
                        add_groups<GROUP>(total, u[i], l[i], b, less, of_token, upper[i], lower[i]);
                    };
                    if (blocks >= LINE_BLOCKS) {  // without branches in between they are computed side by side
#pragma unroll
                        for (int i = 0; i < LINE_BLOCKS; ++i) add(i);
                    } else {
#pragma unroll
                        for (int i = 0; i < LINE_BLOCKS; ++i)
                            if (i < blocks) add(i);
                    }
                }
            }
            if (++from == all.stages) from = 0, phase ^= 1;
        }
        Sum totals[4];
        if constexpr (GROUP == 0) {
#pragma unroll
            for (int e = 0; e < 4; ++e) totals[e] = By::total(sum, e);
            if (all.share > 1) {
                // All that this warp fetched has been read: its stages have room for the sums.
                const unsigned own_sums = stages + lane * sizeof(totals);
                if (mate > 0) store_shared(own_sums, totals);
                asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(all.share * WARP) : "memory");
                if (mate > 0) return;
                for (int i = 1; i < all.share; ++i) {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        totals[e] += shared_at<Sum>(own_sums + i * all.stages * STAGE_BYTES + e * sizeof(Sum));
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int m = 2 * t + e % 2, row = first + own + e / 2 * 8;
            if (m >= all.tokens || row >= last) continue;
            if constexpr (GROUP == 0) store(e % 2, m, my_first + row, totals[e], scale[e / 2], bias[e / 2]);
            else store(e % 2, m, my_first + row, total[e], scale[e / 2], bias[e / 2]);
        }
    }
}

// Pieces of fragments (linear/fragments.cuh) of some tokens to shared memory, by all threads.
template <int LOADS, typename F>
__device__ __forceinline__ void stage_fragments(
    unsigned staged, const unsigned char* a, int groups, int tokens, int depth, const F& number_of) {
    const int lane = threadIdx.x % WARP, m = lane / 4, loads = (depth + STEP - 1) / STEP * LOADS;
    if (m < tokens) {
        const long long p = number_of(m);
        const unsigned char* from = a + p / TOKENS * FRAGMENT_BYTES + (p % TOKENS * 4 + lane % 4) * CHUNK;
        const unsigned to = staged + lane * CHUNK;
#pragma unroll 8
        for (int i = threadIdx.x / WARP; i < loads; i += ROW_WARPS)
            copy_async<CHUNK>(
                to + i * tokens * MEMBER_BYTES, from + static_cast<long long>(i) * groups * FRAGMENT_BYTES);
    }
    commit_copies();
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary(
    const unsigned char* a,           // fragments
    const int* token_sum,             // [tokens] sums of their codes
    const float* token_scale,         // [tokens], or [1] if they share it
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int scale_step, int bias_kind, int share, int stages,
    int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
    const int t = threadIdx.x % 4;
    int own_sum[2];
    float own_scale[2];
    multiply_rows<Integers<T>, 0>(
        &map, Rows{first, static_cast<int>(last - first), tokens, depth, share, stages, of_pass, false}, nullptr,
        [&](unsigned staged, float (&)[2]) {
            stage_fragments<FIELDS>(staged, a, 1, tokens, depth, [](int m) { return static_cast<long long>(m); });
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int m = min(2 * t + e, tokens - 1);
                own_sum[e] = token_sum[m], own_scale[e] = usable(token_scale[m * token_step]);
            }
            wait_copies<0>();
            __syncthreads();
            return 0u;
        },
        [&](int row, float& of, float& added) {
            of = usable(load_scale(scale + (first + row) * scale_step));
            added = bias_of(bias, bias_kind, first + row);
        },
        [&](int e, int m, int row, int sum, float of, float added) {
            const float scaled = Integers<T>::scaled(sum, own_sum[e], own_scale[e], of);
            from_float(y[m * channels + first + row], ieee::add(scaled, added));
        });
#endif
}

// The same with scales of groups along K.
template <typename T, int GROUP>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_groups(
    const unsigned char* a,           // fragments in octets
    const int* group_sums,            // [ceil(depth / GROUP), TOKENS], see store_group_sums
    const float* token_scale,         // [tokens], or [1] if they share it
    const float* __restrict__ scale,  // [channels, depth / GROUP]
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int bias_kind, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
    const int t = threadIdx.x % 4;
    multiply_rows<Integers<T>, GROUP>(
        &map, Rows{first, static_cast<int>(last - first), tokens, depth, 1, stages, of_pass, false},
        scale + first * (depth / GROUP),
        [&](unsigned staged, float (&of_token)[2]) {
            stage_fragments<FIELDS>(staged, a, 1, tokens, depth, [](int m) { return static_cast<long long>(m); });
            const unsigned sums = staged + (depth + STEP - 1) / STEP * FIELDS * tokens * MEMBER_BYTES;
            for (int i = threadIdx.x; i < depth / GROUP * 2; i += ROW_THREADS)
                copy_async<CHUNK>(sums + i * CHUNK, group_sums + i * 4);
            commit_copies();
#pragma unroll
            for (int e = 0; e < 2; ++e) of_token[e] = usable(token_scale[min(2 * t + e, tokens - 1) * token_step]);
            wait_copies<0>();
            __syncthreads();
            return sums;
        },
        [&](int row, float& of, float& added) { of = 0, added = bias_of(bias, bias_kind, first + row); },
        [&](int, int m, int row, float total, float, float added) {
            from_float(y[m * channels + first + row], ieee::add(total, added));
        });
#endif
}

// ---- tokens that are quantized on the way
// ------------------------------------------------------------------------------

// How tokens are quantized: see quantize_activations (linear/activations.cu), whose bits these are.
struct Quantizer {
    const float* weight;  // of RMSNorm, or null
    int normalizes;
    double norm_eps;
    float eps;
    int lowest, highest, away;
};

// 1 / root of the mean of squares of a token, by all threads.
template <typename T>
__device__ __forceinline__ float root_factor(const T* row, int depth, double norm_eps) {
    constexpr int PARTS = LANES / WARP;
    __shared__ double lanes[LANES];
    __shared__ float factor;
    const int thread = threadIdx.x;
    if (thread < LANES) {
        double sum = 0;
#pragma unroll 16
        for (int k = thread; k < depth; k += LANES) {
            const double x = ieee::widen(number(to_float(row[k])));
            sum += x * x;
        }
        lanes[thread] = sum;
    }
    __syncthreads();
    if (thread < WARP) {
        // (i) + (i + half), until one is left; within a warp either of two may come first.
        double part[PARTS];
#pragma unroll
        for (int w = 0; w < PARTS; ++w) part[w] = lanes[w * WARP + thread];
#pragma unroll
        for (int half = PARTS / 2; half > 0; half /= 2)
#pragma unroll
            for (int w = 0; w < half; ++w) part[w] += part[w + half];
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) part[0] += __shfl_xor_sync(FULL_WARP, part[0], step);
        if (thread == 0) factor = ieee::narrow(1.0 / sqrt(part[0] / static_cast<double>(depth) + norm_eps));
    }
    __syncthreads();
    return factor;
}

// Quantize tokens to pieces in shared memory, by all threads; their sums and scales are those of the block.
template <typename T>
__device__ __forceinline__ void quantize_tokens(
    unsigned staged, const T* x, int tokens, int depth, const Quantizer& by, int (&sums)[TOKENS],
    float (&scales)[TOKENS]) {
    __shared__ unsigned most_of[ROW_WARPS];
    __shared__ int sum_of[ROW_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float top = static_cast<float>(by.highest), bottom = static_cast<float>(by.lowest);
    for (int m = 0; m < tokens; ++m) {
        const T* row = x + static_cast<long long>(m) * depth;
        float v[OWN_OCTETS][OCTET];
        const auto place = [&](int i) { return (i * ROW_THREADS + static_cast<int>(threadIdx.x)) * OCTET; };
#pragma unroll
        for (int i = 0; i < OWN_OCTETS; ++i)
            if (place(i) < depth) load_octet<true>(v[i], row, place(i), depth);
        const float factor = by.normalizes ? root_factor(row, depth, by.norm_eps) : 1.0f;
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < OWN_OCTETS; ++i) {
            if (place(i) >= depth) continue;
            if (by.normalizes) {
                float w[OCTET];
                if (by.weight != nullptr) load_octet<true>(w, by.weight, place(i), depth);
#pragma unroll
                for (int e = 0; e < OCTET; ++e) {
                    v[i][e] = ieee::multiply(v[i][e], factor);
                    if (by.weight != nullptr) v[i][e] = ieee::multiply(v[i][e], w[e]);
                }
            }
#pragma unroll
            for (int e = 0; e < OCTET; ++e) {
                v[i][e] = number(v[i][e]);
                most = max(most, ieee::magnitude_bits(v[i][e]));
            }
        }
        most = __reduce_max_sync(FULL_WARP, most);
        if (lane == 0) most_of[warp] = most;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < ROW_WARPS; ++w) most = max(most, most_of[w]);
        const float a = __uint_as_float(max(most, __float_as_uint(by.eps))), scale = ieee::divide(top, a);
        int sum = 0;
#pragma unroll
        for (int i = 0; i < OWN_OCTETS; ++i) {
            const int k = place(i), at = k % STEP;
            if (k >= depth) continue;
            unsigned word[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < OCTET; ++e) {
                const int code = code_of(ieee::multiply(v[i][e], scale), bottom, top, by.away != 0);
                word[e / 4] |= static_cast<unsigned>(code & 0xff) << e % 4 * 8;
                sum += code;
            }
            const int load = k / STEP * FIELDS + at % BLOCK / 32;
            store_shared(
                staged + (load * tokens + m) * MEMBER_BYTES + (at / BLOCK * 2 + at % 32 / 16) * CHUNK + at % 16,
                word[0], word[1]);
        }
        sum = __reduce_add_sync(FULL_WARP, sum);
        if (lane == 0) sum_of[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            sum = 0;
            for (int w = 0; w < ROW_WARPS; ++w) sum += sum_of[w];
            sums[m] = sum, scales[m] = ieee::divide(a, top);
        }
    }
    __syncthreads();
}

// One launch: each block quantizes all tokens for itself, while its first codes are on their way.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_quantized(
    const T* x,                       // [tokens, depth], from a multiple of 16 bytes on
    const float* weight,              // [depth] of RMSNorm, from a multiple of 16 bytes on, or null
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int scale_step, int bias_kind, int normalizes, double norm_eps,
    float eps, int lowest, int highest, int away, int share, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ int sums[TOKENS];
    __shared__ float scales[TOKENS];
    const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
    multiply_rows<Integers<T>, 0>(
        &map, Rows{first, static_cast<int>(last - first), tokens, depth, share, stages, of_pass, true}, nullptr,
        [&](unsigned staged, float (&)[2]) {
            const Quantizer by{weight, normalizes, norm_eps, eps, lowest, highest, away};
            quantize_tokens(staged, x, tokens, depth, by, sums, scales);
            return 0u;
        },
        [&](int row, float& of, float& added) {
            of = usable(load_scale(scale + (first + row) * scale_step));
            added = bias_of(bias, bias_kind, first + row);
        },
        [&](int, int m, int row, int sum, float of, float added) {
            const float scaled = Integers<T>::scaled(sum, sums[m], usable(scales[m]), of);
            from_float(y[m * channels + first + row], ieee::add(scaled, added));
        });
#endif
}

// ---- floats of 16 bits
// ---------------------------------------------------------------------------------------------------

// Tokens as pieces, see arrange_floats (linear/ternary_stream.cu), by all threads. `row_of` gives the row of x that a
// token is. Behind the end of rows they are zero.
template <typename T, typename F>
__device__ __forceinline__ void stage_floats(unsigned staged, const T* x, int tokens, int depth, const F& row_of) {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(x);
    const int of_token = lines_of(depth) * LINE_STEPS * (STEP / 4);
    const bool aligned = reinterpret_cast<unsigned long long>(x) % 8 == 0;
    for (int m = 0; m < tokens; ++m) {
        const unsigned short* row = bits + row_of(m) * depth;
#pragma unroll 4
        for (int i = threadIdx.x; i < of_token; i += ROW_THREADS) {
            const int k = i * 4, at = k % STEP, field = at % 128 / 32, t = at / 128 * 2 + at % 32 / 16,
                      word = at % 16 / 4;
            const int load = k / STEP * 2 * FIELDS + field * 2 + word / 2;
            unsigned low = 0, high = 0;
            if (k < depth && aligned) {
                const uint2 four = *reinterpret_cast<const uint2*>(row + k);
                low = __byte_perm(four.x, four.y, 0x5410), high = __byte_perm(four.x, four.y, 0x7632);
            } else if (k < depth) {
                low = row[k] | row[k + 2] << 16, high = row[k + 1] | row[k + 3] << 16;
            }
            store_shared(staged + (load * tokens + m) * MEMBER_BYTES + t * CHUNK + word % 2 * 8, low, high);
        }
    }
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_floats(
    const T* x,                       // [tokens, depth]
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int scale_step, int bias_kind, int share, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
    multiply_rows<Floats<T>, 0>(
        &map, Rows{first, static_cast<int>(last - first), tokens, depth, share, stages, of_pass, true}, nullptr,
        [&](unsigned staged, float (&)[2]) {
            stage_floats(staged, x, tokens, depth, [](int m) { return static_cast<long long>(m); });
            return 0u;
        },
        [&](int row, float& of, float& added) {
            of = usable(load_scale(scale + (first + row) * scale_step));
            added = bias_of(bias, bias_kind, first + row);
        },
        [&](int, int m, int row, float sum, float of, float added) {
            from_float(y[m * channels + first + row], ieee::add(Floats<T>::scaled(sum, 0, 0, of), added));
        });
#endif
}
