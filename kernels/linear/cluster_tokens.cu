// BitNet's tokens, quantized for the products that read ternary codes in place, where they are few: a cluster of small
// thread blocks has a token, a thread eight neighbours of it, which stay in its registers. The bits are those of
// quantize_activations (linear/activations.cu), RMSNorm included.
//
// Blocks are so small that they find room beside those of the products before and behind: they are there when the one
// ends, and keep no block of the other waiting. What warps of the cluster have to tell each other, a sum of squares and
// a largest magnitude, each of them hands out to all blocks, with an arrival at their barriers: no block waits for more
// than the numbers that it needs.
//
//     x --16 B a lane--> squares --> all blocks --> factor --> largest --> all blocks --> scale --> codes, 8 B a lane
//                                                                                         sums --> the first block
#include "linear/cluster_exchange.cuh"
#include "linear/fragments.cuh"
#include "linear/token_codes.cuh"
#include "linear/warp_sums.cuh"

// Of the host (kbitcupy/products/activations.py), ahead of this source: CLUSTER, blocks of a token; ROW_THREADS, of a
// block at the most; LANES, see linear/rms_norm.cuh; STEP of linear/fragments.cuh.
constexpr int RESIDENT = 1024 / ROW_THREADS;  // as many blocks have 64 registers a thread

// ---- tokens ------------------------------------------------------------------------------------------------------

// The factor of an RMSNorm in the order of the contract, by all threads of a block: for the few sums that another order
// might round otherwise.
template <typename T>
__device__ __noinline__ float factor_in_order(const T* row, int depth, double eps) {
    __shared__ double lanes[LANES];
    for (int lane = threadIdx.x; lane < LANES; lane += blockDim.x) {
        double sum = 0;
        for (int k = lane; k < depth; k += LANES) {
            const double x = ieee::widen(number(to_float(row[k])));
            sum += x * x;
        }
        lanes[lane] = sum;
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int lane = threadIdx.x; lane < half; lane += blockDim.x) lanes[lane] += lanes[lane + half];
    }
    __syncthreads();
    return ieee::narrow(1.0 / sqrt(lanes[0] / static_cast<double>(depth) + eps));
}

// Eight neighbours of a token, or of the weights of an RMSNorm.
template <typename T>
__device__ __forceinline__ void ask(uint4 (&raw)[sizeof(T) / 2], const T* at) {
#pragma unroll
    for (int j = 0; j < int(sizeof(T)) / 2; ++j) raw[j] = load_written(reinterpret_cast<const uint4*>(at) + j);
}
template <typename T>
__device__ __forceinline__ void get(float (&v)[OCTET], const uint4 (&raw)[sizeof(T) / 2]) {
    unsigned word[2 * sizeof(T)];
#pragma unroll
    for (int j = 0; j < int(sizeof(T)) / 2; ++j) to_words(word + 4 * j, raw[j]);
#pragma unroll
    for (int e = 0; e < OCTET; ++e) v[e] = Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
}

// OCTETS: how many times eight numbers a thread has.
template <typename T, int OCTETS>
__global__ void OF_CLUSTER __launch_bounds__(ROW_THREADS, RESIDENT) quantize_in_clusters(
    const T* x,            // [tokens, depth]; rows of this and of the next begin at multiples of 16 bytes
    const float* weight,   // [depth] of RMSNorm, or null
    unsigned char* codes,  // fragments
    float* scales,         // [tokens]
    int* sums,             // of the codes: [tokens], or as store_group_sums has them
    int depth,             // a multiple of 8
    int groups,            // times 8 tokens of fragments
    int group,             // of whose codes there are sums, and fragments in octets; 0 for all of a token
    int normalizes, double norm_share, double norm_eps, float eps, int lowest, int highest, int away,
    int early) {  // whether the product may start ahead of the wait
#if __CUDA_ARCH__ >= 900
    __shared__ Heard<double> squares;
    __shared__ Heard<unsigned> most, added;
    const int rank = block_in_cluster(), m = blockIdx.x / CLUSTER, lane = threadIdx.x % WARP;
    const int of_block = blockDim.x / WARP, warps = CLUSTER * of_block, warp = rank * of_block + warp_number();
    const int first = (rank * blockDim.x + threadIdx.x) * OCTET, run = CLUSTER * blockDim.x * OCTET;
    const T* row = x + static_cast<long long>(m) * depth;
    if (early != 0) launch_dependents();  // weights are there, see linear/integer_tokens.cu
    if (threadIdx.x == 0) {
        squares.begin(), most.begin(), added.begin();
        fence_barrier_init();
    }
    // Addresses, and what translates them, are there when the wait is over: so all lanes ask, within what there is.
    const T* of_x[OCTETS];
    const float* of_g[OCTETS];
    unsigned char* target[OCTETS];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        const int k = min(first + i * run, depth - OCTET);
        of_x[i] = row + k, of_g[i] = weight + k, target[i] = codes + place_in_fragments(k, m, groups, group != 0);
        prefetch_l2(of_x[i]), prefetch_l2(target[i]);
        if (weight != nullptr) prefetch_l2(of_g[i]);
    }
    cluster_arrive_relaxed();
    cluster_wait();
    if (threadIdx.x == 0) {
        most.expect(warps);
        if (normalizes != 0) squares.expect(warps);
        if (group == 0 && rank == 0) added.expect(warps);
    }
    wait_for_previous();
    launch_dependents();
    uint4 raw[OCTETS][sizeof(T) / 2] = {}, of_weight[OCTETS][2];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i)
        if (first + i * run < depth) ask(raw[i], of_x[i]);
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        constexpr unsigned ONE = 0x3f800000u;
        of_weight[i][0] = of_weight[i][1] = uint4{ONE, ONE, ONE, ONE};
        if (weight != nullptr && first + i * run < depth) ask(of_weight[i], of_g[i]);
    }
    float v[OCTETS][OCTET], g[OCTETS][OCTET];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) get<T>(v[i], raw[i]), get<float>(g[i], of_weight[i]);

    float factor = 1.0f;
    if (normalizes != 0) {
        squares.tell(warp, CLUSTER, sum_of_warp(squares_of<T>(v, depth)));
        const double sum = sum_of_warp(squares.hear(warps));
        if (!factor_from(sum, RootMeanSquare{true, weight, norm_share, norm_eps}, factor))
            factor = factor_in_order(row, depth, norm_eps);
    }
    most.tell(warp, CLUSTER, most_of_warp(prepare(v, g, factor, normalizes != 0, depth)));
    const float a = __uint_as_float(max(most_of_warp(most.hear(warps)), __float_as_uint(eps)));
    const float top = static_cast<float>(highest), scale = ieee::divide(top, a);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        const int k = first + i * run;
        unsigned word[2];
        const int of_octet = codes_of(word, v[i], scale, Quantizer{eps, lowest, highest, away}, 0);
        if (k < depth) *reinterpret_cast<uint2*>(target[i]) = make_uint2(word[0], word[1]);
        if (group != 0) store_group_sums(sums, of_octet, k, depth, m, groups, group);
        sum += of_octet;
    }
    if (group == 0) added.tell(warp, 1, sum_of_warp(static_cast<unsigned>(sum)));
    if (rank == CLUSTER - 1 && threadIdx.x == 0) scales[m] = ieee::divide(a, top);
    if (group != 0) return;
    if (rank == 0 && threadIdx.x < WARP) {
        const unsigned all = sum_of_warp(added.hear(warps));
        if (lane == 0) sums[m] = static_cast<int>(all);
    }
#endif
}
