// Few tokens, quantized to fragments for a product that is launched early: thread blocks so small that they find room
// on multiprocessors beside the product before, and wait there for its end.
#include "common/sync.cuh"
#include "linear/integer_tokens.cuh"

// Of the host, ahead of this source: FEW_THREADS of a block; FEW_REGISTERS that products leave to such a block. Of
// tokens that have one scale each, ROW_THREADS and ROW_REGISTERS: each of the four schedulers of a multiprocessor has
// registers of its own, and so a warp of these. (By blocks of 32 they are there early where registers happen to be
// left: on one scheduler that is half of what a warp takes, seen on an H200.)
//
// By blocks of 32: a thread block has FEW_THREADS times sixteen elements of a token.
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

// By tokens: a thread block has ROW_THREADS times sixteen elements, and looks for the largest magnitude of the token in
// all others, too. That is sooner done than to tell each other.
//
//     UNIT  elements whose codes have a sum
template <typename T, int LAYOUT, int UNIT>
__global__ void __launch_bounds__(ROW_THREADS, 65536 / ROW_REGISTERS) quantize_few_rows(
    const T* x,            // [tokens, depth], rows at multiples of 16 bytes; depth a multiple of 16
    unsigned char* codes,  // fragments of `padded` tokens
    float* scales,         // [tokens]
    int* sums,             // [units, padded]
    int depth, int padded) {
    constexpr int PART = ROW_THREADS * SIXTEEN, WARPS = ROW_THREADS / WARP, OTHERS = HELD_NUMBERS<T> - 1;
    __shared__ unsigned exchange[WARPS];
    launch_dependents();
    wait_for_previous();
    const int m = blockIdx.x, of_part = threadIdx.x * SIXTEEN, k = blockIdx.y * PART + of_part;
    const int parts = gridDim.y;
    const T* const row = x + static_cast<long long>(m) * depth;
    Numbers<T> own;
    own.clear();
    if (k < depth) own.load(row + k);
    unsigned most = 0;
#pragma unroll 1
    for (int next = 1; next < parts; next += OTHERS) {
        Numbers<T> others[OTHERS];
#pragma unroll
        for (int i = 0; i < OTHERS; ++i) {
            const int part = blockIdx.y + next + i, from = (part < parts ? part : part - parts) * PART + of_part;
            others[i].clear();
            if (next + i < parts && from < depth) others[i].load(row + from);
        }
#pragma unroll
        for (int i = 0; i < OTHERS; ++i) most = max(most, others[i].largest());
    }
    most = largest_of_warp(max(most, own.largest()));
    if (threadIdx.x % WARP == 0) exchange[threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = max(most, exchange[i]);
    Int8Rule rule;
    rule.begin(most);
    float v[SIXTEEN];
    unsigned word[4];
    own.get(v);
    rule.codes(v, word);
    if (k >= depth) word[0] = word[1] = word[2] = word[3] = 0;
    const int reach = (depth + 127) / 128 * 128;  // fragments have whole 128 k
    Fragments<LAYOUT, UNIT, false>{codes, scales, sums, nullptr, padded}.put(m, k, k < reach, word);
    int sum = sum_of_codes(word);
#pragma unroll
    for (int step = 1; step < UNIT / SIXTEEN; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (k < depth && k % UNIT == 0) sums[k / UNIT * padded + m] = sum;
    if (k == 0) scales[m] = rule.scale();
}
