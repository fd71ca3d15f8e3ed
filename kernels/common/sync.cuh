// Who waits for whom: mbarriers, clusters, warpgroups, and kernels that overlap.
#pragma once
#include "common/types.cuh"

constexpr int WARPGROUP = 4 * WARP;

// ---- mbarriers, by their addresses in the shared window ------------------------------------------------------------

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Make initialized barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive, and announce bytes that the copy engine will deliver.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive at a barrier. What was read before by wgmma and the copy engine needs no fence; a wider scope would cost one.
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same at the barrier that block `rank` of the cluster has at this address.
__device__ __forceinline__ void barrier_arrive(unsigned barrier, unsigned rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Wait until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// barrier_wait for any architecture that has barriers.
__device__ __forceinline__ void ring_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barrier, parity);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "{ .reg .pred done; again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// ---- lanes ---------------------------------------------------------------------------------------------------------

// True for one lane of a warp, of which the compiler knows that it is alone: its operands of the copy engine need no
// loop.
__device__ __forceinline__ bool elect_lane() {
    unsigned elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

// One lane of a warp, all of whose lanes are here.
__device__ __forceinline__ bool elected() {
#if __CUDA_ARCH__ >= 900
    return elect_lane();
#else
    return threadIdx.x % WARP == 0;
#endif
}

// ---- clusters ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned block_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier of the cluster where nothing that was written has to be seen: without a fence.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}

// The two halves of a barrier of the cluster, behind barriers_ready.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- warpgroups ----------------------------------------------------------------------------------------------------

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

// ---- kernels that overlap: programmatic dependent launch -----------------------------------------------------------

// Let a kernel that waits for this one start already.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for what the kernel before this one writes, where the launch does not do so.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
