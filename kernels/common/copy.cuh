// Copies: shared memory by its addresses in the window, cp.async, and TMA (Hopper's tensor memory accelerator,
// cp.async. bulk.tensor), which copies boxes of a matrix that a tensor map describes, in the swizzle that the map
// names.
#pragma once
#include "common/types.cuh"

// ---- shared memory -------------------------------------------------------------------------------------------------

// The address of shared memory in its window.
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// The words of a vector.
__device__ __forceinline__ void to_words(unsigned* w, uint4 v) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }
__device__ __forceinline__ void to_words(unsigned* w, uint2 v) { w[0] = v.x, w[1] = v.y; }

// A number, or two or four words, in shared memory, by its address in the window.
template <typename A>
__device__ __forceinline__ A shared_at(unsigned address) {
    if constexpr (sizeof(A) == 1) {
        unsigned v;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
        return A(v);
    } else if constexpr (sizeof(A) == 2) {
        unsigned short v;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
        return *reinterpret_cast<A*>(&v);
    } else if constexpr (sizeof(A) == 4) {
        unsigned v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
        return *reinterpret_cast<A*>(&v);
    } else if constexpr (sizeof(A) == 8) {
        A v;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
        return v;
    } else {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(address));
        return *reinterpret_cast<A*>(&v);
    }
}

// 16 bytes from shared memory, by their address in the window, where `wanted`; else the registers stay as they are.
__device__ __forceinline__ void load_shared_if(unsigned* w, unsigned address, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                 : "r"(address), "r"(unsigned(wanted)));
}

__device__ __forceinline__ void store_shared(unsigned address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned address, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

__device__ __forceinline__ void store_shared(unsigned address, const int* v) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// ---- cp.async ------------------------------------------------------------------------------------------------------

// Start to copy BYTES, 4, 8 or 16, from global memory to an address of the shared window, without a stop in registers
// where the architecture can (sm_80 on).
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned address, const void* global) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global), "n"(BYTES) : "memory");
#else
    static_assert(BYTES % 4 == 0, "words");
    void* shared = __cvta_shared_to_generic(address);
    if constexpr (BYTES == 16) *static_cast<uint4*>(shared) = __ldcs(static_cast<const uint4*>(global));
    else if constexpr (BYTES == 8) *static_cast<uint2*>(shared) = __ldg(static_cast<const uint2*>(global));
    else *static_cast<unsigned*>(shared) = __ldg(static_cast<const unsigned*>(global));
#endif
}

// The same from sm_80 on, where `there`: a predicate costs less than a branch in a loop.
template <int BYTES>
__device__ __forceinline__ void copy_async_if(unsigned address, const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile(
            "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(address),
            "l"(global), "r"(unsigned(there))
            : "memory");
    else
        asm volatile(
            "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3;}" ::"r"(address),
            "l"(global), "r"(unsigned(there)), "n"(BYTES)
            : "memory");
#endif
}

// ... and the first `bytes` of them, with zeros behind.
template <int BYTES>
__device__ __forceinline__ void copy_async_or_zero(unsigned address, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(address), "l"(global), "r"(bytes), "n"(BYTES)
                     : "memory");
#endif
}

// Commit the copies started since the last call as one group.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for this lane's copies, except those of the last PENDING groups.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- global memory -------------------------------------------------------------------------------------------------

// Bring the 128-byte line of an address to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// 16 or 8 bytes that no kernel under way writes, where `wanted`; else the registers stay as they are.
__device__ __forceinline__ void load_global_if(unsigned* w, const uint4* p, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                 : "l"(p), "r"(unsigned(wanted)));
}
__device__ __forceinline__ void load_global_if(unsigned* w, const uint2* p, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(w[0]), "+r"(w[1])
                 : "l"(p), "r"(unsigned(wanted)));
}

// What the kernel before this one has written; neither the compiler nor the read-only cache may fetch it earlier.
__device__ __forceinline__ float load_written_factor(const float* p) {
    float v;  // as `usable` has it, which from here would take 30 more registers
    asm volatile(
        "{ .reg .pred usable; .reg .b32 bits, less; ld.global.b32 bits, [%1]; sub.u32 less, bits, 1;"
        " setp.lt.u32 usable, less, 0x7f7fffff; selp.b32 %0, bits, 0, usable; }"
        : "=f"(v)
        : "l"(p)
        : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_written(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// 16 bytes of weights that are read once.
__device__ __forceinline__ uint4 load_once(const signed char* w) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(w));
    return v;
}

// ---- TMA -----------------------------------------------------------------------------------------------------------

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Copy a box of the matrix, from row `row` and byte `column` on, to shared memory; its bytes count at `barrier`. One
// lane of a warp, with operands that are uniform: where they differ by lane the compiler makes a loop over lanes.
__device__ __forceinline__ void copy_box(unsigned target, const TensorMap* map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same to this address of every block in `blocks`, whose barriers at that address count.
__device__ __forceinline__ void copy_box_multicast(
    unsigned target, const TensorMap* map, int column, int row, unsigned barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

// Fetch the tensor map itself to TMA's cache, so that the first copy need not wait for it.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Bring a box to the L2 cache: allowed before `wait_for_previous`, as other kernels' writes pass through it.
__device__ __forceinline__ void prefetch_box(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}

// ---- shared memory of a cluster ------------------------------------------------------------------------------------

// Where an address of this block's shared memory lies in that of block `rank` of the cluster.
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Four words from there.
template <typename V>
__device__ __forceinline__ V load_cluster(unsigned address) {
    V v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// To this address of block `rank` of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void store_async(unsigned address, const float (&v)[4], unsigned barrier, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 to, counts; mapa.shared::cluster.u32 to, %0, %6; mapa.shared::cluster.u32 counts, %5, %6;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%1,%2,%3,%4}, [counts]; }" ::"r"(
            address),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier), "r"(rank)
        : "memory");
#endif
}
