// Kernels behind the flat functions that pack indices and encode scales: plain, one element a lane.
#include "common/tiles.cuh"
#include "formats/scales.cuh"

// indices  uint8[n], only the low k bits count      packed  uint32[ceil(n / 32) * k]
// One lane an element, one warp a block.
__global__ void pack_kbit(const unsigned char* indices, long long n, int k, unsigned* packed) {
    const int lane = threadIdx.x % WARP;
    const long long blocks = (n + ROW - 1) / ROW, warps = (long long)gridDim.x * (blockDim.x / WARP);
    for (long long b = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP; b < blocks; b += warps) {
        const long long i = b * ROW + lane;
        unsigned index = i < n ? indices[i] : 0u;
        for (int p = 0; p < k; ++p) {
            unsigned word = __ballot_sync(FULL_WARP, index >> p & 1u);
            if (lane == p) packed[b * k + p] = word;
        }
    }
}

// packed  uint32[ceil(n / 32) * k]      indices  uint8[n]
__global__ void unpack_kbit(const unsigned* packed, long long n, int k, unsigned char* indices) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        unsigned index = 0;
        for (int p = 0; p < k; ++p) index |= (packed[i / ROW * k + p] >> i % ROW & 1u) << p;
        indices[i] = static_cast<unsigned char>(index);
    }
}

// absmax  float32[n]      codes  uint8[n]
__global__ void encode_absmax_e4m4(const float* absmax, long long n, int bias, unsigned char* codes) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        codes[i] = encode_e4m4(absmax[i], bias);
}

__global__ void decode_absmax_e4m4(const unsigned char* codes, long long n, int bias, float* absmax) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        absmax[i] = decode_e4m4(codes[i], bias);
}
