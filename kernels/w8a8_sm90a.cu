// W8A8 products on Hopper (sm_90a): tiles by the bulk tensor copy engine, products by wgmma.
//
// One warp fills the stages of a ring in shared memory, one or two warpgroups multiply what is in them:
//
//     copy engine --full[stage]--> wgmma, 64 tokens x 128 channels an instruction --empty[stage]--> copy engine
//
// A row of a stage is 128 bytes of k, in the 128-byte swizzle that both the engine and wgmma know. Blocks are
// persistent, so the ring fills with the next tile while the last one is rescaled and written.
// Two blocks of a cluster take neighbouring tiles of tokens and the same channels: each reads half of the weights, for
// both.
#include "w8a8.cuh"

constexpr int STEP_K = 128;  // k of a stage: one row of the swizzle
constexpr int WARPGROUP = 4 * WARP;

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// ---- barriers, copies, wgmma -----------------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Make initialized barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive, and announce bytes that the copy engine will deliver.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive at the barrier that block `rank` of the cluster has at this address.
__device__ __forceinline__ void barrier_arrive(unsigned barrier, unsigned rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Wait until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Copy a box of the matrix, from row `row` and byte `column` on, to shared memory; the bytes count at `barrier`.
__device__ __forceinline__ void copy_box(unsigned target, const TensorMap* map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same to this address of every block in `blocks`, whose barriers at that address count.
__device__ __forceinline__ void copy_box_to(
    unsigned target, const TensorMap* map, int column, int row, unsigned barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ unsigned block_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier of one warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Describes rows of 128 bytes in the 128-byte swizzle to wgmma: eight rows, 1024 bytes, are a unit.
__device__ __forceinline__ unsigned long long describe(unsigned address) {
    return (address & 0x3ffffu) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define OPERANDS8(s, i)                                                                                         \
    "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3]), "+r"(s[i + 4]), "+r"(s[i + 5]), "+r"(s[i + 6]), \
        "+r"(s[i + 7])
#define OPERANDS64(s)                                                                                         \
    OPERANDS8(s, 0), OPERANDS8(s, 8), OPERANDS8(s, 16), OPERANDS8(s, 24), OPERANDS8(s, 32), OPERANDS8(s, 40), \
        OPERANDS8(s, 48), OPERANDS8(s, 56)

// sum (+)= a * b for 64 tokens x 128 channels x 32 k; the old sum counts only where `keep` is not 0.
__device__ __forceinline__ void wgmma_s8(int (&sum)[64], unsigned long long a, unsigned long long b, int keep) {
    asm volatile(
        "{ .reg .pred keep; setp.ne.b32 keep, %66, 0;"
        " wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22,"
        " %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44,"
        " %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " %64, %65, keep; }"
        : OPERANDS64(sum)
        : "l"(a), "l"(b), "r"(keep));
}

// Sums that wgmma has written: nothing may read them earlier.
__device__ __forceinline__ void sums_arrived(int (&sum)[64]) { asm volatile("" : OPERANDS64(sum)::"memory"); }

// ---- the kernel ------------------------------------------------------------------------------------------------

// WARPGROUPS multiply, each 64 * M_STEPS tokens x 128 * N_STEPS channels.
template <typename T, int WARPGROUPS, int M_STEPS, int N_STEPS, int STAGES, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__((WARPGROUPS + 1) * WARPGROUP, WARPGROUPS == 1 ? 2 : 1)
    wgmma_w8a8(
        const __grid_constant__ TensorMap a_map,  // int8 [M, K], boxes of 128 bytes x the tokens of a tile
        const __grid_constant__ TensorMap
            w_map,          // int8 [N, K], of 128 bytes x the channels that a block reads of a tile
        T* __restrict__ y,  // [M, N]
        const float* __restrict__ token_scale, const float* __restrict__ channel_scale, const void* __restrict__ bias,
        long long bias_kind, long long tokens, long long channels, long long depth) {
    constexpr int GROUP_M = 64 * M_STEPS, TILE_M = GROUP_M * WARPGROUPS, TILE_N = 128 * N_STEPS;
    constexpr int A_BYTES = TILE_M * STEP_K, STAGE = A_BYTES + TILE_N * STEP_K;
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long full[STAGES], empty[STAGES];
    __shared__ float factors[WARPGROUPS][2][TILE_N];  // scales and biases of a tile's channels
    // The swizzle counts in units of 1024 bytes from address 0.
    const unsigned ring = (shared_address(memory) + 1023u) & ~1023u;
    const unsigned full0 = shared_address(full), empty0 = shared_address(empty);
    const unsigned rank = CLUSTER == 1 ? 0 : block_in_cluster();
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full0 + 8 * i, 1);
            barrier_init(empty0 + 8 * i, WARPGROUPS * CLUSTER);
        }
        barriers_ready();
    }
    if constexpr (CLUSTER == 1) __syncthreads();
    else cluster_sync();

    const TileOrder order{(tokens + TILE_M * CLUSTER - 1) / (TILE_M * CLUSTER), (channels + TILE_N - 1) / TILE_N};
    const int steps = static_cast<int>((depth + STEP_K - 1) / STEP_K);
    const long long tiles = order.along_m * order.along_n;
    unsigned stage = 0, phase = 0;
    auto next_stage = [&] {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    auto tile_at = [&](long long number, long long& m, long long& n) {
        order.at(number, m, n);
        m = m * CLUSTER + rank;
    };
    if (warpgroup == WARPGROUPS) {
        if constexpr (WARPGROUPS > 1) give_registers<40>();
        if (threadIdx.x == WARPGROUPS * WARPGROUP) {
            for (long long number = blockIdx.x / CLUSTER; number < tiles; number += gridDim.x / CLUSTER) {
                long long m, n;
                tile_at(number, m, n);
                for (int step = 0; step < steps; ++step) {
                    const int k = step * STEP_K;
                    barrier_wait(empty0 + 8 * stage, phase ^ 1);
                    const unsigned target = ring + stage * STAGE, barrier = full0 + 8 * stage;
                    barrier_expect(barrier, STAGE);
                    copy_box(target, &a_map, k, static_cast<int>(m * TILE_M), barrier);
                    const int channel = static_cast<int>(n * TILE_N);
                    if constexpr (CLUSTER == 1) {
                        copy_box(target + A_BYTES, &w_map, k, channel, barrier);
                    } else {
                        constexpr int PART = TILE_N / CLUSTER;
                        copy_box_to(
                            target + A_BYTES + rank * PART * STEP_K, &w_map, k, channel + rank * PART, barrier,
                            (1 << CLUSTER) - 1);
                    }
                    next_stage();
                }
            }
        }
        __syncwarp();
    } else {
        if constexpr (WARPGROUPS > 1) take_registers<232>();
        const Rescaling rescaling{token_scale, channel_scale, bias, bias_kind};
        const Output<T> output{y, tokens, channels, is_aligned(y) && channels * sizeof(T) % 16 == 0};
        const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP;
        float* scale = factors[warpgroup][0];
        float* biases = factors[warpgroup][1];
        auto release = [&](unsigned s) {
            if (thread < CLUSTER) barrier_arrive(empty0 + 8 * s, thread);
        };
        for (long long number = blockIdx.x / CLUSTER; number < tiles; number += gridDim.x / CLUSTER) {
            long long m, n;
            tile_at(number, m, n);
            for (int i = thread; i < TILE_N; i += WARPGROUP) {
                const long long channel = n * TILE_N + i;
                scale[i] = channel < channels ? rescaling.of_channel(channel) : 0.0f;
                biases[i] = channel < channels ? rescaling.bias_of(channel) : 0.0f;
            }
            int sum[M_STEPS][N_STEPS][64];
            unsigned last = 0;
            for (int step = 0; step < steps; ++step) {
                barrier_wait(full0 + 8 * stage, phase);
                const unsigned tile = ring + stage * STAGE;
                const unsigned long long x = describe(tile + warpgroup * GROUP_M * STEP_K);
                const unsigned long long b = describe(tile + A_BYTES);
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < STEP_K / 32; ++k)
#pragma unroll
                    for (int i = 0; i < M_STEPS; ++i)
#pragma unroll
                        for (int j = 0; j < N_STEPS; ++j)  // descriptors count in units of 16 bytes
                            wgmma_s8(
                                sum[i][j], x + i * 64 * STEP_K / 16 + 2 * k, b + j * 128 * STEP_K / 16 + 2 * k,
                                step > 0 || k > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release(last);  // its products are done
                last = stage;
                next_stage();
            }
            wgmma_wait<0>();
            release(last);
            warpgroup_sync(warpgroup);  // scales and biases are there
#pragma unroll
            for (int i = 0; i < M_STEPS; ++i)
#pragma unroll
                for (int j = 0; j < N_STEPS; ++j) {
                    sums_arrived(sum[i][j]);
                    const long long token = m * TILE_M + warpgroup * GROUP_M + i * 64 + warp * 16;
#pragma unroll
                    for (int q = 0; q < 4; ++q)
                        output.store(
                            sum[i][j] + 16 * q, token, n * TILE_N + j * 128 + 32 * q, rescaling,
                            scale + j * 128 + 32 * q, biases + j * 128 + 32 * q, lane);
                }
            warpgroup_sync(warpgroup);  // scales and biases are read
        }
    }
    if constexpr (CLUSTER > 1) cluster_sync();  // the other block may still arrive at barriers here
}
