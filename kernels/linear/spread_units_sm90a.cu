// Products of units (linear/integer_units.cuh) of which each thread block has as many stages as the others: those of
// all tiles of 128 rows and 64 tokens stand one after the other, of the same rows beside each other, and a thread block
// has a run of them. So tiles may begin in one and end in others.
//
// A thread block begins with its last tile and ends with its first one. Sums of a tile that others end it leaves in
// global memory; who has the last stages of a tile adds those of the thread blocks before it to its own, in the order
// of k, and writes results. Who waits does so for thread blocks of lower numbers, which left what it wants ahead of
// whatever they wait for themselves.
#include "linear/integer_units.cuh"

// Of the host (kbitcupy/products/integer_units.py), ahead of this source: UNITS_FLAGS, words ahead of sums that are
// left, which are 0 when the kernel starts.
constexpr int LEFT = UNITS_TOKENS * UNITS_ROWS;  // sums of a thread block
constexpr int ITEMS = ITEMS_OF_ALL / CONSUMERS;
static_assert(ITEMS * CONSUMERS == ITEMS_OF_ALL, "threads have as many each");
static_assert(UNITS_TOKENS * PITCH * 4 <= UNITS_STAGE, "sums stand where a stage was");

// The stages of a thread block, numbers among those of all tiles.
struct Run {
    int begin, end, stages;  // `stages` of a tile
    __device__ __forceinline__ int of(int tile) const {
        return min(end, (tile + 1) * stages) - max(begin, tile * stages);
    }
    // Calls `what` with the number of a tile, the first of its stages that this thread block has, and how many.
    template <typename F>
    __device__ __forceinline__ void each(const F& what) const {
        for (int tile = (end - 1) / stages; tile >= begin / stages; --tile) {
            const int first = max(begin - tile * stages, 0);
            what(tile, first, min(end - tile * stages, stages) - first);
        }
    }
};

// An item of the sums that another thread block leaves, or this one.
__device__ __forceinline__ void add_left(float (&total)[8], const float4* from) {
    add_eight(total, [&](int h) { return __ldcg(from + h); });
}
__device__ __forceinline__ void leave(const float (&v)[8], float4* to) {
    __stcg(to, make_float4(v[0], v[1], v[2], v[3]));
    __stcg(to + 1, make_float4(v[4], v[5], v[6], v[7]));
}

