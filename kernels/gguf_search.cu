// Quantizers of GGUF's types whose scales are searched for; what a lane computes stands in formats/gguf_search.cuh.
#include "formats/gguf_search.cuh"

constexpr int THREADS = 128;

// The larger of a number and that of the lanes whose numbers differ in one bit of the lowest three. None is negative or
// NaN, so that bits have the order of the numbers.
__device__ __forceinline__ float largest_of_8(float number) {
    unsigned bits = ieee::is_zero(number) || ieee::less(number, 0.0f) ? 0u : __float_as_uint(number);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, step));
    return __uint_as_float(bits);
}

// Eight lanes for each block, which has a scale and a minimum for every 32 elements.
//
// x       T[blocks * E::BLOCK]
// blocks  how many
// a to e  the planes of the fields, in their order; null where there are fewer
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) search_gguf(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d,
    unsigned char* e) {
    constexpr int PER_BLOCK = THREADS / 8;
    const Fields fields = {{a, b, c, d, e}};
    const int number = threadIdx.x % 8;
    // All lanes of a warp make as many rounds: those beyond the end work on the last block, and do not write.
    for (long long start = (long long)blockIdx.x * PER_BLOCK; start < blocks;
         start += (long long)gridDim.x * PER_BLOCK) {
        const long long block = start + threadIdx.x / 8, found = block < blocks ? block : blocks - 1;
        E lane;
        Source<T>{x + found * E::BLOCK}.load(number * 32, lane.x);
        lane.search();
        const float largest_scale = largest_of_8(lane.scale), largest_minimum = largest_of_8(lane.minimum);
        lane.finish(largest_scale, largest_minimum);
        unsigned beside[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) beside[w] = __shfl_xor_sync(FULL_WARP, lane.codes[w], 1);
        const int sc = __shfl_xor_sync(FULL_WARP, lane.sc, 4), mn = __shfl_xor_sync(FULL_WARP, lane.mn, 4);
        if (block >= blocks) continue;
        lane.store(number, beside, sc, mn, fields, block);
        if (number == 0) {
            fields.put_half(0, block * 2, ieee::divide(largest_scale, 63.0f));
            fields.put_half(0, block * 2 + 1, ieee::divide(largest_minimum, 63.0f));
        }
    }
}
