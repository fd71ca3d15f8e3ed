// Double quantization: the absmax of blocks, themselves quantized. One warp has the 256 absmax of a nested block, eight
// a lane. Apart from table4.cu, since a module compiles every plain kernel.
#include "table4.cuh"

constexpr int WARPS = THREADS / WARP;  // THREADS and MEAN_THREADS are the host's
static_assert(NESTED_BLOCK == 8 * WARP, "a warp has a nested block, eight absmax a lane");

// The sums of each 256 absmax, as the tree (i) + (i + half), zeros beyond the end.
// absmax   float32[blocks]
// sums     float64[(blocks + 255) / 256]
__global__ void __launch_bounds__(THREADS) absmax_sums(const float* absmax, long long blocks, double* sums) {
    const int lane = threadIdx.x % WARP;
    const long long nested = (long long)blockIdx.x * WARPS + threadIdx.x / WARP;
    double v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const long long i = nested * 256 + j * WARP + lane;
        v[j] = i < blocks ? double(absmax[i]) : 0.0;
    }
#pragma unroll
    for (int half = 4; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < half; ++j) v[j] += v[j + half];
#pragma unroll
    for (int half = WARP / 2; half > 0; half /= 2) v[0] += __shfl_xor_sync(FULL_WARP, v[0], half);
    if (lane == 0 && nested * 256 < blocks) sums[nested] = v[0];
}

// The mean: thread i adds sums i, i + MEAN_THREADS, ..., then a tree. One thread block.
// offset   float32[1]
__global__ void __launch_bounds__(MEAN_THREADS) absmax_mean(const double* sums, long long blocks, float* offset) {
    __shared__ double tree[MEAN_THREADS];
    const long long count = (blocks + 255) / 256;
    double total = 0.0;
#pragma unroll 8
    for (long long i = threadIdx.x; i < count; i += MEAN_THREADS) total += sums[i];
    tree[threadIdx.x] = total;
    for (int half = MEAN_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *offset = __double2float_rn(tree[0] / double(blocks));
}

// codes    uint8[blocks]
// nested   float32[(blocks + 255) / 256]
__global__ void __launch_bounds__(THREADS) quantize_absmax(
    const float* absmax, long long blocks, const float* offset, unsigned char* codes, float* nested_absmax,
    const __grid_constant__ Dynamic table) {
    __shared__ unsigned entry[DYNAMIC_BUCKETS];
    const int lane = threadIdx.x % WARP;
    const long long nested = (long long)blockIdx.x * WARPS + threadIdx.x / WARP, first = nested * 256 + lane * 8;
    // A lane has eight neighbours; what memory takes longest for comes first.
    const bool whole = first + 8 <= blocks;
    const float mean = *offset;
    float v[8] = {};
    if (whole && is_aligned(absmax)) {
        const float4* source = reinterpret_cast<const float4*>(absmax + first);
        *reinterpret_cast<float4*>(v) = source[0], *reinterpret_cast<float4*>(v + 4) = source[1];
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = first + j < blocks ? absmax[first + j] : mean;
    }
    for (int i = threadIdx.x; i < DYNAMIC_BUCKETS; i += THREADS) entry[i] = table.entry[i];
    __syncthreads();
    float a = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        v[j] = __fsub_rn(v[j], mean);
        a = fmaxf(a, fabsf(v[j]));  // NaN is no maximum
    }
    a = __uint_as_float(warp_max(__float_as_uint(a)));
    if (lane == 0 && nested * 256 < blocks) nested_absmax[nested] = a;
    const bool large = a > 0x1p126f && a < infinity();  // its reciprocal would be subnormal
    const float down = large ? 0x1p-64f : 1.0f, reciprocal = __frcp_rn(__fmul_rn(a, down));
    unsigned word[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j)
        word[j / 4] |= encode_dynamic(__fmul_rn(__fmul_rn(v[j], down), reciprocal), entry) << j % 4 * 8;
    if (whole && (reinterpret_cast<unsigned long long>(codes) & 7) == 0) {
        *reinterpret_cast<uint2*>(codes + first) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (first + j < blocks) codes[first + j] = word[j / 4] >> j % 4 * 8;
    }
}
