// Bytes beside each other, to shared memory.
#pragma once
#include "common/copy.cuh"

// From global memory, multiples of 16; they count at `barrier`.
__device__ __forceinline__ void copy_run(unsigned target, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void store_words(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
