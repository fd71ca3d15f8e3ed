// Scales of a weight that is decoded to float16 for a product: a power of two brings its largest element under 2^15, so
// that small weights are not rounded to zero nor large ones to infinity. Both kernels read scales once, in passing.
#include "common/sync.cuh"

// THREADS of a block is the host's.

// The bits of |x|; 0 of what is not finite, which no factor changes.
__device__ __forceinline__ unsigned finite_magnitude(float x) {
    return Word<float>::is_finite(__float_as_uint(x)) ? __float_as_uint(x) & 0x7fffffffu : 0u;
}

// The largest of all threads of a block, in each of them.
__device__ __forceinline__ unsigned block_max(unsigned x) {
    __shared__ unsigned of_warp[THREADS / WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; ++i) x = max(x, of_warp[i]);
    __syncthreads();
    return x;
}

// An e with |x| < 2^e, from the bits of |x|.
__device__ __forceinline__ int exponent_above(unsigned magnitude) { return int(magnitude >> 23) - 126; }

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// scales   float32[n]
// largest  uint32[gridDim.x]: what each thread block has found, as bits of a float32
__global__ void __launch_bounds__(THREADS) largest_scales(const float* scales, long long n, unsigned* largest) {
    launch_dependents();
    wait_for_previous();
    const long long step = (long long)gridDim.x * THREADS;
    unsigned most = 0;
#pragma unroll 8
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        most = max(most, finite_magnitude(scales[i]));
    most = block_max(most);
    if (threadIdx.x == 0) largest[blockIdx.x] = most;
}

// scales   float32[n]
// offset   float32[1] that is added to a code times a scale, or null
// values   float32[count] that codes stand for, or null; then none is larger than `value`
// largest  uint32[parts], of largest_scales
// out      float32[n + 2]: scales and offset times a power of two, and what undoes that
__global__ void __launch_bounds__(THREADS) normalize_scales(
    const float* scales, long long n, const float* offset, const float* values, int count, float value,
    const unsigned* largest, int parts, float* out) {
    wait_for_previous();
    unsigned most = 0, most_value = __float_as_uint(value);
    for (int i = threadIdx.x; i < parts; i += THREADS) most = max(most, largest[i]);
    if (values != nullptr) {
        most_value = 0;
        for (int i = threadIdx.x; i < count; i += THREADS) most_value = max(most_value, finite_magnitude(values[i]));
    }
    most = block_max(most), most_value = block_max(most_value);
    const float added = offset == nullptr ? 0.0f : *offset;
    most = max(most, finite_magnitude(added));
    const int sum = exponent_above(most) + exponent_above(most_value) + (offset != nullptr);
    const int e = most == 0 ? 0 : min(max(15 - sum, -126), 126);
    const float factor = power_of_two(e);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        out[n] = __fmul_rn(added, factor);
        out[n + 1] = power_of_two(-e);
    }
    const long long step = (long long)gridDim.x * THREADS;
#pragma unroll 4
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        out[i] = __fmul_rn(scales[i], factor);
}
