// Quantizers of GGUF's types; what they compute stands in formats/gguf_encoders.cuh, and is decoded by blocks.cu.
#include "common/types.cuh"
#include "formats/gguf_encoders.cuh"

constexpr int THREADS = 128;
constexpr unsigned LARGEST_HALF = 0x477fe000u;  // 65504 as a float

// A block's elements of a dtype.
template <typename T>
struct Source {
    const T* x;

    __device__ __forceinline__ void load(int first, float (&v)[32]) const {
        constexpr int PER_WORD = Word<T>::COUNT, EACH = 4 * PER_WORD;  // elements of a word, of 16 bytes
        const T* from = x + first;
        const bool aligned = (reinterpret_cast<unsigned long long>(from) & 15) == 0;
#pragma unroll
        for (int i = 0; i < 32 / EACH; ++i) {
            if (aligned) {
                const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i);
                const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < EACH; ++e) v[i * EACH + e] = Word<T>::get(word[e / PER_WORD], e % PER_WORD);
            } else {
#pragma unroll
                for (int e = 0; e < EACH; ++e) v[i * EACH + e] = to_float(from[i * EACH + e]);
            }
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] = within_half(v[i]);
    }

    // NaN is 0, and what is beyond the largest half is that.
    __device__ __forceinline__ static float within_half(float a) {
        const unsigned bits = ieee::magnitude_bits(a);
        if (bits <= LARGEST_HALF) return a;
        return bits > 0x7f800000u ? 0.0f : __uint_as_float((__float_as_uint(a) & 0x80000000u) | LARGEST_HALF);
    }
};

// A thread for each block.
//
// x       T[blocks * E::BLOCK]
// blocks  how many
// a to d  the planes of the fields, in their order; null where there are fewer
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) quantize_gguf(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d) {
    const Fields fields = {{a, b, c, d}};
    const long long step = (long long)gridDim.x * THREADS;
    for (long long block = (long long)blockIdx.x * THREADS + threadIdx.x; block < blocks; block += step)
        E::encode(Source<T>{x + block * E::BLOCK}, fields, block);
}

// The larger of a number and that of the lanes whose numbers differ in one bit of the lowest three. None is negative or
// NaN, so that bits have the order of the numbers.
__device__ __forceinline__ float largest_of_8(float number) {
    unsigned bits = ieee::is_zero(number) || ieee::less(number, 0.0f) ? 0u : __float_as_uint(number);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(FULL_WARP, bits, step));
    return __uint_as_float(bits);
}

// Eight lanes for each block, which has a scale and a minimum for every 32 elements; the rest as above.
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) quantize_gguf_k(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d) {
    constexpr int PER_BLOCK = THREADS / 8;
    const Fields fields = {{a, b, c, d}};
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
