// What the warps of a cluster of thread blocks tell each other: each hands out a number to all blocks, with an arrival
// at their barriers, so that no block waits for more than the numbers that it needs.
#pragma once
#include "common/copy.cuh"
#include "common/sync.cuh"

// Of the host, ahead of this source: CLUSTER, blocks of a cluster; ROW_THREADS of a block, at the most.
constexpr int PARTS = CLUSTER * (ROW_THREADS / WARP);
static_assert(PARTS <= WARP, "a lane for what each warp has");

#if __CUDA_ARCH__ >= 900
#define OF_CLUSTER __cluster_dims__(CLUSTER)
#else
#define OF_CLUSTER
#endif

// A number to an address of block `rank` of the cluster, of whose arrival the barrier there hears.
__device__ __forceinline__ void send(unsigned address, unsigned barrier, unsigned rank, unsigned v) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 to, heard; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 heard, %1, %2;"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %3, [heard]; }" ::"r"(address),
        "r"(barrier), "r"(rank), "r"(v)
        : "memory");
#endif
}
__device__ __forceinline__ void send(unsigned address, unsigned barrier, unsigned rank, double v) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 to, heard; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 heard, %1, %2;"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [to], %3, [heard]; }" ::"r"(address),
        "r"(barrier), "r"(rank), "d"(v)
        : "memory");
#endif
}

// Wait until all that a barrier expects in its first phase has come, from any block of the cluster.
__device__ __forceinline__ void wait_for_cluster(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;"
        " @!done bra again; }" ::"r"(barrier)
        : "memory");
#endif
}

// What each warp of the cluster has to say, a place for each of them, and the barrier that hears of it.
template <typename A>
struct Heard {
    A part[PARTS];
    alignas(8) unsigned long long barrier;

    // Both by one thread, ahead of a barrier of the cluster and behind it. Numbers may come before they are expected:
    // the phase is not over as long as this arrival is missing.
    __device__ __forceinline__ void begin() { barrier_init(shared_address(&barrier), 1); }
    __device__ __forceinline__ void expect(int warps) {
        barrier_expect(shared_address(&barrier), warps * static_cast<int>(sizeof(A)));
    }
    // The number of this warp, which all its lanes have, to the first blocks.
    __device__ __forceinline__ void tell(int warp, int blocks, A v) {
        const int lane = threadIdx.x % WARP;
        if (lane < blocks) send(shared_address(part + warp), shared_address(&barrier), lane, v);
    }
    // Those of all warps, one a lane, or nothing.
    __device__ __forceinline__ A hear(int warps) const {
        const int lane = threadIdx.x % WARP;
        wait_for_cluster(shared_address(&barrier));
        return lane < warps ? part[lane] : A(0);
    }
};
