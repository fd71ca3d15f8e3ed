// Products of a few tokens of 16 bits and ternary weights on GPUs that copy in bulk, from Hopper on: of one weight, and
// of a mixture of experts. How codes are multiplied is said in linear/ternary_stream.cu; what differs is how operands
// come: warps of their own fill a ring of stages with pieces of rows of codes, and the tokens, in the order of
// fragments, lie in shared memory as long as the thread block lives. So there is no launch ahead that puts them in
// order.
//
//     codes  --bulk copies--> full[stage] --16 B a lane of rows g and g + 8--> mma --> empty[stage]
//     tokens --by the lanes that multiply--> fragments --16 B a lane--> mma
//
// Each block has its part of the channels, in tiles of TILE rows. The warps that multiply share the steps along k, and
// their sums meet in shared memory.
#include "linear/fragments.cuh"
#include "linear/ternary_operands.cuh"

// Of the host (kbitcupy/products/ternary_bulk.py), ahead of this source: STEP, k of 64 bytes of codes; MULTIPLIERS and
// FILLERS, warps that multiply and that copy; MOST_STAGES; FLOAT32_BIAS and its like; struct Group, see
// linear/experts.cu.
constexpr int MULTIPLIER_THREADS = MULTIPLIERS * WARP, BULK_THREADS = MULTIPLIER_THREADS + FILLERS * WARP;
constexpr int TOKENS = 8, TILE = 2 * ROWS, MEMBER_BYTES = FRAGMENT_BYTES / TOKENS;

// Copy whole chunks that are read once from global to shared memory; they count at the barrier. Of an elected lane.
__device__ __forceinline__ void copy_bulk(
    unsigned target, const void* source, unsigned bytes, unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3],"
        " %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// The ring, and where one of its users is.
struct Stages {
    unsigned data0, barriers;  // addresses: the stages; the barriers FULL of all of them, then EMPTY
    int count, piece, pitch;   // bytes of a row in a stage, and from row to row
    int stage = 0;
    unsigned phase = 0;

    __device__ __forceinline__ unsigned data() const { return data0 + stage * TILE * pitch; }
    __device__ __forceinline__ unsigned full() const { return barriers + 8 * stage; }
    __device__ __forceinline__ unsigned empty() const { return barriers + 8 * (MOST_STAGES + stage); }
    __device__ __forceinline__ void step() {
        if (++stage == count) stage = 0, phase ^= 1;
    }
};

// Rows of codes that a thread block multiplies.
struct Rows {
    const unsigned char* codes;  // of the first one
    int count, bytes;            // how many, and of one
};

// One of the lanes that fill the ring: its share of the rows of each stage.
__device__ __forceinline__ void fill_stages(Stages ring, const Rows& rows, int share) {
    const auto policy = passing();
    for (int first = 0; first < rows.count; first += TILE) {
        const int there = min(TILE, rows.count - first);
        const unsigned char* source = rows.codes + static_cast<long long>(first) * rows.bytes;
        for (int at = 0; at < rows.bytes; at += ring.piece) {
            const int bytes = min(ring.piece, rows.bytes - at);
            barrier_wait(ring.empty(), ring.phase ^ 1);
            if (share == 0) barrier_expect(ring.full(), there * bytes);
#pragma unroll 1
            for (int r = share; r < there; r += FILLERS)
                copy_bulk(
                    ring.data() + r * ring.pitch, source + static_cast<long long>(r) * rows.bytes + at, bytes,
                    ring.full(), policy);
            ring.step();
        }
    }
}

