// Who waits for whom: mbarriers, clusters, warpgroups, and kernels that overlap.
#pragma once
#include "common/types.cuh"

constexpr int WARPGROUP = 4 * WARP;

// ---- mbarriers, by their addresses in the shared window ------------------------------------------------------------

__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Make initialized barriers visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and announce bytes that TMA will deliver.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive at a barrier. What wgmma and TMA have read before needs no fence; a wider scope would cost one.
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

// Wait until the phase of this parity is over: the first one has parity 0.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "{ .reg .pred done; again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// The stages of a ring buffer in shared memory, gone through alike by the warps that fill it and by those that empty
// it. Each stage has KINDS barriers; those of a kind stand side by side: which kind says what has become of the stage.
template <int STAGES, int BYTES, int KINDS>
struct Ring {
    unsigned data0, barriers;  // addresses in the shared window
    unsigned stage = 0, phase = 0;

    __device__ __forceinline__ unsigned data(unsigned s) const { return data0 + s * BYTES; }
    __device__ __forceinline__ unsigned data() const { return data(stage); }
    __device__ __forceinline__ unsigned barrier(int kind, unsigned s) const {
        return barriers + 8 * s + 8 * kind * STAGES;
    }
    // The stages on, and rounds of the ring beside them.
    __device__ __forceinline__ void step(int stages, int rounds = 0) {
        stage += stages, phase ^= rounds & 1;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
};

// 0, which depends on words that were read, as far as compiler and hardware know: what needs it starts only when they
// have arrived. `zero` is 0, too, which the compiler does not know.
__device__ __forceinline__ unsigned zero_after(unsigned words_read, unsigned zero) { return words_read & zero; }

// An address at which a copy cannot overwrite what was read: TMA and cp.async wait for no load, and one that is still
// in its queue could otherwise find what they bring.
__device__ __forceinline__ unsigned ordered_after(unsigned address, unsigned words_read, unsigned zero) {
    return address + zero_after(words_read, zero);
}

// ---- lanes ---------------------------------------------------------------------------------------------------------

// True for one lane of a warp, all of whose lanes are here. The compiler knows that it is alone: its operands of TMA
// are uniform, and need no loop over the lanes.
__device__ __forceinline__ bool elect_lane() {
#if __CUDA_ARCH__ >= 900
    unsigned elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
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

// A barrier of the cluster; what was written to shared memory before is seen behind it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// The two halves of one without a fence: where nothing that was written has to be seen, or fence_barrier_init has been
// called for what was.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- warpgroups ----------------------------------------------------------------------------------------------------

// A barrier of one warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// setmaxnreg: give this warpgroup more registers a thread, which others have given back by lower_registers.
template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- kernels that overlap: programmatic dependent launch -----------------------------------------------------------

// Let a kernel that was launched to start early start already; it waits itself for what this one writes.
__device__ __forceinline__ void launch_dependents() {
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
