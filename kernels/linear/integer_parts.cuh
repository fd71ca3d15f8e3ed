// Tiles of integer codes that several thread blocks multiply together, each some stages of k: who has the last stages
// of a tile adds the sums of the others, of blocks before it, from the last to the first, and writes results. Others
// leave theirs in global memory. Who waits does so for blocks of lower numbers, which have started before it, and left
// what it wants ahead of whatever they wait for themselves.
#pragma once
#include "linear/integer_results.cuh"

__device__ __forceinline__ float added(float a, unsigned word) { return add_ieee(a, __uint_as_float(word)); }
__device__ __forceinline__ int added(int a, unsigned word) { return a + static_cast<int>(word); }

// Of the host (kbitcupy/products/integer_tile.py), ahead of this source: PART_FLAGS, words ahead of sums, which are 0
// when the kernel starts.
template <int SUMS>
struct Parts {
    static constexpr int VECTORS = SUMS / 4 * WARPGROUP;  // of 16 bytes, of a warpgroup
    unsigned* flags;
    int warpgroup;

    __device__ __forceinline__ uint4* sums_of(int number) const {
        return reinterpret_cast<uint4*>(flags + PART_FLAGS) + static_cast<long long>(number) * VECTORS +
               threadIdx.x % WARPGROUP;
    }
    // The sums of a warpgroup, that of this number in the grid.
    template <typename A>
    __device__ __forceinline__ void leave(const A (&sum)[SUMS], int number) const {
        static_assert(sizeof(A) == 4, "words");
        uint4* const target = sums_of(number);
#pragma unroll
        for (int j = 0; j < SUMS; j += 4) {
            unsigned word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) word[i] = reinterpret_cast<const unsigned&>(sum[j + i]);
            store_global(target + j / 4 * WARPGROUP, make_uint4(word[0], word[1], word[2], word[3]));
        }
        warpgroup_sync(warpgroup);
        if (threadIdx.x % WARPGROUP == 0)
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flags + number), "r"(1) : "memory");
    }
    // Adds those that another one leaves.
    template <typename A>
    __device__ __forceinline__ void add(A (&sum)[SUMS], int number) const {
        if (threadIdx.x % WARPGROUP == 0) {
            unsigned left;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(left) : "l"(flags + number) : "memory");
            while (left == 0);
        }
        warpgroup_sync(warpgroup);
        const uint4* const source = sums_of(number);
#pragma unroll
        for (int j = 0; j < SUMS; j += 4) {
            const uint4 v = __ldcg(source + j / 4 * WARPGROUP);
            const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j + i] = added(sum[j + i], word[i]);
        }
    }
};
