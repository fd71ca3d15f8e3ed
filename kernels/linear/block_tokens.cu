// BitNet's tokens, quantized to rows of codes, where they are many: a thread block has a token, a thread OCTETS times
// eight neighbours of it, which stay in its registers. The bits are those of quantize_activations
// (linear/activations.cu), RMSNorm included, which takes all other tokens.
//
//     x --16 B a lane--> squares --> factor --> largest --> scale --> codes, 8 B a lane
//                                                           sums
//
// The product waits: each of the three numbers takes one barrier, and what warps have found every warp joins by itself.
#include "linear/token_codes.cuh"
#include "linear/warp_sums.cuh"

// Of the host (kbitcupy/products/activations.py), ahead of this source: ROW_THREADS of a block; LANES, see
// linear/rms_norm.cuh; STEP of linear/fragments.cuh.
static_assert(ROW_WARPS <= WARP, "a lane for what each warp has");

// What the warps have left, a lane each, or nothing.
template <typename A>
__device__ __forceinline__ A of_warps(const A (&part)[ROW_WARPS]) {
    const int lane = threadIdx.x % WARP;
    return lane < ROW_WARPS ? part[lane] : A(0);
}

template <typename T, int OCTETS>
__global__ void __launch_bounds__(ROW_THREADS) quantize_in_blocks(
    const T* x,                       // [tokens, depth]; rows of this and of the next begin at multiples of 16 bytes
    const float* weight,              // [depth] of RMSNorm, or null
    signed char* __restrict__ codes,  // rows [tokens, pitch], zeros from depth on; a multiple of 8
    float* __restrict__ scales,       // [tokens]
    int* __restrict__ sums,           // [tokens] of the codes, or null
    int depth, int pitch, int normalizes, double norm_share, double norm_eps, float eps, int lowest, int highest,
    int away) {
    constexpr int PIECES = sizeof(T) / 2;  // of 16 bytes of an octet
    __shared__ double squares[ROW_WARPS];
    __shared__ unsigned most[ROW_WARPS], added[ROW_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long m = blockIdx.x;
    const T* row = x + m * depth;
    signed char* const target = codes + m * pitch;
    // Addresses, and what translates them, are there when the wait is over.
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        const int k = min(place_of(i), depth - OCTET);
        prefetch_l2(row + k), prefetch_l2(target + k);
        if (weight != nullptr) prefetch_l2(weight + k);
    }
    wait_for_previous();
    launch_dependents();  // not earlier: the next kernel reads weights at once
    uint4 raw[OCTETS][PIECES] = {};
#pragma unroll
    for (int i = 0; i < OCTETS; ++i)
#pragma unroll
        for (int j = 0; j < PIECES; ++j)
            if (place_of(i) < depth) raw[i][j] = load_written(reinterpret_cast<const uint4*>(row + place_of(i)) + j);
    float v[OCTETS][OCTET], g[OCTETS][OCTET], factor = 1.0f;
    load_weight(g, weight, depth);
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        unsigned word[4 * PIECES];
#pragma unroll
        for (int j = 0; j < PIECES; ++j) to_words(word + 4 * j, raw[i][j]);
#pragma unroll
        for (int e = 0; e < OCTET; ++e) v[i][e] = Word<T>::get(word[e / Word<T>::COUNT], e % Word<T>::COUNT);
    }
    if (normalizes != 0) {
        const double own = sum_of_warp(squares_of<T>(v, depth));
        if (lane == 0) squares[warp] = own;
        __syncthreads();
        const double sum = sum_of_warp(of_warps(squares));
        if (!factor_from(sum, RootMeanSquare{true, weight, norm_share, norm_eps}, factor))
            factor = ordered_factor(row, depth, norm_eps);
    }
    const unsigned largest = most_of_warp(prepare(v, g, factor, normalizes != 0, depth));
    if (lane == 0) most[warp] = largest;
    __syncthreads();
    const float a = __uint_as_float(max(most_of_warp(of_warps(most)), __float_as_uint(eps)));
    const float top = static_cast<float>(highest), scale = ieee::divide(top, a);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        unsigned word[2];
        const int of_octet = codes_of(word, v[i], scale, Quantizer{eps, lowest, highest, away}, 0);
        if (place_of(i) < depth) *reinterpret_cast<uint2*>(target + place_of(i)) = make_uint2(word[0], word[1]);
        sum += of_octet;
    }
    for (int k = depth + threadIdx.x * OCTET; k < pitch; k += RUN) *reinterpret_cast<uint2*>(target + k) = uint2{0, 0};
    if (threadIdx.x == 0) scales[m] = ieee::divide(a, top);
    if (sums == nullptr) return;
    const unsigned of_codes = sum_of_warp(static_cast<unsigned>(sum));
    if (lane == 0) added[warp] = of_codes;
    __syncthreads();
    if (warp > 0) return;
    const unsigned all = sum_of_warp(of_warps(added));
    if (lane == 0) sums[m] = static_cast<int>(all);
}
