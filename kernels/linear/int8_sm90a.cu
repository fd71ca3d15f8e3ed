// W8A8 products on Hopper (sm_90a): tiles by TMA, products by wgmma.
//
// One warp fills the stages of a ring in shared memory, one or two warpgroups multiply what is in them:
//
//     TMA --full[stage]--> wgmma, 64 tokens x 128 channels an instruction --empty[stage]--> TMA
//
// A row of a stage is 128 bytes of k, in the 128-byte swizzle that both TMA and wgmma know. Blocks are
// persistent, so the ring fills with the next tile while the last one is rescaled and written.
//
// A cluster is SHARE x SPLIT blocks. SHARE of them take neighbouring tiles of tokens and the same channels: each reads
// its part of the weights, for all of them. SPLIT parts of k are multiplied side by side where tiles are too few to
// fill the GPU; then the sums are exchanged through shared memory and each block adds up, rescales and writes its part.
#include "linear/int8.cuh"

// STEP_K of a stage, one row of the swizzle, is the host's.

// A barrier of all that multiply.
template <int WARPGROUPS>
__device__ __forceinline__ void multipliers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(WARPGROUPS + 1), "n"(WARPGROUPS * WARPGROUP) : "memory");
}

// ---- the kernel ------------------------------------------------------------------------------------------------

// The ring of stages. A stage is FULL when the copies have arrived, EMPTY when it has been multiplied.
enum Barrier { FULL, EMPTY };
template <int STAGES, int BYTES>
struct Stages : Ring<STAGES, BYTES, 2> {
    __device__ __forceinline__ unsigned full(unsigned s) const { return this->barrier(FULL, s); }
    __device__ __forceinline__ unsigned empty(unsigned s) const { return this->barrier(EMPTY, s); }
};

// Fills the ring with the steps of a tile.
template <int TILE_M, int TILE_N, int STAGES, int SHARE>
struct Fetcher {
    static constexpr int A_BYTES = TILE_M * STEP_K, BYTES = A_BYTES + TILE_N * STEP_K, ROWS = TILE_N / SHARE;
    const TensorMap *a_map, *w_map;
    unsigned sharer, part;
    int first_step, steps;

    __device__ __forceinline__ void weights(
        const Stages<STAGES, BYTES>& ring, unsigned s, int step, int channel) const {
        const int k = (first_step + step) * STEP_K;
        const unsigned target = ring.data(s) + A_BYTES + sharer * ROWS * STEP_K;
        barrier_expect(ring.full(s), BYTES);
        if constexpr (SHARE == 1) copy_box(target, w_map, k, channel, ring.full(s));
        else
            copy_box_multicast(
                target, w_map, k, channel + sharer * ROWS, ring.full(s), ((1 << SHARE) - 1) << part * SHARE);
    }
    // first: of the block. Then the weights of all stages do not wait for the tokens to be quantized.
    __device__ __forceinline__ void tile(Stages<STAGES, BYTES>& ring, int token, int channel, bool first) const {
        const int ahead = first ? min(steps, STAGES) : 0;
        for (int step = 0; step < ahead; ++step) weights(ring, step, step, channel);
        if (first) wait_for_previous();
        for (int step = 0; step < steps; ++step) {
            if (step >= ahead) {
                barrier_wait(ring.empty(ring.stage), ring.phase ^ 1);
                weights(ring, ring.stage, step, channel);
            }
            copy_box(ring.data(ring.stage), a_map, (first_step + step) * STEP_K, token, ring.full(ring.stage));
            ring.step(1);
        }
    }
};