// Tokens as fragments, see arrange_floats, by all threads that multiply. `row_of` gives the row of x that a token is.
template <typename T, typename F>
__device__ __forceinline__ void stage_tokens(unsigned staged, const T* x, int tokens, int depth, const F& row_of) {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(x);
    const int of_token = (depth + STEP - 1) / STEP * (STEP / 4);
    const bool aligned = reinterpret_cast<unsigned long long>(x) % 8 == 0;
    for (int m = 0; m < tokens; ++m) {
        const unsigned short* row = bits + row_of(m) * depth;
#pragma unroll 4
        for (int i = threadIdx.x; i < of_token; i += MULTIPLIER_THREADS) {
            const int k = i * 4, at = k % STEP, field = at % 128 / 32, t = at / 128 * 2 + at % 32 / 16,
                      word = at % 16 / 4;
            const int fragment = (k / STEP * 2 * FIELDS + field * 2 + word / 2) * tokens + m;
            unsigned low = 0, high = 0;
            if (k < depth && aligned) {
                const uint2 four = *reinterpret_cast<const uint2*>(row + k);
                low = __byte_perm(four.x, four.y, 0x5410), high = __byte_perm(four.x, four.y, 0x7632);
            } else if (k < depth) {
                low = row[k] | row[k + 2] << 16, high = row[k + 1] | row[k + 3] << 16;
            }
            store_shared(staged + fragment * MEMBER_BYTES + t * CHUNK + word % 2 * 8, low, high);
        }
    }
}

// The products of some rows and up to TOKENS tokens.
//
// piece, pitch, stages  of the ring, see Stages
// stage_at              puts the tokens to an address; all threads that multiply call it
// scale_of, store       of rows: the scale of one; gets number of token and row, and y but for the bias
template <typename T, typename G, typename S, typename F>
__device__ __forceinline__ void multiply_rows(
    const Rows& rows, int tokens, int piece, int pitch, int stages, const G& stage_at, const S& scale_of,
    const F& store) {
    using By = Floats<T>;
    constexpr int LOADS = By::LOADS;
    __shared__ alignas(8) unsigned long long barriers[2 * MOST_STAGES];
    __shared__ float partial[2][MULTIPLIERS][TOKENS][TILE + 1];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const unsigned data = shared_address(dynamic_memory()), staged = data + stages * TILE * pitch;
    Stages ring{data, shared_address(barriers), stages, piece, pitch};
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(ring.barriers + 8 * i, 1);
            barrier_init(ring.barriers + 8 * (MOST_STAGES + i), MULTIPLIERS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (warp >= MULTIPLIERS) {
        if (elect_lane()) fill_stages(ring, rows, warp - MULTIPLIERS);
        return;
    }

    const auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIER_THREADS) : "memory"); };
    const int row = threadIdx.x % TILE, own = threadIdx.x / TILE, pieces = (rows.bytes + piece - 1) / piece;
    float row_scale = scale_of(min(row, rows.count - 1));
    stage_at(staged);
    sync();
    // Columns beyond the last token repeat it: they are not written.
    const unsigned column = staged + min(g, tokens - 1) * MEMBER_BYTES + t * CHUNK, zero = tokens >> 16;
    const int of_load = tokens * MEMBER_BYTES, of_step = LOADS * of_load;
    int buffer = 0;
    for (int first = 0; first < rows.count; first += TILE, buffer ^= 1) {
        float sum[2][FIELDS][4] = {};
        for (int p = 0; p < pieces; ++p) {
            barrier_wait(ring.full(), ring.phase);
            const unsigned base = ring.data() + g * pitch + t * CHUNK;
            const int bytes = min(piece, rows.bytes - p * piece);
            unsigned b_at = (p * piece / STEP_BYTES + warp) * of_step, read = 0;
#pragma unroll 1
            for (int s = warp * STEP_BYTES; s < bytes; s += MULTIPLIERS * STEP_BYTES, b_at += MULTIPLIERS * of_step) {
                // Behind the end of rows is anything, and tokens are zero.
                uint4 u[2], l[2], b[LOADS];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u[h] = shared_at<uint4>(base + h * ROWS * pitch + s);
                    l[h] = shared_at<uint4>(base + (h * ROWS + 8) * pitch + s);
                }
                read = u[0].x | l[1].w;
#pragma unroll
                for (int j = 0; j < LOADS; ++j) b[j] = shared_at<uint4>(column + b_at + j * of_load);
#pragma unroll
                for (int h = 0; h < 2; ++h) By::multiply(sum[h], u[h], l[h], b);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty() + zero_after(read, zero));
            ring.step();
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                partial[buffer][warp][2 * t + e % 2][h * ROWS + g + e / 2 * 8] = By::total(sum[h], e);
        sync();  // one is enough: who writes these sums again has passed the next
        if (first + row < rows.count) {
#pragma unroll 1
            for (int m = own; m < tokens; m += MULTIPLIER_THREADS / TILE) {
                float total = partial[buffer][0][m][row];
#pragma unroll
                for (int of = 1; of < MULTIPLIERS; ++of) total += partial[buffer][of][m][row];
                store(m, first + row, By::scaled(total, 0, 0, usable(row_scale)));
            }
        }
        row_scale = scale_of(min(first + TILE + row, rows.count - 1));
    }
}

