// Few tokens, quantized by blocks of 32 to fragments for a product that is launched early: thread blocks so small that
// they find room on multiprocessors beside the product before, and wait there for its end.
#include "common/sync.cuh"
#include "linear/integer_tokens.cuh"

// Of the host, ahead of this source: FEW_THREADS of a block; FEW_REGISTERS that products leave to such a block.
//
// A block has FEW_THREADS times sixteen elements of a token.
template <typename T, int LAYOUT>
__global__ void __launch_bounds__(FEW_THREADS, 65536 / FEW_REGISTERS) quantize_few_integers(
    const T* x,  // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* codes, float* scales, int* sums, int depth, int padded) {
    launch_dependents();
    wait_for_previous();
    const int m = blockIdx.x, begin = blockIdx.y * (FEW_THREADS * SIXTEEN);
    Fragments<LAYOUT, Q8_BLOCK, true>{codes, scales, sums, nullptr, padded, m, begin}.template quantize<1>(
        x + static_cast<long long>(m) * depth + begin, 1, min(depth - begin, FEW_THREADS * SIXTEEN), [](unsigned) {});
}
