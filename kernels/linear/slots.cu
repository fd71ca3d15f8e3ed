// What goes behind the products of a mixture of experts (kbitcupy/products/experts.py): the weighted products of each
// token are added up.
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "linear/epilogue.cuh"
#include "linear/ids.cuh"

// y[t, n] = the sum over the slots s of products[t, s, n] times weights[t, s], in their order: each sum is
// `added(sum before, number of the slot among all, number of the product's element, s)`.
//
// products  float32[tokens, slots, n]      weights  float32[tokens, slots]      y  T[size], size = tokens * n
template <typename T, typename Added>
__device__ __forceinline__ void combine(T* y, long long size, int slots, int n, const Added& added) {
    launch_dependents();
    wait_for_previous();
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size;
         i += (long long)gridDim.x * blockDim.x) {
        const long long token = i / n;
        float sum = 0.0f;
        for (int s = 0; s < slots; ++s) sum = added(sum, token * slots + s, (token * slots + s) * n + i % n, s);
        store(y + i, sum);
    }
}

template <typename T>
__global__ void combine_slots(const float* products, const float* weights, T* y, long long size, int slots, int n) {
    combine(y, size, slots, n, [=](float sum, long long slot, long long element, int) {
        return fmaf(weights[slot], products[element], sum);
    });
}

// The same with the bits of NumPy: each term is rounded, and then added, subnormal numbers kept. Where there are ids,
// products of those outside 0 .. experts - 1 are zero and need not be written; without weights there is one slot, whose
// product is only rounded to the type of y.
//
// ids  int32 or int64[tokens, slots], of id_bytes bytes each, or null
template <typename T>
__global__ void combine_rounded_slots(
    const float* products, const float* weights, T* y, const void* ids, long long size, int slots, int n, int experts,
    int id_bytes) {
    combine(y, size, slots, n, [=](float sum, long long slot, long long element, int s) {
        const long long id = ids == nullptr ? 0 : id_at(ids, id_bytes, slot);
        const bool chosen = ids == nullptr || (id >= 0 && id < experts);
        const float product = chosen ? products[element] : 0.0f;
        const float term = weights == nullptr ? product : ieee::multiply(product, weights[slot]);
        return s == 0 ? term : ieee::add(sum, term);
    });
}
