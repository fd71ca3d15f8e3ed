// What goes ahead of the products of a mixture of experts (kbitcupy/products/experts.py): tokens are sorted by expert.
#include "common/sync.cuh"
#include "linear/decoder.cuh"

// Sort products by expert: order[products] lists them, groups[room] cuts that list into at most 8 of one expert each.
// Ids outside 0 .. experts - 1 stand for no expert. One thread block; dynamic shared memory: experts + 1 numbers.
//
// ids  Id[products]      order  int32[products]      groups  Group[room], those not needed of expert -1
template <typename Id>
__global__ void __launch_bounds__(1024, 1)
    group_tokens(const Id* ids, int* order, Group* groups, int products, int experts, int room) {
    launch_dependents();
    extern __shared__ uint4 dynamic[];
    int* count = reinterpret_cast<int*>(dynamic);  // of each expert, then where its next product goes
    auto bin_of = [&](int p) { return ids[p] >= Id(0) && ids[p] < Id(experts) ? int(ids[p]) : experts; };
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
    wait_for_previous();
    for (int i = threadIdx.x; i < room; i += blockDim.x) groups[i] = Group{-1, 0, 0, 0};
    __syncthreads();
    for (int p = threadIdx.x; p < products; p += blockDim.x) atomicAdd(count + bin_of(p), 1);
    __syncthreads();
    if (threadIdx.x < WARP) {  // one warp adds up, 32 experts at a time
        int products_before = 0, groups_before = 0;
        for (int base = 0; base <= experts; base += WARP) {
            const int e = base + threadIdx.x, mine = e <= experts ? count[e] : 0, cuts = (mine + TOKENS - 1) / TOKENS;
            int sum = mine, cut_sum = cuts;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                const int a = __shfl_up_sync(FULL_WARP, sum, step), b = __shfl_up_sync(FULL_WARP, cut_sum, step);
                if (int(threadIdx.x) >= step) sum += a, cut_sum += b;
            }
            if (e <= experts) {
                const int begin = products_before + sum - mine, group = groups_before + cut_sum - cuts;
                count[e] = begin;
                for (int i = 0; i < cuts; ++i)
                    groups[group + i] =
                        Group{e < experts ? e : -1, begin + i * TOKENS, min(TOKENS, mine - i * TOKENS), 0};
            }
            products_before += __shfl_sync(FULL_WARP, sum, WARP - 1);
            groups_before += __shfl_sync(FULL_WARP, cut_sum, WARP - 1);
        }
    }
    __syncthreads();
    for (int p = threadIdx.x; p < products; p += blockDim.x) order[atomicAdd(count + bin_of(p), 1)] = p;
}
