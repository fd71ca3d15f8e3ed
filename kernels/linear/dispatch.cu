// What is behind the products of dispatches to experts (kbitcupy/products/dispatch.py): those of a token are added up.
#include "common/sync.cuh"
#include "linear/epilogue.cuh"

// Of the host, ahead of this source: THREADS of a block.

// y[t, n] = the sum of products[i, n] over the dispatches i of token t, in their order, in float32; 0 where there are
// none. blockIdx.x is the token; the dispatches are looked through THREADS at a time.
//
// products  T[count, n]      tokens  Id[count]      y  T[gridDim.x, n]
template <typename T, typename Id>
__global__ void __launch_bounds__(THREADS)
    combine_dispatches(const T* products, const Id* tokens, T* y, long long count, long long n) {
    __shared__ unsigned mine[THREADS / WARP];  // bits of the dispatches of this token
    launch_dependents();
    wait_for_previous();
    for (long long first = (long long)blockIdx.y * THREADS; first < n; first += (long long)gridDim.y * THREADS) {
        const long long column = first + threadIdx.x;
        float sum = 0.0f;
        for (long long base = 0; base < count; base += THREADS) {
            const long long i = base + threadIdx.x;
            const unsigned found = __ballot_sync(FULL_WARP, i < count && tokens[i] == Id(blockIdx.x));
            __syncthreads();  // all have read the bits before
            if (threadIdx.x % WARP == 0) mine[threadIdx.x / WARP] = found;
            __syncthreads();
            if (column >= n) continue;
#pragma unroll 1
            for (int w = 0; w < THREADS / WARP; ++w)
                for (unsigned bits = mine[w]; bits; bits &= bits - 1)
                    sum = __fadd_rn(sum, to_float(products[(base + w * WARP + __ffs(bits) - 1) * n + column]));
        }
        if (column < n) store(y + blockIdx.x * n + column, sum);
    }
}