// The sums of SPLIT blocks, of which each adds up and stores a part: 16 tokens x 32 channels, a unit, at a time. `own`
// is shared memory of this warpgroup, at the same place in all blocks.
template <int N_STEPS, int SHARE, int SPLIT, typename Store>
__device__ __forceinline__ void exchange(
    const int (&sum)[N_STEPS][64], unsigned own, unsigned part, unsigned sharer, const Store& store) {
    constexpr int UNITS = 4 * N_STEPS;  // of a warp
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
#pragma unroll
    for (int r = 0; r < 16 * N_STEPS; ++r)  // four sums of thread t go to place (r, t)
        store_shared(own + (r * WARPGROUP + thread) * 16, &sum[r / 16][r % 16 * 4]);
    cluster_sync();
    for (int unit = part * 4 + warp; unit < 4 * UNITS; unit += 4 * SPLIT) {
        const int of_warp = unit / UNITS, q = unit % UNITS;
        const unsigned place = own + (q * 4 * WARPGROUP + of_warp * WARP + lane) * 16;
        int total[16] = {};
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
            const unsigned source = cluster_address(place, other * SHARE + sharer);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int4 v = load_cluster<int4>(source + r * WARPGROUP * 16);
                total[4 * r] += v.x, total[4 * r + 1] += v.y, total[4 * r + 2] += v.z, total[4 * r + 3] += v.w;
            }
        }
        store(total, of_warp, 32 * q);
    }
}

// The sizes that the host reckons with: threads of a block, tokens and channels of a tile, bytes of a stage.
template <int THREADS, int TOKENS, int CHANNELS, int STAGE_BYTES>
struct Layout {
    template <int Threads, int Tokens, int Channels, int StageBytes>
    static constexpr bool IS =
        Threads == THREADS && Tokens == TOKENS && Channels == CHANNELS && StageBytes == STAGE_BYTES;
};