// INNER     whether weights are q4_k's, with inner scales and minima
// GROUPED   whether there are more than 64 tokens
template <bool INNER, bool GROUPED>
__global__ void __launch_bounds__(CONSUMERS + WARPGROUP, 1) spread_units(
    const __grid_constant__ TensorMap x_map,    // int8 [tokens, K], boxes of 128 bytes x UNITS_TOKENS
    const __grid_constant__ TensorMap w_map,    // codes [rows, K / 2], boxes of 128 bytes x UNITS_ROWS
    void* __restrict__ y,                       // [tokens, rows] of the type that y_kind names
    const unsigned char* __restrict__ records,  // of 64 tokens, [K / UNITS_K], and of the next
    const void* __restrict__ scale,             // d [rows, K / 32]; of q4_k d and dmin, two halves, [rows, K / 256]
    const unsigned* __restrict__ inner,         // q4_k: inner scales and minima, 12 bytes, beside them
    const void* __restrict__ bias,              // [rows] of the type that bias_kind names, or null
    unsigned* left,                             // flags; sums of each thread block, [UNITS_TOKENS, UNITS_ROWS]
    int tokens, int groups, int rows, int stages, int share, int bias_kind, int y_kind, unsigned nothing) {
    using S = Layout<INNER>;
    using Ring = UnitsRing<S::BYTES>;
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[Ring::BARRIERS * UNITS_STAGES];
    __shared__ alignas(128) uint4 constants[CONSTANTS];
    const unsigned ring0 = (shared_address(memory) + 1023u) & ~1023u;
    Ring ring{ring0, shared_address(barriers)};
    const int block = blockIdx.x, all = (rows + UNITS_ROWS - 1) / UNITS_ROWS * (GROUPED ? groups : 1) * stages;
    const Run run{block * share, min(block * share + share, all), stages};
    if (threadIdx.x == 0) {
        ring.begin();
        fence_barrier_init();
    }
    Multiplier<INNER>::make_constants(constants);
    __syncthreads();
    const int warp = warp_number(), lane = threadIdx.x % WARP;
    if (threadIdx.x >= CONSUMERS) {
        lower_registers<S::COPYING>();
        const int own = static_cast<int>(threadIdx.x) - CONSUMERS;
        const StageCopies<INNER> copies{x_map, w_map, records, GROUPS};
        int done = 0;
        run.each([&](int tile, int first, int count) {
            const int first_row = (GROUPED ? tile / groups : tile) * UNITS_ROWS, group = GROUPED ? tile % groups : 0;
            if (own == 0 && done == 0) copies.begin(ring, first, first_row);
            __syncwarp();
            // What is beyond all rows is of no use.
            const unsigned blocks = stages;
            TableMaker<INNER> maker{scale, inner, own, min(first_row + own, rows - 1) * blocks};
            maker.run(ring, first, count, [&](const Ring& ring, int stage) {
                if (own == 0)
                    copies.copy(ring, done + stage, first + stage, first_row, group * UNITS_TOKENS, group * stages);
                __syncwarp();
            });
            done += count;
        });
        return;
    }
    raise_registers<S::MULTIPLYING>();
    const int part = warp / 4;
    Multiplier<INNER> multiplier(warp, lane, constants);
    const Rescaling rescaling{nullptr, nullptr, bias, bias_kind};
    const bool aligned = is_aligned(y, rows);
    const auto item_of = [&](int block, int thread, int n) {
        float* const sums = reinterpret_cast<float*>(left + UNITS_FLAGS) + static_cast<long long>(block) * LEFT;
        return reinterpret_cast<float4*>(sums + (thread + n * CONSUMERS) * 8);
    };
    ring.step(part);
    float total[TILES][SUMS] = {};
    int tile = (run.end - 1) / stages;
    // Numbers of stages within tiles go up, those of tiles down.
    for (int left_over = run.of(tile);;) {
        ring.wait_full();
        multiplier.template stage<INNER, INNER>(ring.data(), total);
        left_over -= GROUPS;
        if (left_over > 0) {
            multiplier.release(ring, total, nothing);
            ring.step(GROUPS);
            continue;
        }
        warpgroup_sync(part);
        // Opaque: what is worked out from it would wait in registers through all stages, where there is none left.
        const int thread = static_cast<int>(opaque(threadIdx.x));
        keep_sums(ring.data(), thread / WARP, thread % WARP, total);
        wait_for_previous();
        const int before = tile * stages / share;  // the thread block that has the first stages
        const bool ends = run.end >= (tile + 1) * stages;
        for (int other = before + thread; ends && other < block; other += CONSUMERS) {
            unsigned is_left;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_left) : "l"(left + other) : "memory");
            while (is_left == 0);
        }
        consumers_sync();
        const int first_row = (GROUPED ? tile / groups : tile) * UNITS_ROWS;
        const int first_token = GROUPED ? tile % groups * UNITS_TOKENS : 0;
        const unsigned last = ring.stage + UNITS_STAGES - part;  // of the first warpgroup
        // All items of a thread at once, so that all of another thread block's are under way together.
        float v[ITEMS][8] = {};
        if (ends) {
#pragma unroll 1
            for (int other = before; other < block; ++other)
#pragma unroll
                for (int n = 0; n < ITEMS; ++n) add_left(v[n], item_of(other, thread, n));
        }
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) {
            const int item = thread + n * CONSUMERS;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
                add_item(v[n], ring0 + (last + group) % UNITS_STAGES * S::BYTES + place_of(item));
            if (!ends) {
                leave(v[n], item_of(block, thread, n));
            } else {
                const int token = first_token + item / QUARTERS * 2, row = first_row + item % QUARTERS * 4;
                write_item<INNER>(v[n], rescaling, y, token, tokens, row, rows, y_kind, aligned);
            }
        }
        fence_async_proxy();
        consumers_sync();
        if (!ends && thread == 0)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(left + block), "r"(1) : "memory");
        barrier_arrive(ring.empty());
        ring.step(GROUPS);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < SUMS; ++j) total[i][j] = 0.0f;
        if (tile * stages <= run.begin) break;
        --tile;
        left_over = run.of(tile);
    }
}
