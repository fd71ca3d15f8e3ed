// Few tokens, quantized to fragments for a product that is launched early: thread blocks so small that they find room
// on multiprocessors beside the product before, and wait there for its end.
#include "common/sync.cuh"
#include "linear/integer_tokens.cuh"

// Of the host, ahead of this source: FEW_THREADS of a block, FEW_BLOCKS that a multiprocessor could hold.
//
// A block has one token, or with Q8 FEW_THREADS times sixteen elements of it.
template <typename T, int LAYOUT, int UNIT, bool Q8>
__global__ void __launch_bounds__(FEW_THREADS, FEW_BLOCKS) quantize_few_integers(
    const T* x,  // [tokens, depth], rows at multiples of 16 bytes
    unsigned char* codes, float* scales, int* sums, int depth, int padded) {
    __shared__ unsigned exchange[2 * FEW_THREADS / WARP];
    launch_dependents();
    wait_for_previous();
    const int m = blockIdx.x, begin = blockIdx.y * (FEW_THREADS * SIXTEEN);
    const int here = Q8 ? min(depth - begin, FEW_THREADS * SIXTEEN) : depth;
    Fragments<LAYOUT, UNIT, Q8>{codes, scales, sums, exchange, padded, m, begin}.template quantize<2>(
        x + static_cast<long long>(m) * depth + begin, 1, here);
}