// WARPGROUPS multiply, each 64 tokens x 128 * N_STEPS channels. With SPLIT > 1 the grid has a cluster for every tile.
template <typename T, int WARPGROUPS, int N_STEPS, int STAGES, int SHARE, int SPLIT, typename Layout>
__global__ void __cluster_dims__(SHARE* SPLIT)
    __launch_bounds__(WARPGROUPS* WARPGROUP + (WARPGROUPS == 1 ? WARP : WARPGROUP), WARPGROUPS* N_STEPS == 1 ? 2 : 1)
        wgmma_w8a8(
            const __grid_constant__ TensorMap a_map,  // int8 [M, K], boxes of 128 bytes x the tokens of a tile
            const __grid_constant__ TensorMap
                w_map,          // int8 [N, K], of 128 bytes x the channels that a block reads of a tile
            T* __restrict__ y,  // [M, N]
            const float* __restrict__ token_scale, const float* __restrict__ channel_scale,
            const void* __restrict__ bias, long long bias_kind, long long tokens, long long channels, long long depth) {
    constexpr int CLUSTER = SHARE * SPLIT, TILE_M = 64 * WARPGROUPS, TILE_N = 128 * N_STEPS;
    using Fetch = Fetcher<TILE_M, TILE_N, STAGES, SHARE>;
    constexpr int THREADS = WARPGROUPS * WARPGROUP + (WARPGROUPS == 1 ? WARP : WARPGROUP);
    static_assert(Layout::template IS<THREADS, TILE_M, TILE_N, Fetch::BYTES>, "the host reckons with other sizes");
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * STAGES];
    __shared__ float factors[WARPGROUPS][2][TILE_N];  // scales and biases of a tile's channels
    // The swizzle counts in units of 1024 bytes from address 0.
    Stages<STAGES, Fetch::BYTES> ring{{(shared_address(memory) + 1023u) & ~1023u, shared_address(barriers)}};
    const unsigned rank = CLUSTER == 1 ? 0 : block_in_cluster();
    const unsigned sharer = rank % SHARE, part = rank / SHARE;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), WARPGROUPS * SHARE);
        }
        fence_barrier_init();
    }
    if constexpr (SHARE == 1) __syncthreads();
    else cluster_sync();

    const TileOrder order{(tokens + TILE_M * SHARE - 1) / (TILE_M * SHARE), (channels + TILE_N - 1) / TILE_N};
    const int all_steps = static_cast<int>((depth + STEP_K - 1) / STEP_K);
    const int first_step = all_steps * static_cast<int>(part) / SPLIT;
    const int steps = all_steps * static_cast<int>(part + 1) / SPLIT - first_step;
    const long long tiles = order.along_m * order.along_n, stride = gridDim.x / CLUSTER;
    // Where a tile starts.
    auto tile_at = [&](long long number, long long& token, long long& channel) {
        order.at(number, token, channel);
        token = (token * SHARE + sharer) * TILE_M;
        channel *= TILE_N;
    };
    if (warpgroup == WARPGROUPS) {
        if constexpr (WARPGROUPS > 1) lower_registers<40>();
        if (threadIdx.x == WARPGROUPS * WARPGROUP) {
            const Fetch fetch{&a_map, &w_map, sharer, part, first_step, steps};
            const long long first = blockIdx.x / CLUSTER;
            for (long long number = first; number < tiles; number += stride) {
                long long token, channel;
                tile_at(number, token, channel);
                fetch.tile(ring, static_cast<int>(token), static_cast<int>(channel), number == first);
            }
        }
        __syncwarp();
        if constexpr (SPLIT > 1) cluster_sync();  // the one of the exchange
    } else {
        if constexpr (WARPGROUPS > 1) raise_registers<232>();
        const Rescaling rescaling{token_scale, channel_scale, bias, bias_kind};
        const Output<T> output{y, tokens, channels, is_aligned(y) && channels * sizeof(T) % 16 == 0};
        const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP;
        float* scale = factors[warpgroup][0];
        float* biases = factors[warpgroup][1];
        auto release = [&](unsigned s) {
            if constexpr (SHARE == 1) {
                if (thread == 0) barrier_arrive(ring.empty(s));
            } else {
                if (thread < SHARE) barrier_arrive(ring.empty(s), part * SHARE + thread);
            }
        };
        for (long long number = blockIdx.x / CLUSTER; number < tiles; number += stride) {
            long long token, channel;
            tile_at(number, token, channel);
            for (int i = thread; i < TILE_N; i += WARPGROUP) {
                scale[i] = channel + i < channels ? rescaling.of_channel(channel + i) : 0.0f;
                biases[i] = channel + i < channels ? rescaling.bias_of(channel + i) : 0.0f;
            }
            int sum[N_STEPS][64];
            unsigned last = 0;
            for (int step = 0; step < steps; ++step) {
                barrier_wait(ring.full(ring.stage), ring.phase);
                const unsigned tile = ring.data(ring.stage);
                const unsigned long long x = wgmma_descriptor(tile + warpgroup * 64 * STEP_K);
                const unsigned long long b = wgmma_descriptor(tile + Fetch::A_BYTES);
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < STEP_K / 32; ++k)
#pragma unroll
                    for (int j = 0; j < N_STEPS; ++j)  // descriptors count in units of 16 bytes
                        wgmma_s8(sum[j], x + 2 * k, b + j * 128 * STEP_K / 16 + 2 * k, step > 0 || k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release(last);  // its products are done
                last = ring.stage;
                ring.step(1);
            }
            wgmma_wait<0>();
            release(last);
            wait_for_previous();        // the scales of the tokens are there
            warpgroup_sync(warpgroup);  // ... and those of the channels
            auto store = [&](const int* sums, int of_warp, int n) {
                output.store(
                    sums, token + warpgroup * 64 + of_warp * 16, channel + n, rescaling, scale + n, biases + n, lane);
            };
#pragma unroll
            for (int j = 0; j < N_STEPS; ++j) fence_operands(sum[j]);
            if constexpr (SPLIT == 1) {
#pragma unroll
                for (int q = 0; q < 4 * N_STEPS; ++q) store(sum[q / 4] + q % 4 * 16, warp, 32 * q);
            } else {
                multipliers_sync<WARPGROUPS>();  // the ring is free, as nothing more is fetched
                exchange<N_STEPS, SHARE, SPLIT>(
                    sum, ring.data0 + warpgroup * N_STEPS * 64 * WARPGROUP * 4, part, sharer, store);
            }
            warpgroup_sync(warpgroup);  // scales and biases are read
        }
    }
    if constexpr (CLUSTER > 1)
        cluster_arrive_relaxed(), cluster_wait();  // others may still arrive at barriers or read sums here
}
