// Few tokens, quantized to fragments for a product that is launched early: thread blocks so small that they find room
// on multiprocessors beside the product before, and wait there for its end. Each of the four schedulers of a
// multiprocessor has registers of its own: what does not fit beside the product on one of them starts on the few
// multiprocessors that are free first, and keeps the next product from these (3 to 5 us on an H200).
//
// Dependents are launched ahead of the wait: the product asks for weights while tokens are quantized. These are there
// already: what writes weights ends before anything behind it starts, as it does not launch dependents early.
#include "common/sync.cuh"
#include "linear/cluster_exchange.cuh"
#include "linear/integer_tokens.cuh"

// Of the host, ahead of this source: FEW_THREADS of a block, and FEW_REGISTERS that products leave to it; of tokens
// that have one scale each, CLUSTER blocks, ROW_THREADS of one at the most, and ROW_REGISTERS.
//
// By blocks of 32: a thread has FOUR neighbours; with more it would have no room.
constexpr int FOUR = 4, LANES_OF_BLOCK = Q8_BLOCK / FOUR;

// Puts the codes of four neighbours where Fragments has them; all of a warp call it.
template <int LAYOUT>
__device__ __forceinline__ void store_four(unsigned char* codes, int padded, int m, int k, unsigned word) {
    static_assert(LAYOUT != HALF_ROWS, "rows are no fragments");
    constexpr bool BOTH = LAYOUT == HALVES_IN_TURN;
    if constexpr (BOTH || evens_first(LAYOUT)) {
        // Two lanes exchange two of their bytes.
        constexpr int APART = BOTH ? 16 : FOUR;
        constexpr unsigned FIRST = BOTH ? 0x5140 : 0x6420, SECOND = BOTH ? 0x3726 : 0x3175;
        const unsigned other = __shfl_xor_sync(FULL_WARP, word, APART / FOUR);
        word = __byte_perm(word, other, k & APART ? SECOND : FIRST);
    }
    const Place place = place_in_fragment(BOTH ? HALVES : LAYOUT, k / OCTET * OCTET);
    const int at = place.at + (k % OCTET ? place.behind : 0);
    *reinterpret_cast<unsigned*>(codes + (place.fragment * padded + m) * MEMBER_BYTES + at) = word;
}

// Four bytes, which have signs, as halves.
__device__ __forceinline__ uint2 halves_of(unsigned word) {
    const auto pair = [&](int i) {
        return Word<__half>::pack(
            static_cast<float>(static_cast<signed char>(word >> 8 * i)),
            static_cast<float>(static_cast<signed char>(word >> 8 * i + 8)));
    };
    return make_uint2(pair(0), pair(2));
}

template <typename T, int LAYOUT>
__global__ void __launch_bounds__(FEW_THREADS, 65536 / FEW_REGISTERS) quantize_few_integers(
    const T* x,  // [tokens, depth], rows at multiples of 16 bytes; depth a multiple of 32
    unsigned char* codes, float* scales,
    int* sums,  // not of HALF_ROWS
    int depth, int padded) {
    launch_dependents();
    wait_for_previous();
    const int m = blockIdx.x, k = (blockIdx.y * FEW_THREADS + threadIdx.x) * FOUR;
    if (k >= (depth + 127) / 128 * 128) return;  // fragments have whole 128 k, as a warp has
    Numbers<T, FOUR> numbers;
    numbers.clear();
    if (k < depth) numbers.load(x + static_cast<long long>(m) * depth + k);
    unsigned most = numbers.largest();
#pragma unroll
    for (int step = 1; step < LANES_OF_BLOCK; step *= 2) most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
    const BlockRule rule(most);
    float v[FOUR];
    numbers.get(v);
    unsigned word[1];
    rule.codes(v, word);
    if constexpr (LAYOUT == HALF_ROWS) {
        if (k >= depth) return;
        reinterpret_cast<uint2*>(codes)[(static_cast<long long>(m) * depth + k) / FOUR] = halves_of(word[0]);
        if (k % Q8_BLOCK == 0) scales[k / Q8_BLOCK * padded + m] = rule.scale;
        return;
    } else {
        store_four<LAYOUT>(codes, padded, m, k, word[0]);
    }
    int sum = sum_of_codes(word);
#pragma unroll
    for (int step = 1; step < LANES_OF_BLOCK; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (k < depth && k % Q8_BLOCK == 0) {
        const int at = k / Q8_BLOCK * padded + m;
        scales[at] = rule.scale, sums[at] = sum;
    }
}

// By tokens: a cluster of thread blocks has a token, a thread eight neighbours of it.
//
//     UNIT  elements whose codes have a sum
template <typename T, int LAYOUT, int UNIT>
__global__ void OF_CLUSTER __launch_bounds__(ROW_THREADS, 65536 / ROW_REGISTERS) quantize_few_rows(
    const T* x,            // [tokens, depth], rows at multiples of 16 bytes; depth a multiple of 16
    unsigned char* codes,  // fragments of `padded` tokens
    float* scales,         // [tokens]
    int* sums,             // [units, padded]
    int depth, int padded) {
#if __CUDA_ARCH__ >= 900
    static_assert(LAYOUT == OWN_NIBBLES, "octets of a lane, the even ones first");
    __shared__ Heard<unsigned> heard;
    launch_dependents();
    const int rank = block_in_cluster(), m = blockIdx.x / CLUSTER, of_block = blockDim.x / WARP;
    const int k = (rank * blockDim.x + threadIdx.x) * OCTET;
    if (threadIdx.x == 0) {
        heard.begin();
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    if (threadIdx.x == 0) heard.expect(CLUSTER * of_block);
    wait_for_previous();
    Numbers<T, OCTET> numbers;
    numbers.clear();
    if (k < depth) numbers.load(x + static_cast<long long>(m) * depth + k);
    heard.tell(rank * of_block + warp_number(), CLUSTER, largest_of_warp(numbers.largest()));
    Int8Rule rule;
    rule.begin(largest_of_warp(heard.hear(CLUSTER * of_block)));
    float v[OCTET];
    unsigned word[2];
    numbers.get(v);
    rule.codes(v, word);
    if (k >= depth) word[0] = word[1] = 0;
    if (k < (depth + 127) / 128 * 128) {  // fragments have whole 128 k
        const Place place = place_in_fragment(LAYOUT, k);
        *reinterpret_cast<uint2*>(codes + (place.fragment * padded + m) * MEMBER_BYTES + place.at) =
            make_uint2(__byte_perm(word[0], word[1], 0x6420), __byte_perm(word[0], word[1], 0x7531));
    }
    int sum = sum_of_codes(word);
#pragma unroll
    for (int step = 1; step < UNIT / OCTET; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (k < depth && k % UNIT == 0) sums[k / UNIT * padded + m] = sum;
    if (k == 0) scales[m] = rule.scale();
#endif
}