template <typename T>
__global__ void __launch_bounds__(BULK_THREADS, 1) bulk_ternary(
    const unsigned char* __restrict__ codes,  // [channels, depth / 4]
    const T* x,                               // [tokens, depth]
    const float* __restrict__ scale,          // [channels], or [1] if they share it
    const void* __restrict__ bias,            // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                        // [tokens, channels]
    long long channels, int tokens, int depth, int scale_step, int bias_kind, int piece, int pitch, int stages) {
#if __CUDA_ARCH__ >= 900  // barriers of copies: the host never asks older ones
    wait_for_previous();  // which may have written the weight
    launch_dependents();
    const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
    const int row_bytes = depth / FIELDS;
    multiply_rows<T>(
        Rows{codes + first * row_bytes, static_cast<int>(last - first), row_bytes}, tokens, piece, pitch, stages,
        [&](unsigned staged) {
            stage_tokens(staged, x, tokens, depth, [](int m) { return static_cast<long long>(m); });
        },
        [&](int row) { return load_scale(scale + (first + row) * scale_step); },
        [&](int m, int row, float scaled) {
            const long long n = first + row;
            from_float(y[m * channels + n], ieee::add(scaled, bias_of(bias, bias_kind, n)));
        });
#endif
}

// The same for a mixture of experts: a thread block takes up to 8 products of one expert, as group_tokens
// (linear/experts.cu) has sorted them, and a part of its channels.
template <typename Y, typename T>
__global__ void __launch_bounds__(BULK_THREADS, 2) bulk_ternary_experts(
    const unsigned char* __restrict__ codes,  // [experts, channels, depth / 4]
    const T* x,                               // [ceil(products / divisor), depth]
    const float* __restrict__ scale,          // [experts, channels], or [experts] or [1] where they share it
    const Group* groups,                      // [gridDim.y]
    const int* order,                         // [products]
    Y* __restrict__ y,                        // [products, channels]
    long long channels, int depth, int divisor, int scale_step, long long expert_step, int piece, int pitch,
    int stages) {
#if __CUDA_ARCH__ >= 900  // barriers of copies: the host never asks older ones
    wait_for_previous();
    launch_dependents();
    const Group group = groups[blockIdx.y];
    const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
    const int count = static_cast<int>(last - first), row_bytes = depth / FIELDS;
    if (group.expert < 0) {  // of products of no expert, or of no products
        for (int m = 0; m < group.count; ++m)
            for (int i = threadIdx.x; i < count; i += BULK_THREADS)
                from_float(y[order[group.first + m] * channels + first + i], 0.0f);
        return;
    }
    const float* scales = scale + group.expert * expert_step;
    multiply_rows<T>(
        Rows{codes + (group.expert * channels + first) * row_bytes, count, row_bytes}, group.count, piece, pitch,
        stages,
        [&](unsigned staged) {
            stage_tokens(staged, x, group.count, depth, [&](int m) {
                return static_cast<long long>(order[group.first + m] / divisor);
            });
        },
        [&](int row) { return load_scale(scales + (first + row) * scale_step); },
        [&](int m, int row, float scaled) { from_float(y[order[group.first + m] * channels + first + row], scaled); });
#endif
}
