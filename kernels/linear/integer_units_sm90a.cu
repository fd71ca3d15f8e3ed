// Products of units (linear/integer_units.cuh) of up to 64 tokens whose rows keep all multiprocessors busy once: thread
// blocks of a cluster share rows, each with a part of K, and send each other the sums of the tokens that the other one
// writes.
#include "linear/integer_units.cuh"

static_assert(UNITS_SHARE == 2, "a thread block is sent the sums of one other");
constexpr int WRITTEN = UNITS_TOKENS / UNITS_SHARE, SENT = WRITTEN / 2 * PITCH * 8;
static_assert(GROUPS * SENT <= UNITS_STAGE && UNITS_STAGES > GROUPS + 1, "sums stand where stages were");

// To the same address of shared memory of thread block `rank`, whose barrier counts the bytes.
__device__ __forceinline__ void send_run(
    unsigned target, unsigned from, unsigned bytes, unsigned barrier, unsigned rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     cluster_address(target, rank)),
                 "r"(from), "r"(bytes), "r"(cluster_address(barrier, rank))
                 : "memory");
}

// Adds the sums of all warpgroups of a cluster, in their order, and writes the outputs of a thread block: those of its
// part of the tokens. `own` are sums of its first warpgroup for these, `own_next` of its second, `sent` of the other
// thread block's, beside each other. It arrives at the barrier of the cluster: what it sent has come, as it is told.
template <bool INNER>
__device__ __forceinline__ void write_outputs(
    const Rescaling& rescaling, unsigned own, unsigned own_next, unsigned sent, unsigned rank, int first_row,
    void* __restrict__ y, int tokens, int rows, int y_kind) {
    constexpr int ITEMS = ITEMS_OF_ALL / UNITS_SHARE / CONSUMERS;
    static_assert(ITEMS * CONSUMERS * UNITS_SHARE == ITEMS_OF_ALL, "threads have as many each");
    const bool aligned = is_aligned(y, rows);
    const unsigned part[GROUPS * UNITS_SHARE] = {
        rank ? sent : own, rank ? sent + SENT : own_next, rank ? own : sent, rank ? own_next : sent + SENT};
    float total[ITEMS][8] = {};
#pragma unroll
    for (int n = 0; n < ITEMS; ++n)
#pragma unroll
        for (int i = 0; i < GROUPS * UNITS_SHARE; ++i)
            add_item(total[n], part[i] + place_of(threadIdx.x + n * CONSUMERS));
    cluster_arrive_relaxed();
#pragma unroll
    for (int n = 0; n < ITEMS; ++n) {
        const int item = threadIdx.x + n * CONSUMERS, token = rank * WRITTEN + item / QUARTERS * 2;
        const int row = first_row + item % QUARTERS * 4;
        write_item<INNER>(total[n], rescaling, y, token, tokens, row, rows, y_kind, aligned);
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// INNER   whether weights are q4_k's, with inner scales and minima
template <bool INNER>
__global__ void __cluster_dims__(UNITS_SHARE) __launch_bounds__(CONSUMERS + WARPGROUP, 1) multiply_units(
    const __grid_constant__ TensorMap x_map,    // int8 [tokens, K], boxes of 128 bytes x UNITS_TOKENS
    const __grid_constant__ TensorMap w_map,    // codes [rows, K / 2], boxes of 128 bytes x UNITS_ROWS
    void* __restrict__ y,                       // [tokens, rows] of the type that y_kind names
    const unsigned char* __restrict__ records,  // of tokens, [K / UNITS_K]
    const void* __restrict__ scale,             // d [rows, K / 32]; of q4_k d and dmin, two halves, [rows, K / 256]
    const unsigned* __restrict__ inner,         // q4_k: inner scales and minima, 12 bytes, beside them
    const void* __restrict__ bias,              // [rows] of the type that bias_kind names, or null
    int tokens, int rows, int stages, int bias_kind, int y_kind, unsigned nothing) {
    using S = Layout<INNER>;
    using Ring = UnitsRing<S::BYTES>;
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[Ring::BARRIERS * UNITS_STAGES + 1];
    __shared__ alignas(128) uint4 constants[CONSTANTS];
    const unsigned ring0 = (shared_address(memory) + 1023u) & ~1023u;
    Ring ring{ring0, shared_address(barriers)};
    const unsigned received = ring.barriers + 8 * Ring::BARRIERS * UNITS_STAGES;  // sums of the other thread block
    const unsigned rank = blockIdx.x % UNITS_SHARE;
    const int first_row = blockIdx.x / UNITS_SHARE * UNITS_ROWS, share = (stages + UNITS_SHARE - 1) / UNITS_SHARE;
    const int first = rank * share, mine = min(share, stages - first);
    if (threadIdx.x == 0) {
        ring.begin();
        barrier_init(received, 1);
        fence_barrier_init();
        barrier_expect(received, GROUPS * SENT);
    }
    Multiplier<INNER>::make_constants(constants);
    __syncthreads();
    const int warp = warp_number(), lane = threadIdx.x % WARP;
    if (threadIdx.x >= CONSUMERS) {
        lower_registers<S::COPYING>();
        const int own = static_cast<int>(threadIdx.x) - CONSUMERS;
        const StageCopies<INNER> copies{x_map, w_map, records, min(mine, GROUPS)};
        if (own == 0) copies.begin(ring, first, first_row);
        __syncwarp();
        // What is beyond all rows is of no use.
        const unsigned blocks = stages;
        TableMaker<INNER> maker{scale, inner, own, min(first_row + own, rows - 1) * blocks};
        maker.run(ring, first, mine, [&](const Ring& ring, int stage) {
            if (own == 0) copies.copy(ring, stage, first + stage, first_row, 0, 0);
            __syncwarp();
        });
        __syncwarp();
        cluster_arrive_relaxed(), cluster_wait();
        cluster_arrive_relaxed(), cluster_wait();
        return;
    }
    raise_registers<S::MULTIPLYING>();
    const int part = warp / 4;
    Multiplier<INNER> multiplier(warp, lane, constants);
    float total[TILES][SUMS] = {};
    ring.step(part);
    // As it begins with its last stage, or has none, the cluster may know.
    if (part >= mine) cluster_arrive_relaxed();
    for (int stage = part; stage < mine; stage += GROUPS) {
        if (stage + GROUPS >= mine) cluster_arrive_relaxed();
        ring.wait_full();
        multiplier.template stage<false, true>(ring.data(), total);
        multiplier.release(ring, total, nothing);
        ring.step(GROUPS);
    }
    // A warpgroup's sums replace its last stage. Those that it is sent replace what was four stages ahead of the last
    // of all, which the warpgroup that began with the last one, and said so to the cluster, had read.
    const auto slot = [&](int stage) { return ring0 + stage % UNITS_STAGES * S::BYTES; };
    const auto sums_of = [&](int group) { return slot(mine + UNITS_STAGES - 1 - ((mine - 1 - group) & 1)); };
    const unsigned own = rank * SENT, others = (rank ^ 1) * SENT;
    warpgroup_sync(part);
    keep_sums(sums_of(part), warp, lane, total);
    fence_async_proxy();
    cluster_wait();
    warpgroup_sync(part);
    if (threadIdx.x % WARPGROUP == 0)
        send_run(slot(stages - mine) + part * SENT, sums_of(part) + others, SENT, received, rank ^ 1);
    consumers_sync();
    wait_for_previous();
    barrier_wait(received, 0);
    const Rescaling rescaling{nullptr, nullptr, bias, bias_kind};
    write_outputs<INNER>(
        rescaling, sums_of(0) + own, sums_of(1) + own, slot(mine), rank, first_row, y, tokens, rows, y_kind);
    cluster_wait();  // the other has what was sent
}
