// Double quantization: the absmax of blocks, themselves quantized. Apart, since a module compiles every plain kernel.
#include "float4.cuh"

// The sums of each 256 absmax, as the tree (i) + (i + half), zeros beyond the end.
// absmax   float32[blocks]
// sums     float64[(blocks + 255) / 256]
__global__ void __launch_bounds__(256) absmax_sums(const float* absmax, long long blocks, double* sums) {
    __shared__ double tree[256];
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    tree[threadIdx.x] = i < blocks ? double(absmax[i]) : 0.0;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = tree[0];
}

// The mean: thread i adds sums i, i + 1024, ..., then a tree. One thread block of 1024.
// offset   float32[1]
__global__ void __launch_bounds__(1024) absmax_mean(const double* sums, long long blocks, float* offset) {
    __shared__ double tree[1024];
    const long long count = (blocks + 255) / 256;
    double total = 0.0;
    for (long long i = threadIdx.x; i < count; i += 1024) total += sums[i];
    tree[threadIdx.x] = total;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *offset = __double2float_rn(tree[0] / double(blocks));
}

// codes    uint8[blocks]
// nested   float32[(blocks + 255) / 256]
__global__ void __launch_bounds__(256) quantize_absmax(
    const float* absmax, long long blocks, const float* offset, unsigned char* codes, float* nested,
    const __grid_constant__ Dynamic table) {
    __shared__ float threshold[128], largest[256 / WARP];
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (threadIdx.x < 128) threshold[threadIdx.x] = table.threshold[threadIdx.x];
    float v = i < blocks ? __fsub_rn(absmax[i], *offset) : 0.0f;
    float a = fmaxf(fabsf(v), 0.0f);  // NaN is no maximum
    for (int step = 1; step < WARP; step *= 2) a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, step));
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = a;
    __syncthreads();
    for (int w = 0; w < 256 / WARP; ++w) a = fmaxf(a, largest[w]);
    if (threadIdx.x == 0) nested[blockIdx.x] = a;
    float divisor = a;
    if (a > 0x1p126f && a < infinity()) divisor = __fmul_rn(a, 0x1p-64f), v = __fmul_rn(v, 0x1p-64f);
    if (i < blocks) codes[i] = encode_dynamic_slowly(__fmul_rn(v, __frcp_rn(divisor)), threshold);
}
