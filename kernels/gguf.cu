// Quantizers of GGUF's simple types; what they compute stands in formats/gguf_encoders.cuh, and is decoded by
// blocks.cu.
#include "formats/gguf_encoders.cuh"

constexpr int THREADS = 128;

// A thread for each block.
//
// x       T[blocks * E::BLOCK]
// blocks  how many
// a to e  the planes of the fields, in their order; null where there are fewer
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS) quantize_gguf(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d,
    unsigned char* e) {
    const Fields fields = {{a, b, c, d, e}};
    const long long step = (long long)gridDim.x * THREADS;
    for (long long block = (long long)blockIdx.x * THREADS + threadIdx.x; block < blocks; block += step)
        E::encode(Source<T>{x + block * E::BLOCK}, fields, block);
}
